"""Services that a program of a sandbox adds to it, and removes.

Guarantee: what such a service is lies in the sandbox's file tree and its rows, so checkpoints have it; one that cannot
be added leaves nothing behind. The roots of those that run are not touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import posixpath
from collections.abc import Collection, Iterator
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import msgspec

from daemon.catalogue import put_sandbox
from daemon.turns.place import located
from daemon.turns.place import place as place_of
from sandbox.container import services
from sandbox.container.cgroup import parse_bytes
from sandbox.container.identity import name_services
from sandbox.container.pipes import in_thread
from sandbox.container.shim import ShimError
from sandbox.container.trust import trust
from sandbox.errors import Conflict, Invalid, NotFound, PagurusError, TooMany
from sandbox.image.store import StoredImage
from sandbox.messages import Composition, CopyRequest, Service, StopRequest
from sandbox.messages.services import MAX_SERVICES, ServiceNetwork, ServiceState, Volume
from sandbox.tree import files
from sandbox.tree.copy_into import TargetTree, canonical, copy_into
from sandbox.tree.safe_path import NO_LINKS, as_sandbox_root, directory, opened

if TYPE_CHECKING:
    from daemon.turns.turns import LiveSandbox
    from sandbox.tree.safe_path import SandboxRoot

NONE = Composition(services={}, networks={}, main="")
MAX_SIZE = 256 << 10  # bytes of all that is said of services: each turn writes it down
MAX_TREE = 64 << 30  # bytes of a service's files where the sandbox has no limit of its disk
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY


def with_service(composition: Composition | None, name: str, service: Service) -> Composition:
    """A composition with one more service, in a slot that is free. Pure. Raises Conflict, TooMany."""
    composition = composition or NONE
    if name in composition.services:
        raise Conflict(f"there is a service {name} already", hint="remove it, or choose another name")
    used = {port.published for one in composition.services.values() for port in one.ports}
    service = msgspec.structs.replace(
        service,
        ports=[port for port in service.ports if port.published not in used],
        claimed=[port for port in service.ports if port.published in used],
    )
    taken = {services.slot(composition, other) for other in composition.services}
    free = next((number for number in range(MAX_SERVICES) if number not in taken), None)
    if free is None:
        raise TooMany(f"a sandbox has {MAX_SERVICES} services at most", hint="remove some")
    # The others keep the addresses that they have by their place in order.
    staying = {
        other: msgspec.structs.replace(one, slot=services.slot(composition, other))
        for other, one in composition.services.items()
    }
    added = msgspec.structs.replace(service, slot=free)
    missing = {
        network: ServiceNetwork(internal=network.startswith(services.ALONE))
        for network in service.networks
        if network not in composition.networks
    }
    return msgspec.structs.replace(
        composition, services={**staying, name: added}, networks={**composition.networks, **missing}
    )


def checked(composition: Composition) -> Composition:
    """A composition as the next daemon will read it. Pure. Raises Invalid for one that it would not.

    What a program of a sandbox says, names above all, must not keep a host from starting.
    """
    try:
        made = msgspec.convert(msgspec.to_builtins(composition), Composition)
    except msgspec.ValidationError as error:
        raise Invalid(f"the services of the sandbox: {error}", hint="use letters, digits, dots and dashes") from None
    if len(msgspec.json.encode(made)) > MAX_SIZE:
        raise Invalid(f"what is said of services is {MAX_SIZE} bytes at most", hint="put large values in files")
    return made


def without_service(composition: Composition, name: str) -> Composition:
    """Likewise with one less. Raises NotFound, Conflict."""
    said = composition.services.get(name)
    if said is None:
        raise NotFound(f"no service {name}", hint=f"there are: {', '.join(composition.services) or 'none'}")
    if not said.container:
        raise Conflict(f"service {name} belongs to the composition of its sandbox", hint="stop it")
    staying = {other: one for other, one in composition.services.items() if other != name}
    own = {network for network in said.networks if network.startswith(services.ALONE)}
    own -= {network for one in staying.values() for network in one.networks}
    networks = {network: one for network, one in composition.networks.items() if network not in own}
    return msgspec.structs.replace(composition, services=staying, networks=networks)


def with_name(composition: Composition, name: str, other: str) -> Composition:
    """Likewise with another name of a service that programs of the sandbox have made. Raises NotFound, Conflict."""
    without_service(composition, name)
    if other in composition.services:
        raise Conflict(f"there is a service {other} already", hint="remove it, or choose another name")
    said = msgspec.structs.replace(composition.services[name], slot=services.slot(composition, name))
    made = {other if key == name else key: said if key == name else one for key, one in composition.services.items()}
    return msgspec.structs.replace(composition, services=made)


def with_ports(composition: Composition, name: str, running: Collection[str]) -> Composition:
    """A composition whose service has the ports that it claimed, before it starts. Pure.

    As in Docker a number belongs to the container that runs. Raises Conflict for one of those that are `running`, or of
    the sandbox's composition.
    """
    made, own = dict(composition.services), composition.services[name]
    numbers = {port.published for port in own.claimed}
    for other, one in composition.services.items():
        lost = [port for port in one.ports if port.published in numbers]
        if lost and (other in running or not one.container):
            raise Conflict(f"port {lost[0].published} is already allocated, to {other}", hint="choose another one")
        if lost:
            left = [port for port in one.ports if port not in lost]
            made[other] = msgspec.structs.replace(one, ports=left, claimed=[*one.claimed, *lost])
    made[name] = msgspec.structs.replace(own, ports=[*own.ports, *own.claimed], claimed=[])
    return msgspec.structs.replace(composition, services=made)


class AddedServices:
    """Those of one sandbox."""

    def __init__(self, live: LiveSandbox) -> None:
        self._live = live
        self._changing = asyncio.Lock()
        self._attachments: dict[object, tuple[str, str]] = {}

    async def add(self, name: str, service: Service, image: StoredImage) -> None:
        """Fill its root from an image and mount it. It is not started.

        Takes as long as a copy of the image. Raises Conflict, Invalid, NoSpace, TooMany.
        """
        live = self._live
        async with self._changing, live.altering("services", services.root(name)):
            checked(with_service(live.row.composition, name, service))  # before gigabytes are copied
            await self._unmount(name)
            try:
                service = await in_thread(self._fill, name, service, image)
                made = with_service(live.row.composition, name, service)
                await self._publish(made)
                await live.container.join_service(made, name)
                await asyncio.to_thread(self._announce, made)
            except ShimError as error:
                await asyncio.shield(self._undo(name))
                raise Invalid(f"nothing can be mounted in {name}: {error}", hint="look at what it mounts") from error
            except BaseException:
                await asyncio.shield(self._undo(name))
                raise

    async def remove(self, name: str) -> None:
        """End it, and take its files away; volumes stay. Raises NotFound, Conflict."""
        live = self._live
        without_service(live.row.composition or NONE, name)
        await live.composed.stop(name, StopRequest(timeout=0.0))
        async with self._changing, live.altering("services", services.root(name)):
            if live.row.composition is not None and name in live.row.composition.services:
                await self._undo(name)

    async def claim_ports(self, name: str) -> None:
        """Give one the ports that it publishes, before it starts. Raises Conflict."""
        async with self._changing:
            composed = self._live.composed
            composition = composed.composition
            if composition.services[name].claimed:
                states = (ServiceState.RUNNING, ServiceState.RESTARTING)
                made = with_ports(composition, name, {one.name for one in composed.all() if one.state in states})
                await self._publish(made)
                await asyncio.to_thread(self._announce, made)

    async def rename(self, name: str, other: str) -> None:
        """Give one that does not run another name. Raises Conflict, Invalid, NotFound."""
        live = self._live
        async with self._changing, live.altering("services", services.root(name), services.root(other)):
            made = checked(with_name(live.row.composition or NONE, name, other))
            if live.composed.info(name).state in (ServiceState.RUNNING, ServiceState.RESTARTING):
                raise Conflict(f"{name} runs, and its files lie below its name", hint="stop it, and rename it then")
            await asyncio.shield(self._move(name, other, made))

    async def _move(self, name: str, other: str, made: Composition) -> None:
        live = self._live
        inside, base = live.container.inside, live.row.uid_base
        await self._unmount(name)
        await in_thread(files.move, inside, base, services.root(name), services.root(other))
        for row in list(live.row.programs.values()):
            if row.service == name:
                live.programs.put(msgspec.structs.replace(row, service=other))
        await self._publish(made)
        await live.container.join_service(made, other)
        await asyncio.to_thread(self._announce, made)

    @contextlib.contextmanager
    def attached(self, name: str, past: str) -> Iterator[None]:
        """A client reads the outputs of a service, or waits for those of its next program after `past`."""
        key = object()
        self._attachments[key] = name, past
        try:
            yield
        finally:
            del self._attachments[key]

    async def delivered(self, name: str, program: str) -> None:
        """Returns when all clients that read the outputs of a program that has ended have them."""
        while any(of == name and past != program for of, past in self._attachments.values()):
            await self._live.composed.changed(0.02)

    async def remove_ended(self, name: str, program: str) -> None:
        """Remove one whose last program has ended, once its outputs are delivered."""
        await self.delivered(name, program)
        if self._live.row.composition is not None and name in self._live.row.composition.services:
            await self.remove(name)

    async def change(self, name: str, **changed: object) -> None:
        """Change what is said of one, but not what is mounted in it."""
        async with self._changing:
            composition = self._live.composed.composition
            said = msgspec.structs.replace(composition.services[name], **changed)
            made = msgspec.structs.replace(composition, services={**composition.services, name: said})
            await self._publish(made)
            await asyncio.to_thread(self._announce, made)

    async def change_networks(self, *, add: dict[str, ServiceNetwork] | None = None, remove: str = "") -> None:
        """Networks that no service has yet, or has any more."""
        async with self._changing, self._live.using():
            composition = self._live.row.composition or NONE
            networks = {name: one for name, one in {**composition.networks, **(add or {})}.items() if name != remove}
            await self._publish(msgspec.structs.replace(composition, networks=networks))

    async def change_images(self, *, add: dict[str, str] | None = None, remove: str = "") -> None:
        """Names that programs of the sandbox have given to images."""
        async with self._changing, self._live.using():
            composition = self._live.row.composition or NONE
            images = {name: one for name, one in {**composition.images, **(add or {})}.items() if name != remove}
            await self._publish(msgspec.structs.replace(composition, images=images))

    async def make_volume(self, name: str, labels: dict[str, str]) -> None:
        """An empty one, unless it is there."""
        place = services.volume(name)
        async with self._changing, self._live.using():
            composition = self._live.row.composition or NONE
            made = {**composition.volume_labels, name: labels}
            await self._publish(msgspec.structs.replace(composition, volume_labels=made))
        async with self._live.altering("services", place):
            await in_thread(files.make_directory, self._live.container.inside, self._live.row.uid_base, place)

    async def remove_volume(self, name: str) -> None:
        """One that no service has."""
        place = services.volume(name)
        async with self._live.altering("services", place):
            inside, base = self._live.container.inside, self._live.row.uid_base
            await in_thread(files.remove, inside, base, place, recursive=True)
        async with self._changing, self._live.using():
            composition = self._live.row.composition or NONE
            staying = {other: labels for other, labels in composition.volume_labels.items() if other != name}
            await self._publish(msgspec.structs.replace(composition, volume_labels=staying))

    async def _publish(self, composition: Composition) -> None:
        composition = checked(composition)
        await self._live.container.change_services(composition)
        self._live.row.composition = composition
        await self._live.services.catalogue.write([put_sandbox(self._live.row)])

    def _announce(self, composition: Composition) -> None:
        """Their names and addresses, to them and to the kernel; whom they trust. Blocks."""
        container = self._live.container
        name_services(container, composition, fresh=True)
        if container.authority:
            with contextlib.suppress(PagurusError, OSError):  # one has made its store of certificates something else
                trust(container, container.authority)
        self._live.services.addresses.announce(container)

    async def _unmount(self, name: str) -> None:
        """Also what a daemon that died left there."""
        with contextlib.suppress(ShimError):  # nothing is
            await self._live.container.part_service(name)

    async def _undo(self, name: str) -> None:
        live = self._live
        composition = live.row.composition
        if composition is not None and name in composition.services:
            await live.programs.remove_service(name)
            await self._publish(without_service(composition, name))
        await self._unmount(name)
        await in_thread(self._clear, name)
        if live.row.composition is not None:
            await asyncio.to_thread(self._announce, live.row.composition)

    def _clear(self, name: str) -> None:
        with contextlib.suppress(NotFound):
            files.remove(self._live.container.inside, self._live.row.uid_base, services.root(name), recursive=True)

    # ----------------------------------------------------------------- its files; all of it blocks

    def _fill(self, name: str, service: Service, image: StoredImage) -> Service:
        """The root of a service; what is returned has its places as they are once links are followed."""
        self._clear(name)
        row, inside = self._live.row, self._live.container.inside
        limit = MAX_TREE if row.limits.disk is None else parse_bytes(row.limits.disk)
        base = row.uid_base
        files.make_directory(inside, base, services.root(name))
        with inside.opened() as root, directory(image.tree) as source, as_sandbox_root(base):
            request = CopyRequest(sources=["/"], target=services.root(name))
            copy_into(source, TargetTree(root, base), request, limit=limit)
            _like(source, "/", root, services.root(name), base)
            service = self._resolved(root, service, services.root(name))
            if (pair := services.overlap(service)) is not None:
                raise Invalid(f"what is mounted at {pair[0]} and {pair[1]} overlaps", hint="use other directories")
            for volume in service.volumes:
                self._make_volume(root, source, volume, limit)
        own = inside.below(services.root(name))
        for place in (*services.SHARED, *service.tmpfs):
            _need_directory(own, base, place)
        sources = {one.target: services.volume(one.name) for one in service.volumes}
        sources |= {one.target: one.source for one in service.trees}
        for target in sorted(sources, key=lambda target: target.count("/")):
            outer, place = services.mount_point(service, target)
            self._make_place(inside.below(outer) if outer else own, sources[target], place)
        if service.workdir is not None:
            outer, place = services.mount_point(service, service.workdir)
            with contextlib.suppress(Invalid):  # it lies in a file: the start says so
                _need_directory(inside.below(outer) if outer else own, base, place)
        return service

    def _resolved(self, root: int, service: Service, below: str) -> Service:
        """A service with its places as they are once the links of its own root, and of the tree in which directories
        are named, are followed: that of the main service, or of the sandbox."""
        row, inside = self._live.row, self._live.container.inside
        with opened(root, below, os.O_PATH | os.O_DIRECTORY, resolve=NO_LINKS) as own:

            def source(path: str) -> str:
                above, inner = located(row, place_of(row, None), path)
                tree = inside.below(above) if above else inside
                try:  # what the host mounts in the sandbox is refused with EXDEV
                    with tree.opened() as top:
                        return posixpath.join("/", above, canonical(top, inner))
                except NotFound:
                    raise Invalid(f"bind source path does not exist: {path}", hint="make it, or use -v") from None
                except OSError as error:
                    raise Invalid(
                        f"{path} is no part of the sandbox's file tree", hint="mount another directory"
                    ) from error

            def inner(target: str) -> str:
                path = posixpath.join("/", canonical(own, target, missing=True))
                if path in (*services.SHARED, "/"):
                    raise Invalid(f"nothing can be mounted at {path}", hint="use another directory")
                return path

            return msgspec.structs.replace(
                service,
                volumes=[msgspec.structs.replace(one, target=inner(one.target)) for one in service.volumes],
                tmpfs=[inner(target) for target in service.tmpfs],
                trees=[
                    msgspec.structs.replace(one, source=source(one.source), target=inner(one.target))
                    for one in service.trees
                ],
            )

    def _make_volume(self, root: int, source: int, volume: Volume, limit: int) -> None:
        """A new volume has what the image has where it is mounted, as in Docker."""
        place, base = services.volume(volume.name), self._live.row.uid_base
        with contextlib.suppress(NotFound), opened(root, place, _DIRECTORY):
            return
        target = TargetTree(root, base)
        copy_into(source, target, CopyRequest(target=place, make_directory=True), limit=limit)
        with contextlib.suppress(NotFound, Invalid), opened(source, volume.target, _DIRECTORY):
            copy_into(source, target, CopyRequest(sources=[volume.target], target=place), limit=limit)
            _like(source, volume.target, root, place, base)

    def _make_place(self, own: SandboxRoot, source: str, target: str) -> None:
        """Where a part of the sandbox's tree is mounted: a file for a file."""
        base = self._live.row.uid_base
        inside = self._live.container.inside
        if (owner := services.owner(f"{source}/")) is not None:  # its root is a mount
            inside, source = inside.below(services.root(owner)), source.removeprefix(services.root(owner)) or "/"
        if source == "/" or files.status(inside, base, source).kind == "directory":
            _need_directory(own, base, target)
            return
        with contextlib.suppress(NotFound):
            files.status(own, base, target)
            return
        _need_directory(own, base, str(PurePosixPath(target).parent))
        files.write(own, base, target, io.BytesIO(b""))


def _need_directory(own: SandboxRoot, base: int, path: str) -> None:
    with contextlib.suppress(NotFound):
        files.entries(own, base, path)
        return
    files.make_directory(own, base, path)


def _like(source: int, path: str, root: int, place: str, base: int) -> None:
    """Give a directory the owner and mode of another one."""
    with opened(source, path, _DIRECTORY) as one, opened(root, place, _DIRECTORY) as other:
        status = os.fstat(one)
        os.fchown(other, base + status.st_uid, base + status.st_gid)
        os.fchmod(other, status.st_mode & 0o7777)
