"""The control groups of services that have limits of their own, below those of their sandbox.

Guarantee: such a service meets its limits alone; what the sandbox may use in all holds for all of them. The freezer,
the counters and the inspector work on the group of the sandbox, which has these in it.

::

    pagurus/SANDBOX                 v1, hierarchies of memory, cpu and pids: what has no group of its own
    pagurus/SANDBOX/service-NAME    v2: no process, once it is divided, for only leaves may have some
    pagurus/SANDBOX/main            v2: what has no group of its own

Each program of a sandbox has the sandbox's group as the root of its namespace of groups: there it finds those limits,
and its own below. On v2 a new pid 1, or a CRIU that restores one, begins in that group while this has no controllers
for those below (:meth:`ServiceGroups.gather`), makes the namespace, and moves on to ``main``.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from sandbox.container import cgroup as groups_of_host
from sandbox.container import limits, services
from sandbox.container.cgroup import MAIN, Cgroup, parse_bytes
from sandbox.errors import Conflict
from sandbox.messages import Composition, Limits
from sandbox.messages.services import ServiceLimits

PREFIX = "service-"
CONTROLLERS = ("memory", "cpu", "pids")
UNIFIED = "v2"  # instead of a controller
MAX_MOVES = 200  # looks at whether the sandbox's group is empty: processes may be born while others are moved


def limited(composition: Composition | None) -> dict[str, ServiceLimits]:
    """The services that have limits of their own."""
    every = {} if composition is None else composition.services
    return {name: service.limits for name, service in every.items() if service.limits != ServiceLimits()}


class ServiceGroups:
    """Those of one sandbox. Nothing here waits, but for the kernel's locks of groups."""

    def __init__(self, cgroup: Cgroup, composition: Composition | None):
        self.cgroup = cgroup
        self._limits = limited(composition)

    def places(self) -> dict[str, Path]:
        """The groups of the sandbox in which services have theirs, by controller."""
        if self.cgroup.pure:
            return {UNIFIED: self.cgroup.path}
        return {name: self.cgroup.v1[name] for name in CONTROLLERS if name in self.cgroup.v1}

    def of(self, service: str) -> dict[str, Path]:
        """The groups of a service, by controller; {}: it has none."""
        if service not in self._limits:
            return {}
        groups = {name: place / f"{PREFIX}{service}" for name, place in self.places().items()}
        return {name: group for name, group in groups.items() if group.is_dir()}

    @property
    def divided(self) -> bool:
        """Whether processes may be in groups below the sandbox's v2 group alone."""
        return self.cgroup.leaf != self.cgroup.path

    def make(self, composition: Composition | None) -> None:
        """From now on these services have groups. Those of others go, if nothing is in them. :meth:`divide` follows."""
        self._limits = limited(composition)
        target = {f"{PREFIX}{name}" for name in self._limits}
        for place in self.places().values():
            for entry in list(os.scandir(place)):
                if entry.name.startswith(PREFIX) and entry.name not in target:
                    with contextlib.suppress(OSError):
                        os.rmdir(entry.path)
            for name in {*target, MAIN} if self.cgroup.pure and target else target:
                (place / name).mkdir(exist_ok=True)

    def unmake(self) -> None:
        """Have none of them, where they cannot be used."""
        self.make(None)
        if self.divided:
            self.cgroup.leaf.rmdir()

    def divide(self, sandbox: Limits) -> None:
        """Let the groups of :meth:`make` have their limits. Raises Conflict where processes are born too fast."""
        if self.divided:
            self._spread()
        self.apply(sandbox)

    def gather(self) -> None:
        """Let a process begin in the sandbox's v2 group, while no other is in it or below. Limits of those end."""
        if self.divided:
            limits.write(self.cgroup.path / "cgroup.subtree_control", self._controllers("-"))

    def onward(self) -> tuple[str, str] | None:
        """Where a process goes after that, below `places`, and what it lets the sandbox's group then have for those
        below it; None: it stays."""
        return (f"{UNIFIED}/{MAIN}", self._controllers("+")) if self.divided else None

    @staticmethod
    def _controllers(sign: str) -> str:
        return " ".join(sign + name for name in groups_of_host.V2_CONTROLLERS)

    def _spread(self) -> None:
        """Move what is in the sandbox's own v2 group on to ``main``, and let the groups below have controllers."""
        for _ in range(MAX_MOVES):
            for pid in (self.cgroup.path / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    limits.write(self.cgroup.leaf / "cgroup.procs", pid)
            try:
                limits.write(self.cgroup.path / "cgroup.subtree_control", self._controllers("+"))
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
            else:
                return
        raise Conflict(
            "its processes start others faster than they can be moved into groups of services", hint="end some of them"
        )

    def apply(self, sandbox: Limits) -> None:
        """Set the limits of each, when those of the `sandbox` are: none may have more of the processors."""
        total = None if sandbox.memory is None else parse_bytes(sandbox.memory)
        for name, own in self._limits.items():
            memory = None if own.memory is None else parse_bytes(own.memory)
            cpus = [one for one in (own.cpus, sandbox.cpus) if one is not None]
            self._set(name, memory, total, limits.cpu_quota(min(cpus, default=None)), own.processes)
        if self.divided:  # some programs, such as a JVM, look at the group that they are in, and not above
            limits.set_below_v2(self.cgroup.leaf, memory=total, quota=limits.cpu_quota(sandbox.cpus), processes=None)

    def lift(self) -> None:
        """Remove the limits, for a restore."""
        for name in self._limits:
            self._set(name, None, None, None, None)
        if self.divided:
            limits.set_below_v2(self.cgroup.leaf, memory=None, quota=None, processes=None)

    def _set(self, name: str, memory: int | None, total: int | None, quota: int | None, processes: int | None) -> None:
        groups = self.of(name)
        if (unified := groups.get(UNIFIED)) is not None:
            smallest = min((one for one in (memory, total) if one is not None), default=None)
            limits.set_below_v2(unified, memory=smallest, quota=quota, processes=processes)
            return
        rest = {controller: group for controller, group in groups.items() if controller != "memory" or memory is None}
        limits.set_v1(rest, memory=None, quota=quota, processes=processes)
        if memory is not None and (group := groups.get("memory")) is not None:
            limits.set_memory_v1(group, memory)

    def oom_kills(self, service: str) -> int | None:
        """Processes that the OOM killer has ended in a service so far; None: it is not counted alone."""
        groups = self.of(service)
        if (group := groups.get(UNIFIED) or groups.get("memory")) is not None:
            with contextlib.suppress(OSError):  # it goes with its sandbox
                return groups_of_host.oom_kills_in(group)
        return None

    @contextlib.contextmanager
    def opened(self, root: str) -> Iterator[list[int]]:
        """Descriptors by which a process joins the groups of the service with this root, if it has some."""
        service = services.owner(f"{root}/.") if root else None
        result: list[int] = []
        try:
            for group in self.of(service).values() if service is not None else ():
                result.append(os.open(group / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
            yield result
        finally:
            for descriptor in result:
                os.close(descriptor)

    def paths(self) -> dict[str, str]:
        """Of each service with groups, the path of these below the sandbox's."""
        return {name: f"{PREFIX}{name}" for name in self._limits if self.of(name)}
