"""btrfs by ioctl: subvolumes, snapshots, generations.

Guarantee: no process is started; each call is one system call on a directory descriptor, and other threads run during
it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from sandbox.descriptors import closing
from sandbox.errors import Conflict, NoSpace, NotFound, Unsupported
from sandbox.libc import checked, file_system

MAGIC = 0x9123683E
_NAME_MAX = 255
_READ_ONLY = 1 << 1


def _write_ioctl(number: int, size: int) -> int:
    return (1 << 30) | (size << 16) | (0x94 << 8) | number


def _read_ioctl(number: int, size: int) -> int:
    return (2 << 30) | (size << 16) | (0x94 << 8) | number


_ARGS = 4096  # struct btrfs_ioctl_vol_args: s64 fd, name[4088]
_ARGS_V2 = 4096  # struct btrfs_ioctl_vol_args_v2: s64 fd, u64 transid, u64 flags, u64 unused[4], name[4040]
_INFO = 504  # struct btrfs_ioctl_get_subvol_info_args
_SUBVOL_CREATE = _write_ioctl(14, _ARGS)
_SNAP_DESTROY = _write_ioctl(15, _ARGS)
_SNAP_CREATE_V2 = _write_ioctl(23, _ARGS_V2)
_SNAP_DESTROY_V2 = _write_ioctl(63, _ARGS_V2)
_BY_NUMBER = 1 << 4
_ROOT_TREE, _ROOT_REF = 1, 156
_QUOTA_TREE, _GROUP_RELATION = 8, 246
_SYNC = (0x94 << 8) | 8
_QUOTA_CTL = (3 << 30) | (16 << 16) | (0x94 << 8) | 40
_ENABLE_SIMPLE_QUOTA = 4
_QGROUP_LIMIT = _read_ioctl(43, 48)
_LIMIT_REFERENCED = 1
_MAX = (1 << 64) - 1
_GET_SUBVOL_INFO = _read_ioctl(60, _INFO)
_TREE_SEARCH_V2 = (3 << 30) | (112 << 16) | (0x94 << 8) | 17
_KEY = struct.Struct("=QQQQQQQIIII32xQ")  # key, then buf_size
_HEADER = struct.Struct("=QQQII")  # transid, objectid, offset, type, len
_BUFFER = 1 << 16


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ioctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)


def ioctl(fd: int, number: int, args: bytearray) -> None:
    """An ioctl. Python's own keeps the interpreter's lock while the kernel works on an argument beyond 1,024 bytes, and
    making or removing a snapshot waits for the commit of a transaction."""
    checked(_libc.ioctl(fd, number, (ctypes.c_char * len(args)).from_buffer(args)))


def opened(path: Path) -> closing:
    """A descriptor of the directory `path`."""
    return closing(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def _translate(error: OSError, doing: str, path: Path) -> Exception:
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return NoSpace(f"{doing} {path}: the disk is full", hint="remove checkpoints or enlarge the pool")
        case errno.EEXIST:
            return Conflict(f"{doing} {path}: exists already")
        case errno.ENOENT:
            return NotFound(f"{doing} {path}: no such directory")
        case errno.ENOTTY:
            return Unsupported(f"{doing} {path}: not on btrfs")
        case _:
            return error


def _name(path: Path, size: int) -> bytes:
    name = os.fsencode(path.name)
    if not name or len(name) > _NAME_MAX:
        raise ValueError(f"not a subvolume name: {path.name!r}")
    return name.ljust(size, b"\0")


def is_btrfs(path: Path) -> bool:
    """Whether `path` lies on btrfs."""
    return file_system(path) == MAGIC


def create_subvolume(path: Path) -> None:
    with opened(path.parent) as parent:
        try:
            ioctl(parent, _SUBVOL_CREATE, bytearray(struct.pack("=q", 0) + _name(path, 4088)))
        except OSError as error:
            raise _translate(error, "create subvolume", path) from error


def snapshot(source: Path, target: Path, *, readonly: bool) -> None:
    """Snapshot of the subvolume `source` as `target`. Takes what a writer has already finished writing."""
    with opened(source) as taken, opened(target.parent) as parent:
        args = struct.pack("=qQQ32x", taken, 0, _READ_ONLY if readonly else 0) + _name(target, 4040)
        try:
            ioctl(parent, _SNAP_CREATE_V2, bytearray(args))
        except OSError as error:
            raise _translate(error, "snapshot", target) from error


def delete_subvolume(path: Path) -> None:
    """Delete a subvolume, read-only or not, with all that lie in it. Missing is fine.

    The space is free seconds later.
    """
    args = struct.pack("=q", 0) + _name(path, 4088)
    try:
        with opened(path.parent) as parent:
            try:
                ioctl(parent, _SNAP_DESTROY, bytearray(args))
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise
                _delete_below(parent, tree_of(path))
                ioctl(parent, _SNAP_DESTROY, bytearray(args))
    except FileNotFoundError:
        return


def _delete_below(fd: int, tree: int) -> None:
    """Delete the subvolumes in the one with this number, the inner ones first, by number: no path of theirs is used."""
    inside = _related(fd, _ROOT_TREE, _ROOT_REF)
    order = [tree]
    for item in order:
        order += inside.get(item, [])
    groups = _related(fd, _QUOTA_TREE, _GROUP_RELATION)
    for group in {*order, *(above for item in order for above in groups.get(item, []))} if groups else ():
        _limit(fd, None, group)  # a removal out of a subvolume that is full would be refused
    for number in reversed(order[1:]):
        args = struct.pack("=qQQ32xQ", 0, 0, _BY_NUMBER, number).ljust(_ARGS_V2, b"\0")
        ioctl(fd, _SNAP_DESTROY_V2, bytearray(args))


def _related(fd: int, tree: int, target: int) -> dict[int, list[int]]:
    result: dict[int, list[int]] = {}
    with contextlib.suppress(FileNotFoundError):  # the file system has no quotas
        for number, kind, offset, _ in items(fd, tree=tree):
            if kind == target:
                result.setdefault(number, []).append(offset)
    return result


def generation(path: Path) -> int:
    """Grows with every committed change of the subvolume: equal means unchanged."""
    return _number(path, 280)


def created_in(path: Path) -> int:
    """The transaction that made this snapshot."""
    return _number(path, 352)


def tree_of(path: Path) -> int:
    """The number of a subvolume's tree."""
    return _number(path, 0)


