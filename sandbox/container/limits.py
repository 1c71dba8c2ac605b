"""Writing limits into control groups of v1 and of v2. A limit that is None is none."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

from sandbox.descriptors import closing

CPU_PERIOD = 100_000  # microseconds


def write(path: Path, value: str | int) -> None:
    """Set a value of a group."""
    with closing(os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)) as file:
        os.write(file, b"%s\n" % str(value).encode())


def cpu_quota(cpus: float | None) -> int | None:
    """Microseconds of processor time in each period."""
    return None if cpus is None else max(1000, int(cpus * CPU_PERIOD))


def set_v2(group: Path, *, memory: int | None, quota: int | None, processes: int | None) -> None:
    """Set the limits of one group: bytes, microseconds in each period, tasks."""
    write(group / "memory.max", memory or "max")
    if (group / "memory.swap.max").exists():
        write(group / "memory.swap.max", 0 if memory else "max")
    write(group / "cpu.max", f"{quota or 'max'} {CPU_PERIOD}")
    write(group / "pids.max", processes or "max")


def set_below_v2(group: Path, *, memory: int | None, quota: int | None, processes: int | None) -> None:
    """Likewise of a group below a sandbox's, while that one has controllers for it.

    What it holds and cannot give back it keeps: after a restore that may be a little more than before.
    """
    if not (group / "memory.max").exists():
        return
    if memory is not None:
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        memory = max(memory, int(stat["anon"]) + int(stat["shmem"]))
    set_v2(group, memory=memory, quota=quota, processes=processes)


def set_v1(groups: Mapping[str, Path], *, memory: int | None, quota: int | None, processes: int | None) -> None:
    """Likewise in the hierarchies of the controllers memory, cpu and pids, as far as they are there."""
    if path := groups.get("memory"):
        swap = path / "memory.memsw.limit_in_bytes"
        steps = [path / "memory.limit_in_bytes", *([swap] if swap.exists() else [])]
        current = int(steps[0].read_text())
        if memory is None or memory > current:
            steps.reverse()  # memory + swap may never be below memory
        for step in steps:
            write(step, -1 if memory is None else memory)
    if path := groups.get("cpu"):
        write(path / "cpu.cfs_period_us", CPU_PERIOD)
        write(path / "cpu.cfs_quota_us", quota or -1)
    if path := groups.get("pids"):
        write(path / "pids.max", processes or "max")


def set_memory_v1(group: Path, memory: int) -> None:
    """Set the limit of memory of a group that may hold more by now: then it gets no more than that."""
    try:
        set_v1({"memory": group}, memory=memory, quota=None, processes=None)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        used = int((group / "memory.usage_in_bytes").read_text())
        set_v1({"memory": group}, memory=max(memory, used), quota=None, processes=None)
