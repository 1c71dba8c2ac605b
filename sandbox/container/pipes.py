"""Blocking work at one end of a pipe, the event loop at the other.

Owns: threads that may wait for a pipe. Guarantee: they are threads of their own, so that they cannot take
the worker that would fill or empty their pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import IO, Any


def in_thread(function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
    """Run `function` in a new thread; the future has its result or what it raised."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, failure: BaseException | None) -> None:
        if future.cancelled():
            return
        if failure is not None:
            future.set_exception(failure)
        else:
            future.set_result(result)

    def run() -> None:
        result, failure = None, None
        try:
            result = function(*args)
        except BaseException as error:  # noqa: BLE001  handed to whoever waits
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name=function.__name__, daemon=True).start()
    return future


def put(out: IO[bytes], part: bytes) -> None:
    """Write all of `part` to an unbuffered pipe. Blocks."""
    view = memoryview(part)
    while view:
        view = view[out.write(view) :]
