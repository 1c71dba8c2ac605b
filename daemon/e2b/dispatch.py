"""Which sandbox and which port a request of E2B's clients is for.

Guarantee: what names no sandbox reaches the router as if nothing were here.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

from aiohttp import web

from daemon.api.gate import Gate
from daemon.api.route import ApiRoute, Handler
from daemon.e2b.keys import Keys, sandbox_of
from daemon.e2b.proxy import OPEN
from daemon.e2b.route import BELOW
from daemon.e2b.wire import ConnectDialect, EnvdDialect, FilesDialect, number_error
from daemon.host.host import Host
from sandbox.page import PORTS

ENVD = 49983
ID_HEADER, PORT_HEADER = "E2b-Sandbox-Id", "E2b-Sandbox-Port"
_NAMED = re.compile(r"([0-9]{1,5})-(s[0-9a-f]{10})\.", re.ASCII)
_ID = re.compile(r"s-?[0-9a-f]{10}", re.ASCII)
_ALONE = ("/files", "/process.Process/", "/filesystem.Filesystem/")  # paths that are envd's for every caller


class Limiter:
    """Stands before the router."""

    def __init__(
        self, gate: Gate, keys: Keys, host: Host, routes: list[ApiRoute], proxy: Handler, entrance: Handler
    ) -> None:
        self._keys = keys
        self._host = host
        self._proxy, self._entrance = proxy, entrance
        self._handlers: dict[tuple[str, str], Handler] = {}
        for route in routes:
            path = route.path.removeprefix(BELOW)
            dialect = (
                ConnectDialect(keys) if "." in path else FilesDialect(keys) if path == "/files" else EnvdDialect(keys)
            )
            self._handlers[route.method, path] = gate.handler(route, dialect)

    @web.middleware
    async def enter(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            place = addressed(request.headers, request.host)
        except ValueError as error:
            return number_error(400, str(error))
        if place is None and request.path.startswith(_ALONE):
            place = await self._unaddressed(request), ENVD
        if place is None:
            return await handler(request)
        sandbox, port = place
        if port != ENVD and request.path.removeprefix(PORTS) == OPEN and "ticket" in request.query:
            request.match_info["id"], request.match_info["port"] = sandbox, str(port)
            return await self._entrance(request)
        envd = self._proxy if port != ENVD else self._handlers.get((request.method, request.path))
        if envd is None:  # old clients send these headers with every call, also to the control plane
            return await handler(request)
        request.match_info["id"], request.match_info["port"] = sandbox, str(port)
        return await envd(request)

    async def _unaddressed(self, request: web.Request) -> str:
        """The sandbox of a call that only its token or its signature names; "" for none."""
        if (token := request.headers.get("X-Access-Token")) is not None:
            return sandbox_of(token) or ""
        if "signature" not in request.query:
            return ""
        result = await asyncio.to_thread(self._keys.signer, request, list(self._host.live_sandboxes))
        return "" if result is None else result[0]


def addressed(headers: Mapping[str, str], host: str) -> tuple[str, int] | None:
    """The sandbox and the port that a request names; None where it names none. Raises ValueError.

    Headers count where the host is no name of a sandbox.

    >>> addressed({}, "8000-s4f1c00aa12.localhost:8700")
    ('s4f1c00aa12', 8000)
    >>> addressed({"E2b-Sandbox-Id": "s4f1c00aa12", "E2b-Sandbox-Port": "49983"}, "127.0.0.1:8700")
    ('s4f1c00aa12', 49983)
    """
    if (named := _NAMED.match(host.lower())) is not None:
        return named[2], _port(named[1])
    sandbox, port = headers.get(ID_HEADER), headers.get(PORT_HEADER)
    if sandbox is None and port is None:
        return None
    if sandbox is None or port is None:
        raise ValueError(f"{ID_HEADER} and {PORT_HEADER} belong together")
    if _ID.fullmatch(sandbox) is None:
        return "none", _port(port)
    return sandbox, _port(port)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65_535):
        raise ValueError(f"not a port: {text[:16]!r}")
    return int(text)
