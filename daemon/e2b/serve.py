"""Puts E2B's API in front of an application and into it."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from daemon.api import GATE
from daemon.api.ports import LINKS, PortLinks
from daemon.api.wire import HOST, TOKENS
from daemon.e2b import content, control, filesystem, process, template_routes
from daemon.e2b.commands import AllCommands
from daemon.e2b.control import DOMAIN, KEYS
from daemon.e2b.description import PATH, description
from daemon.e2b.dispatch import Limiter
from daemon.e2b.keys import Keys
from daemon.e2b.process import COMMANDS
from daemon.e2b.proxy import OPEN, entrance, proxy
from daemon.e2b.route import ALIASES, json_answer
from daemon.e2b.templates import TEMPLATES, Templates
from daemon.e2b.watchers import WATCHERS, Watchers
from daemon.e2b.wire import ControlDialect

NAMES = {"base": "debian", "code-interpreter-v1": "code-interpreter"}  # names that clients use unasked


def serve(app: web.Application, secret: bytes, names: Mapping[str, str], domain: str, address: str) -> None:
    """Serve it next to the API of `app`. `names`: further names of images. `domain`: of sandboxes' host names; "": what
    the caller's request names. `address`: of the daemon's own socket."""
    gate, host = app[GATE], app[HOST]
    keys = Keys(secret, app[TOKENS])
    app[KEYS], app[DOMAIN], app[ALIASES] = keys, domain, {**NAMES, **names}
    app[COMMANDS], app[WATCHERS] = AllCommands(), Watchers()
    app.on_shutdown.append(app[WATCHERS].close)
    app[TEMPLATES] = Templates(host, secret, address)
    dialect = ControlDialect(keys)
    for route in (*template_routes.AT.routes, *control.ROUTES):
        app.router.add_route(route.method, route.path, gate.handler(route, dialect))
    envd = [*process.SERVICE.routes, *filesystem.SERVICE.routes, *content.ROUTES]
    made = json_answer(description([*template_routes.AT.routes, *control.ROUTES], envd)).body

    async def described(_: web.Request) -> web.Response:
        return web.Response(body=made, content_type="application/json")

    app.router.add_get(PATH, described)
    app[LINKS] = PortLinks(domain, lambda *port: f"{OPEN}?ticket={keys.ticket(*port)}")
    limiter = Limiter(gate, keys, host, envd, proxy(gate, keys, host), entrance(gate, keys, host))
    app.middlewares.insert(1, limiter.enter)
