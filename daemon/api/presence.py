"""Whether the caller is still connected.

Guarantee: work for a caller that has left ends soon, also where there is nothing to send that would fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from aiohttp import web

from daemon.gateway.answer import is_open
from sandbox.errors import Conflict

POLL_INTERVAL = 0.5  # seconds
T = TypeVar("T")


class ClientLeft(Conflict):
    """The connection is gone."""


async def while_requested(request: web.Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. It is cancelled when the connection of `request` is gone, or the caller is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=POLL_INTERVAL)
            if not task.done() and not is_open(request):
                raise ClientLeft("the caller has left")  # not sent to anyone
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def while_there(request: web.Request, work: Coroutine[Any, Any, None]) -> bool:
    """Do `work` to its end (True), or until the connection of `request` is gone: then it is cancelled."""
    gone = False
    try:
        await while_requested(request, work)
    except* (ClientLeft, ConnectionError):  # a write may meet the end before we look
        gone = True
    return not gone
