"""The gateway's sockets: pieces too small and too many neither wake the daemon without end nor fill its memory."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import aiohttp
import pytest
from aiohttp import web

from daemon.gateway import listener as gateway_listener
from daemon.gateway.listener import GatewayListener, _Reading
from sandbox.container.paced import BURST, RATE, Allowance
from tests.support.daemon_host import until


class LastSeen(asyncio.Protocol):
    """Counts what it is told."""

    def __init__(self) -> None:
        self.parts = 0
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.parts += 1


class Wire(asyncio.Transport):
    """A connection of which only matters whether it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = True

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def is_closing(self) -> bool:
        return False


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.setblocking(False)
        yield sock


async def test_a_body_in_single_bytes_arrives_and_wakes_nobody_for_each(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, woken = 60_000, 0
    hear = _Reading.data_received

    def counted(self: _Reading, data: bytes) -> None:
        nonlocal woken
        woken += 1
        hear(self, data)

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text=str(len(await request.read())))

    answers: list[bytes] = []

    def dribble() -> None:
        with socket.create_connection(listening.getsockname()) as peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size)
            for _ in range(size):
                peer.send(b"x")
            answers.append(peer.recv(1 << 16))

    monkeypatch.setattr(_Reading, "data_received", counted)
    listener, began = GatewayListener(listening, handler), time.monotonic()
    thread = threading.Thread(target=dribble)
    thread.start()
    try:
        await until(lambda: bool(answers), seconds=60)
        assert answers[0].endswith(b"60000") and b"200 OK" in answers[0]
        assert woken <= BURST + RATE * (time.monotonic() - began) + 2
    finally:
        await listener.close()
        thread.join()


async def test_what_speaks_http_says_when_it_has_enough() -> None:
    last_seen, wire, allowance = LastSeen(), Wire(), Allowance()
    reading = _Reading(last_seen, allowance)
    reading.connection_made(wire)
    assert last_seen.transport is not None
    while wire.reads:
        reading.data_received(b"x")
    last_seen.transport.pause_reading()  # it has enough: the end of the pace does not change that
    await asyncio.sleep(5 / RATE)
    assert not wire.reads
    last_seen.transport.resume_reading()
    assert wire.reads
    while wire.reads:
        reading.data_received(b"x")
    last_seen.transport.resume_reading()  # it wants more, and has to wait
    assert not wire.reads
    await until(lambda: wire.reads)
    reading.connection_lost(None)


async def test_silent_connections_of_strangers_give_way(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text="served")

    monkeypatch.setattr(gateway_listener, "FIRST", 1.0)
    listener = GatewayListener(listening, handler, limit=4, paced=False)
    loop, silent = asyncio.get_running_loop(), []
    try:
        for _ in range(3):  # two are one address's part
            peer = socket.socket()
            peer.setblocking(False)
            silent.append(peer)
            await loop.sock_connect(peer, listening.getsockname())
        for peer in silent:
            with contextlib.suppress(ConnectionResetError):
                assert await loop.sock_recv(peer, 1) == b""
        async with aiohttp.ClientSession() as session:
            host, port = listening.getsockname()
            async with session.get(f"http://{host}:{port}/") as answer:
                assert await answer.text() == "served"
            await asyncio.sleep(1.1)
            async with session.get(f"http://{host}:{port}/") as answer:  # who has asked may be silent for a while
                assert await answer.text() == "served"
    finally:
        for peer in silent:
            peer.close()
        await listener.close()
