"""The daemon, noting at every instant what it is at, so that a bench that kills it knows what it hit.

The notes are counters in a file that outlives the process: they say what was under way when it died.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

WHERE = "PAGURUS_BENCH_STAGES"  # names the file
STAGES = ("command", "dump", "snapshot", "hash", "compress", "publication", "collection", "restore")


class Notes:
    """One counter of two bytes for each stage: how many of its works are under way."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, 2 * len(STAGES))
            self._counts = mmap.mmap(descriptor, 2 * len(STAGES))
        finally:
            os.close(descriptor)
        self._lock = threading.Lock()

    def clear(self) -> None:
        """A new daemon is at nothing."""
        self._counts[:] = bytes(len(self._counts))

    def under_way(self) -> list[str]:
        return [stage for stage in STAGES if any(self._counts[(at := 2 * STAGES.index(stage)) : at + 2])]

    @contextlib.contextmanager
    def within(self, stage: str) -> Iterator[None]:
        self._add(stage, 1)
        try:
            yield
        finally:
            self._add(stage, -1)

    def _add(self, stage: str, change: int) -> None:
        at = 2 * STAGES.index(stage)
        with self._lock:
            count = int.from_bytes(self._counts[at : at + 2], "little") + change
            self._counts[at : at + 2] = count.to_bytes(2, "little")

    def note(self, owner: Any, name: str, stage: str) -> None:
        """Count every call of this blocking method."""
        work: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(work)
        def noted(*arguments: Any, **options: Any) -> Any:
            with self.within(stage):
                return work(*arguments, **options)

        setattr(owner, name, noted)

    def note_async(self, owner: Any, name: str, stage: str) -> None:
        """Count every call of this coroutine method."""
        work: Callable[..., Awaitable[Any]] = getattr(owner, name)

        @functools.wraps(work)
        async def noted(*arguments: Any, **options: Any) -> Any:
            with self.within(stage):
                return await work(*arguments, **options)

        setattr(owner, name, noted)


def watch(notes: Notes) -> None:
    """Have this process note what it does."""
    from daemon.checkpoints import queue
    from daemon.host.restore import Restorer
    from daemon.store.gc import GarbageCollector
    from sandbox.container.container import Container
    from sandbox.content.pages import PageStore
    from sandbox.criu import dump
    from sandbox.database import WriterThread

    enter, leave = queue.QueuedCapture.__aenter__, queue.QueuedCapture.__aexit__

    async def entered(ticket: Any) -> None:
        await enter(ticket)
        ticket.noted = notes.within(ticket.job.stage.value)
        ticket.noted.__enter__()

    async def left(ticket: Any, *error: Any) -> None:
        ticket.noted.__exit__(*error)
        await leave(ticket, *error)

    queue.QueuedCapture.__aenter__ = entered  # type: ignore[method-assign,assignment]
    queue.QueuedCapture.__aexit__ = left  # type: ignore[method-assign,assignment]
    notes.note(dump.FrozenWindow, "__call__", "snapshot")  # taken between the end of a dump and the thaw
    notes.note(WriterThread, "_commit", "publication")
    notes.note(PageStore, "collect", "collection")
    notes.note_async(GarbageCollector, "_forget", "collection")
    notes.note_async(Restorer, "bring_back", "restore")
    notes.note_async(Container, "exec", "command")


if __name__ == "__main__":
    written = Notes(Path(os.environ[WHERE]))
    written.clear()
    watch(written)
    from daemon.app import main

    raise SystemExit(main())
