"""What a sandbox holds, found without the inspector: the truth that its verdicts are compared with.

Owns: a complete reading of a quiet sandbox: every file of its tree, every process, IPC objects, listeners, mounts.
Does not own: what an agent would call a change; here every difference is one, except
the times of directories (a temporary file moves them), access times, and the blocks that a file occupies.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import stat
import struct
import termios
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_CLONE_NEWIPC = 0x08000000
_GETALL = 13
_MEMORY = ("/memfd:", "/SYSV", "/dev/zero", "[")  # mappings with a name but without a file of the tree
_SKIPPED = {"proc", "sys"}  # at the root: not part of the tree
_STATUS = re.compile(
    r"^(?:State|Tgid|PPid|Uid|Gid|Groups|Threads|SigPnd|ShdPnd|SigBlk|SigIgn|SigCgt|Umask|Cpus_allowed|Seccomp):.*$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Truth:
    """A sandbox at one instant. Two of them are equal when nothing that matters for recovery differs."""

    files: dict[str, Any] = field(default_factory=dict)
    processes: dict[str, Any] = field(default_factory=dict)

    def changes(self, before: Truth) -> tuple[list[str], list[str]]:
        """Paths and process facts that differ."""
        return _differ(before.files, self.files), _differ(before.processes, self.processes)


def read(init: int, tasks: list[int]) -> Truth:
    """The truth about the sandbox of this pid 1. `tasks` are the host's numbers of its threads."""
    root = f"/proc/{init}/root"
    return Truth(files=dict(_tree(root)), processes=dict(_processes(init, tasks)))


def _differ(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))


# --------------------------------------------------------------------------- files


def _tree(root: str) -> Iterator[tuple[str, Any]]:
    links: dict[tuple[int, int], str] = {}
    pending = [""]
    while pending:
        directory = pending.pop()
        with os.scandir(f"{root}{directory}") as entries:
            for entry in sorted(entries, key=lambda one: one.name):
                path = f"{directory}/{entry.name}"
                if not directory and entry.name in _SKIPPED:
                    continue
                found = os.lstat(f"{root}{path}")
                if stat.S_ISDIR(found.st_mode):
                    if path != "/dev/pts":
                        pending.append(path)
                    yield path, (found.st_mode, found.st_uid, found.st_gid, _attributes(f"{root}{path}"))
                    continue
                first = links.setdefault((found.st_dev, found.st_ino), path)
                yield path, _file(f"{root}{path}", found, first)


def _file(path: str, found: os.stat_result, first: str) -> tuple[Any, ...]:
    content: Any = None
    if stat.S_ISREG(found.st_mode):
        with open(path, "rb", buffering=0) as file:
            content = hashlib.blake2b(file.read(), digest_size=16).digest()
    elif stat.S_ISLNK(found.st_mode):
        content = os.readlink(path)
    when = 0 if stat.S_ISFIFO(found.st_mode) or stat.S_ISSOCK(found.st_mode) else found.st_mtime_ns
    return (
        found.st_mode, found.st_uid, found.st_gid, found.st_size, found.st_nlink, found.st_rdev, when, content, first,
        _attributes(path),
    )  # fmt: skip


def _attributes(path: str) -> tuple[tuple[str, bytes], ...]:
    names = sorted(os.listxattr(path, follow_symlinks=False))
    return tuple((name, os.getxattr(path, name, follow_symlinks=False)) for name in names)


# --------------------------------------------------------------------------- processes


def _processes(init: int, tasks: list[int]) -> Iterator[tuple[str, Any]]:
    yield "ipc", _in_ipc_namespace(init, _ipc_objects)
    yield "mounts", Path(f"/proc/{init}/mountinfo").read_text()
    survivors = [pid for pid in tasks if pid != init]
    for pid in survivors:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        name = f"task {pid} of {fields[19]}"  # a pid with its start time is one task for ever
        yield name, _task(pid, fields)
    if survivors:  # without one, nobody holds a socket or a pipe
        yield "listeners", _listeners(init)
        yield "fifos", dict(_fifos(f"/proc/{init}/root"))


def _task(pid: int, fields: list[str]) -> tuple[Any, ...]:
    base = Path(f"/proc/{pid}")
    status = tuple(_STATUS.findall((base / "status").read_text()))
    nice = fields[16]
    descriptors = []
    for name in sorted(os.listdir(base / "fd")):
        information = (base / "fdinfo" / name).read_text()
        descriptors.append((name, os.readlink(base / "fd" / name), information))
    return (
        status, nice, (base / "limits").read_text(), os.readlink(base / "cwd"), tuple(descriptors),
        (base / "maps").read_text(), _memory(pid), (base / "syscall").read_text(),
    )  # fmt: skip


def _memory(pid: int) -> bytes:
    """Digest of everything that the task could have written, but for mapped files: they belong to the tree."""
    total = hashlib.blake2b(digest_size=16)
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            span, rights, _, _, _, *path = line.split()
            if "w" not in rights or ("s" in rights and path and not path[0].startswith(_MEMORY) and len(path) == 1):
                continue
            start, end = (int(each, 16) for each in span.split("-"))
            memory.seek(start)
            total.update(memory.read(end - start))
    return total.digest()


def _listeners(init: int) -> list[str]:
    """Listening TCP sockets with the length of their queue, and bound Unix ones."""
    found = []
    for line in Path(f"/proc/{init}/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A":
            found.append(f"{words[1]} {words[4]}")
    return sorted(found)


def _fifos(root: str) -> Iterator[tuple[str, int]]:
    """Bytes that wait in the named pipes of the work directory."""
    for path in sorted(Path(root, "work").glob("*")):
        if not path.is_fifo():
            continue
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            waiting = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0]
        finally:
            os.close(fd)
        if waiting:
            yield path.name, waiting


def _ipc_objects() -> tuple[str, list[list[int]]]:
    tables = [Path("/proc/sysvipc", kind).read_text() for kind in ("shm", "sem", "msg")]
    return "".join(tables), [_semaphores(*map(int, line.split()[1:4:2])) for line in tables[1].splitlines()[1:]]


def _semaphores(identity: int, count: int) -> list[int]:
    """Values of a set of semaphores. Its table shows when they changed, by the second, but not to what."""
    values = (ctypes.c_ushort * count)()
    if ctypes.CDLL(None, use_errno=True).semctl(identity, 0, _GETALL, values) < 0:
        raise OSError(ctypes.get_errno(), "semctl")
    return list(values)


def _in_ipc_namespace(init: int, call: Any) -> Any:
    """Call in a thread that joined the sandbox's IPC namespace."""
    result: list[Any] = []

    def inside() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        fd = os.open(f"/proc/{init}/ns/ipc", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if libc.setns(fd, _CLONE_NEWIPC) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        finally:
            os.close(fd)
        result.append(call())

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    if not result:
        raise RuntimeError("the IPC objects of the sandbox cannot be read")
    return result[0]
