"""Watches that clients have open: their slots, and the events between a watch and its reader.

Guarantee: events are reported in their order; to a reader that is slower than they come an ``overflow`` says that some
are missing; a large tree that has to be looked through holds up no other work of the daemon than watches.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TypeVar

from sandbox.container.process import readable
from sandbox.errors import PagurusError, TooMany
from sandbox.messages import FileEvent
from sandbox.tree.watch import TreeWatch

MAX_WATCHES = 64  # at once; the kernel allows few inotify instances
WATCHES_EACH = 16  # of one owner; the host's own user may have all
BACKLOG = 10_000  # events between a watch and a reader that is slower
THREADS = 4
T = TypeVar("T")

_taken: Counter[str] = Counter()  # by owner; one count for the process, as the kernel counts


@contextlib.contextmanager
def place(owner: str) -> Iterator[None]:
    """One of the places, for a watch of this owner ("": the host's own user). Raises TooMany."""
    if _taken.total() >= MAX_WATCHES or (owner and _taken[owner] >= WATCHES_EACH):
        limit = f"{WATCHES_EACH} of your own" if owner and _taken[owner] >= WATCHES_EACH else str(MAX_WATCHES)
        raise TooMany(f"more than {limit} watches at once", hint="end some")
    _taken[owner] += 1
    try:
        yield
    finally:
        _taken[owner] -= 1
        if not _taken[owner]:
            del _taken[owner]


@contextlib.asynccontextmanager
async def events(
    root: Callable[[], AbstractContextManager[int]], path: str, *, recursive: bool
) -> AsyncIterator[asyncio.Queue[FileEvent]]:
    """What happens below `path`; the last one is an ``end``. For `root` see
    :class:`sandbox.tree.watch.TreeWatch`.
    """
    watch = TreeWatch(root, path, recursive=recursive)
    result: asyncio.Queue[FileEvent] = asyncio.Queue(BACKLOG)
    scanning: asyncio.Future[None] | None = None
    try:
        await _in_thread(watch.open)
        scanning = asyncio.ensure_future(_scan(watch, result))
        yield result
    finally:
        watch.stop()
        if scanning is not None:
            scanning.cancel()
            await asyncio.wait({scanning})
        await asyncio.shield(_in_thread(watch.close))


async def _scan(watch: TreeWatch, result: asyncio.Queue[FileEvent]) -> None:
    while True:
        await readable(watch.descriptor)
        try:
            reported = await _in_thread(watch.read)
        except (PagurusError, OSError):  # its tree is gone, or larger than can be watched
            reported = [FileEvent(kind="end")]
        for event in reported:
            keep(result, event)
            if event.kind == "end":
                return


def keep(result: asyncio.Queue[FileEvent], event: FileEvent) -> None:
    """Add an event. Two places are left for what must not be lost: an overflow, and the end."""
    if event.kind == "end" or result.qsize() < BACKLOG - 2:
        result.put_nowait(event)
    elif result.qsize() == BACKLOG - 2:
        result.put_nowait(FileEvent(kind="overflow"))


# --------------------------------------------------------------------------- threads


def _ordinary() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 0)  # the event loop's is higher


_threads = ThreadPoolExecutor(THREADS, "watch", initializer=_ordinary)


def _in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    return asyncio.get_running_loop().run_in_executor(_threads, function)
