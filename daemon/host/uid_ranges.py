"""User id ranges of sandboxes: each has one of its own, so that none owns what is another's.

No I/O. Guarantee: a range is given to one sandbox at a time, and to the next one only after all others had their turn:
what a removed sandbox left on the disk stays unowned for long.
"""

from __future__ import annotations

from sandbox.errors import Conflict

FIRST = 0x2000_0000  # beyond what distributions and user databases hand out
SIZE = 65_536
LAST = 0x7000_0000


class IdRanges:
    """See the module. A range is named by its first id. ``IdRanges().take() == FIRST``."""

    def __init__(self, first: int = FIRST, last: int = LAST) -> None:
        self._first, self._last = first, last
        self._next = first
        self._taken: set[int] = set()

    def take(self) -> int:
        """A free range."""
        for _ in range((self._last - self._first) // SIZE):
            base = self._next
            self._next = base + SIZE if base + SIZE < self._last else self._first
            if base not in self._taken:
                self._taken.add(base)
                return base
        raise Conflict("all user id ranges of this host are in use", hint="remove some sandboxes")

    def claim(self, base: int) -> None:
        """A sandbox that was there before has this one. Idempotent."""
        self._taken.add(base)

    def release(self, base: int) -> None:
        """Idempotent."""
        self._taken.discard(base)
