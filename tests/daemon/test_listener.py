"""Who is let in by each listening socket, over real connections of several addresses."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.typedefs import Handler

from daemon import connection_limits, listener
from daemon.auth import tls
from daemon.connection_limits import ConnectionLimiter
from daemon.listener import Listeners

LIMIT = 8  # connections on each socket; four from one address
REQUEST = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
EARLY = REQUEST.replace(b"/ ", b"/early ", 1)  # a middleware answers it, before there is a route


class Served:
    """Listeners over a Unix socket, a plain TCP one and one with TLS."""

    def __init__(self, directory: Path) -> None:
        app = web.Application(middlewares=[self._early])
        app.router.add_get("/", self._answer)
        self.listeners = Listeners(app, connections=LIMIT)
        self.unix = directory / "socket"
        self.plain, self.secure = listener.tcp("127.0.0.1", 0), listener.tcp("127.0.0.1", 0)
        certificate, key = tls.self_signed(directory / "tls", "127.0.0.1")
        self.tls = tls.context(certificate, key)
        self.trust = ssl.create_default_context(cafile=str(certificate))
        self.trust.check_hostname = False
        self._open: list[asyncio.StreamWriter] = []

    @web.middleware
    async def _early(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        return await (self._answer(request) if request.path == "/early" else handler(request))

    async def _answer(self, request: web.Request) -> web.Response:
        return web.Response(text="here")

    async def open(self) -> None:
        await self.listeners.open()
        await self.listeners.serve(listener.unix(self.unix))
        await self.listeners.serve(self.plain)
        await self.listeners.serve(self.secure, self.tls)

    async def connect(
        self, to: socket.socket | None, source: int = 1
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection from 127.0.0.`source`; None: to the Unix socket."""
        if to is None:
            made = await asyncio.open_unix_connection(str(self.unix))
        else:
            made = await asyncio.open_connection(*to.getsockname(), local_addr=(f"127.0.0.{source}", 0))
        self._open.append(made[1])
        return made

    async def request(self, to: socket.socket | None, source: int = 1) -> bytes:
        """The first line of the answer to a new connection; b"" when it is closed."""
        reader, writer = await self.connect(to, source)
        with contextlib.suppress(ConnectionError):
            writer.write(REQUEST)
            return await reader.readline()
        return b""

    async def close(self) -> None:
        for writer in self._open:
            writer.close()
        await self.listeners.close()


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    made = Served(tmp_path)
    await made.open()
    try:
        yield made
    finally:
        await made.close()


async def ended(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(ConnectionError):
        return await reader.read() == b""
    return True


async def test_one_address_has_a_part_of_the_connections(served: Served) -> None:
    for _ in range(LIMIT // listener.ADDRESSES):
        assert b" 200 " in await served.request(served.plain, 2)
    assert b" 503 " in await served.request(served.plain, 2)
    assert b" 200 " in await served.request(served.plain, 3)


async def test_nothing_on_tcp_keeps_anybody_from_the_unix_socket(served: Served) -> None:
    for number in range(3 * LIMIT):
        await served.connect((served.plain, served.secure)[number % 2], 2 + number // 4)
    for _ in range(LIMIT):
        assert b" 200 " in await served.request(None)
    assert b" 503 " in await served.request(None)


async def test_who_asks_takes_the_place_of_who_is_silent(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = [await served.connect(served.plain, 2 + number // 4) for number in range(LIMIT)]
    assert b" 503 " in await served.request(served.plain, 100)  # they may be about to ask
    monkeypatch.setattr(connection_limits, "SILENCE", 0.0)
    assert b" 200 " in await served.request(served.plain, 101)
    assert await ended(silent[0][0])
    assert b" 200 " in await served.request(served.plain, 101)
    assert await ended(silent[1][0])
    _, writer = silent[2]
    writer.write(REQUEST)
    assert b" 200 " in await silent[2][0].readline()  # of the others each may still ask


async def test_who_never_asks_is_closed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "FIRST", 0.05)
    reader, writer = await served.connect(served.plain)
    writer.write(REQUEST[:-2])  # not whole
    assert await ended(reader)
    monkeypatch.setattr(listener, "FIRST", 1.0)
    asking = [(await served.connect(served.plain), request) for request in (REQUEST, EARLY)]
    for (reader, writer), request in asking:
        writer.write(request)
        assert b" 200 " in await reader.readuntil(b"here")
    await asyncio.sleep(1.1)
    for (reader, writer), request in asking:
        writer.write(request)
        assert b" 200 " in await reader.readuntil(b"here")


async def test_who_does_not_speak_tls_is_counted_and_closed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE", 0.05)
    mute = [await served.connect(served.secure, 2 + number // 4) for number in range(LIMIT)]
    over, _ = await served.connect(served.secure, 100)
    assert await ended(over)
    for reader, _ in mute:
        assert await ended(reader)
    monkeypatch.setattr(listener, "HANDSHAKE", 60.0)
    reader, writer = await asyncio.open_connection(*served.secure.getsockname(), ssl=served.trust)
    writer.write(REQUEST)
    assert b" 200 " in await reader.readline()
    writer.close()


async def test_connections_that_ended_are_not_counted(served: Served) -> None:
    for _ in range(3 * LIMIT):
        reader, writer = await served.connect(served.plain, 2)
        writer.write(REQUEST)
        assert b" 200 " in await reader.readline()
        writer.close()
        await writer.wait_closed()
        await asyncio.sleep(0.01)


def test_of_ipv6_a_network_is_one_address() -> None:
    class Peer:
        def __init__(self, address: str) -> None:
            self._address = address

        def get_extra_info(self, name: str) -> tuple[str, int]:
            assert name == "peername"
            return self._address, 1

    def of(address: str) -> str:
        return connection_limits._address(Peer(address))  # type: ignore[arg-type]

    assert of("2001:db8::1") == of("2001:db8::ffff:1") != of("2001:db8:0:1::1")
    assert of("::ffff:127.0.0.1") == "127.0.0.1"
    assert of("fe80::1%eth0") == "fe80::/64"
    assert ConnectionLimiter(1).item is None


def test_a_daemon_ends_although_a_thread_never_does() -> None:
    code = (
        "import asyncio, threading\nfrom daemon import app\n"
        "app.MAX_SHUTDOWN = 0.1\napp._end_at_last()\nasyncio.run(asyncio.to_thread(threading.Event().wait))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=600).returncode == 1
