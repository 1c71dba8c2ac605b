"""One thread for everything that the rollout writes: the event loop never waits for a disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from rollout.store.journal import Key, TurnEntry, TurnJournal

T = TypeVar("T")


class DiskThread:
    """``await disk.do(store.put, trajectory, fence)``. Calls are carried out one after another, cancelled or not."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "rollout disk")

    async def do(self, act: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, act, *arguments)

    def close(self) -> None:
        """After what was queued."""
        self._pool.shutdown()


class JournalThread:
    """A journal as episodes write it: an entry that was begun is written, even if its caller stops waiting for it."""

    def __init__(self, journal: TurnJournal, disk: DiskThread):
        self._journal, self._disk = journal, disk

    async def append(self, key: Key, entry: TurnEntry) -> None:
        await asyncio.shield(self._disk.do(self._journal.append, key, entry))

    async def restored(self, key: Key, turn: int, epoch: str) -> None:
        await asyncio.shield(self._disk.do(self._journal.restored, key, turn, epoch))
