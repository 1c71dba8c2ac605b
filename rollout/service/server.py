"""The rollout's door: HTTP over a Unix socket of the run directory, and over TCP where other hosts ask.

Guarantee: the Unix socket is this user's alone. TCP asks for the key of the run directory (rollout.engine.tls), or for
its token, and is refused without TLS unless it is the loopback.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
from aiohttp import web

from rollout.engine.client import PublishResult
from rollout.service import protocol as wire
from rollout.store.samples import Fence
from sandbox.errors import Invalid, PagurusError

MSGPACK = "application/msgpack"
MAX_BODY = 1 << 20  # bytes of a call
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RolloutHandler(Protocol):
    """The possible requests. A method per struct of the protocol."""

    async def open_trainer(self, request: wire.OpenTrainer) -> Fence: ...
    async def publish(self, request: wire.Publish) -> wire.Done: ...
    async def take(self, request: wire.Take) -> wire.BatchReference: ...
    async def complete(self, request: wire.Complete) -> wire.BatchReference: ...
    async def group_reference(self, request: wire.GroupReference) -> wire.Payloads: ...
    async def ack(self, request: wire.Ack) -> wire.Done: ...
    async def evaluate(self, request: wire.Evaluate) -> wire.EvaluationResult: ...
    async def finish_run(self, request: wire.FinishRun) -> wire.RolloutCounters: ...
    async def count(self, request: wire.Count) -> wire.RolloutCounters: ...


class EngineHandler(Protocol):
    """The possible requests to an engine's keeper. A method per struct."""

    async def serving(self, request: wire.Serving) -> wire.ServedAddress: ...
    async def fetch(self, request: wire.Fetch) -> wire.Done: ...
    async def serve_version(self, request: wire.ServeVersion) -> PublishResult: ...
    async def restart_engine(self, request: wire.RestartEngine) -> wire.Done: ...


Requests = tuple[type[Any], ...]
REQUESTS: Requests = (
    *(
        wire.OpenTrainer,
        wire.Publish,
        wire.Take,
        wire.Complete,
        wire.GroupReference,
        wire.Ack,
        wire.Evaluate,
        wire.FinishRun,
        wire.Count,
    ),
)
ENGINE_REQUESTS: Requests = (wire.Serving, wire.Fetch, wire.ServeVersion, wire.RestartEngine)


class RolloutServer:
    """``async with RolloutServer(handler, roles) as server: ...``; ``await server.listen("0.0.0.0:8710", context)`` for
    other hosts."""

    def __init__(
        self,
        handler: RolloutHandler | EngineHandler,
        roles: Path,
        *,
        socket: str = wire.SOCKET,
        requests: Requests = REQUESTS,
    ):
        """`socket`: its name in the directory of roles. `requests`: the possible requests, by the names of the
        structs."""
        self.handler, self.roles, self._socket = handler, roles, socket
        self._token = ""
        application = web.Application(client_max_size=MAX_BODY, middlewares=[self._guarded])
        application.add_routes([self._route(kind) for kind in requests])
        self._runner = web.AppRunner(
            application, handler_cancellation=True, access_log=None, shutdown_timeout=1.0, keepalive_timeout=600.0
        )

    async def __aenter__(self) -> RolloutServer:
        await self._runner.setup()
        self.roles.mkdir(parents=True, exist_ok=True)
        directory = os.open(self.roles, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        before = os.umask(0o177)
        try:
            (self.roles / self._socket).unlink(missing_ok=True)  # of a process that died: this one holds the run's lock
            await web.UnixSite(self._runner, f"/proc/self/fd/{directory}/{self._socket}").start()
        finally:
            os.umask(before)
            os.close(directory)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def listen(self, address: str, tls: ssl.SSLContext | None = None) -> int:
        """Serve TCP as well, for who has the run's key or its token. The port: that of the address, if it is not 0."""
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise Invalid(f"{address!r} is no address", hint="write it like 10.0.0.1:8710")
        if tls is None and not _loopback(host):
            raise Invalid(f"{address} would carry samples and a token in the clear", hint="give certificate and key")
        self._token = _token(self.roles / wire.TOKEN)
        await web.TCPSite(self._runner, host, int(port), ssl_context=tls).start()
        return int(self._runner.addresses[-1][1])

    def _route(self, kind: type[Any]) -> web.RouteDef:
        name = wire.method(kind)
        act = getattr(self.handler, name)

        async def handle(request: web.Request) -> web.Response:
            return _answer(await act(msgspec.msgpack.decode(await request.read(), type=kind)))

        return web.post(f"/{name}", handle)

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Who asks, and the one place where an error becomes a response."""
        try:
            self._need_token(request)
            return await handler(request)
        except msgspec.MsgspecError as error:
            failure: PagurusError = Invalid(f"{request.path}: {error}")
        except PagurusError as error:
            failure = error
        return web.Response(status=failure.status, body=msgspec.msgpack.encode(failure.body()), content_type=MSGPACK)

    def _need_token(self, request: web.Request) -> None:
        peer = request.transport.get_extra_info("peername") if request.transport is not None else None
        if not isinstance(peer, tuple):
            return  # the Unix socket: the kernel has checked who may open it
        if request.transport is not None and request.transport.get_extra_info("peercert"):
            return  # it has the run's key, or its certificate would have been refused
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not self._token or not hmac.compare_digest(given.encode(), self._token.encode()):
            raise Invalid("no token, or a wrong one", hint=f"give the content of {wire.TOKEN} of the run directory")


def _answer(body: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.msgpack.encode(body), content_type=MSGPACK)


def _token(path: Path) -> str:
    """The token of a run directory: made once, readable by its owner alone."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
    except FileExistsError:
        pass
    return path.read_text()


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
