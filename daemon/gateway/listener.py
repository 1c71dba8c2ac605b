"""Where agents connect to: a socket inside a sandbox, or one of the host's for agents outside.

Guarantee (I6): a socket of a sandbox is made inside its network namespace and bound to its loopback, so nothing of the
host becomes reachable; a client accepted there is of that sandbox, whatever it says. A sandbox that floods its
listener slows itself down: it has so many connections, a pace of its own, and a share of memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from aiohttp import HttpVersion11, web

from daemon.connection_limits import ADDRESSES, FIRST, ConnectionLimiter
from daemon.gateway import encodings, wire
from daemon.network.namespace import is_here, within
from sandbox.container.paced import Allowance
from sandbox.errors import Conflict, Invalid, PagurusError, SandboxDead, Timeout, TooMany

if TYPE_CHECKING:
    from sandbox.container.container import Container

MAX_CONNECTIONS = 64  # open at a time, of one sandbox
AT_ONCE = 32  # requests under way, of one sandbox
MAX_MEMORY = 64 << 20  # bytes of bodies that one sandbox may have in the daemon's memory
PACE = 50.0  # requests, and connections, per second that one sandbox may make for long
BURST = 200.0
SIZE_COST = 64 << 10  # bytes of a body that count as much as a request
BACKLOG = 64
RETAINED = "gateway"  # the name by which a shim keeps the socket
HANDSHAKE = 10.0  # seconds of a TLS handshake
BODY_TIMEOUT = 60.0  # seconds for a whole body

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Serve = Callable[[str, web.BaseRequest], Awaitable[web.StreamResponse]]


class ConnectionRateLimit:
    """At most PACE a second in the long run, BURST at once. Who comes too early waits."""

    def __init__(self) -> None:
        self._tokens = BURST
        self._at = time.monotonic()

    async def take(self, cost: float = 1.0) -> None:
        now = time.monotonic()
        self._tokens = min(BURST, self._tokens + PACE * (now - self._at)) - cost
        self._at = now
        if self._tokens < 0:
            await asyncio.sleep(-self._tokens / PACE)


class SandboxShare:
    """What one sandbox may have under way."""

    def __init__(self) -> None:
        self.requests = 0
        self.memory = 0
        self.pace = ConnectionRateLimit()
        self._unpacking = asyncio.Lock()

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        if self.requests >= AT_ONCE:
            raise TooMany(f"{AT_ONCE} requests of this sandbox are under way", hint="wait for some of them")
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1

    @contextlib.asynccontextmanager
    async def body(self, request: web.BaseRequest) -> AsyncIterator[bytes]:
        """The whole body of a request, bounded in size, time and company."""
        if (request.content_length or 0) > wire.MAX_BODY:
            raise Invalid(f"the body is larger than {wire.MAX_BODY} bytes", hint="shorten the conversation")
        await go_ahead(request)
        parts: list[bytes] = []
        decoded = b""
        try:
            await self._read(request, parts)
            raw = b"".join(parts)
            if encoding := ", ".join(request.headers.getall("Content-Encoding", [])):
                raw = decoded = await self._unpacked(encoding, raw)
            yield raw
        finally:
            self.memory -= sum(map(len, parts)) + len(decoded)

    async def _unpacked(self, encoding: str, raw: bytes) -> bytes:
        async with self._unpacking:  # one at a time: what it unpacks to is counted only afterwards
            decoded = await asyncio.to_thread(encodings.decode, encoding, raw, limit=wire.MAX_BODY)
            self._need_memory(len(decoded))
            self.memory += len(decoded)
        await self.pace.take(len(decoded) / SIZE_COST)
        return decoded

    def _need_memory(self, size: int) -> None:
        if self.memory + size > MAX_MEMORY:
            raise TooMany("this sandbox's requests need too much memory", hint="ask one after another")

    async def _read(self, request: web.BaseRequest, parts: list[bytes]) -> None:
        size = 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                async for part in request.content.iter_any():
                    size += len(part)
                    if size > wire.MAX_BODY:
                        raise Invalid(f"the body is larger than {wire.MAX_BODY} bytes", hint="shorten the conversation")
                    self._need_memory(len(part))
                    parts.append(part)
                    self.memory += len(part)
        except TimeoutError:
            raise Timeout(
                f"the body took longer than {BODY_TIMEOUT:g} s", hint="send the request again, at once"
            ) from None
        except (web.RequestPayloadError, ConnectionError) as error:
            raise Invalid(f"the body broke off: {type(error).__name__}", hint="send the request again") from None
        await self.pace.take(size / SIZE_COST)


async def go_ahead(request: web.BaseRequest) -> None:
    """Answer a client that waits for permission to send its body."""
    expected = request.headers.get("Expect")
    if expected is None or request.version < HttpVersion11:
        return
    if expected.strip().lower() != "100-continue":
        raise Invalid(f"the expectation {expected[:50]!r} is not known", hint="100-continue is")
    if request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def refusal(request: web.BaseRequest, error: PagurusError) -> web.Response:
    """One of our own errors, in the words of the agent's protocol."""
    body = wire.error_body(wire.family_of(request.path), error)
    headers = {"retry-after": "1"} if isinstance(error, TooMany) else {}
    return web.Response(status=error.status, body=body, content_type="application/json", headers=headers)


