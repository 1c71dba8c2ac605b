"""How many bytes a btrfs snapshot really added to the disk, and where its files have their data.

Files may share their data, with others and with themselves: a file of a tebibyte may lie on a mebibyte. So
:func:`shared_once` returns for each piece of the disk one place only from which it can be read. Guarantee: data extents
are counted exactly, once each, and only those written after the older snapshot; the kernel skips unchanged parts of the
tree, so the cost follows the change.

Tree blocks are not listed by the kernel: they are counted from the items that changed blocks hold,
at least one block, since a snapshot always has a root block of its own.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Collection
from pathlib import Path

from sandbox.tree import btrfs

NODE = 16_384  # bytes of a tree block, as mkfs.btrfs makes them
_EXTENT = struct.Struct("<QQBBHBQQ")  # generation, ram_bytes, ..., type, disk_bytenr, disk_num_bytes
_FORM = 20  # where the type lies
_PART = struct.Struct("<QQ")  # behind it: offset in the extent, num_bytes
_EXTENT_DATA = 108
_INLINE, _PREALLOCATED = 0, 2


def added_bytes(snapshot: Path, before: Path | None) -> int:
    """Bytes that `snapshot` has and the older snapshot `before` of the same line has not; None: all that it has."""
    since = btrfs.generation(before) + 1 if before is not None else 0
    extents: dict[int, int] = {}
    items = 0
    with btrfs.opened(snapshot) as fd:
        for _, kind, _, data in btrfs.items(fd, since=since):
            items += len(data) + 25
            if kind == _EXTENT_DATA and len(data) >= _EXTENT.size:
                generation, _, _, _, _, form, address, size = _EXTENT.unpack_from(data)
                if form != _INLINE and address and generation >= since:
                    extents[address] = size
    blocks = max(1, -(-items // (NODE - 101)))
    return sum(extents.values()) + NODE * blocks


class RangeSet:
    """A set of numbers, as ranges."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def take(self, start: int, end: int) -> list[tuple[int, int]]:
        """Add a range; returns the parts of it that were missing.

        >>> covered = RangeSet()
        >>> covered.take(10, 20), covered.take(15, 30), covered.take(0, 40)
        ([(10, 20)], [(20, 30)], [(0, 10), (30, 40)])
        """
        first, last = bisect.bisect_left(self._ends, start), bisect.bisect_right(self._starts, end)
        missing, at = [], start
        for existing, behind in zip(self._starts[first:last], self._ends[first:last], strict=True):
            if at < existing:
                missing.append((at, existing))
            at = max(at, behind)
        if at < end:
            missing.append((at, end))
        self._starts[first:last] = [min([start, *self._starts[first:last]])]
        self._ends[first:last] = [max([end, *self._ends[first:last]])]
        return missing


def shared_once(subvolume: int, inodes: Collection[int]) -> dict[int, list[tuple[int, int]]]:
    """By inode: (offset, bytes) of what of these files is on the disk, but each piece of the disk only once. Blocks.

    Data that lie in the tree itself (small files) are always included.
    """
    result: dict[int, list[tuple[int, int]]] = {}
    covered = RangeSet()
    for inode, kind, offset, data in btrfs.items(subvolume):
        if kind != _EXTENT_DATA or inode not in inodes or len(data) <= _FORM:
            continue
        if data[_FORM] == _INLINE:
            result.setdefault(inode, []).append((offset, struct.unpack_from("<Q", data, 8)[0]))
            continue
        _, _, packed, _, _, form, address, size = _EXTENT.unpack_from(data)
        if form == _PREALLOCATED or not address:
            continue
        inside, length = _PART.unpack_from(data, _EXTENT.size)
        if packed:  # a reader of a part reads all of it
            missing = [(0, length)] if covered.take(address, address + size) else []
        else:
            begin = address + inside
            missing = [(start - begin, end - begin) for start, end in covered.take(begin, begin + length)]
        result.setdefault(inode, []).extend((offset + start, end - start) for start, end in missing)
    return result
