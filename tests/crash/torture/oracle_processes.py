"""The truth about the processes of a quiet sandbox, found without the inspector.

Pid 1 is ours and holds no state; pages of a mapped file belong to the file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import re
import select
import stat
import struct
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sandbox.container import namespaces

_GETALL = 13
_IOPRIO_GET, _PIDFD_GETFD, _FSOPEN, _FSCONFIG, _FSMOUNT = 252, 438, 430, 431, 432
_CREATE = 6  # FSCONFIG_CMD_CREATE
_MEMORY = ("/memfd:", "/SYSV", "/dev/zero", "[")  # mappings with a name but without a file of the tree
_STATUS = re.compile(
    r"^(?:Name|State|Tgid|PPid|Uid|Gid|Groups|Threads|SigPnd|ShdPnd|SigBlk|SigIgn|SigCgt|Umask|Cpus_allowed|Seccomp|"
    r"TracerPid|Cap\w+|NoNewPrivs):.*$",
    re.MULTILINE,
)
_libc = ctypes.CDLL(None, use_errno=True)


def read(init: int, tasks: list[int]) -> Iterator[tuple[str, Any]]:
    """Facts by name. Raises FileNotFoundError or ProcessLookupError when a process ends meanwhile."""
    yield from _in_namespaces(init)
    yield "mounts", Path(f"/proc/{init}/mountinfo").read_text()
    survivors = [pid for pid in tasks if pid != init]
    for pid in survivors:
        yield from _process(pid)
    if survivors:  # without one, nobody holds a socket or a pipe
        yield "listeners", _listeners(init)


# --------------------------------------------------------------------------- one process


def _process(pid: int) -> Iterator[tuple[str, Any]]:
    base = Path(f"/proc/{pid}")
    name = f"process {pid} of {_fields(base)[19]}"  # a pid with its start time is one process for ever
    yield name, ((base / "limits").read_text(), os.readlink(base / "cwd"), (base / "oom_score_adj").read_text())
    yield f"{name}: descriptors", tuple(_descriptors(pid))
    yield f"{name}: mappings", (base / "maps").read_text()
    yield f"{name}: memory", _memory(pid)
    for task in sorted(os.listdir(base / "task")):
        fields = _fields(base / "task" / task)
        status = tuple(_STATUS.findall((base / "task" / task / "status").read_text()))
        priority = _libc.syscall(_IOPRIO_GET, 1, int(task))
        # Of the fields: priority, nice, real-time priority, policy.
        yield (
            f"{name}: thread {task}",
            (status, fields[15:17], fields[37:39], priority, (base / "task" / task / "syscall").read_text()),
        )


def _fields(base: Path) -> list[str]:
    """Of /proc/PID/stat, from the state on: [0] is the third."""
    return (base / "stat").read_text().rpartition(")")[2].split()


def _descriptors(pid: int) -> Iterator[tuple[Any, ...]]:
    """Each with its position, flags, locks, counters, and what waits in it."""
    base = Path(f"/proc/{pid}")
    pidfd = os.pidfd_open(pid)
    try:
        for name in sorted(os.listdir(base / "fd"), key=int):
            target = os.readlink(base / "fd" / name)
            information = (base / "fdinfo" / name).read_text()
            result = os.stat(base / "fd" / name)
            size = result.st_size if stat.S_ISREG(result.st_mode) else 0  # no dump is restored over another size
            nameless = target.endswith(" (deleted)") and _content(str(base / "fd" / name))
            yield name, target, information, size, nameless or _waiting(pidfd, int(name), target, result.st_mode)
    finally:
        os.close(pidfd)


def _content(path: str) -> Any:
    """Of a file without a name: it lives in the process dump alone."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        return None
    with open(path, "rb", buffering=0) as file:
        result = os.fstat(file.fileno())
        return result.st_mode, result.st_uid, result.st_size, hashlib.blake2b(file.read(), digest_size=16).digest()