class _Reading(asyncio.Protocol):
    """Between a connection and what speaks HTTP on it. Pieces that come too small and too often wait for each other."""

    def __init__(self, inner: asyncio.Protocol, allowance: Allowance, limiter: ConnectionLimiter | None = None) -> None:
        self._inner = inner
        self._limiter = limiter
        self._allowance = allowance
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._held = False  # by what speaks HTTP, which has enough for now
        self.writable = asyncio.Event()  # not too much waits to be sent
        self.writable.set()
        self.ended: Callable[[], None] | None = None  # who reads on after HTTP; called when the client says no more

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if self._limiter is not None:
            if not self._limiter.admits(transport):
                transport.abort()
                return
            asyncio.get_running_loop().call_later(FIRST, self._limiter.close_silent, transport)
        self._transport = transport
        self._inner.connection_made(cast(asyncio.BaseTransport, PausedTransport(transport, self)))

    def requested(self) -> None:
        """A whole request has come."""
        if self._limiter is not None and self._transport is not None:
            self._limiter.requested(self._transport)

    def data_received(self, data: bytes) -> None:
        if self._transport is None:  # not let in
            return
        self._inner.data_received(data)
        wait = self._allowance.spend(len(data))
        if wait and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(wait, self._go_on)
            self._transport.pause_reading()

    def _go_on(self) -> None:
        self._timer = None
        self.hold(self._held)

    def hold(self, held: bool) -> None:
        """Whether what speaks HTTP wants nothing for now."""
        self._held = held
        if self._transport is None or self._transport.is_closing():
            return
        if held or self._timer is not None:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def eof_received(self) -> bool | None:
        if self.ended is None:
            return self._inner.eof_received()
        self.ended()
        return True  # it may still listen

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport = None
            self.writable.set()
            if self.ended is not None:
                self.ended()
            self._inner.connection_lost(error)

    def pause_writing(self) -> None:
        self.writable.clear()
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self.writable.set()
        self._inner.resume_writing()


class PausedTransport:
    """A transport; whether it is read is decided elsewhere."""

    def __init__(self, transport: asyncio.Transport, reading: _Reading) -> None:
        self._transport = transport
        self.reading = reading

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def pause_reading(self) -> None:
        self.reading.hold(True)

    def resume_reading(self) -> None:
        self.reading.hold(False)


