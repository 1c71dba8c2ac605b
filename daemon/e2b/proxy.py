"""HTTP and WebSocket to a port of a sandbox, by the address that E2B's get_host gives.

Guarantee: a request reaches the loopback of that sandbox and nothing else; a caller that shows no token of it is let
through only where its owner opened its ports; our tokens do not reach it; nothing is kept in memory but what is on its
way.

A browser is let in by an address of the page, which is good for a minute and leaves a cookie for this one name. The
cookie counts for what a page of this very port sends, and for addresses that somebody opens: no other site acts by it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re

import aiohttp
from aiohttp import hdrs, web
from aiohttp.client_proto import ResponseHandler
from multidict import CIMultiDict
from yarl import URL

from daemon.api import sockets
from daemon.api.gate import Gate
from daemon.api.presence import while_there
from daemon.api.route import Handler
from daemon.auth.access import Caller
from daemon.auth.visibility import dashed
from daemon.e2b.bodies import PUBLIC
from daemon.e2b.keys import Keys
from daemon.e2b.route import BELOW, declared
from daemon.e2b.wire import EnvdDialect, gone, is_gone, proxy_error
from daemon.host.host import Host
from daemon.turns import ports
from daemon.turns.turns import LiveSandbox
from sandbox.errors import Conflict, Forbidden, Invalid, PagurusError, Unauthorized
from sandbox.page import PORTS
from sandbox.websockets import bridge

OPEN = "/.pagurus/open"
COOKIE = "pagurus-port"
TOKEN_HEADER = "E2b-Traffic-Access-Token"
HEARTBEAT = 30.0  # seconds between signs of life of a WebSocket
CHUNK = 64 << 10
_OURS = {"e2b-sandbox-id", "e2b-sandbox-port", "e2b-traffic-access-token", "x-access-token", "x-api-key"}
#: A token of this daemon in whatever form, or of one of its sandboxes. The server in the sandbox is a stranger.
_OUR_TOKEN = re.compile(r"(pgr|e2b|es|et)_[0-9A-Za-z_-]{10}")
_HOP = {
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
_SOCKET = {"sec-websocket-key", "sec-websocket-version", "sec-websocket-extensions", "sec-websocket-protocol"}


class TrafficDialect(EnvdDialect):
    """Callers with the token of the sandbox, or everybody where its owner opened its ports."""

    def __init__(self, keys: Keys, host: Host) -> None:
        super().__init__(keys)
        self._host = host

    def caller(self, request: web.Request) -> Caller:
        headers, sandbox = request.headers, request.match_info["id"]
        token = headers.get(TOKEN_HEADER) or headers.get("X-Access-Token")
        if token is None and not _from_elsewhere(request):
            token = request.cookies.get(COOKIE)
        if token is not None:
            return self.keys.visitor(token, sandbox, traffic=True)
        live = self._host.live_sandboxes.get(dashed(sandbox))
        if live is not None and live.row.labels.get(PUBLIC) == "yes":
            return Caller(owner=live.row.owner, scope="exec", everything=not live.row.owner)
        raise Unauthorized(
            "this port is not public",
            hint=f"send {TOKEN_HEADER} (sandbox.traffic_access_token), or create the sandbox with "
            'network={"allow_public_traffic": True}',
        )

    def refusal(self, request: web.Request, error: BaseException) -> web.Response:
        sandbox = request.match_info["id"]
        if is_gone(error):
            return gone(sandbox)
        if isinstance(error, Conflict) and "nothing listens" in error.message:
            return proxy_error(sandbox, "The sandbox is running but port is not open")
        if isinstance(error, BadAnswer):
            return proxy_error(sandbox, error.message)
        if isinstance(error, PagurusError) and not isinstance(error, Unauthorized | Forbidden):
            answer = super().refusal(request, error)
            return answer if answer.status < 500 else proxy_error(sandbox, str(error))
        return super().refusal(request, error)


class BadAnswer(Conflict):
    """The server in the sandbox has not answered the request."""


class SandboxConnector(aiohttp.UnixConnector):
    """Connections of one client to one port inside a sandbox."""

    def __init__(self, live: LiveSandbox, port: int) -> None:
        super().__init__("unused", force_close=True)
        self._live, self._inside = live, port

    async def _create_connection(self, *_: object) -> ResponseHandler:
        inside = await ports.connect(self._live, self._inside)
        with contextlib.ExitStack() as undo:
            undo.enter_context(inside)
            made = await asyncio.get_running_loop().create_connection(self._factory, sock=inside)
            undo.pop_all()
        return made[1]


def proxy(gate: Gate, keys: Keys, host: Host) -> Handler:
    """What answers requests for ports of sandboxes."""
    return gate.handler(declared("*", f"{BELOW}/proxy", _pass, scope="exec"), TrafficDialect(keys, host))


def entrance(gate: Gate, keys: Keys, host: Host) -> Handler:
    """What answers the address that lets a browser in."""

    async def enter(request: web.Request, port: str) -> web.Response:
        token = keys.admitted(request.query.get("ticket", ""), request.match_info["id"], int(port))
        answer = web.Response(status=303, headers={"Location": "/", "Referrer-Policy": "no-referrer"})
        answer.set_cookie(COOKIE, token, httponly=True, samesite="Lax", secure=request.secure)
        return answer

    return gate.handler(declared("GET", OPEN, enter, scope="open"), TrafficDialect(keys, host))


def _from_elsewhere(request: web.Request) -> bool:
    """Whether a page of another origin has the browser send this, rather than somebody open it."""
    if request.headers.get("Sec-Fetch-Site", "none") in ("same-origin", "none"):
        return False
    return request.method != hdrs.METH_GET or request.headers.get("Sec-Fetch-Mode") != "navigate"


async def _pass(request: web.Request, live: LiveSandbox, port: str) -> web.StreamResponse:
    live.need_alive()
    url = f"http://{request.host}{_path(request)}"
    with live.attending():
        async with aiohttp.ClientSession(
            connector=SandboxConnector(live, int(port)),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        ) as session:
            if request.headers.get("Upgrade", "").lower() == "websocket":
                return await _socket(request, session, url)
            return await _request(request, session, url)


def _path(request: web.Request) -> str:
    """Path and query, also of a request in absolute form (RFC 9112, 3.2.2), whose host is not the server's to see."""
    if request.method == hdrs.METH_CONNECT:
        raise Invalid("CONNECT is not passed on to ports of sandboxes", hint="send the request itself")
    if request.raw_path.startswith("/"):
        return request.raw_path.removeprefix(PORTS)
    if "://" not in request.raw_path:  # OPTIONS *
        raise Invalid(f"{request.raw_path[:100]} is no path", hint="begin it with /")
    return URL(request.raw_path, encoded=True).raw_path_qs or "/"


