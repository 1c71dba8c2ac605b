"""The page at a port of loopback, before a daemon that this user reaches: ``pagurus view``.

Guarantee: no request gets through without the code that was printed, which is good once, nor by another name than this
machine's own: a site that has its name point here is refused. What names a port of a sandbox, below ``localhost``, gets
through to that port or nowhere: the daemon lets in who comes by its own ticket.

::

    browser ──cookie and key──▶ this process ──the user's socket or token──▶ daemon
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import secrets
import webbrowser
from collections.abc import Awaitable, Callable, Mapping

import aiohttp
import msgspec
from aiohttp import hdrs, web
from yarl import URL

from pagurus.page.runs import RunRoutes
from sandbox import paths
from sandbox.errors import Forbidden, Invalid, NoDaemon, NotFound, PagurusError, Unauthorized, Unsupported
from sandbox.messages.tokens import LoginInfo, LoginRequest
from sandbox.page import KEY_HEADER, PORTS, PROTOCOL, Logins, add_page
from sandbox.sdk.client import Client
from sandbox.termination import termination_signals
from sandbox.websockets import bridge

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

ADDRESS = "127.0.0.1"
SUBJECT = "view"
HEARTBEAT = 30.0  # seconds between signs of life of a WebSocket
MAX_MESSAGE = 64 << 20  # bytes
CHUNK = 1 << 16
# What belongs to one connection, or to the login here: not passed on.
_OWN = {
    hdrs.AUTHORIZATION, hdrs.CONNECTION, hdrs.CONTENT_LENGTH, hdrs.COOKIE, hdrs.HOST, hdrs.KEEP_ALIVE, hdrs.ORIGIN,
    hdrs.PROXY_AUTHORIZATION, hdrs.SET_COOKIE, hdrs.TE, hdrs.TRAILER, hdrs.TRANSFER_ENCODING, hdrs.UPGRADE, KEY_HEADER,
}  # fmt: skip
_OF_PORTS = {hdrs.AUTHORIZATION, hdrs.COOKIE, hdrs.ORIGIN, hdrs.SET_COOKIE}  # are between the browser and the port
_PORT_NAME = re.compile(r"[0-9]{1,5}-s[0-9a-f]{10}\.localhost:[0-9]{1,5}", re.ASCII)


class Viewer:
    """The application. `code` logs one browser in. `run`: a run directory; `daemon`: None where none answers."""

    def __init__(self, daemon: Client | None, run: RunRoutes | None = None) -> None:
        self._daemon = daemon
        self._run = run
        self._logins = Logins(secrets.token_bytes(32))
        self.code: str | None = secrets.token_urlsafe(24)

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._guarded])
        app.router.add_post("/v1/login", self._log_in)
        app.router.add_get("/v1/login", self._report)
        app.router.add_delete("/v1/login", self._log_out)
        if (paths.page() / "index.html").is_file():
            add_page(app)
        if self._run is not None:
            self._run.add(app)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        return app

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Errors are answered as the daemon does; other names than loopback's are refused."""
        try:
            if _PORT_NAME.fullmatch(request.host) is not None:
                return await self._forward(request, {hdrs.HOST: request.host})
            if request.host.rpartition(":")[0] not in (ADDRESS, "localhost"):
                raise Forbidden(
                    "this address is for a browser of this machine",
                    hint="open it on this machine, or use `pagurus daemon --listen`",
                )
            if request.path.startswith("/v1/run/"):
                self._need_login(request)
            return await handler(request)
        except PagurusError as error:
            body = msgspec.json.encode(error.body())
            return web.Response(body=body, status=error.status, content_type="application/json")
        except (aiohttp.ClientError, ConnectionError) as error:
            body = msgspec.json.encode(PagurusError(f"the daemon does not answer: {error}").body())
            return web.Response(body=body, status=502, content_type="application/json")

    # ----------------------------------------------------------------- the login

    async def _log_in(self, request: web.Request) -> web.Response:
        try:
            shown = msgspec.json.decode(await request.read(), type=LoginRequest).token
        except msgspec.MsgspecError as error:
            raise Invalid(f"the request cannot be taken: {error}", hint="reload the page") from None
        if self.code is None or not hmac.compare_digest(shown.encode(), self.code.encode()):
            raise Unauthorized("this address was used already", hint="`pagurus view` prints another one")
        self.code = None
        login = self._logins.begin(SUBJECT, None)
        body = msgspec.json.encode(msgspec.structs.replace(await self._who(), key=login.key))
        response = web.Response(body=body, content_type="application/json")
        login.put_into(request, response)
        return response

    async def _report(self, request: web.Request) -> web.Response:
        self._need_login(request)
        return web.Response(body=msgspec.json.encode(await self._who()), content_type="application/json")

    async def _who(self) -> LoginInfo:
        run = "" if self._run is None else self._run.name
        if self._daemon is None:
            return LoginInfo(scope="run", run=run)
        return msgspec.structs.replace(await self._daemon.call("GET", "/v1/login", LoginInfo), run=run)

    def _need_login(self, request: web.Request) -> None:
        if self._logins.subject(request) != SUBJECT:
            raise Unauthorized("not logged in", hint="open the address that `pagurus view` printed")

    async def _log_out(self, request: web.Request) -> web.Response:
        response = web.json_response({})
        self._logins.end(request, response)
        return response

    # ----------------------------------------------------------------- passing on

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        self._need_login(request)
        return await self._forward(request)

    async def _forward(self, request: web.Request, of_port: Mapping[str, str] | None = None) -> web.StreamResponse:
        """`of_port`: headers of a request for a port of a sandbox, whose cookies and origin are the port's own."""
        if self._daemon is None:
            raise Unsupported("no daemon is shown here, only a run", hint="start `pagurus view` without a run")
        session, base = self._daemon.raw_session()
        target = URL(base + ("" if of_port is None else PORTS) + request.raw_path, encoded=True)
        if of_port is not None and {".", ".."} & set(target.path.split("/")):
            raise NotFound("no such path", hint="write it without dots")
        own = _OWN if of_port is None else _OWN - _OF_PORTS
        headers = {name: value for name, value in request.headers.items() if name not in own} | dict(of_port or {})
        if request.headers.get(hdrs.UPGRADE, "").lower() == "websocket":
            return await self._carry(request, session, target, {} if of_port is None else headers)
        body = request.content.iter_chunked(CHUNK) if request.body_exists else None
        async with session.request(
            request.method, target, headers=headers, data=body, allow_redirects=of_port is None
        ) as answer:
            response = web.StreamResponse(status=answer.status, reason=answer.reason)
            response.headers.extend((name, value) for name, value in answer.headers.items() if name not in own)
            await response.prepare(request)
            with contextlib.suppress(ConnectionError):  # the browser went away
                async for part in answer.content.iter_any():
                    await response.write(part)
                await response.write_eof()
        return response

    async def _carry(
        self, request: web.Request, session: aiohttp.ClientSession, target: URL, headers: Mapping[str, str]
    ) -> web.StreamResponse:
        """Messages both ways, until either side has ended. `headers`: of a port of a sandbox; none: of a terminal."""
        passed = {name: value for name, value in headers.items() if not name.lower().startswith("sec-websocket-")}
        said = headers.get(hdrs.SEC_WEBSOCKET_PROTOCOL, "").split(",")
        protocols = [item.strip() for item in said if item.strip()]
        async with session.ws_connect(
            target, headers=passed, protocols=protocols, compress=0, heartbeat=HEARTBEAT, max_msg_size=MAX_MESSAGE
        ) as there:
            spoken = [there.protocol] if there.protocol else [PROTOCOL]
            here = web.WebSocketResponse(heartbeat=HEARTBEAT, max_msg_size=MAX_MESSAGE, protocols=spoken)
            await here.prepare(request)
            try:
                await bridge(here, there)
            finally:
                await here.close()
        return here


async def serve(daemon: Client, port: int, *, run: RunRoutes | None, browser: bool) -> None:
    """Until a signal asks it to end. A run is shown with or without a daemon."""
    stop = asyncio.Event()
    for number in termination_signals():
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with daemon:
        answering: Client | None = daemon
        try:
            await daemon.call("GET", "/v1/login", LoginInfo)  # refused here, rather than in the browser
        except NoDaemon:
            if run is None:
                raise
            answering = None
        viewer = Viewer(answering, run)
        runner = web.AppRunner(viewer.application(), access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
        await runner.setup()
        try:
            site = web.TCPSite(runner, ADDRESS, port)
            await site.start()
            address = f"http://{ADDRESS}:{runner.addresses[0][1]}/#code={viewer.code}"
            print(address, flush=True)
            if browser:
                await asyncio.to_thread(webbrowser.open, address)
            await stop.wait()
        finally:
            await runner.cleanup()
