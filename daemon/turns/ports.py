"""Ports of a sandbox, reached from the host.

Guarantee: a connection goes to that sandbox's loopback and nowhere else; each direction is read only as fast as the
other side takes it, and its end is passed on.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from sandbox.container import namespaces
from sandbox.errors import Conflict
from sandbox.tree.safe_path import SandboxRoot

if TYPE_CHECKING:
    from daemon.turns.turns import LiveSandbox

CONNECT_TIMEOUT = 10.0  # seconds
CHUNK = 64 << 10
LISTEN = "0A"
LOOPBACKS = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))


async def connect(live: LiveSandbox, port: int) -> socket.socket:
    """A connection to `port` inside the sandbox. Raises Conflict when nothing listens."""
    async with live.using():
        live.need_alive()
        for family, address in LOOPBACKS:
            made = await asyncio.to_thread(_socket, live.container.inside, family)
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT):
                    await asyncio.get_running_loop().sock_connect(made, (address, port))
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


def _socket(inside: SandboxRoot, family: int) -> socket.socket:
    def make() -> socket.socket:
        return socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)

    with inside.of_process("ns/net") as namespace:
        made = namespaces.inside(namespace, namespaces.IDS["net"], make)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


async def listening(live: LiveSandbox) -> list[int]:
    """The TCP ports on which something in the sandbox listens, in order."""
    live.need_alive()
    return await asyncio.to_thread(_listening, live.container.inside)


def _listening(inside: SandboxRoot) -> list[int]:
    result: set[int] = set()
    for name in ("tcp", "tcp6"):
        with inside.of_process(f"net/{name}") as file, open(file, closefd=False) as table:
            result |= parse(table.read())
    return sorted(result)


def parse(table: str) -> set[int]:
    """Listening ports of a ``/proc/net/tcp``."""
    ports = set()
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 3 and fields[3] == LISTEN:
            ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


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
