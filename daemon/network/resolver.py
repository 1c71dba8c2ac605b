"""The resolver of one sandbox: 127.0.0.53 in its network namespace, answered by the daemon.

Guarantee: a question for a name that is not allowed never leaves this host; an address is open before the sandbox
sees it; an address that no sandbox may reach is never given out, whatever name points to it. The client is known
by the socket, which only that sandbox can reach. A sandbox that asks without a pause wakes the daemon so often a second
and no more (:mod:`sandbox.container.paced`); the rest its own kernel drops.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import dns.asyncquery
import dns.exception
import dns.message
import dns.rcode

from daemon.network import names
from daemon.network.namespace import is_here, within
from daemon.network.policy import NameVerdict, Policy, canonical, is_private, judge_answer, judge_name
from sandbox.container.paced import PacedReader
from sandbox.container.process import readable
from sandbox.errors import Conflict, Invalid

log = logging.getLogger("pagurus.network")

ADDRESS = ("127.0.0.53", 53)
RETAINED = "resolver"  # the name by which a shim keeps the sockets
AT_ONCE = 32  # questions of one sandbox under way
PER_SECOND = 100  # questions of one sandbox that are answered
STREAMS = 8  # TCP connections of one sandbox
STREAM_IDLE = 5.0  # seconds
REDIRECT_TTL = 5  # seconds
UPSTREAM_TIMEOUT = 2.0  # seconds for each of the host's resolvers
UPSTREAM_AT_ONCE = 256  # questions of all sandboxes under way
UPSTREAM_SHARE = UPSTREAM_AT_ONCE // 2  # those of one owner

#: Opens addresses to a sandbox for some seconds: (name, addresses, ports, seconds).
Opener = Callable[[str, Sequence[IPv4Address], Sequence[tuple[int, int]], int], Awaitable[None]]


class UpstreamResolver:
    """The host's own resolvers: those of PAGURUS_RESOLVERS (``10.0.0.2,10.0.0.3:5353``), else of /etc/resolv.conf."""

    def __init__(self, configuration: Path = Path("/etc/resolv.conf")) -> None:
        self._configuration = configuration
        self._observed = 0.0
        self._servers: list[tuple[str, int]] = []
        self._limit = asyncio.Semaphore(UPSTREAM_AT_ONCE)
        self._shares: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # while one is in use

    def servers(self) -> list[tuple[str, int]]:
        named = os.environ.get("PAGURUS_RESOLVERS")
        if named:
            return [_server(item) for item in named.split(",") if item.strip()]
        with contextlib.suppress(OSError):
            changed = self._configuration.stat().st_mtime
            if changed != self._observed:
                self._servers, self._observed = parse_servers(self._configuration.read_text()), changed
        return self._servers

    async def request(self, name: str, sharer: str) -> dns.message.Message:
        """The answer of the first resolver that gives one. Raises OSError or DNSException."""
        question = names.request(name)
        failure: Exception = OSError("the host has no resolver")
        share = self._shares.setdefault(sharer, asyncio.Semaphore(UPSTREAM_SHARE))
        async with share, self._limit:  # in this order: who waits for his share takes no place
            for host, port in self.servers():
                try:
                    answer, _ = await dns.asyncquery.udp_with_fallback(
                        question, host, timeout=UPSTREAM_TIMEOUT, port=port, ignore_unexpected=True
                    )
                    return answer
                except (dns.exception.DNSException, OSError) as error:
                    failure = error
        raise failure


def parse_servers(text: str) -> list[tuple[str, int]]:
    """The resolvers that a resolv.conf names."""
    fields = [line.split() for line in text.splitlines()]
    return [(parts[1], 53) for parts in fields if len(parts) >= 2 and parts[0] == "nameserver"]


def _server(text: str) -> tuple[str, int]:
    host, _, port = text.strip().partition(":")
    if port and not port.isdigit():
        raise Invalid(f"PAGURUS_RESOLVERS: {text!r} is no address", hint="write 10.0.0.2 or 10.0.0.2:5353")
    return host, int(port or 53)


