"""The resolver in a network namespace of its own: questions without end wake it at a pace, and it answers on."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import dns.message
import dns.rcode
import pytest

from daemon.network.namespace import within
from daemon.network.probe import fresh_namespace
from daemon.network.resolver import ADDRESS, STREAMS, Resolver, UpstreamResolver
from sandbox.container.paced import BURST, RATE
from tests.support.daemon_host import until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="entering a network namespace needs root")
QUESTION = dns.message.make_query("a.test", "A").to_wire()


class Counting(Resolver):
    """A resolver that knows how often it was woken."""

    woken = 0

    def _datagram(self, sock: socket.socket) -> int:
        self.woken += 1
        return super()._datagram(sock)

    def _accept(self, listening: socket.socket) -> int:
        self.woken += 1
        return super()._accept(listening)


class Inside:
    """A namespace with a resolver in it."""

    def __init__(self, namespace: Path, resolver: Counting) -> None:
        self.namespace, self.resolver = namespace, resolver

    def socket(self, kind: socket.SocketKind) -> socket.socket:
        return within(self.namespace, lambda: socket.socket(socket.AF_INET, kind))

    async def count(self, attempt: Callable[[], None], seconds: float = 0.7) -> tuple[int, float]:
        """How often the resolver was woken while a thread did this again and again, and for how long that was."""
        done, before, began = threading.Event(), self.resolver.woken, time.monotonic()

        def repeat() -> None:
            while not done.is_set():
                attempt()

        thread = threading.Thread(target=repeat)
        thread.start()
        await asyncio.sleep(seconds)
        done.set()
        await asyncio.to_thread(thread.join)
        return self.resolver.woken - before, time.monotonic() - began


@pytest.fixture
async def inside() -> AsyncIterator[Inside]:
    async def opened(*_: object) -> None:
        return

    resolver = Counting(UpstreamResolver(), opened, lambda name, why: None)
    with fresh_namespace() as namespace:
        await resolver.listen(namespace)
        try:
            yield Inside(namespace, resolver)
        finally:
            await resolver.close()


async def test_questions_without_a_pause(inside: Inside) -> None:
    with inside.socket(socket.SOCK_DGRAM) as asker:
        asker.connect(ADDRESS)
        woken, seconds = await inside.count(lambda: asker.send(b"nonsense") and None)
        assert 0 < woken <= BURST + RATE * seconds + 1
        asker.setblocking(False)

        async def answered() -> bool:
            asker.send(QUESTION)
            try:
                return dns.message.from_wire(asker.recv(4096)).rcode() == dns.rcode.NXDOMAIN
            except BlockingIOError:
                return False

        await until(answered, "an answer after the flood")


async def test_connections_without_a_pause(inside: Inside) -> None:
    def knock() -> None:
        with inside.socket(socket.SOCK_STREAM) as peer:
            peer.setblocking(False)
            peer.connect_ex(ADDRESS)

    woken, seconds = await inside.count(knock)
    assert 0 < woken <= BURST + RATE * seconds + 1


async def test_a_question_in_single_bytes_and_more_streams_than_there_are(inside: Inside) -> None:
    loop = asyncio.get_running_loop()
    peers = [inside.socket(socket.SOCK_STREAM) for _ in range(STREAMS + 1)]
    try:
        for peer in peers:
            peer.setblocking(False)
            await loop.sock_connect(peer, ADDRESS)
        first = peers[0]
        first.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in len(QUESTION).to_bytes(2, "big") + QUESTION:
            await loop.sock_sendall(first, bytes([byte]))
        answer = await loop.sock_recv(first, 4096)
        assert dns.message.from_wire(answer[2:]).rcode() == dns.rcode.NXDOMAIN
        assert await loop.sock_recv(peers[-1], 1) == b"", "one too many"
    finally:
        for peer in peers:
            peer.close()
