"""What lies on the tmpfs mounts of a sandbox: a listing, to tell whether names that were made there are gone again.

Owns: reading it, bounded, below a root that belongs to somebody else. Does not own: what is stored by way of a mapping
later: its owner ran then.
Guarantee: two equal listings have the same names with the same inodes, metadata, attributes and content; times of all
but directories are among it. None: too large, hidden below another mount, or changing: then nothing can be said.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import re
import stat
import struct
from pathlib import Path

MOUNTS_MOST = 8
ENTRIES_MOST = 512
BYTES_MOST = 1 << 20
_KINDS = ("tmpfs", "ramfs")
_OPENAT2 = 437
_GETFLAGS = 0x80086601  # FS_IOC_GETFLAGS
_IN_ROOT_WITHOUT_LINKS = 0x10 | 0x02  # RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS

Listing = dict[str, tuple[object, ...]]

_libc = ctypes.CDLL(None, use_errno=True)


def listing(init_pid: int) -> Listing | None:
    """All names on the tmpfs mounts that pid 1 of a sandbox sees. Blocks; a few system calls where there are none."""
    found: Listing = {}
    budget = [BYTES_MOST]
    try:
        mounts = [
            (number, device, _unescaped(point))
            for number, device, point, kind in _mounts(Path(f"/proc/{init_pid}/mountinfo").read_text())
            if kind in _KINDS
        ]
        if len(mounts) > MOUNTS_MOST:
            return None
        root = os.open(f"/proc/{init_pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # pid 1 ended meanwhile
        return None
    try:
        for number, device, point in mounts:
            with _opened(root, point) as descriptor:
                status = os.fstat(descriptor)
                if f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}" != device:
                    return None  # another mount lies over it
                found[f"{number}:"] = (status.st_mode, status.st_uid, status.st_gid, _attributes(descriptor))
                _walk(descriptor, f"{number}:", found, budget)
    except (OSError, OverflowError):  # it changes while it is read, or is too large
        return None
    finally:
        os.close(root)
    return found


def _mounts(text: str) -> list[tuple[str, str, str, str]]:
    """Number, device, mount point and type of each line of a mountinfo."""
    found = []
    for line in text.splitlines():
        words, _, kinds = line.partition(" - ")
        number, _, device, _, point, *_ = words.split()
        found.append((number, device, point, kinds.split()[0]))
    return found


def _unescaped(point: str) -> str:
    """Mountinfo writes blanks and backslashes as octal numbers of three digits.

    >>> _unescaped(r"/a\\040b")
    '/a b'
    """
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), point)


@contextlib.contextmanager
def _opened(root: int, path: str):  # type: ignore[no-untyped-def]
    how = struct.pack("=QQQ", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NONBLOCK, 0, _IN_ROOT_WITHOUT_LINKS)
    descriptor = _libc.syscall(_OPENAT2, root, os.fsencode(path), how, len(how))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), f"open {path}")
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _walk(directory: int, prefix: str, found: Listing, budget: list[int]) -> None:
    device = os.fstat(directory).st_dev
    with os.scandir(directory) as entries:
        for entry in entries:
            if len(found) >= ENTRIES_MOST:
                raise OverflowError
            status = entry.stat(follow_symlinks=False)
            path = f"{prefix}/{entry.name}"
            facts = (status.st_ino, status.st_mode, status.st_uid, status.st_gid, status.st_rdev)
            if stat.S_ISLNK(status.st_mode):
                found[path] = (*facts, status.st_nlink, os.readlink(entry.name, dir_fd=directory))
            elif stat.S_ISDIR(status.st_mode):
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                below = os.open(entry.name, flags, dir_fd=directory)
                try:
                    found[path] = (*facts, _attributes(below))
                    if status.st_dev == device:  # else a mount of its own
                        _walk(below, path, found, budget)
                finally:
                    os.close(below)
            else:
                times = (status.st_size, status.st_nlink, status.st_mtime_ns)
                content = _content(directory, entry.name, budget) if stat.S_ISREG(status.st_mode) else ()
                found[path] = (*facts, *times, *content)


def _content(directory: int, name: str, budget: list[int]) -> tuple[object, ...]:
    """Attributes, flags and a digest of the bytes of a regular file."""
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOATIME, dir_fd=directory)
    try:
        flags = array.array("l", [0])
        with contextlib.suppress(OSError):  # a file system without flags
            fcntl.ioctl(file, _GETFLAGS, flags)
        digest = hashlib.blake2b(digest_size=16)
        while part := os.read(file, 1 << 16):
            digest.update(part)
            budget[0] -= len(part)
            if budget[0] < 0:
                raise OverflowError
        return flags[0], _attributes(file), digest.digest()
    finally:
        os.close(file)


def _attributes(file: int) -> tuple[tuple[str, bytes], ...]:
    try:
        return tuple((name, os.getxattr(file, name)) for name in sorted(os.listxattr(file)))
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return ()
        raise
