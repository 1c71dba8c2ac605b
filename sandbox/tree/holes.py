"""Where a file holds data, and where it has holes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from itertools import zip_longest

STEP = 1 << 20  # bytes read at a time; an aligned piece of this size without data makes a content sparse
_libc = ctypes.CDLL(None, use_errno=True)
_libc.lseek.restype, _libc.lseek.argtypes = ctypes.c_int64, (ctypes.c_int, ctypes.c_int64, ctypes.c_int)


def data_ranges(file: int) -> Iterator[tuple[int, int]]:
    """Where a file holds data: (first byte, behind the last) of each range. Between them are holes."""
    size, end = os.fstat(file).st_size, 0
    while end < size:
        # Not os.lseek: where data end with the last byte that a file can have, btrfs answers with a number below zero,
        # of which os.lseek makes an exception that comes out of another call.
        if (start := _libc.lseek(file, end, os.SEEK_DATA)) < 0:  # ENXIO: no data behind here
            return
        behind = _libc.lseek(file, start, os.SEEK_HOLE)
        end = behind if start < behind < size else size
        yield start, end


def same_ranges(one: int, other: int) -> bool:
    """Whether two open files have their data at the same places."""
    return all(first == second for first, second in zip_longest(data_ranges(one), data_ranges(other)))


def pieces(file: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of all data of a file, in pieces of at most STEP."""
    for start, end in data_ranges(file):
        for offset in range(start, end, STEP):
            yield offset, min(STEP, end - offset)
