"""What a sandbox sees of the kernel in addition to /proc: /sys, and its own control groups, as in Docker's default
container.

Guarantee: all are read-only, and show no other sandbox's group. Programs size themselves by their groups: JVM, Node.

Every sandbox has a place for each view, whether its host has such control groups or not. So a checkpoint from a host
with v1 groups is restored on one with v2 groups and the other way round; what that one does not have is empty there.
"""

from __future__ import annotations

from pathlib import Path

from sandbox.container.cgroup import Cgroup
from sandbox.private import passable

#: Instead of a directory: the shim mounts sysfs, in the network namespace of the sandbox, or a tmpfs with mount points.
SYSFS, TMPFS = "sysfs", "tmpfs"
_GROUPS = "/sys/fs/cgroup"
#: Name of a view -> where a sandbox has it; those that lie in others behind these.
TARGETS = {
    "sys": "/sys",
    "cgroup": _GROUPS,
    **{name: f"{_GROUPS}/{name}" for name in ("memory", "cpu", "cpuacct", "cpuset", "pids")},
}


def places(run_dir: Path) -> dict[str, Path]:
    """Where the shim of a sandbox has each view; none of one that an older version made. Blocks, for microseconds."""
    directory = run_dir / "views"
    return {name: directory / name for name in TARGETS} if directory.is_dir() else {}


def make(run_dir: Path, cgroup: Cgroup) -> list[tuple[str, Path, str]]:
    """(what is mounted, where, target) of each view that this host has. Blocks, some 0.1 ms."""
    directory = run_dir / "views"
    passable(directory, run_dir)
    for name in TARGETS:
        (directory / name).mkdir(exist_ok=True)
    result = [(SYSFS, directory / "sys", TARGETS["sys"])]
    if cgroup.pure:
        return [*result, (str(cgroup.path), directory / "cgroup", TARGETS["cgroup"])]
    shown = [name for name in TARGETS if name in cgroup.v1]
    result.append((TMPFS, directory / "cgroup", TARGETS["cgroup"]))
    return [*result, *((str(cgroup.v1[name]), directory / name, TARGETS[name]) for name in shown)]
