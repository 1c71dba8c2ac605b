"""Ports of a sandbox, reached from the host.

Guarantee: a connection goes to that sandbox's loopback and nowhere else; each direction is read only as fast as the
other side takes it, and its end is passed on.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from sandbox.container import namespaces, services
from sandbox.errors import Conflict
from sandbox.messages import Composition
from sandbox.tree.safe_path import SandboxRoot

if TYPE_CHECKING:
    from daemon.turns.turns import LiveSandbox

CONNECT_TIMEOUT = 10.0  # seconds
CHUNK = 64 << 10
LISTEN = "0A"
MAPPED = "0000000000000000FFFF0000"  # in front of an IPv4 address in the form of IPv6
LOOPBACKS = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))


async def connect(live: LiveSandbox, port: int) -> socket.socket:
    """A connection to `port` inside the sandbox. Raises Conflict when nothing listens."""
    async with live.using():
        live.need_alive()
        for family, address, number in _places(live.row.composition, port):
            made = await asyncio.to_thread(_socket, live.container.inside, family)
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT):
                    await asyncio.get_running_loop().sock_connect(made, (address, number))
                return made
            except (OSError, TimeoutError):
                made.close()
            except asyncio.CancelledError:
                made.close()
                raise
    raise Conflict(
        f"nothing listens on port {port} of its loopback",
        hint="start the server first; it must listen on 127.0.0.1, ::1 or all addresses",
        sandbox=live.row.id,
    )


def _places(composition: Composition | None, port: int) -> list[tuple[socket.AddressFamily, str, int]]:
    """Where a port of the sandbox may be: on its loopback, or in the service that publishes it, else in the main one.

    Pure.
    """
    if composition is None:
        return [(family, address, port) for family, address in LOOPBACKS]
    for name, service in composition.services.items():
        for one in service.ports:
            if one.published == port:
                return [(socket.AF_INET, services.address(composition, name), one.target)]
    if not composition.main:
        return [(family, address, port) for family, address in LOOPBACKS]
    return [(socket.AF_INET, services.address(composition, composition.main), port)]


def _socket(inside: SandboxRoot, family: int) -> socket.socket:
    def make() -> socket.socket:
        return socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)

    with inside.of_process("ns/net") as namespace:
        made = namespaces.inside(namespace, namespaces.IDS["net"], make)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


async def listening(live: LiveSandbox) -> list[int]:
    """The TCP ports on which something in the sandbox listens, in order: those that :func:`connect` knows."""
    live.need_alive()
    listeners = await asyncio.to_thread(_listening, live.container.inside)
    composition = live.row.composition
    if composition is None:
        return sorted({port for _, port in listeners})
    addresses = {services.address(composition, name): name for name in composition.services}
    main = {port for address, port in listeners if addresses.get(address, "") == composition.main}
    published = {
        one.published
        for address, port in listeners
        if (name := addresses.get(address)) is not None
        for one in composition.services[name].ports
        if one.target == port
    }
    return sorted(published | main)


def _listening(inside: SandboxRoot) -> set[tuple[str, int]]:
    result: set[tuple[str, int]] = set()
    for name in ("tcp", "tcp6"):
        with inside.of_process(f"net/{name}") as file, open(file, closefd=False) as table:
            result |= parse(table.read())
    return result


def parse(table: str) -> set[tuple[str, int]]:
    """Listening addresses (IPv4 in either form, else "") and ports of a ``/proc/net/tcp``."""
    ports = set()
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 3 and fields[3] == LISTEN:
            address, _, port = fields[1].rpartition(":")
            ipv4 = address[-8:] if len(address) == 8 or address[:24] == MAPPED else ""
            ports.add((socket.inet_ntoa(bytes.fromhex(ipv4)[::-1]) if ipv4 else "", int(port, 16)))
    return ports


def unread(table: str, address: str, port: int) -> int:
    """Bytes that the IPv4 connection of this local address has received and its program has not read, by a
    ``/proc/net/tcp``; 0 where there is none.

    >>> unread("head\\n 1: 0100007F:0947 0100007F:BEEF 01 00000000:0000002A 00:00000000", "127.0.0.1", 0x947)
    42
    """
    own = f"{socket.inet_aton(address)[::-1].hex().upper()}:{port:04X}"
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 4 and fields[1] == own and fields[3] != LISTEN:
            return int(fields[4].rpartition(":")[2], 16)
    return 0


async def carry(
    inside: socket.socket,
    receive: Callable[[], Awaitable[bytes | None]],
    send: Callable[[bytes], Awaitable[None]],
    ended: Callable[[], Awaitable[None]],
) -> None:
    """Carry bytes until both directions have ended or one broke. `receive`: b"" at the end, None when broken."""
    loop = asyncio.get_running_loop()

    async def inwards() -> None:
        while data := await receive():
            await loop.sock_sendall(inside, data)
        if data is None:
            raise ConnectionResetError
        inside.shutdown(socket.SHUT_WR)

    async def outwards() -> None:
        while data := await loop.sock_recv(inside, CHUNK):
            await send(data)
        await ended()

    with inside:
        tasks = [asyncio.ensure_future(inwards()), asyncio.ensure_future(outwards())]
        try:
            await asyncio.gather(*tasks)
        except OSError:  # one side broke: so does the other
            pass
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
