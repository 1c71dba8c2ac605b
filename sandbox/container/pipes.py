"""Blocking work on threads of its own, the event loop or another thread waiting for it.

Guarantee: no other work lands on one of them, so that none takes the worker that would fill or empty its pipe.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def in_thread(function: Callable[P, T], *args: P.args, **named: P.kwargs) -> asyncio.Future[T]:
    """Run `function` in a new thread; the future has its result or what it raised."""
    future: Future[T] = Future()

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(function(*args, **named))
        except BaseException as error:  # noqa: BLE001 - handed to the waiting caller
            future.set_exception(error)

    threading.Thread(target=run, name=function.__name__, daemon=True).start()
    return asyncio.wrap_future(future)


def own_thread(function: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """What `function` returns or raises, on a thread that ends with it. Blocks."""
    with ThreadPoolExecutor(1) as own:
        return own.submit(function, *args, **named).result()


def put(out: IO[bytes], part: bytes) -> None:
    """Write all of `part` to an unbuffered pipe. Blocks."""
    view = memoryview(part)
    while view:
        view = view[out.write(view) :]
