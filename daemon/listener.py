"""The sockets of the API: made, inherited, bounded.

Owns: the Unix socket, the TCP socket, those that systemd hands over, the number of connections. Does not own: HTTP.
Guarantee: the Unix socket is the daemon user's alone; connections over the bound are told so and closed; a TLS
handshake, a request line and headers that do not come in time end the connection.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from pathlib import Path

from aiohttp import web

from sandbox.errors import Conflict, Invalid

BACKLOG = 512
HANDSHAKE = 10.0  # seconds
PATIENCE = 5.0  # seconds that requests under way have when the daemon stops
KEEPALIVE = 60.0  # seconds that a connection may be without a whole request
LINE_MOST = 128 << 10  # bytes of a request line: two paths of a sandbox may stand in it, percent-encoded
HEADER_MOST = 16 << 10  # bytes of one header
FIRST_INHERITED = 3  # the first descriptor that systemd passes

_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
    b'{"code":"too_many","message":"too many connections","remedy":"close some, or raise --connections"}'
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
            raise Conflict(f"a daemon already listens on {path}", remedy="stop it first, or set PAGURUS_RUN")
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
        raise Invalid(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return server


def inherited() -> list[socket.socket]:
    """The sockets that systemd listens on for us: clients wait there while the daemon is replaced."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return []
    count = int(os.environ.pop("LISTEN_FDS", "0"))
    os.environ.pop("LISTEN_PID")
    found = [socket.socket(fileno=FIRST_INHERITED + index) for index in range(count)]
    for each in found:
        each.set_inheritable(False)
    return found


class _Arrival(asyncio.Protocol):
    """Lets a new connection in, or says that there are too many. Counted as they arrive, one after another."""

    def __init__(self, server: web.Server, most: int) -> None:
        self._server = server
        self._most = most

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if len(self._server.connections) >= self._most:
            transport.write(_BUSY)
            transport.close()
            return
        inner = self._server()
        transport.set_protocol(inner)
        inner.connection_made(transport)


class Listeners:
    """All listening sockets of one daemon and the application behind them."""

    def __init__(self, app: web.Application, *, connections: int) -> None:
        self._most = connections
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            shutdown_timeout=PATIENCE,
            keepalive_timeout=KEEPALIVE,
            max_line_size=LINE_MOST,
            max_field_size=HEADER_MOST,
        )
        self._servers: list[asyncio.Server] = []

    async def open(self) -> None:
        await self._runner.setup()

    async def serve(self, listening: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Accept on this socket."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            self._protocol,
            sock=listening,
            ssl=tls,
            backlog=BACKLOG,
            ssl_handshake_timeout=HANDSHAKE if tls is not None else None,
        )
        self._servers.append(server)

    def _protocol(self) -> asyncio.Protocol:
        server = self._runner.server
        assert server is not None
        return _Arrival(server, self._most)

    async def close(self) -> None:
        """Accept no more; requests under way have a moment to end."""
        for server in self._servers:
            server.close()
        await self._runner.cleanup()