def _number(path: Path, offset: int) -> int:
    """A field of struct btrfs_ioctl_get_subvol_info_args."""
    info = bytearray(_INFO)
    with opened(path) as fd:
        ioctl(fd, _GET_SUBVOL_INFO, info)
    return int(struct.unpack_from("=Q", info, offset)[0])


def items(fd: int, *, tree: int = 0, since: int = 0) -> Iterator[tuple[int, int, int, memoryview]]:
    """(number, kind, offset, data) of the items of a tree in order; 0: the tree that `fd` lies in.

    Of blocks that were changed since a generation: the kernel skips the others, so the cost follows the change.
    """
    number, kind, offset = 0, 0, 0
    while True:
        args = bytearray(_KEY.size + _BUFFER)
        _KEY.pack_into(args, 0, tree, number, _MAX, offset, _MAX, since, _MAX, kind, 255, 1 << 20, 0, _BUFFER)
        ioctl(fd, _TREE_SEARCH_V2, args)
        (count,) = struct.unpack_from("=I", args, 64)
        if not count:
            return
        position = _KEY.size
        for _ in range(count):
            _, number, offset, kind, size = _HEADER.unpack_from(args, position)
            position += _HEADER.size
            yield number, kind, offset, memoryview(args)[position : position + size]
            position += size
        if offset < _MAX:
            offset += 1
        elif kind < 255:
            kind, offset = kind + 1, 0
        else:
            number, kind, offset = number + 1, 0, 0


def enable_quota(path: Path) -> None:
    """Account for bytes by the subvolume that wrote them (simple quotas, Linux 6.7). Snapshots cost nothing more."""
    with opened(path) as fd:
        try:
            ioctl(fd, _QUOTA_CTL, bytearray(struct.pack("=QQ", _ENABLE_SIMPLE_QUOTA, 0)))
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOTTY, errno.EOPNOTSUPP):
                raise Unsupported(
                    f"btrfs of Linux {os.uname().release} cannot limit the disk space of a sandbox (needs 6.7)",
                    hint="sandboxes run, without a limit of their disk space; a kernel of 6.7 or newer has it",
                ) from error
            raise


def has_quota(path: Path) -> bool:
    """Whether the file system of `path` can limit what its subvolumes write."""
    with opened(path) as fd:
        try:
            _limit(fd, None, 0)
        except OSError as error:
            if error.errno != errno.ENOTCONN:
                raise
            return False
    return True


def limit(path: Path, size: int | None, *, group: int = 0) -> None:
    """Let the subvolume `path` write at most `size` bytes; what its snapshots still hold counts too. Then: EDQUOT.

    `group`: a quota group on the same file system instead (:mod:`sandbox.tree.quota`).
    """
    with opened(path) as fd:
        try:
            _limit(fd, size, group)
        except OSError as error:
            if error.errno != errno.ENOTCONN:
                raise
            if size is not None:
                raise Unsupported(
                    f"limit {path}: quotas are off on this file system",
                    hint="the pool of a daemon has them: set PAGURUS_STATE, or start `pagurus daemon`",
                ) from error


def _limit(fd: int, size: int | None, group: int) -> None:
    value = _MAX if size is None else size
    ioctl(fd, _QGROUP_LIMIT, bytearray(struct.pack("=QQQQQQ", group, _LIMIT_REFERENCED, value, 0, 0, 0)))


def sync(path: Path) -> None:
    """Commit the whole file system of `path` to disk."""
    with opened(path) as fd:
        fcntl.ioctl(fd, _SYNC)


def flush(path: Path) -> None:
    """Write out dirty pages of the file system of `path` (syncfs)."""
    with opened(path) as fd:
        checked(_libc.syncfs(fd), str(path))
