"""What the kernel says of processes, threads and mounts in /proc.

Guarantee: nothing that a process calls itself is taken for a word of the kernel's. Its name stands in both `stat` and
`status`; it may hold any byte, parentheses and "NSpid:" as well, but for line feeds, which the kernel writes as
``\\n``.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sandbox.descriptors import closing

# Of the fields of `stat`.
STATE, PARENT, GROUP, SESSION, TERMINAL, FOREGROUND, FLAGS, STARTED, PENDING = 0, 1, 2, 3, 4, 5, 6, 19, 28
ENDED = (b"Z", b"X")  # states
_EXITING = 0x4  # of the flags: PF_EXITING


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, distinguished from a later one of the same number."""

    pid: int
    parent: int
    group: int
    session: int
    started: int  # clock ticks since boot: distinguishes a process from a later one of the same number


class MountInfo(NamedTuple):
    """A mount that the daemon sees."""

    source: str
    point: str
    kind: str
    options: str


def read_bytes(path: str, directory: int | None = None) -> bytes:
    """A small file of the kernel's, read at once: a few times as fast as by pathlib, for what every command does."""
    with closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)) as descriptor:
        return os.read(descriptor, 1 << 16)


def memory() -> dict[str, int]:
    """Bytes of the host's memory, by the kernel's names: MemTotal, MemAvailable, ..."""
    lines = (line.split(":") for line in read_bytes("/proc/meminfo").decode().splitlines())
    return {name: int(value.split()[0]) << 10 for name, value in lines}


def stat(of: int | str, directory: int | None = None) -> list[bytes]:
    """The fields of `stat` behind the name. `of`: a process, or a path to the file. Raises OSError when it is gone."""
    return read_bytes(f"/proc/{of}/stat" if isinstance(of, int) else of, directory).rpartition(b")")[2].split()


def status(of: int | str, what: str) -> str | None:
    """A line of `status` of a process, or of PID/task/TID; None when it is gone."""
    with contextlib.suppress(OSError):
        if result := re.search(rb"^%s:[ \t]*(.*)$" % what.encode(), read_bytes(f"/proc/{of}/status"), re.M):
            return result[1].decode("utf-8", "backslashreplace")
    return None


def task_of(pid: int) -> ProcessIdentity | None:
    """None when it has ended."""
    try:
        fields = stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[STATE] in ENDED:
        return None
    return ProcessIdentity(pid, int(fields[PARENT]), int(fields[GROUP]), int(fields[SESSION]), int(fields[STARTED]))


def is_doomed(pid: int) -> bool:
    """Whether a process was killed or is exiting. Its namespace starts nothing any more, though it is not dead yet."""
    try:
        fields = stat(pid)
    except OSError:
        return True
    # A signal that kills is made pending for each thread by itself, which is what stands there.
    return bool(int(fields[FLAGS]) & _EXITING or int(fields[PENDING]) >> (signal.SIGKILL - 1) & 1)


def inner_pid(of: int | str) -> int | None:
    """The number that a process or thread has in the innermost namespace it is in; None when it is gone."""
    numbers = status(of, "NSpid")
    return int(numbers.split()[-1]) if numbers else None


def host_pid(inner: int, pids: list[int]) -> int | None:
    """Which of these processes of a sandbox has this pid inside it."""
    return next((pid for pid in pids if inner_pid(pid) == inner), None)


def descriptors(pid: int) -> list[tuple[int, str]]:
    """(number, where it leads) of the open files of a process; empty when it is gone."""
    result = []
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed since
                result.append((int(name), os.readlink(f"/proc/{pid}/fd/{name}")))
    return result


def threads(pid: int) -> list[int]:
    """The threads of a process, the first one first. Raises OSError when it is gone."""
    return sorted(map(int, os.listdir(f"/proc/{pid}/task")))


def mounts() -> Iterator[MountInfo]:
    """What is mounted in the daemon's namespace."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        yield MountInfo(*line.split()[:4])
