"""Routes of the fake host for the services of a composition: their states, and the tree of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from sandbox.errors import ImageNotFound, Invalid, NotFound
from sandbox.messages import Composition, ServiceInfo, StopRequest, UpRequest
from sandbox.messages.services import ServiceHealth, ServiceState
from sandbox.testing.files import FakeFiles
from sandbox.testing.wire import body, reply


class ServiceRoutes:
    """Part of :class:`FakeHost`. A service runs from `up` until it is stopped; its health check succeeds."""

    _alive: Callable[[web.Request], Any]

    def _of_services(self) -> dict[tuple[str, str], Any]:
        one = "/v1/sandboxes/{id}/services"
        return {
            ("GET", one): self._list_services,
            ("POST", f"{one}/up"): self._up,
            ("POST", f"{one}/{{service}}/stop"): self._stop_service,
            ("POST", f"{one}/{{service}}/restart"): self._restart_service,
        }

    async def _list_services(self, request: web.Request) -> web.Response:
        return reply(list(self._composed(request).services.values()))

    def _composed(self, request: web.Request) -> Any:
        sandbox = self._alive(request)
        if sandbox.request.composition is None:
            raise Invalid("it has no services", hint="create it with a composition", sandbox=sandbox.info.id)
        return sandbox

    async def _up(self, request: web.Request) -> web.Response:
        sandbox, target = self._composed(request), await body(request, UpRequest)
        composition: Composition = sandbox.request.composition
        chosen = _with_dependencies(composition, target.services or [*composition.services])
        for name in composition.order():
            if name in chosen and sandbox.services[name].state is not ServiceState.RUNNING:
                _start(sandbox.services[name], composition)
        return reply(list(sandbox.services.values()))

    async def _stop_service(self, request: web.Request) -> web.Response:
        _, info = await self._service(request)
        info.state, info.exit_code, info.health = ServiceState.EXITED, 143, ServiceHealth.NONE
        return reply(info)

    async def _restart_service(self, request: web.Request) -> web.Response:
        sandbox, info = await self._service(request)
        _start(info, sandbox.request.composition)
        return reply(info)

    async def _service(self, request: web.Request) -> tuple[Any, ServiceInfo]:
        await body(request, StopRequest)
        sandbox, name = self._composed(request), request.match_info["service"]
        if name not in sandbox.services:
            raise NotFound(f"no service {name}", hint=f"there are: {', '.join(sandbox.services) or 'none'}")
        return sandbox, sandbox.services[name]


def _start(info: ServiceInfo, composition: Composition) -> None:
    service = composition.services[info.name]
    info.restarts += info.program is not None
    info.program, info.started_at, info.exit_code = f"p-{info.name}-{info.restarts}", time.time(), None
    info.state = ServiceState.RUNNING
    probed = service.healthcheck is not None and bool(service.healthcheck.test)
    info.health = ServiceHealth.HEALTHY if probed else ServiceHealth.NONE


def _with_dependencies(composition: Composition, names: list[str]) -> set[str]:
    result: set[str] = set()
    pending = [*names]
    while pending:
        name = pending.pop()
        if name not in composition.services:
            raise NotFound(f"no service {name}", hint=f"there are: {', '.join(composition.services)}")
        if name not in result:
            result.add(name)
            pending += [other for other in composition.services[name].depends_on if other in composition.services]
    return result


def created(composition: Composition | None, images: tuple[str, ...]) -> dict[str, ServiceInfo]:
    """The services of a new sandbox. Raises ImageNotFound."""
    if composition is None:
        return {}
    for service in composition.services.values():
        if service.image not in images:
            raise ImageNotFound(f"no image {service.image!r}; there are: {', '.join(images) or 'none'}")
    return {
        name: ServiceInfo(
            name=name,
            image=service.image,
            state=ServiceState.CREATED,
            address=f"127.1.0.{number}",
            command=" ".join(service.command or []),
            ports=service.ports,
        )
        for number, (name, service) in enumerate(composition.services.items(), 1)
    }


def tree_of(composition: Composition | None, files: FakeFiles, service: str | None) -> FakeFiles:
    """The tree that a call means which names this service."""
    if composition is None:
        if service is not None:
            raise Invalid("it has no services", hint="leave `service` out")
        return files
    name = service or composition.main
    if name not in composition.services:
        raise NotFound(f"no service {name}", hint=f"there are: {', '.join(composition.services)}")
    root = Path(files.root, "services", name)
    root.mkdir(parents=True, exist_ok=True)
    return FakeFiles(root)
