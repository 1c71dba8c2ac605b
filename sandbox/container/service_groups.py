"""The control groups of services that have limits of their own, below those of their sandbox.

Guarantee: such a service meets its limits alone; what the sandbox may use in all holds for all of them. The freezer,
the counters and the inspector work on the group of the sandbox, which has these in it.

::

    pagurus/SANDBOX                 in the hierarchies of memory, cpu and pids: what has no group of its own
    pagurus/SANDBOX/service-NAME

There are none where only v2 has the controllers: there only leaves have processes, and a sandbox's group is one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from sandbox.container import limits, services
from sandbox.container.cgroup import Cgroup, parse_bytes
from sandbox.messages import Composition, Limits
from sandbox.messages.services import ServiceLimits

PREFIX = "service-"
CONTROLLERS = ("memory", "cpu", "pids")


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
        return {name: self.cgroup.v1[name] for name in CONTROLLERS if name in self.cgroup.v1}

    def of(self, service: str) -> dict[str, Path]:
        """The groups of a service, by controller; {}: it has none."""
        if service not in self._limits:
            return {}
        groups = {name: place / f"{PREFIX}{service}" for name, place in self.places().items()}
        return {name: group for name, group in groups.items() if group.is_dir()}

    def divide(self, composition: Composition | None, sandbox: Limits) -> None:
        """From now on these services have groups, with their limits. Those of others go, if nothing is in them."""
        self._limits = limited(composition)
        target = {f"{PREFIX}{name}" for name in self._limits}
        for place in self.places().values():
            for entry in list(os.scandir(place)):
                if entry.name.startswith(PREFIX) and entry.name not in target:
                    with contextlib.suppress(OSError):
                        os.rmdir(entry.path)
            for name in target:
                (place / name).mkdir(exist_ok=True)
        self.apply(sandbox)

    def apply(self, sandbox: Limits) -> None:
        """Set the limits of each, when those of the `sandbox` are: none may have more of the processors."""
        for name, own in self._limits.items():
            memory = None if own.memory is None else parse_bytes(own.memory)
            cpus = [one for one in (own.cpus, sandbox.cpus) if one is not None]
            self._set(name, memory, limits.cpu_quota(min(cpus, default=None)), own.processes)

    def lift(self) -> None:
        """Remove the limits, for a restore."""
        for name in self._limits:
            self._set(name, None, None, None)

    def _set(self, name: str, memory: int | None, quota: int | None, processes: int | None) -> None:
        groups = self.of(name)
        rest = {controller: group for controller, group in groups.items() if controller != "memory" or memory is None}
        limits.set_v1(rest, memory=None, quota=quota, processes=processes)
        if memory is not None and (group := groups.get("memory")) is not None:
            limits.set_memory_v1(group, memory)

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
