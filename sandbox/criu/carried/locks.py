"""POSIX locks of restored processes, as fcntl(F_SETLK) takes them.

Guarantee: after :func:`take` each process holds each POSIX lock of its images, or RestoreFailed is raised.

CRIU takes the locks first and maps files afterwards: it opens a file, maps it, and closes it. By POSIX's rules a
process that closes any descriptor of a file loses all its locks on it. SQLite in WAL mode maps a file that it locks.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sandbox.criu import image_files
from sandbox.criu.carried import inject
from sandbox.errors import RestoreFailed

_POSIX = 1  # CRIU's FL_POSIX
_FCNTL = 72
_FLOCK = struct.Struct("=hh4xqqi4x")  # type, whence, start, length, pid
_KINDS = {b"READ": fcntl.F_RDLCK, b"WRITE": fcntl.F_WRLCK}
_LINE = re.compile(rb"^lock:\s+\d+: POSIX\s+\S+\s+(READ|WRITE)\s+\S+ \S+ (\d+) (\d+|EOF)$", re.M)


@dataclass(frozen=True)
class Lock:
    """One lock: bytes from `start` on, `length` of them; 0: to the end of the file, wherever that will be."""

    pid: int  # in the sandbox
    fd: int
    kind: int
    start: int
    length: int


def pending(directory: Path) -> list[Lock]:
    """The POSIX locks of an image directory. Blocks."""
    image = image_files.read(directory / "filelocks.img", image_files.messages().file_lock_entry)
    entries = image.entries if image is not None else []
    return [Lock(one.pid, one.fd, one.type, one.start, one.len) for one in entries if one.flag & _POSIX]


def missing(locks: Iterable[Lock], numbers: dict[int, int]) -> list[Lock]:
    """Those that the processes do not hold. `numbers`: host pids by pid in the sandbox. Blocks."""
    return [lock for lock in locks if lock not in _held(lock.pid, lock.fd, numbers)]


def _held(pid: int, fd: int, numbers: dict[int, int]) -> list[Lock]:
    try:
        content = Path(f"/proc/{numbers[pid]}/fdinfo/{fd}").read_bytes()
    except (FileNotFoundError, KeyError):
        return []
    result = []
    for kind, first, last in _LINE.findall(content):
        start = int(first)
        result.append(Lock(pid, fd, _KINDS[kind], start, 0 if last == b"EOF" else int(last) + 1 - start))
    return result


def take(lost: list[Lock], numbers: dict[int, int], tasks: inject.Standing) -> None:
    """Have the processes take these again, while no other process can. Blocks."""
    for lock in lost:
        target = _FLOCK.pack(lock.kind, os.SEEK_SET, lock.start, lock.length, 0)
        if (result := tasks.call(numbers[lock.pid], _FCNTL, lock.fd, fcntl.F_SETLK, None, data=target)) < 0:
            raise RestoreFailed(
                f"process {lock.pid} cannot lock bytes {lock.start} to {lock.start + lock.length - 1} of descriptor "
                f"{lock.fd} again: {os.strerror(-result)}",
                hint="restore an older checkpoint",
            )
