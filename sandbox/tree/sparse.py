"""The content of a file, known by a hash that costs what its data cost, not the holes between them.

Guarantee: the hash follows from the bytes alone, wherever they are holes and wherever they are written zeros. It is
blake3 of the bytes, but for a content with a whole aligned mebibyte of zeros: of such a one it is a hash of the blocks
that hold anything, of where they lie and of the size. Of a hole nothing is ever read.
"""

from __future__ import annotations

import heapq
import os
import struct
from collections.abc import Iterable, Iterator

import numpy as np
from blake3 import blake3

from sandbox.tree.holes import STEP, data_ranges

BLOCK = 4096
_ZEROS = bytes(STEP)
_SPARSE = "pagurus 2026 content with holes"
_RUN = struct.Struct("<QQ")


def of_file(file: int, *, fresh: bool = False) -> bytes:
    """The hash of an open regular file; `fresh` reads it from the disk and leaves nothing of it in memory."""
    size = os.fstat(file).st_size
    if fresh:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        result = None if _has_wide_hole(file, size) else _dense(file, size)
        return result or _sparse(file, size)
    finally:
        if fresh:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def read_once(file: int, parts: Iterable[tuple[int, int]]) -> None:
    """Read these parts (offset, bytes) of an open file from the disk; what was damaged there raises OSError."""
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    for start, size in parts:
        for offset in range(start, start + size, STEP):
            os.pread(file, min(STEP, start + size - offset), offset)
        os.posix_fadvise(file, start, size, os.POSIX_FADV_DONTNEED)


def same(one: int, other: int) -> bool:
    """Whether two open files of the same size hold the same bytes. What is a hole in both is not read."""
    done = 0
    for start, end in heapq.merge(data_ranges(one), data_ranges(other)):
        for offset in range(max(start, done), end, STEP):
            size = min(STEP, end - offset)
            if os.pread(one, size, offset) != os.pread(other, size, offset):
                return False
        done = max(done, end)
    return True


def data_size(result: os.stat_result) -> int:
    """How many bytes must be read at most to know the content of a file."""
    return min(result.st_size, result.st_blocks * 512 + BLOCK)


def _has_wide_hole(file: int, size: int) -> bool:
    done = 0
    for start, end in data_ranges(file):
        if -(-done // STEP) * STEP + STEP <= start:
            return True
        done = end
    return -(-done // STEP) * STEP + STEP <= size


def _dense(file: int, size: int) -> bytes | None:
    """None: there is a whole piece of zeros after all, written ones."""
    hasher = blake3()
    for offset in range(0, size, STEP):
        piece = os.pread(file, STEP, offset)
        if piece == _ZEROS:
            return None
        hasher.update(piece)
    return hasher.digest()


def _sparse(file: int, size: int) -> bytes:
    data, places = blake3(), blake3()
    first = last = 0  # of the run of blocks that is being read
    for start, piece in _pieces(file, size):
        for begin, end in _runs(piece):
            if start + begin != last:
                places.update(_RUN.pack(first, last))
                first = start + begin
            last = start + end
            data.update(piece[begin:end])
    places.update(_RUN.pack(first, last))
    complete = blake3(derive_key_context=_SPARSE)
    return complete.update(_RUN.pack(size, last) + data.digest() + places.digest()).digest()


def _pieces(file: int, size: int) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of all data, by whole blocks."""
    done = 0
    for start, end in data_ranges(file):
        behind = min(size, -(-end // BLOCK) * BLOCK)
        for offset in range(max(start // BLOCK * BLOCK, done), behind, STEP):
            yield offset, os.pread(file, min(STEP, behind - offset), offset)
        done = max(done, behind)


def _runs(piece: bytes) -> Iterator[tuple[int, int]]:
    """The runs of blocks in which there is anything but zeros."""
    complete = len(piece) // BLOCK
    used = np.frombuffer(piece, np.uint64, complete * BLOCK // 8).reshape(complete, BLOCK // 8).any(axis=1)
    used = np.concatenate([[False], used, [any(piece[complete * BLOCK :])], [False]])
    edges = np.flatnonzero(used[1:] != used[:-1]).tolist()
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        yield begin * BLOCK, min(end * BLOCK, len(piece))
