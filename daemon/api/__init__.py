"""The daemon's HTTP API, an area per module: each declares its own routes."""

from __future__ import annotations

import time
from pathlib import Path

from aiohttp import web

from daemon.api import (
    checkpoints,
    commands,
    copies,
    files,
    gateway,
    images,
    login,
    members,
    network,
    overview,
    ports,
    processes,
    runs,
    sandboxes,
    services,
    sessions,
    steps,
    store,
    tokens,
)
from daemon.api.gate import Gate, named, started
from daemon.api.idempotency import Answers
from daemon.api.login import LOGINS
from daemon.api.openapi import describe
from daemon.api.overview import EXAMINATION, READINGS, Examination, Readings
from daemon.api.route import ApiRoute
from daemon.api.sandboxes import DESCRIPTION
from daemon.api.sockets import SOCKETS, Sockets, close_all
from daemon.api.steps import BUILDS
from daemon.api.wire import HOST, TOKENS
from daemon.auth.tokens import TokenStore
from daemon.host.host import Host
from daemon.store.build_logs import BuildLogs
from sandbox.page import Logins, add_page, key_file

AREAS = (
    sandboxes,
    runs,
    commands,
    files,
    copies,
    checkpoints,
    store,
    gateway,
    network,
    tokens,
    login,
    images,
    steps,
    processes,
    services,
    sessions,
    ports,
    members,
    overview,
)
GATE: web.AppKey[Gate] = web.AppKey("gate", Gate)
MAX_RAW = 256 << 20  # bytes of a raw body that a handler reads at once; structs are bounded by their route


def routes() -> list[ApiRoute]:
    """All routes of the API."""
    return [route for area in AREAS for route in area.AREA.routes]


def application(host: Host, token_file: Path, answers: Answers | None = None) -> web.Application:
    """The API of `host`, whose tokens lie in `token_file`. Without `answers` no repeated call is recognised."""
    app = web.Application(client_max_size=MAX_RAW, middlewares=[named])
    app.on_response_prepare.append(started)
    app[HOST] = host
    app[SOCKETS] = Sockets()
    app[BUILDS] = BuildLogs(token_file.with_name("builds"), clock=time.time)
    app[READINGS], app[EXAMINATION] = Readings(), Examination()
    app.on_shutdown.append(close_all)
    app[TOKENS] = TokenStore(token_file, clock=time.time)
    app[LOGINS] = Logins(key_file(token_file.with_name("page.key")))
    app[GATE] = gate = Gate(host, app[TOKENS], app[LOGINS], answers)
    for route in routes():
        app.router.add_route(route.method, route.path, gate.handler(route))
    add_page(app)
    app[DESCRIPTION] = describe(routes())
    return app
