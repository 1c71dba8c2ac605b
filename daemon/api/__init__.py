"""The daemon's HTTP API, an area per module: each lists its own ROUTES."""

from __future__ import annotations

from aiohttp import web

from daemon.api import checkpoints, commands, files, sandboxes
from daemon.api.wire import BODY_MOST, HOST, errors
from daemon.host import Host

AREAS = (sandboxes, commands, files, checkpoints)


def application(host: Host) -> web.Application:
    """The API of `host`."""
    app = web.Application(client_max_size=BODY_MOST, middlewares=[errors])
    app[HOST] = host
    for area in AREAS:
        app.add_routes(area.ROUTES)
    return app
