"""How many bytes a btrfs snapshot really added to the disk.

Owns: reading a subvolume's tree by ``BTRFS_IOC_TREE_SEARCH_V2`` from a generation on. Does not own:
snapshots. Guarantee: data extents are counted exactly, once each, and only those written after the
older snapshot; the kernel skips unchanged parts of the tree, so the cost follows the change.

Tree blocks are not listed by the kernel: they are counted from the items that changed blocks hold,
at least one block, since a snapshot always has a root block of its own.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

from sandbox.tree import btrfs

NODE = 16_384  # bytes of a tree block, as mkfs.btrfs makes them
_BUFFER = 1 << 16
_SEARCH_V2 = (3 << 30) | (112 << 16) | (0x94 << 8) | 17
_KEY = struct.Struct("=QQQQQQQIIII32xQ")  # key, then buf_size
_HEADER = struct.Struct("=QQQII")  # transid, objectid, offset, type, len
_EXTENT = struct.Struct("<QQBBHBQQ")  # generation, ram_bytes, ..., type, disk_bytenr, disk_num_bytes
_EXTENT_DATA = 108
_INLINE = 0
_MOST = (1 << 64) - 1


def added_bytes(snapshot: Path, before: Path | None) -> int:
    """Bytes that `snapshot` has and the older snapshot `before` of the same line has not; None: all that it has."""
    since = btrfs.generation(before) + 1 if before is not None else 0
    extents: dict[int, int] = {}
    items = 0
    descriptor = os.open(snapshot, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        start = (0, 0, 0)
        while True:
            found = _search(descriptor, start, since)
            if not found:
                break
            for _, kind, _, data in found:
                items += len(data) + 25
                if kind == _EXTENT_DATA and len(data) >= _EXTENT.size:
                    generation, _, _, _, _, form, address, size = _EXTENT.unpack_from(data)
                    if form != _INLINE and address and generation >= since:
                        extents[address] = size
            start = _after(found[-1][:3])
    finally:
        os.close(descriptor)
    blocks = max(1, -(-items // (NODE - 101)))
    return sum(extents.values()) + NODE * blocks


def _search(descriptor: int, start: tuple[int, int, int], since: int) -> list[tuple[int, int, int, bytes]]:
    """Items (objectid, type, offset, data) from `start` on, out of blocks changed since a generation."""
    objectid, kind, offset = start
    args = bytearray(_KEY.size + _BUFFER)
    _KEY.pack_into(args, 0, 0, objectid, _MOST, offset, _MOST, since, _MOST, kind, 255, 4096, 0, _BUFFER)
    fcntl.ioctl(descriptor, _SEARCH_V2, args)
    (count,) = struct.unpack_from("=I", args, 64)
    found, position = [], _KEY.size
    for _ in range(count):
        _, item, place, form, size = _HEADER.unpack_from(args, position)
        position += _HEADER.size
        found.append((item, form, place, bytes(args[position : position + size])))
        position += size
    return found


def _after(key: tuple[int, int, int]) -> tuple[int, int, int]:
    objectid, kind, offset = key
    if offset < _MOST:
        return objectid, kind, offset + 1
    return (objectid, kind + 1, 0) if kind < 255 else (objectid + 1, 0, 0)