class GatewayListener:
    """Accepts on a socket, and serves each connection with `handler`: of a sandbox at a pace, of others by a door."""

    def __init__(
        self,
        sock: socket.socket,
        handler: Handler,
        *,
        limit: int = MAX_CONNECTIONS,
        paced: bool = True,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._socket = sock
        self._limit = limit
        self._paced = paced
        self._limiter = None if paced else ConnectionLimiter(limit, max(1, limit // ADDRESSES))
        self._tls = tls
        self._greeting: set[asyncio.Task[None]] = set()
        self._pace = ConnectionRateLimit()
        self._allowance = Allowance() if paced else None  # all connections of a sandbox share it
        # Bodies are read, and unpacked, by us, bounded. Handlers outlive a connection that breaks.
        self._handler = handler
        self._server = web.Server(
            self._serve, access_log=None, auto_decompress=False, keepalive_timeout=120.0, lingering_time=0.1
        )
        self._task = asyncio.get_running_loop().create_task(self._accept(), name="gateway listener")

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while self._open() >= self._limit:  # noqa: ASYNC110 - the server has no event for it
                await asyncio.sleep(0.05)
            if self._paced:
                await self._pace.take()
            try:
                connection, _ = await loop.sock_accept(self._socket)
            except OSError:  # no descriptor is left, or the peer went away while it was accepted
                await asyncio.sleep(0.1)
                continue
            if self._tls is None:
                await self._greet(connection)
                continue
            task = loop.create_task(self._greet(connection), name="gateway handshake")  # a slow one delays none
            self._greeting.add(task)
            task.add_done_callback(self._greeting.discard)

    async def _greet(self, connection: socket.socket) -> None:
        timeout = None if self._tls is None else HANDSHAKE
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol, connection, ssl=self._tls, ssl_handshake_timeout=timeout
            )
        except OSError:  # the peer went away before it said anything, or speaks no TLS
            connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise

    def _open(self) -> int:
        """Connections that keep others waiting; a door says itself who gives way to whom."""
        return len(self._greeting) + (0 if self._limiter is not None else len(self._server.connections))

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        if isinstance(held := cast(object, request.transport), PausedTransport):
            held.reading.requested()
        return await self._handler(request)

    def _protocol(self) -> asyncio.Protocol:
        return _Reading(self._server(), self._allowance or Allowance(), self._limiter)

    async def close(self) -> None:
        tasks = [self._task, *self._greeting]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()
        await self._server.shutdown(0.2)


class InsideListeners:
    """The sockets on which the host listens inside of sandboxes, for one purpose.

    Guarantee: a restore that makes a new network namespace has a listener in it before a program runs there; who
    connects while no daemon runs waits for the next one, and no program of the sandbox can take the port.

    `name`: by which shims keep them. `serve` gets the sandbox with each request.
    """

    def __init__(self, name: str, serve: Serve, spawn: Callable[[Coroutine[Any, Any, None], str], object]) -> None:
        self._name = name
        self._serve = serve
        self._spawn = spawn
        self._closed = False
        # sandbox -> number of its namespace, listener
        self._listeners: dict[str, tuple[int, GatewayListener]] = {}

    async def attach(self, sandbox: str, port: int, container: Container) -> None:
        """Listen in a sandbox. Idempotent. Raises Conflict where something of its own has the port."""
        inode = (await asyncio.to_thread(container.netns.stat)).st_ino
        if (existing := self._listeners.get(sandbox)) is None or existing[0] != inode:
            retained = await container.outside.retained(self._name)
            sock = await asyncio.to_thread(socket_inside, container.netns, port, retained)
            self._moved(sandbox, inode, sock, container)
        loop = asyncio.get_running_loop()
        container.followers[self._name] = functools.partial(self._follow, loop, sandbox, port, container)

    def _follow(
        self, loop: asyncio.AbstractEventLoop, sandbox: str, port: int, container: Container, netns: Path
    ) -> None:
        sock = socket_inside(netns, port)
        loop.call_soon_threadsafe(self._moved, sandbox, netns.stat().st_ino, sock, container)

    def _moved(self, sandbox: str, inode: int, sock: socket.socket, container: Container) -> None:
        """From now on `sandbox` is served on this socket, in the namespace with this number."""
        if (existing := self._listeners.pop(sandbox, None)) is not None:
            self._spawn(existing[1].close(), f"end of the listener of {sandbox}")
        if self._closed:
            sock.close()
            return
        self._listeners[sandbox] = (inode, GatewayListener(sock, functools.partial(self._serve, sandbox)))
        self._spawn(self._keep(container, os.dup(sock.fileno())), f"socket of {sandbox}")

    async def _keep(self, container: Container, fd: int) -> None:
        try:
            await container.outside.keep(self._name, [fd])
        except SandboxDead:  # and its shim: there is nothing to keep it for
            return
        finally:
            os.close(fd)

    async def detach(self, sandbox: str) -> None:
        """Listen there no more. Idempotent."""
        if (existing := self._listeners.pop(sandbox, None)) is not None:
            await existing[1].close()

    async def close(self) -> None:
        """Cut all off; the shims keep the sockets. Idempotent."""
        self._closed = True
        listeners = [listening for _, listening in self._listeners.values()]
        self._listeners.clear()
        await asyncio.gather(*(item.close() for item in listeners))


def socket_inside(netns: Path, port: int, retained: Sequence[int] = (), *, address: str = "127.0.0.1") -> socket.socket:
    """A listening socket on `address`:`port` of a network namespace, by default for the gateway. Blocks.

    `retained`: descriptors of a former daemon's, taken over: its socket is used again where it is this one. Who
    connected in between waits in it.
    """
    try:
        return within(netns, lambda: _former(retained, (address, port)) or _listening(socket.AF_INET, address, port))
    except OSError as error:
        raise Conflict(
            f"the host cannot listen on {address}:{port} in the sandbox: {error.strerror}",
            hint="if something in it holds that port, end it and restore the sandbox",
        ) from None


def socket_outside(host: str, port: int) -> socket.socket:
    """A listening socket of the host's, for agents outside."""
    try:
        return _listening(socket.AF_INET6 if ":" in host else socket.AF_INET, host, port)
    except OSError as error:
        raise Conflict(
            f"the gateway cannot listen on {host}:{port}: {error.strerror}",
            hint="choose another port, or end what listens there",
        ) from None


def _former(retained: Sequence[int], name: tuple[str, int]) -> socket.socket | None:
    """Of the sockets of a former daemon the one that listens here; the others are closed."""
    result: socket.socket | None = None
    for fd in retained:
        sock = socket.socket(fileno=fd)
        if result is None and is_here(sock) and sock.getsockname() == name:
            sock.setblocking(False)
            result = sock
        else:
            sock.close()
    return result


def _listening(family: int, host: str, port: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    with contextlib.ExitStack() as undo:
        undo.enter_context(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
        sock.setblocking(False)
        undo.pop_all()
    return sock
