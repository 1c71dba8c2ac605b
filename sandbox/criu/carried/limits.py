"""Limits of processes that leave CRIU no room: it opens a few descriptors and maps some memory in each that it dumps.

Guarantee: the limits are raised only while the processes are stopped, only of those near them, and by a fixed amount;
images have the limits as they were. If the daemon dies in between, a process keeps that much more.
"""

from __future__ import annotations

import contextlib
import os
import resource
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
        self._former: list[tuple[int, int, int, tuple[int, int]]] = []  # pid, pidfd, limit, what it was

    def lift(self, pids: list[int]) -> None:
        """Raise what is too low in these processes, which are stopped. Blocks; some 10 µs a process."""
        for pid in pids:
            with contextlib.suppress(OSError, ValueError):  # it has just been killed
                self._lift(pid, resource.RLIMIT_NOFILE, _descriptors(pid), DESCRIPTORS)
                self._lift(pid, resource.RLIMIT_AS, _address_space(pid), ADDRESS_SPACE)

    def _lift(self, pid: int, limit: int, used: int, needed: int) -> None:
        soft, hard = resource.prlimit(pid, limit)
        if soft == resource.RLIM_INFINITY or used + needed <= soft:
            return
        if limit == resource.RLIMIT_NOFILE:  # a descriptor may lie above the limit
            used = max((number for number, _ in procfs.descriptors(pid)), default=0) + 1
        raised = max(used, soft) + needed
        pidfd = os.pidfd_open(pid)
        self._former.append((pid, pidfd, limit, (soft, hard)))
        within = hard == resource.RLIM_INFINITY or raised <= hard
        try:
            resource.prlimit(pid, limit, (raised, hard if within else raised))
        except (ValueError, PermissionError):  # no CAP_SYS_RESOURCE, in a container
            resource.prlimit(pid, limit, (hard, hard))

    def put_back(self) -> None:
        """Idempotent. Blocks."""
        while self._former:
            pid, pidfd, limit, former = self._former.pop()
            with contextlib.suppress(OSError, ValueError):
                if not is_readable(pidfd):  # else it has died, and another may have its number
                    resource.prlimit(pid, limit, former)
            os.close(pidfd)

    def amend(self, images: Path) -> None:
        """Have the images say what was. Blocks."""
        for pid, _, limit, former in self._former:
            path = images / f"core-{procfs.inner_pid(pid)}.img"
            core = image_files.read(path, image_files.messages().core_entry)
            if core is not None:
                one = core.entries[0].tc.rlimits.rlimits[limit]
                one.cur, one.max = (item % (1 << 64) for item in former)
                core.write(path)


def _descriptors(pid: int) -> int:
    directory = f"/proc/{pid}/fd"
    return os.stat(directory).st_size or len(os.listdir(directory))  # the size is their number from Linux 6.2 on


def _address_space(pid: int) -> int:
    return int(procfs.read_bytes(f"/proc/{pid}/statm").split()[0]) * _PAGE
