"""The sockets of the API: made, inherited, bounded.

Guarantee: the Unix socket is the daemon user's alone, and no number of TCP connections keeps anybody from it;
connections over the bound get an error and are closed; a TLS handshake, a request line and headers that do not come in
time end the connection.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from aiohttp import web

from daemon.connection_limits import ADDRESSES, FIRST, ConnectionLimiter
from sandbox.errors import Conflict, Invalid

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

BACKLOG = 512
HANDSHAKE = 10.0  # seconds
TIMEOUT = 5.0  # seconds that requests under way have when the daemon stops
KEEPALIVE = 60.0  # seconds that a connection may be without a whole request
MAX_LINE = 128 << 10  # bytes of a request line: two paths of a sandbox may stand in it, percent-encoded
MAX_HEADER = 16 << 10  # bytes of one header
FIRST_INHERITED = 3  # the first descriptor that systemd passes

_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
    b'{"code":"too_many","message":"too many connections","hint":"close some, or raise --connections"}'
)


def unix(path: Path) -> socket.socket:
    """A Unix socket that only the daemon's user can reach. A stale one is replaced, a living one refused."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            path.unlink(missing_ok=True)
        else:
            raise Conflict(f"a daemon already listens on {path}", hint="stop it first, or set PAGURUS_RUN")
    server = socket.socket(socket.AF_UNIX)
    old = os.umask(0o177)
    try:
        server.bind(str(path))
    finally:
        os.umask(old)
    return server


def tcp(host: str, port: int) -> socket.socket:
    """A TCP socket; not yet listening."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        server = socket.socket(family, kind, protocol)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
    except OSError as error:
        raise Invalid(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            hint="choose another port with --listen, or end what listens there",
        ) from None
    return server


def inherited() -> list[socket.socket]:
    """The sockets that systemd listens on for us: clients wait there while the daemon is replaced."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return []
    count = int(os.environ.pop("LISTEN_FDS", "0"))
    os.environ.pop("LISTEN_PID")
    result = [socket.socket(fileno=FIRST_INHERITED + index) for index in range(count)]
    for item in result:
        item.set_inheritable(False)
    return result


class _Arrival(asyncio.Protocol):
    """Lets a new connection in, or says that there are too many. Counted as they arrive, before anything is said."""

    def __init__(self, listeners: Listeners, limiter: ConnectionLimiter, tls: ssl.SSLContext | None) -> None:
        self._listeners = listeners
        self._limiter = limiter
        self._tls = tls
        self._early: list[bytes] = []  # what came with the end of the TLS handshake

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if not self._limiter.admits(transport):
            if self._tls is None:
                transport.write(_BUSY)
                transport.close()
            else:
                transport.abort()  # it would wait for a handshake, not for words
        elif self._tls is None:
            self._enter(transport)
        else:
            transport.pause_reading()
            self._listeners.spawn(self._secure(transport, self._tls))

    async def _secure(self, transport: asyncio.Transport, tls: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        try:
            secured = await loop.start_tls(transport, self, tls, server_side=True, ssl_handshake_timeout=HANDSHAKE)
        except (OSError, ssl.SSLError):  # the peer does not speak TLS, or not in time
            transport.abort()
            return
        if secured is None or transport.is_closing():
            transport.abort()
            return
        self._limiter.became(transport, secured)
        self._enter(secured)

    def data_received(self, data: bytes) -> None:
        self._early.append(data)

    def _enter(self, transport: asyncio.Transport) -> None:
        inner = self._listeners.protocol()
        transport.set_protocol(inner)
        inner.connection_made(transport)
        for data in self._early:
            inner.data_received(data)
        self._listeners.expect(transport, self._limiter)


class Listeners:
    """All listening sockets of one daemon and the application behind them."""

    def __init__(self, app: web.Application, *, connections: int) -> None:
        self._limit = connections
        app.middlewares.insert(0, self._last_seen)  # some answer what others stand before
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            shutdown_timeout=TIMEOUT,
            keepalive_timeout=KEEPALIVE,
            max_line_size=MAX_LINE,
            max_field_size=MAX_HEADER,
        )
        self._servers: list[asyncio.Server] = []
        self._endpoints: list[ConnectionLimiter] = []
        self._securing: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        await self._runner.setup()

    async def serve(self, listening: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Accept on this socket."""
        local = listening.family == socket.AF_UNIX
        limiter = ConnectionLimiter(self._limit, None if local else max(1, self._limit // ADDRESSES))
        self._endpoints.append(limiter)
        server = await asyncio.get_running_loop().create_server(
            lambda: _Arrival(self, limiter, tls), sock=listening, backlog=BACKLOG
        )
        self._servers.append(server)

    def protocol(self) -> asyncio.Protocol:
        """What speaks HTTP on a new connection."""
        server = self._runner.server
        assert server is not None
        return server()

    def expect(self, transport: asyncio.Transport, limiter: ConnectionLimiter) -> None:
        """A whole request must come on it before long."""
        if limiter.item is not None:
            asyncio.get_running_loop().call_later(FIRST, limiter.close_silent, transport)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._securing.add(task)
        task.add_done_callback(self._securing.discard)

    @web.middleware
    async def _last_seen(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if isinstance(request.transport, asyncio.Transport):
            for limiter in self._endpoints:
                limiter.requested(request.transport)
        return await handler(request)

    async def close(self) -> None:
        """Accept no more; requests under way have a moment to end."""
        for server in self._servers:
            server.close()
        for task in self._securing:
            task.cancel()
        await self._runner.cleanup()
