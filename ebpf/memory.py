"""What lies on the tmpfs mounts of a sandbox: a listing, to tell whether names that were made there are gone again.

Owns: reading it, bounded, below a root that belongs to somebody else. Does not own: what is stored by way of a mapping
later: its owner ran then.
Guarantee: two listings that are the same have the same names with the same inodes, metadata, attributes, content and
times; those of directories move with each name made in them, and count where a program set them. None: too large,
hidden below another mount, or changing: then nothing can be said.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sandbox.errors import PagurusError
from sandbox.tree import safe_path

MOUNTS_MOST = 8
ENTRIES_MOST = 512
BYTES_MOST = 1 << 20
_KINDS = ("tmpfs", "ramfs")
_GETFLAGS = 0x80086601  # FS_IOC_GETFLAGS


@dataclass(frozen=True)
class Listing:
    """What was found, by path, and the times of directories: modified and changed, in nanoseconds."""

    entries: dict[str, tuple[object, ...]] = field(default_factory=dict)
    times: dict[str, tuple[int, int]] = field(default_factory=dict)


def same(before: Listing, now: Listing, *, set_to_now: bool) -> bool:
    """Whether nothing is left of what was done. `set_to_now`: the times of a directory may have been, by a program.

    A name that is made or removed moves both times of its directory to the same present; a time that a program chose
    differs from that of the change.

    >>> was, gone, chosen = (Listing(times={"/": times}) for times in ((1, 1), (5, 5), (3, 5)))
    >>> same(was, gone, set_to_now=False), same(was, gone, set_to_now=True), same(was, chosen, set_to_now=False)
    (True, False, False)
    """
    if before.entries != now.entries:
        return False
    moved = [times for path, times in now.times.items() if times[0] != before.times[path][0]]
    return not any(set_to_now or modified != changed for modified, changed in moved)


def listing(init_pid: int) -> Listing | None:
    """All names on the tmpfs mounts that pid 1 of a sandbox sees. Blocks; a few system calls where there are none."""
    found = Listing()
    budget = [BYTES_MOST]
    try:
        mounts = [
            (number, device, _unescaped(point))
            for number, device, point, kind in _mounts(os.fsdecode(Path(f"/proc/{init_pid}/mountinfo").read_bytes()))
            if kind in _KINDS
        ]
        if len(mounts) > MOUNTS_MOST:
            return None
        with safe_path.root_of(init_pid) as root:
            for number, device, point in mounts:
                with _opened(root, point) as descriptor:
                    status = os.fstat(descriptor)
                    if f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}" != device:
                        return None  # another mount lies over it
                    owner = (status.st_mode, status.st_uid, status.st_gid)
                    found.entries[f"{number}:"] = (*owner, _attributes(descriptor))
                    found.times[f"{number}:"] = (status.st_mtime_ns, status.st_ctime_ns)
                    _walk(descriptor, f"{number}:", found, budget)
    except (OSError, OverflowError, RecursionError, PagurusError):  # pid 1 ended, it changes meanwhile, is too large
        return None
    return found


def _mounts(text: str) -> list[tuple[str, str, str, str]]:
    """Number, device, mount point and type of each line of a mountinfo."""
    found = []
    for line in filter(None, text.split("\n")):  # the sandbox names directories: other ends of lines are part of names
        words, _, kinds = line.partition(" - ")
        number, _, device, _, point, *_ = words.split(" ")
        found.append((number, device, point, kinds.split(" ")[0]))
    return found


def _unescaped(point: str) -> str:
    """Mountinfo writes blanks and backslashes as octal numbers of three digits.

    >>> _unescaped(r"/a\\040b")
    '/a b'
    """
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), point)


@contextlib.contextmanager
def _opened(root: int, path: str) -> Iterator[int]:
    descriptor = safe_path.openat2(root, path, os.O_RDONLY | os.O_DIRECTORY, resolve=safe_path.ACROSS_MOUNTS)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _walk(directory: int, prefix: str, found: Listing, budget: list[int]) -> None:
    device = os.fstat(directory).st_dev
    with os.scandir(directory) as entries:
        for entry in entries:
            if len(found.entries) >= ENTRIES_MOST:
                raise OverflowError
            status = entry.stat(follow_symlinks=False)
            path = f"{prefix}/{entry.name}"
            facts = (status.st_ino, status.st_mode, status.st_uid, status.st_gid, status.st_rdev)
            if stat.S_ISLNK(status.st_mode):
                target = os.readlink(entry.name, dir_fd=directory)
                found.entries[path] = (*facts, status.st_nlink, status.st_mtime_ns, target, _of_name(directory, entry))
            elif stat.S_ISDIR(status.st_mode):
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                below = os.open(entry.name, flags, dir_fd=directory)
                try:
                    found.entries[path] = (*facts, _attributes(below))
                    found.times[path] = (status.st_mtime_ns, status.st_ctime_ns)
                    if status.st_dev == device:  # else a mount of its own
                        _walk(below, path, found, budget)
                finally:
                    os.close(below)
            else:
                times = (status.st_size, status.st_nlink, status.st_mtime_ns)
                regular = stat.S_ISREG(status.st_mode)
                content = _content(directory, entry.name, budget) if regular else _of_name(directory, entry)
                found.entries[path] = (*facts, *times, *content)


def _content(directory: int, name: str, budget: list[int]) -> tuple[object, ...]:
    """Attributes, flags and a digest of the bytes of a regular file."""
    with safe_path.regular(directory, name) as file:
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


def _of_name(directory: int, entry: os.DirEntry[str]) -> tuple[tuple[str, bytes], ...]:
    """Attributes of what cannot be opened: a symbolic link, a FIFO, a socket, a device."""
    return _attributes(f"/proc/self/fd/{directory}/{entry.name}")


def _attributes(file: int | str) -> tuple[tuple[str, bytes], ...]:
    follow = isinstance(file, int)
    try:
        names = sorted(os.listxattr(file, follow_symlinks=follow))
        return tuple((name, os.getxattr(file, name, follow_symlinks=follow)) for name in names)
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return ()
        raise