class Resolver:
    """The resolver of one sandbox. `refused` hears of (name, why). `redirect`: the address of the sandbox's own
    loopback that stands for a name, or None."""

    def __init__(
        self,
        upstream: UpstreamResolver,
        opener: Opener,
        refused: Callable[[str, str], None],
        redirect: Callable[[str], IPv4Address | None] = lambda _: None,
    ) -> None:
        self.policy = Policy()
        self.sharer = ""  # with whose questions to the host's resolvers those of this sandbox count
        self.allowed = 0
        self.refused = 0
        self._upstream = upstream
        self._open = opener
        self._report = refused
        self._redirect = redirect
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening: list[tuple[socket.socket, PacedReader]] = []
        self._streams: set[asyncio.Task[None]] = set()
        self._second, self._requested = 0.0, 0

    async def listen(self, namespace: Path, retained: Sequence[int] = ()) -> list[int]:
        """Answer in this network namespace. Raises Conflict where a program of the sandbox has taken the address.

        `retained`: the sockets of a former daemon, to be used again where they are of this namespace: a question
        sent in between waits in them. Returns the descriptors to keep.
        """
        await self.close()
        try:
            datagrams, stream = await asyncio.to_thread(within, namespace, lambda: _sockets(retained))
        except OSError as error:
            raise Conflict(
                f"cannot listen on {ADDRESS[0]}:{ADDRESS[1]} in the sandbox: {error.strerror}",
                hint="end the program that listens there",
            ) from error
        self._listening = [
            (datagrams, PacedReader(datagrams.fileno(), partial(self._datagram, datagrams))),
            (stream, PacedReader(stream.fileno(), partial(self._accept, stream))),
        ]
        return [datagrams.fileno(), stream.fileno()]

    @property
    def listening(self) -> bool:
        return bool(self._listening)

    async def close(self) -> None:
        """Idempotent."""
        for sock, reader in self._listening:  # an open socket would take the next daemon's questions
            reader.stop()
            sock.close()
        self._listening.clear()
        tasks = [*self._tasks, *self._streams]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------ questions

    def busy(self) -> bool:
        """Whether one more question is too much now."""
        now = asyncio.get_running_loop().time()
        if now - self._second >= 1:
            self._second, self._requested = now, 0
        self._requested += 1
        return self._requested > PER_SECOND or len(self._tasks) >= AT_ONCE

    async def answer(self, data: bytes, *, stream: bool) -> bytes | None:
        """What to send back; None for what is no question."""
        question = names.read_question(data)
        if question is None:
            return None
        return names.write(question, await self._respond(question), stream=stream)

    async def _respond(self, question: names.Question) -> dns.message.Message:
        name = canonical(question.name)
        if name and (instead := self._redirect(name)) is not None:
            self.allowed += 1
            there = names.ResolvedName(addresses=(instead,), ttl=REDIRECT_TTL)
            return names.answered(question, there) if question.addresses else names.nothing(question)
        verdict = judge_name(self.policy, name) if name else NameVerdict(False)
        if not name or not verdict.allowed:
            self._refuse(question.name, "the policy does not name it")
            return names.nothing(question, dns.rcode.NXDOMAIN)
        self.allowed += 1
        if not question.addresses:
            return names.nothing(question)
        try:
            result = names.read_answer(name, await self._upstream.request(name, self.sharer))
        except (dns.exception.DNSException, OSError, ValueError) as error:
            log.debug("no answer for %s: %s", name, error)
            return names.nothing(question, dns.rcode.SERVFAIL)
        reasons = {address: judge_answer(self.policy, address) for address in result.addresses}
        fine = tuple(address for address, why in reasons.items() if not why)
        if result.addresses and not fine:
            self._refuse(question.name, next(iter(reasons.values())))
            return names.nothing(question, dns.rcode.NXDOMAIN)
        opened = tuple(address for address in fine if not is_private(address))
        if opened and self.policy.mode == "allow":
            try:
                await self._open(name, opened, verdict.ports, names.open_seconds(result.ttl))
            except OSError as error:
                log.warning("cannot open the addresses of %s: %s", name, error)
                return names.nothing(question, dns.rcode.SERVFAIL)
        return names.answered(question, names.ResolvedName(result.aliases, fine, result.ttl, result.missing))

    def _refuse(self, name: str, why: str) -> None:
        self.refused += 1
        self._report(name, why)

    # ------------------------------------------------------------------ datagrams and streams

    def _datagram(self, sock: socket.socket) -> int:
        """Takes one question; how long it was."""
        try:
            data, asker = sock.recvfrom(names.MAX_QUESTION + 1)
        except OSError:  # nothing there after all, or an earlier answer that was not read
            return 0
        if not self.busy():  # else it is as if it had been lost on the way: the asker tries again
            _start(self._tasks, self._reply(data, sock, asker))
        return len(data)

    async def _reply(self, data: bytes, sock: socket.socket, asker: tuple[str, int]) -> None:
        if (reply := await self.answer(data, stream=False)) is not None:
            with contextlib.suppress(OSError):  # no room, or closed since: lost on the way
                sock.sendto(reply, asker)

    def _accept(self, listening: socket.socket) -> int:
        with contextlib.suppress(OSError):  # it has gone away again, or no descriptor is left
            connection, _ = listening.accept()
            if len(self._streams) < STREAMS:
                _start(self._streams, self._stream(connection))
            else:
                connection.close()
        return 0

    async def _stream(self, connection: socket.socket) -> None:
        with connection:
            connection.setblocking(False)
            try:
                while True:
                    async with asyncio.timeout(STREAM_IDLE):
                        size = int.from_bytes(await _complete(connection, 2), "big")
                        data = await _complete(connection, min(size, names.MAX_QUESTION + 1))
                    reply = None if self.busy() else await self.answer(data, stream=True)
                    if reply is None:
                        return
                    async with asyncio.timeout(STREAM_IDLE):
                        loop = asyncio.get_running_loop()
                        await loop.sock_sendall(connection, len(reply).to_bytes(2, "big") + reply)
            except (OSError, EOFError, TimeoutError):  # the sandbox went away, or says nothing
                return


def _start(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


async def _complete(connection: socket.socket, size: int) -> bytes:
    """So many bytes, once all of them are here: single ones do not wake anybody. Raises EOFError."""
    data = b""
    while len(data) < size:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size - len(data))
        await readable(connection.fileno())
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _sockets(retained: Sequence[int] = ()) -> tuple[socket.socket, socket.socket]:
    """In the sandbox's namespace."""
    former = [socket.socket(fileno=fd) for fd in retained]
    if len(former) == 2 and all(is_here(item) for item in former):
        for item in former:
            item.setblocking(False)
        return former[0], former[1]
    for item in former:
        item.close()
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    try:
        datagrams.bind(ADDRESS)
        stream = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            stream.bind(ADDRESS)
            stream.listen(STREAMS)
        except OSError:
            stream.close()
            raise
    except OSError:
        datagrams.close()
        raise
    return datagrams, stream
