"""Limits of processes that leave CRIU no room: it opens a few descriptors and maps some memory in each that it dumps.

Guarantee: the limits are raised only while the processes are stopped, only of those near them, and by a fixed amount;
images have the limits as they were. If the daemon dies in between, a process keeps that much more.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable
from pathlib import Path

from sandbox import procfs
from sandbox.container.alive import is_readable
from sandbox.criu import image_files

DESCRIPTORS = 16  # that CRIU may need in a process
ADDRESS_SPACE = 64 << 20  # bytes
_PAGE = resource.getpagesize()


class RaisedLimits:
    """The limits of one dump."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}  # pid -> pidfd
        self._former: list[tuple[int, int, tuple[int, int]]] = []  # pid, limit, what it was

    def lift(self, tasks: Callable[[], list[int]]) -> None:
        """Raise what is too low in these processes, which are stopped. Blocks; some 10 µs a process."""
        for pid in filter(_is_near, tasks()):
            with contextlib.suppress(OSError):
                self._held[pid] = os.pidfd_open(pid)
        members = set(tasks()) if self._held else set()
        for pid, pidfd in self._held.items():
            with contextlib.suppress(OSError, ValueError):  # it has just been killed
                if pid in members and not is_readable(pidfd):
                    for limit, used, needed in LIMITS:
                        self._lift(pid, limit, used(pid), needed)

    def _lift(self, pid: int, limit: int, used: int, needed: int) -> None:
        soft, hard = resource.prlimit(pid, limit)
        if not _is_too_low(soft, used, needed):
            return
        if limit == resource.RLIMIT_NOFILE:  # a descriptor may lie above the limit
            used = max((number for number, _ in procfs.descriptors(pid)), default=0) + 1
        raised = max(used, soft) + needed
        self._former.append((pid, limit, (soft, hard)))
        within = hard == resource.RLIM_INFINITY or raised <= hard
        try:
            resource.prlimit(pid, limit, (raised, hard if within else raised))
        except (ValueError, PermissionError):  # no CAP_SYS_RESOURCE, in a container
            resource.prlimit(pid, limit, (hard, hard))

    def put_back(self) -> None:
        """Idempotent. Blocks."""
        while self._former:
            pid, limit, former = self._former.pop()
            with contextlib.suppress(OSError, ValueError):
                if not is_readable(self._held[pid]):  # else it has died, and another may have its number
                    resource.prlimit(pid, limit, former)
        while self._held:
            os.close(self._held.popitem()[1])

    def amend(self, images: Path) -> None:
        """Have the images say what was. Blocks."""
        for pid, limit, former in self._former:
            path = images / f"core-{procfs.inner_pid(pid)}.img"
            core = image_files.read(path, image_files.messages().core_entry)
            if core is not None:
                one = core.entries[0].tc.rlimits.rlimits[limit]
                one.cur, one.max = (item % (1 << 64) for item in former)
                core.write(path)


def _is_too_low(soft: int, used: int, needed: int) -> bool:
    return soft != resource.RLIM_INFINITY and used + needed > soft


def _is_near(pid: int) -> bool:
    """Whether a limit of a process may leave too little."""
    with contextlib.suppress(OSError, ValueError):
        return any(_is_too_low(resource.prlimit(pid, limit)[0], used(pid), needed) for limit, used, needed in LIMITS)
    return False


def _descriptors(pid: int) -> int:
    directory = f"/proc/{pid}/fd"
    return os.stat(directory).st_size or len(os.listdir(directory))  # the size is their number from Linux 6.2 on


def _address_space(pid: int) -> int:
    return int(procfs.read_bytes(f"/proc/{pid}/statm").split()[0]) * _PAGE


LIMITS = (
    (resource.RLIMIT_NOFILE, _descriptors, DESCRIPTORS),
    (resource.RLIMIT_AS, _address_space, ADDRESS_SPACE),
)