def _headers(request: web.Request, without: set[str] = frozenset()) -> CIMultiDict[str]:  # type: ignore[assignment]
    named = {item.strip().lower() for item in request.headers.get("Connection", "").split(",")}
    dropped = _OURS | _HOP | named | without
    if _OUR_TOKEN.search(request.headers.get("Authorization", "")):
        dropped |= {"authorization"}
    passed = CIMultiDict((name, value) for name, value in request.headers.items() if name.lower() not in dropped)
    if COOKIE in passed.get(hdrs.COOKIE, ""):
        others = [item.strip() for item in passed.pop(hdrs.COOKIE).split(";")]
        if left := [item for item in others if not item.startswith(f"{COOKIE}=")]:
            passed[hdrs.COOKIE] = "; ".join(left)
    return passed


async def _request(request: web.Request, session: aiohttp.ClientSession, url: str) -> web.StreamResponse:
    body = request.content.iter_chunked(CHUNK) if request.body_exists else None
    response: web.StreamResponse | None = None

    async def carry() -> None:
        nonlocal response
        async with session.request(
            request.method, URL(url, encoded=True), headers=_headers(request), data=body, allow_redirects=False
        ) as answer:
            if answer.status < 200:  # a proxy before us would take what follows for a tunnel
                raise BadAnswer(f"the server in the sandbox answered {answer.status}, which nobody wanted of it")
            response = web.StreamResponse(status=answer.status, reason=answer.reason)
            for name, value in answer.headers.items():
                if name.lower() not in _HOP:
                    response.headers.add(name, value)
            await response.prepare(request)
            async for data in answer.content.iter_any():
                await response.write(data)
            await response.write_eof()

    try:
        await while_there(request, carry())
    except* aiohttp.ClientError as errors:
        if response is not None and response.prepared:
            raise
        raise BadAnswer(f"the server in the sandbox did not answer: {errors.exceptions[0]}") from None
    assert response is not None
    return response


async def _socket(request: web.Request, session: aiohttp.ClientSession, url: str) -> web.StreamResponse:
    target = [item.strip() for item in request.headers.get("Sec-WebSocket-Protocol", "").split(",") if item.strip()]
    try:
        inside = await session.ws_connect(
            url, headers=_headers(request, _SOCKET), protocols=target, max_msg_size=sockets.MAX_MESSAGE
        )
    except aiohttp.ClientError as error:
        raise Conflict(
            f"the server in the sandbox took no WebSocket: {error}", hint="check that the server there speaks WebSocket"
        ) from None
    async with inside:
        outside = sockets.socket(request, heartbeat=HEARTBEAT, protocols=[inside.protocol] if inside.protocol else [])
        await outside.prepare(request)
        try:
            await bridge(outside, inside)
        finally:
            with contextlib.suppress(ConnectionError):
                await outside.close(code=inside.close_code or 1000)
    return outside
