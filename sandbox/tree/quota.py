"""One disk limit for all that a sandbox writes: its tree of today and of before each restore, and its scratch.

Guarantee: the subvolumes that joined the group of a sandbox write at most its limit together, as far as any of them or
a snapshot holds it; a restore begins with what is left of it, not again.

The kernel counts an extent for the subvolume that wrote it, for as long as anybody refers to it. A group of level 1
adds up its members, also those that were deleted and whose extents are still held.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import struct
from collections.abc import Collection
from pathlib import Path

from sandbox.errors import Unsupported
from sandbox.tree import btrfs

_LEVEL = 48  # bits of a number below the level
_ASSIGN, _CREATE = (1 << 30) | (24 << 16) | (0x94 << 8) | 41, (1 << 30) | (16 << 16) | (0x94 << 8) | 42
_ROOTS, _QUOTAS = 1, 8  # numbers of trees
_ROOT_ITEM, _GROUP_INFO = 132, 242
_GONE = (errno.ENOENT, errno.EINVAL)  # the group was swept away before the subvolume joined it
_TRIES = 20
_USED = struct.Struct("=4Q")  # bytes referred to and exclusive, each also compressed


def group(sandbox: str) -> int:
    """The number of a sandbox's group."""
    name = int.from_bytes(hashlib.sha256(sandbox.encode()).digest()[:6], "big")
    return 1 << _LEVEL | name


def join(path: Path, sandbox: str) -> None:
    """Count what is written into the subvolume `path` for this sandbox. Idempotent. Blocks."""
    number = btrfs.tree_of(path)
    with btrfs.opened(path.parent) as fd:  # called on a subvolume that is full, it would be refused
        for left in reversed(range(_TRIES)):
            try:
                _call(fd, _CREATE, 1, group(sandbox), allowed=errno.EEXIST)
                _call(fd, _ASSIGN, 1, number, group(sandbox), allowed=errno.EEXIST)
                return
            except OSError as error:
                if error.errno == errno.ENOTCONN:  # quotas are off: a limit will say so
                    return
                if error.errno not in _GONE or not left:
                    raise


def need(path: Path, size: str | int | None, default: str | int | None) -> bool:
    """Whether `size` can be a limit below `path`: False without one, and for the default where the kernel has none.

    Raises Unsupported for any other. Blocks.
    """
    if size is None or btrfs.has_quota(path):
        return size is not None
    if size == default:
        return False
    raise Unsupported(
        f"a disk limit of {size} cannot be kept: btrfs of Linux {os.uname().release} has no simple quotas (needs 6.7)",
        hint="leave the limit out (what sandboxes write is then bounded by the pool alone), or boot a newer kernel",
    )


def count(tree: Path, sandbox: str) -> None:
    """Count what is written from now on, in addition to what former trees of the sandbox and its scratch hold. No limit
    yet."""
    join(tree, sandbox)
    limit(tree, sandbox, None)


def limit(path: Path, sandbox: str, size: int | None) -> None:
    """Let the members of the sandbox's group write at most `size` bytes together. `path`: one of them. Blocks."""
    btrfs.limit(path.parent, size, group=group(sandbox))


def sweep(path: Path, sandboxes: Collection[str]) -> int:
    """Forget the groups of sandboxes that are no more, and of subvolumes of which nothing is held. Blocks.

    Returns how many. Those whose content is still held, or being cleaned up, stay until the next time.
    """
    gone = 0
    keep = {group(name) for name in sandboxes}
    if not btrfs.has_quota(path):
        return 0
    with btrfs.opened(path) as fd:
        groups = [(offset, data) for _, kind, offset, data in btrfs.items(fd, tree=_QUOTAS) if kind == _GROUP_INFO]
        # Looked at afterwards: what was made since lives.
        living = {number for number, kind, _, _ in btrfs.items(fd, tree=_ROOTS) if kind == _ROOT_ITEM}
        members = {number for number, data in groups if not number >> _LEVEL and not any(_USED.unpack_from(data, 8))}
        for number in members - living:
            gone += _forget(fd, number)
        for number in {number for number, _ in groups if number >> _LEVEL} - keep:
            gone += _forget(fd, number)
    return gone


def _forget(fd: int, number: int) -> int:
    try:
        fcntl.ioctl(fd, _CREATE, bytearray(struct.pack("=QQ", 0, number)))
    except OSError as error:
        if error.errno in (errno.EBUSY, errno.ENOENT):
            return 0
        raise
    return 1


def _call(fd: int, request: int, *words: int, allowed: int) -> None:
    try:
        fcntl.ioctl(fd, request, bytearray(struct.pack(f"={len(words)}Q", *words)))
    except OSError as error:
        if error.errno != allowed:
            raise
