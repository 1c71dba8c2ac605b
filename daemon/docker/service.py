"""Where programs of a sandbox find the Engine API: a socket on its loopback, named by DOCKER_HOST.

Guarantee (I6): who connects there is of that sandbox, whatever it says; nothing else of the host becomes reachable.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from daemon.catalogue import SandboxRow
from daemon.docker import archives, containers, events, objects, refused, streams
from daemon.docker.build import Builds
from daemon.docker.engine import Engine
from daemon.docker.paths import ROUTES, Call, json_answer, refusal
from daemon.gateway.listener import InsideListeners
from daemon.network.addresses import ENGINE_PORT as PORT
from sandbox.errors import Closed, PagurusError
from sandbox.messages import Composition, SandboxState

if TYPE_CHECKING:
    from daemon.host.host import Host
    from sandbox.container.container import Container

log = logging.getLogger("pagurus.docker")

_CALLS = (archives, containers, events, objects, refused)  # they register theirs
NAME = "docker"  # by which shims keep the socket
ENVIRONMENT = {"DOCKER_HOST": f"tcp://127.0.0.1:{PORT}", "DOCKER_BUILDKIT": "0"}


def for_main(composition: Composition) -> Composition:
    """A composition whose main service, if it has one, finds the engine: no other one does. Pure."""
    if (main := composition.services.get(composition.main)) is None:
        return composition
    said = msgspec.structs.replace(main, env={**ENVIRONMENT, **main.env})
    return msgspec.structs.replace(composition, services={**composition.services, composition.main: said})


class DockerService:
    """An attachment of each sandbox that was created with `docker`."""

    def __init__(self, host: Host, address: str) -> None:
        """`address`: of the daemon's own socket."""
        self._host, self._builds = host, Builds(host, address)
        self._engines: dict[str, Engine] = {}
        self._inside = InsideListeners(NAME, self.serve, host.services.spawn)

    async def open(self, rows: Sequence[SandboxRow]) -> None:
        """Nothing is left of a former daemon but the sockets that shims keep."""

    async def close(self) -> None:
        await self._inside.close()

    async def attach(self, row: SandboxRow, container: Container) -> None:
        """Raises Conflict where something of the sandbox has the port."""
        if row.docker:
            row.env = {**ENVIRONMENT, **row.env}
            if row.composition is not None:
                row.composition = for_main(row.composition)
            await self._inside.attach(row.id, PORT, container)

    async def detach(self, row: SandboxRow, container: Container) -> None:
        """Take the listener away."""
        self._engines.pop(row.id, None)
        await self._inside.detach(row.id)
        if row.state is SandboxState.REMOVED and row.docker:
            await self._builds.sweep(without=row.id)

    async def serve(self, sandbox: str, request: web.BaseRequest) -> web.StreamResponse:
        """One request of a program of this sandbox."""
        try:
            live = self._host.live_sandboxes.get(sandbox)
            if live is None:
                raise Closed("the sandbox is not there yet, or no more", hint="ask again")
            engine = self._engines.get(sandbox)
            if engine is None or engine.live is not live:
                engine = self._engines[sandbox] = Engine(self._host, live, self._builds)
            handler, named = ROUTES.find(request.method, request.path)
            return await handler(engine, Call(request, named))
        except PagurusError as error:
            return refusal(error)
        except ConnectionError:  # it has left
            return streams.NoResponse()
        except Exception as error:  # the boundary: a bug in one call is an answer and a log entry
            log.error("%s %s failed", request.method, request.path, exc_info=error, extra={"sandbox": sandbox})
            return json_answer({"message": "the host failed: its log says why"}, status=500)
