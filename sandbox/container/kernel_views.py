"""What a sandbox sees of the kernel beside /proc: /sys, and its own control groups, as in Docker's default container.

Owns: which directories these are, where they lie in a sandbox and on the host. Does not own: mounting them (the shim).
Guarantee: all are read-only, and show no other sandbox's group. Programs size themselves by their groups: JVM, Node.

Every sandbox has a place for each view, whether its host has such control groups or not. So a checkpoint from a host
with v1 groups is restored on one with v2 groups and the other way round; what that one does not have is empty there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sandbox.container.cgroup import Cgroup, shown_group
from sandbox.private import passable

SYSFS = "sysfs"  # instead of a directory: the shim mounts it, in the network namespace of the sandbox
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


def make(run_dir: Path, cgroup: Cgroup) -> Iterator[tuple[str, Path, str]]:
    """(what is mounted, where, target) of each view that this host has. Blocks, some 0.1 ms."""
    directory = run_dir / "views"
    for name in TARGETS:
        passable(directory / name, run_dir)
    yield SYSFS, directory / "sys", TARGETS["sys"]
    groups = {name: path for name in TARGETS if (path := shown_group(cgroup, name)) is not None}
    if not cgroup.pure:  # a directory with a mount point for each
        for name in groups:
            passable(directory / "cgroup" / name, run_dir)
        (directory / "cgroup").chmod(0o755)
        groups = {"cgroup": directory / "cgroup", **groups}
    for name, path in groups.items():
        yield str(path), directory / name, TARGETS[name]
