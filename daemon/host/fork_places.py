"""How many forks are made at a time, and whose is next.

Owns: the places. Does not own: making a fork. Guarantee: an owner whose forks wait by the thousand, or take minutes,
keeps nobody else waiting: beside the places that one owner can have there is one more, which goes to an owner that has
none, and a place that is free goes to the waiting owner that has the fewest, the longest wait first.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator


class ForkPlaces:
    """`most` places for the forks of one owner, and one more for those that have none. From one event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: Counter[str] = Counter()  # by owner
        self._waiting: dict[str, dict[int, asyncio.Future[None]]] = {}  # by owner and arrival, the longest wait first
        self._arrivals = itertools.count()

    @contextlib.asynccontextmanager
    async def place(self, owner: str) -> AsyncIterator[None]:
        """One of them, for as long as the block takes."""
        number, asked = next(self._arrivals), asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, {})[number] = asked
        self._give()
        try:
            await asked
            yield
        finally:
            if asked.cancelled():  # while it waited
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
        """Give free places to those who wait."""
        while (owner := self._next()) is not None:
            number, asked = next(iter(self._waiting[owner].items()))
            self._leave(owner, number)
            if not asked.cancelled():
                self._taken[owner] += 1
                asked.set_result(None)

    def _next(self) -> str | None:
        """Whose turn it is."""
        taken = self._taken.total()
        fitting = [
            (self._taken.get(owner, 0), next(iter(waiting)), owner)
            for owner, waiting in self._waiting.items()
            if taken < self._most or (taken == self._most and owner not in self._taken)
        ]
        return min(fitting)[2] if fitting else None
