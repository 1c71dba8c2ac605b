"""Slots that owners share, and whose turn it is.

Guarantee: an owner that waits a thousand times, or keeps its slots for minutes, keeps no other owner waiting for that
long: `reserved` slots go only to owners that have fewer than that many, and a free slot goes to the waiting owner that
has the fewest, the longest wait first.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator


class OwnerSlots:
    """`total` slots, of which one owner leaves `reserved` to others. From one event loop."""

    def __init__(self, total: int, reserved: int) -> None:
        self._total, self._reserved = total, reserved
        self._taken: Counter[str] = Counter()  # by owner
        self._waiting: dict[str, dict[int, asyncio.Future[None]]] = {}  # by owner and arrival, the longest wait first
        self._arrivals = itertools.count()

    def resize(self, total: int, reserved: int) -> None:
        """Other numbers from now on; what is taken stays taken."""
        self._total, self._reserved = total, reserved
        self._give()

    @contextlib.asynccontextmanager
    async def slot(self, owner: str) -> AsyncIterator[None]:
        """One of them, for as long as the block takes."""
        number, requested = next(self._arrivals), asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, {})[number] = requested
        self._give()
        try:
            await requested
            yield
        finally:
            if requested.cancelled():  # while it waited
                if number in self._waiting.get(owner, {}):
                    self._leave(owner, number)
            else:
                self._taken[owner] -= 1
                if not self._taken[owner]:
                    del self._taken[owner]
            self._give()

    def _leave(self, owner: str, number: int) -> None:
        del self._waiting[owner][number]
        if not self._waiting[owner]:
            del self._waiting[owner]

    def _give(self) -> None:
        """Give free slots to those who wait."""
        while (owner := self._next()) is not None:
            number, requested = next(iter(self._waiting[owner].items()))
            self._leave(owner, number)
            if not requested.cancelled():
                self._taken[owner] += 1
                requested.set_result(None)

    def _next(self) -> str | None:
        """Whose turn it is."""
        free = self._total - self._taken.total()
        fitting = [
            (self._taken.get(owner, 0), next(iter(waiting)), owner)
            for owner, waiting in self._waiting.items()
            if free > self._reserved or (free > 0 and self._taken.get(owner, 0) < self._reserved)
        ]
        return min(fitting)[2] if fitting else None
