"""Connections that carry messages both ways, and their end with the daemon's.

Guarantee: a daemon that stops closes all of them at once, so that its stop does not wait for a terminal, and its client
looks for the next daemon.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence

from aiohttp import WSCloseCode, web

from sandbox.page import PROTOCOL

MAX_MESSAGE = 1 << 20  # bytes
FAREWELL = 1.0  # seconds for the other side to say good-bye


class Sockets:
    """Those of one application."""

    def __init__(self) -> None:
        self.open: weakref.WeakSet[web.WebSocketResponse] = weakref.WeakSet()


SOCKETS: web.AppKey[Sockets] = web.AppKey("sockets", Sockets)


def socket(request: web.Request, *, heartbeat: float, protocols: Sequence[str] = ()) -> web.WebSocketResponse:
    """A connection, not yet upgraded. `heartbeat`: seconds between signs of life."""
    offered = (*protocols, PROTOCOL)  # the last one: what a page speaks that shows its key with it
    made = web.WebSocketResponse(
        heartbeat=heartbeat,
        timeout=FAREWELL,
        max_msg_size=MAX_MESSAGE,
        compress=False,
        protocols=offered,
    )
    request.app[SOCKETS].open.add(made)
    return made


async def close_all(app: web.Application) -> None:
    """The daemon stops."""
    await asyncio.gather(
        *(item.close(code=WSCloseCode.GOING_AWAY, message=b"the daemon stops") for item in set(app[SOCKETS].open)),
        return_exceptions=True,
    )
