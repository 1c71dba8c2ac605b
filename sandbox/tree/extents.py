"""How many bytes a btrfs snapshot really added to the disk.

Owns: what the items of a subvolume's tree add up to. Does not own:
snapshots. Guarantee: data extents are counted exactly, once each, and only those written after the
older snapshot; the kernel skips unchanged parts of the tree, so the cost follows the change.

Tree blocks are not listed by the kernel: they are counted from the items that changed blocks hold,
at least one block, since a snapshot always has a root block of its own.
"""

from __future__ import annotations

import struct
from pathlib import Path

from sandbox.tree import btrfs

NODE = 16_384  # bytes of a tree block, as mkfs.btrfs makes them
_EXTENT = struct.Struct("<QQBBHBQQ")  # generation, ram_bytes, ..., type, disk_bytenr, disk_num_bytes
_EXTENT_DATA = 108
_INLINE = 0


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