def _waiting(pidfd: int, number: int, target: str, mode: int) -> Any:
    """Bytes in a pipe, named or not, a socket or terminal; readiness of a socket; settings of a terminal."""
    terminal = target.startswith(("/dev/ptmx", "/dev/pts/"))
    if not (stat.S_ISFIFO(mode) or terminal or target.startswith("socket:")):
        return None
    fd = _libc.syscall(_PIDFD_GETFD, pidfd, number, 0)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    try:
        result: list[Any] = []
        with contextlib.suppress(OSError):  # a listening socket has no bytes
            result.append(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0])
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        result.append(poll.poll(0))
        if terminal:
            result.append(repr(termios.tcgetattr(fd)))
            result.append(fcntl.ioctl(fd, termios.TIOCGWINSZ, bytes(8)))
        return [[events for _, events in part] if isinstance(part, list) else part for part in result]
    finally:
        os.close(fd)


def _memory(pid: int) -> bytes:
    """Digest of everything that the process could have written, but for mapped files: they belong to the tree."""
    total = hashlib.blake2b(digest_size=16)
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            span, rights, _, _, _, *path = line.split()
            if "w" not in rights or ("s" in rights and path and not path[0].startswith(_MEMORY) and len(path) == 1):
                continue
            at, end = (int(item, 16) for item in span.split("-"))
            while at < end:
                memory.seek(at)
                try:
                    result = memory.read(end - at)
                except OSError as error:
                    if error.errno != errno.EIO:
                        raise
                    result = b""  # a page behind the end of a file
                total.update(result or b"nothing")
                at += len(result) or mmap.PAGESIZE
    return total.digest()


# --------------------------------------------------------------------------- channels


def _listeners(init: int) -> list[str]:
    """Listening TCP sockets with the length of their queue, and bound UDP ones with theirs."""
    result = []
    for protocol in ("tcp", "udp"):
        for line in Path(f"/proc/{init}/net/{protocol}").read_text().splitlines()[1:]:
            words = line.split()
            if protocol == "udp" or words[3] == "0A":
                result.append(f"{protocol} {words[1]} {words[4]}")
    return sorted(result)


# --------------------------------------------------------------------------- namespaces


def _in_namespaces(init: int) -> list[tuple[str, Any]]:
    """Facts that can be read only from inside the IPC and UTS namespaces."""
    pidfd = os.pidfd_open(init)
    try:
        return namespaces.inside(pidfd, namespaces.flags(("ipc", "uts")), _namespaced)
    finally:
        os.close(pidfd)


def _namespaced() -> list[tuple[str, Any]]:
    machine = os.uname().nodename, Path("/proc/sys/kernel/domainname").read_text()
    return [("machine", machine), ("ipc", _ipc_objects()), ("queues", list(_message_queues()))]


def _ipc_objects() -> tuple[str, list[list[int]]]:
    tables = [Path("/proc/sysvipc", kind).read_text() for kind in ("shm", "sem", "msg")]
    return "".join(tables), [_semaphores(*map(int, line.split()[1:4:2])) for line in tables[1].splitlines()[1:]]


def _semaphores(identity: int, count: int) -> list[int]:
    """Values of a set of semaphores. Its table shows when they changed, by the second, but not to what."""
    values = (ctypes.c_ushort * count)()
    if _libc.semctl(identity, 0, _GETALL, values) < 0:
        raise OSError(ctypes.get_errno(), "semctl")
    return list(values)


def _message_queues() -> Iterator[tuple[Any, ...]]:
    """POSIX message queues of this IPC namespace, by a file system of them that is mounted nowhere."""
    context = _libc.syscall(_FSOPEN, b"mqueue", 1)
    if context < 0:
        raise OSError(ctypes.get_errno(), "fsopen mqueue")
    mount = directory = -1
    try:
        if _libc.syscall(_FSCONFIG, context, _CREATE, None, None, 0) == 0:
            mount = _libc.syscall(_FSMOUNT, context, 1, 0)
        if mount < 0:
            raise OSError(ctypes.get_errno(), "mount mqueue")
        directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=mount)
        for name in sorted(os.listdir(directory)):
            result = os.stat(name, dir_fd=directory)
            fd = os.open(name, os.O_RDONLY, dir_fd=directory)
            try:
                yield name, result.st_mode, result.st_uid, result.st_gid, os.read(fd, 256)
            finally:
                os.close(fd)
    finally:
        for fd in (directory, mount, context):
            if fd >= 0:
                os.close(fd)
