"""Which checkpoints are kept, and the removal of those that nothing needs.

Owns: the rule and its execution. Does not own: making checkpoints, or garbage without rows
(:mod:`daemon.recovery`).

Guarantee: a checkpoint is kept while its sandbox lives, while a living sandbox stands on it (its head, or
what it was forked from), and while a restore or a fork reads it. Content is removed only after the rows
that named it are gone, and only when no row that is left names it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from daemon.catalogue import CheckpointRow, drop_checkpoint
from daemon.turns import Services, TurnLoop


class Keeper:
    """The checkpoints of a host, as far as keeping goes. `loops` are its living sandboxes."""

    def __init__(self, services: Services, loops: Mapping[str, TurnLoop]) -> None:
        self._services = services
        self._loops = loops
        self._pins: Counter[str] = Counter()
        self._collecting = asyncio.Lock()

    def kept(self, row: CheckpointRow) -> bool:
        """Whether a checkpoint must stay."""
        return row.sandbox in self._loops or row.id in self.held()

    def held(self) -> set[str]:
        """Checkpoints that living sandboxes, restores and forks stand on, whoever they belong to."""
        living = {checkpoint for loop in self._loops.values() for checkpoint in (loop.row.head, loop.row.origin)}
        return living | set(self._pins)

    @contextlib.contextmanager
    def pin(self, row: CheckpointRow) -> Iterator[None]:
        """Keep a checkpoint while it is read, though its sandbox may be removed meanwhile."""
        self._pins[row.id] += 1
        try:
            yield
        finally:
            self._pins[row.id] -= 1
            if not self._pins[row.id]:
                del self._pins[row.id]
                if row.sandbox not in self._loops:
                    self._services.spawn(self.collect(row.sandbox), f"collection of {row.sandbox}")

    async def collect(self, sandbox: str) -> None:
        """Remove the checkpoints of a removed sandbox that nothing needs, then their content."""
        async with self._collecting:
            mine = [row for row in self._services.checkpoints.values() if row.sandbox == sandbox]
            for row in mine:
                if (flight := self._services.flights.get(row.id)) is not None:
                    await flight.settled(durable=True)
            held = self.held()
            await self.forget([row for row in mine if row.id not in held])

    async def forget(self, gone: list[CheckpointRow]) -> None:
        """Remove checkpoints: first the rows, then the content that no other row needs."""
        if not gone:
            return
        for row in gone:
            del self._services.checkpoints[row.id]
        needed = self.content(self._services.checkpoints.values())
        await self._services.catalogue.write([drop_checkpoint(row.id) for row in gone])
        unused = {row.id for row in gone} | self.content(gone)
        await asyncio.to_thread(self._discard, unused - needed)

    def _discard(self, checkpoints: Iterable[str]) -> None:
        for checkpoint in checkpoints:
            self._services.capturer.discard(checkpoint)

    @staticmethod
    def content(rows: Iterable[CheckpointRow]) -> set[str]:
        """The owners of all content that these checkpoints need."""
        return {owner for row in rows for owner in (row.files, row.dump) if owner is not None}
