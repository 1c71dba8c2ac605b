"""Addresses of the services of a composition, fastened to the sandbox's control group.

Guarantee: before a program of a restored or new sandbox runs, its services have their addresses; a new daemon takes
over without a moment in which they have none.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from ipaddress import IPv4Address
from typing import TYPE_CHECKING

from daemon.catalogue import SandboxRow
from ebpf.addresses import Addresses, ServiceAddress
from sandbox.container import services
from sandbox.errors import Unsupported
from sandbox.messages import Composition

if TYPE_CHECKING:
    from sandbox.container.container import Container

ENGINE_PORT = 2375  # of Docker's Engine API at 127.0.0.1, in a sandbox with `docker`
_MOUNT = re.compile(rb"^(\d+) \d+ \S+ \S+ (\S+) ", re.M)


class ServiceAddresses:
    """An attachment (:mod:`daemon.host.attachments`). The programs are loaded for the first composition."""

    def __init__(self) -> None:
        self._loaded: Addresses | None = None
        self._loading = asyncio.Lock()
        self._announced: dict[str, tuple[int, ...]] = {}  # mounts of services, by sandbox
        self._published: dict[str, tuple[int, tuple[int, ...]]] = {}  # number of its group, and ports, by sandbox
        self._gateways: dict[str, int] = {}  # ports, by sandbox
        self._engines: dict[str, int] = {}  # likewise

    async def open(self, rows: Sequence[SandboxRow]) -> None:
        """Nothing is left of a former daemon but what is attached."""

    async def close(self) -> None:
        """Sandboxes keep what is attached."""
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None

    async def attach(self, row: SandboxRow, container: Container) -> None:
        """Raises Unsupported on a kernel without it."""
        if row.composition is None and not row.docker:
            return
        async with self._loading:
            if self._loaded is None:
                try:
                    self._loaded = await asyncio.to_thread(Addresses.load)
                except OSError as error:
                    raise _unsupported(row, error) from error
        self._gateways[row.id] = 0 if row.gateway is None else row.gateway.port
        self._engines[row.id] = ENGINE_PORT if row.docker else 0
        if container.init_pid is not None:
            self.announce(container)
        try:
            await asyncio.to_thread(self._loaded.attach, container.cgroup.path)
        except OSError as error:
            raise _unsupported(row, error) from error

    def announce(self, container: Container) -> None:
        """The services have their roots by now, and nothing runs in them. Blocks, some 0.1 ms."""
        sandbox, composition = container.spec.id, container.spec.composition
        if self._loaded is None or composition is None:
            return
        with open(f"/proc/{container.init_pid}/mountinfo", "rb") as table:
            mounts = {place.decode("utf-8", "replace"): int(number) for number, place in _MOUNT.findall(table.read())}
        entries = {
            mounts[services.root(name)]: kernel_entry(
                composition,
                name,
                container.cgroup.id,
                self._gateways.get(sandbox, 0),
                self._engines.get(sandbox, 0) if name == composition.main else 0,
            )
            for name in composition.services
            if services.root(name) in mounts
        }
        self._loaded.announce(entries)
        former = self._announced.get(sandbox, ())
        self._announced[sandbox] = tuple(entries)
        self._loaded.forget(number for number in former if number not in entries)
        self._publish(self._loaded, container, composition)

    def _publish(self, loaded: Addresses, container: Container, composition: Composition) -> None:
        places, sandbox = published_places(composition), container.spec.id
        loaded.publish(container.cgroup.id, places)
        _, former = self._published.get(sandbox, (0, ()))
        loaded.withdraw(container.cgroup.id, (port for port in former if port not in places))
        self._published[sandbox] = container.cgroup.id, tuple(places)

    def forget(self, sandbox: str) -> None:
        """The mounts of its services are gone or about to go; their numbers will be those of others."""
        if self._loaded is not None:
            self._loaded.forget(self._announced.pop(sandbox, ()))
            self._loaded.withdraw(*self._published.pop(sandbox, (0, ())))

    async def detach(self, row: SandboxRow, container: Container) -> None:
        """The group goes with the sandbox; so do the mounts."""
        self.forget(row.id)
        self._gateways.pop(row.id, None)
        self._engines.pop(row.id, None)


def published_places(composition: Composition) -> dict[int, tuple[int, int]]:
    """Published ports, and the address and port of a service behind each, for programs outside of all services, or for
    those of a main service, which are to find those of containers that were added. Pure."""
    return {
        one.published: (int(IPv4Address(services.address(composition, name))), one.target)
        for name, service in composition.services.items()
        if service.container or not composition.main
        for one in service.ports
    }


def kernel_entry(composition: Composition, name: str, cgroup: int, gateway: int, engine: int = 0) -> ServiceAddress:
    """What the kernel is to know of a service. Pure."""
    reached = services.reaches(composition, name)
    return ServiceAddress(
        cgroup=cgroup,
        own=int(IPv4Address(services.address(composition, name))),
        first=services.FIRST,
        reaches=sum(1 << services.slot(composition, other) for other in reached),
        outside=services.goes_outside(composition, name),
        gateway=gateway,
        engine=engine,
    )


def _unsupported(row: SandboxRow, error: OSError) -> Unsupported:
    return Unsupported(
        f"this kernel gives services no addresses: {str(error).splitlines()[0]}",
        hint="use one with CONFIG_CGROUP_BPF, or a sandbox for each service",
        sandbox=row.id,
    )
