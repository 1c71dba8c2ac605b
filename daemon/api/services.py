"""Routes of the services of a composition."""

from __future__ import annotations

from daemon.api.route import Area
from daemon.turns.turns import LiveSandbox
from sandbox.messages import ServiceInfo, StopRequest, UpRequest

AREA = Area()


@AREA("GET", "/v1/sandboxes/{id}/services")
async def _list(live: LiveSandbox) -> list[ServiceInfo]:
    """The services of a sandbox, as they are in its present state."""
    return live.composed.all()


@AREA("POST", "/v1/sandboxes/{id}/services/up", scope="exec", keyed="once")
async def _up(live: LiveSandbox, body: UpRequest) -> list[ServiceInfo]:
    """Start those that do not run, in order, and end the turn once they are up."""
    return await live.composed.up(body)


@AREA("POST", "/v1/sandboxes/{id}/services/{service}/stop", scope="exec", keyed="once")
async def _stop(live: LiveSandbox, service: str, body: StopRequest) -> ServiceInfo:
    """Stop a service; it is not started again by its policy."""
    return await live.composed.stop(service, body)


@AREA("POST", "/v1/sandboxes/{id}/services/{service}/restart", scope="exec", keyed="once")
async def _restart(live: LiveSandbox, service: str, body: StopRequest) -> ServiceInfo:
    """Stop a service and start it again, and end the turn."""
    return await live.composed.restart(service, body)
