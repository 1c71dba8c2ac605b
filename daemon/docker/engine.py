"""Docker's Engine API for the programs of one sandbox.

Guarantee: whatever a client asks for is done to that sandbox alone, within its limits; nothing is fetched from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from daemon.docker import bodies, shown
from daemon.turns.added import NONE
from sandbox.container import services
from sandbox.errors import ImageNotFound, Invalid, NotFound
from sandbox.image import reference
from sandbox.image.store import BUILT, COMPOSED
from sandbox.messages import Composition, ImageInfo, Service
from sandbox.tree import files

if TYPE_CHECKING:
    from daemon.docker.build import Builds
    from daemon.host.host import Host
    from daemon.turns.turns import LiveSandbox
    from sandbox.image.store import StoredImage

MIN_ID = 3  # digits of an id that mean it
MAX_EXECS = 256  # that are remembered, of one sandbox


@dataclass
class PreparedExec:
    """A command in a container: made by one request, started by another, looked at by a third."""

    container: str
    body: bodies.ExecBody
    number: str = field(default_factory=lambda: secrets.token_hex(32))
    program: str = ""
    exit_code: int | None = None
    attached: bool = False
    finishing: asyncio.Task[None] | None = None


class Engine:
    """What one sandbox has of the engine in addition to its services."""

    def __init__(self, host: Host, live: LiveSandbox, builds: Builds) -> None:
        self.host = host
        self.live = live
        self.builds = builds
        self.building = asyncio.Lock()
        self.execs: dict[str, PreparedExec] = {}

    @property
    def composition(self) -> Composition:
        return self.live.row.composition or NONE

    def name(self, said: str) -> str:
        """The service that is meant by a name, or by the beginning of an id. Raises NotFound."""
        said = said.removeprefix("/")
        if said in self.composition.services:
            return said
        matches = [
            name for name, one in self.composition.services.items() if shown.identity(name, one).startswith(said)
        ]
        if len(matches) != 1 or len(said) < MIN_ID:
            raise NotFound(f"No such container: {said[:80]}", hint="docker ps -a lists them")
        return matches[0]

    def images(self) -> list[ImageInfo]:
        """Those of the host, and those that were built here by the names that they have here. Blocks."""
        images, built = self.host.images, self.composition.images
        result = [images.info(name) for name in images.list() if not name.startswith((BUILT, COMPOSED))]
        for tag, name in built.items():
            with contextlib.suppress(NotFound):
                result.append(msgspec.structs.replace(images.info(name), name=tag))
        return result

    def image_info(self, said: str) -> ImageInfo:
        """One of these, by its name or the beginning of its id. Raises NotFound. Blocks."""
        digest = said.removeprefix("sha256:")
        with contextlib.suppress(NotFound, Invalid):
            digest = self._named(said).digest
        for info in self.images():
            if info.digest.startswith(digest) and len(digest) >= MIN_ID:
                return info
        raise NotFound(f"No such image: {said[:200]}", hint="docker images lists those of this host")

    def image(self, said: str) -> StoredImage:
        """Likewise what a container starts from."""
        with contextlib.suppress(NotFound, Invalid):
            return self._named(said)
        return self._named(self.image_info(said).name)

    def _named(self, said: str) -> StoredImage:
        if said.startswith(BUILT):  # by another sandbox
            raise ImageNotFound(f"no image {said}", hint="docker images lists those of this host")
        return self.host.images.resolve(self.composition.images.get(tagged(said), said))

    def networks(self) -> list[str]:
        """Those that clients are shown: not that of a container which is to have none."""
        named = [name for name in self.composition.networks if not name.startswith(services.ALONE)]
        return [*dict.fromkeys([bodies.BRIDGE, *named])]

    def network(self, said: str) -> str:
        names = self.networks()
        if said in names:
            return said
        matches = [name for name in names if shown.network_id(name).startswith(said)]
        if not matches or len(said) < MIN_ID:
            raise NotFound(f"network {said[:80]} not found", hint="docker network ls lists them")
        return matches[0]

    def connected(self, requested: Service) -> Service:
        """A container as it is requested, in the networks of the main service if it names none: the two find one
        another by name."""
        composition, networks = self.composition, dict(requested.networks)
        if not composition.main or bodies.BRIDGE not in networks:
            return requested
        aliases = networks.pop(bodies.BRIDGE)
        own = {network: aliases for network in composition.services[composition.main].networks}
        return msgspec.structs.replace(requested, networks={**own, **networks})

    async def make_directories(self, paths: list[str]) -> None:
        """Make those that are missing where programs of the main service find them, as Docker does for ``-v``."""
        base = self.live.row.uid_base
        for path in paths:
            inside, inner = self.live.located(None, path)
            try:
                await asyncio.to_thread(files.reach, inside, inner)
            except NotFound:
                async with self.live.altering("docker run", path):
                    await asyncio.to_thread(files.make_directory, inside, base, inner)
            except Invalid:  # it is of the host, such as /proc: the mount of it is refused
                continue

    def remember(self, prepared: PreparedExec) -> None:
        self.execs[prepared.number] = prepared
        while len(self.execs) > MAX_EXECS:
            del self.execs[next(iter(self.execs))]

    def prepared(self, number: str) -> PreparedExec:
        if number not in self.execs:
            raise NotFound(f"No such exec instance: {number[:80]}", hint="make one again")
        return self.execs[number]

    async def change_network(self, name: str, network: str, *, aliases: list[str] | None) -> None:
        """Put a container into a network (with these other names), or take it out (None)."""
        said = self.composition.services[name]
        networks = {other: names for other, names in said.networks.items() if other != network}
        if aliases is not None:
            networks[network] = aliases
        await self.live.added.change(name, networks=networks)


def tagged(name: str) -> str:
    """A name of an image with its tag.

    >>> tagged("app"), tagged("team/app:2"), tagged("docker.io/library/app")
    ('app:latest', 'team/app:2', 'app:latest')
    """
    return reference.parse(name).name if reference.is_one(name) else name
