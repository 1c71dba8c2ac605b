"""Routes of a sandbox's network."""

from __future__ import annotations

from aiohttp import web

from daemon.api.route import Route
from daemon.api.wire import HOST, body, reply
from sandbox.messages import Network, NetworkStatistics, NetworkStatus


async def _status(request: web.Request) -> web.Response:
    """What a sandbox may reach, what it did, and what it was refused."""
    host = request.app[HOST]
    return reply(request, await host.networks.status(host.live(request.match_info["id"]).row))


async def _set(request: web.Request) -> web.Response:
    """Change what a sandbox may reach, at once. Connections that the new policy does not allow end."""
    wanted = await body(request, Network)
    return reply(request, await request.app[HOST].set_network(request.match_info["id"], wanted))


async def _statistics(request: web.Request) -> web.Response:
    """The traffic of all sandboxes together."""
    return reply(request, await request.app[HOST].networks.statistics())


ROUTES: list[Route] = [
    Route("GET", "/v1/sandboxes/{id}/network", _status, answer=NetworkStatus),
    Route("PUT", "/v1/sandboxes/{id}/network", _set, body=Network, answer=NetworkStatus, scope="exec"),
    Route("GET", "/v1/network", _statistics, answer=NetworkStatistics),
]
