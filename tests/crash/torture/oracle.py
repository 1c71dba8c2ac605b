"""What a sandbox holds, found without the inspector: the truth that its verdicts are compared with.

The times of directories and FIFOs are told apart: whoever uses them moves them.

Per file: type, mode, owner, size, links and which names share an inode, device, modification time, content, where its
holes are, inode flags, extended attributes (ACLs and capabilities are such). Files of a tmpfs are facts about
processes: they live in the process dump. Files of scratch are told apart: no checkpoint holds them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.crash.torture import oracle_processes

_SKIPPED = {"proc", "sys"}  # at the root: not part of the tree
_GETFLAGS = 0x80086601
_LARGE = 1 << 18  # bytes from which a file's digest is kept until its inode changes


@dataclass(frozen=True)
class Changes:
    """What differs between two instants."""

    files: list[str]
    processes: list[str]
    times: list[str]  # of the files, those of which only the modification time differs
    moved: tuple[str, ...] = ()  # directories and FIFOs that are still there, with another modification time
    moved_in_memory: tuple[str, ...] = ()  # the same on a tmpfs: facts about processes
    scratch: tuple[str, ...] = ()  # files that no checkpoint holds: seen they must be, captured not
    scratch_times: tuple[str, ...] = ()  # of these, as `times`
    moved_in_scratch: tuple[str, ...] = ()


@dataclass(frozen=True)
class Truth:
    """A sandbox at one instant. Two of them are equal when nothing that matters for recovery differs."""

    files: dict[str, Any] = field(default_factory=dict)
    processes: dict[str, Any] = field(default_factory=dict)
    moving: dict[str, int] = field(default_factory=dict)  # modification times of directories and FIFOs
    memory: tuple[str, ...] = ()  # where a tmpfs is mounted, with a slash behind
    mounted: frozenset[str] = frozenset()  # mount points: what is seen there is the mount's, and below "mounts"
    scratch: dict[str, Any] = field(default_factory=dict)  # as `files`, of what no checkpoint holds
    excluded: tuple[str, ...] = ()  # where that is mounted, with a slash behind

    def since(self, before: Truth) -> Changes:
        """The facts that differ."""
        covered = tuple(f"{point}/" for point in before.mounted ^ self.mounted)  # another tree is seen there now
        files = [path for path in _differ(before.files, self.files) if not f"{path}/".startswith(covered)]
        times = [path for path in files if _only_time(before.files.get(path), self.files.get(path))]
        scratch = [path for path in _differ(before.scratch, self.scratch) if not f"{path}/".startswith(covered)]
        scratch_times = [path for path in scratch if _only_time(before.scratch.get(path), self.scratch.get(path))]
        moved = [path for path, when in self.moving.items() if before.moving.get(path, when) != when]
        memory = tuple(path for path in moved if f"{path}/".startswith(self.memory or ("\0",)))
        excluded = tuple(path for path in moved if f"{path}/".startswith(self.excluded or ("\0",)))
        return Changes(
            files,
            _differ(before.processes, self.processes),
            times,
            moved=tuple(path for path in moved if path not in memory and path not in excluded),
            moved_in_memory=memory,
            scratch=tuple(scratch),
            scratch_times=tuple(scratch_times),
            moved_in_scratch=excluded,
        )


def read(init: int, tasks: list[int], excluded: Sequence[str] = ()) -> Truth:
    """The truth about the sandbox of this pid 1. `tasks` are the host's numbers of its processes.

    `apart`: mount points of what no checkpoint holds.
    """
    root = f"/proc/{init}/root"
    processes = dict(oracle_processes.read(init, tasks))
    points = dict(_mount_points(processes["mounts"]))
    memory = tuple(f"{point}/" for point, kind in points.items() if kind in ("tmpfs", "ramfs"))
    outside = tuple(f"{point}/" for point in excluded)
    files, scratch = {}, {}
    moving: dict[str, int] = {}
    for path, facts in _tree(root, moving, outside):
        if memory and path.startswith(memory):
            processes[f"tmpfs {path}"] = facts
        elif outside and f"{path}/".startswith(outside):
            scratch[path] = facts
        else:
            files[path] = facts
    return Truth(
        files=files,
        processes=processes,
        moving=moving,
        memory=memory,
        mounted=frozenset(points),
        scratch=scratch,
        excluded=outside,
    )


def _differ(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))


def _only_time(before: Any, after: Any) -> bool:
    return isinstance(before, _File) and isinstance(after, _File) and before.rest == after.rest


def _mount_points(mounts: str) -> Iterator[tuple[str, str]]:
    """Path and type of each file system of a mountinfo table, but for those over parts of /proc."""
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4]
        if not point.startswith("/proc"):
            yield point, right.split()[0]


@dataclass(frozen=True, slots=True)
class _File:
    when: int
    rest: tuple[Any, ...]


def _tree(root: str, moving: dict[str, int], excluded: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    links: dict[tuple[int, int, str], str] = {}  # of each mount its own: the same directory may be mounted twice
    pending = [""]
    while pending:
        directory = pending.pop()
        with os.scandir(f"{root}{directory}") as entries:
            for entry in sorted(entries, key=lambda one: one.name):
                path = f"{directory}/{entry.name}"
                if not directory and entry.name in _SKIPPED:
                    continue
                full = f"{root}{path}"
                result = os.lstat(full)
                if stat.S_ISDIR(result.st_mode) or stat.S_ISFIFO(result.st_mode):
                    moving[path] = result.st_mtime_ns
                if stat.S_ISDIR(result.st_mode):
                    if path != "/dev/pts":
                        pending.append(path)
                    yield path, (result.st_mode, result.st_uid, result.st_gid, _attributes(full))
                    continue
                mount = next((point for point in excluded if path.startswith(point)), "")
                first = links.setdefault((result.st_dev, result.st_ino, mount), path)
                yield path, _file(full, result, first)


def _file(path: str, result: os.stat_result, first: str) -> _File:
    content: Any = None
    if stat.S_ISREG(result.st_mode):
        content = _content(path, result)
    elif stat.S_ISLNK(result.st_mode):
        content = os.readlink(path)
    when = 0 if stat.S_ISFIFO(result.st_mode) or stat.S_ISSOCK(result.st_mode) else result.st_mtime_ns
    rest = (
        result.st_mode, result.st_uid, result.st_gid, result.st_size, result.st_nlink, result.st_rdev, content, first,
        _attributes(path),
    )  # fmt: skip
    return _File(when, rest)


_digests: dict[tuple[int, ...], bytes] = {}


def _content(path: str, result: os.stat_result) -> tuple[Any, ...]:
    identity = (result.st_dev, result.st_ino, result.st_ctime_ns, result.st_mtime_ns, result.st_size)
    with open(path, "rb", buffering=0) as file:
        flags = _flags(file.fileno())
        digest = _digests.get(identity) if result.st_size >= _LARGE else None
        if digest is None:
            digest = hashlib.blake2b(file.read(), digest_size=16).digest()
            if result.st_size >= _LARGE:
                _digests[identity] = digest
        return digest, tuple(_data(file.fileno(), result.st_size)), flags


def _flags(fd: int) -> int | None:
    try:
        return int(struct.unpack("q", fcntl.ioctl(fd, _GETFLAGS, bytes(8)))[0] & 0xFFFFFFFF)
    except OSError:  # a file system without flags
        return None


def _data(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Where the file holds data, and not a hole."""
    at = 0
    while at < size:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # only a hole follows
            return
        end = os.lseek(fd, at, os.SEEK_HOLE)
        yield at, end
        at = end


def _attributes(path: str) -> tuple[tuple[str, bytes], ...]:
    names = sorted(os.listxattr(path, follow_symlinks=False))
    return tuple((name, os.getxattr(path, name, follow_symlinks=False)) for name in names)


def processes_below(cgroup: Path) -> list[int]:
    """Host pids of all processes of this control group and of those below it."""
    result = []
    for directory, _, _ in os.walk(cgroup):
        result += [int(line) for line in Path(directory, "cgroup.procs").read_text().split()]
    return result
