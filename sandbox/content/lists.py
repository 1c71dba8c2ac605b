"""Hashes of the memory pages of the newest dumps, kept in memory: a process that needs them again need not make them
again.

What is kept here may go at any time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np

LIMIT = 64 << 20  # bytes: of 8 GiB of memory
PageHashes = Mapping[str, np.ndarray]  # of each file of pages, [n, 32] uint8; zeros for the zero page


class Lists:
    """By the name of the dump. The least recently used goes first."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._size = 0
        self._retained: OrderedDict[str, PageHashes] = OrderedDict()
        self._lock = threading.Lock()

    def remember(self, dump: str, hashes: PageHashes) -> None:
        with self._lock:
            self._drop(dump)
            self._retained[dump] = hashes
            self._size += _bytes(hashes)
            while self._size > self._limit:
                self._drop(next(iter(self._retained)))

    def find(self, dump: str) -> PageHashes | None:
        with self._lock:
            if dump in self._retained:
                self._retained.move_to_end(dump)
            return self._retained.get(dump)

    def _drop(self, dump: str) -> None:
        if (gone := self._retained.pop(dump, None)) is not None:
            self._size -= _bytes(gone)


def _bytes(hashes: PageHashes) -> int:
    return sum(item.nbytes for item in hashes.values())
