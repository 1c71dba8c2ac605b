"""How much the calls of one owner may have the daemon hold while they are under way.

Guarantee: what the calls of one owner hold together stays within the part, but for the last piece of each; what a call
held is free again when it has ended, however it ends. Administrators are not counted: they are the host itself.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator

from daemon.auth.access import Caller
from sandbox.errors import TooMany

MIN_MEMORY = 256 << 20  # bytes in memory that the calls of one owner may hold on the smallest host
MEMORY_PART = 32  # else one of so many parts of its memory: a body is there several times while it is taken apart
MAX_DISK = 1 << 30  # bytes of uploads of one owner that lie on the disk until they are whole


def memory_part() -> int:
    """Bytes in this host's memory that the calls of one owner may hold."""
    return max(MIN_MEMORY, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // MEMORY_PART)


class Shares:
    """What the calls of each owner hold of one thing, such as memory."""

    def __init__(self, what: str, limit: int) -> None:
        self._what, self._limit = what, limit
        self.held: Counter[str] = Counter()

    @contextlib.contextmanager
    def call(self, caller: Caller) -> Iterator[CallShare]:
        """A call of `caller` is under way."""
        held = CallShare(self, None if caller.everything else caller.owner)
        try:
            yield held
        finally:
            held.free()

    def need(self, owner: str, size: int) -> None:
        """Raise TooMany where `size` bytes more are too many."""
        if self.held[owner] + size > self._limit:
            raise TooMany(
                f"the calls of this owner hold {self.held[owner] >> 20} MiB {self._what}, of {self._limit >> 20}",
                hint="wait until some have ended, or ask for less at once",
            )


class CallShare:
    """What one call holds."""

    def __init__(self, shares: Shares, owner: str | None) -> None:
        self._shares, self._owner = shares, owner
        self._size = 0

    def add(self, size: int) -> None:
        """Before `size` bytes more are held. Raises TooMany."""
        if self._owner is not None:
            self._shares.need(self._owner, size)
        self.count(size)

    def count(self, size: int) -> None:
        """`size` bytes more are held, in any case."""
        self._size += size
        if self._owner is not None:
            self._shares.held[self._owner] += size

    def free(self) -> None:
        """Nothing is held any more."""
        self.count(-self._size)
        if self._owner is not None and not self._shares.held[self._owner]:
            del self._shares.held[self._owner]
