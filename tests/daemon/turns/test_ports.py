"""Ports of a sandbox, reached from the host through a real daemon."""

from __future__ import annotations

import asyncio
import socket

import pytest

from daemon.turns.ports import parse
from sandbox import Sandbox
from sandbox.errors import Conflict
from sandbox.sdk import ports

PERL = r"""
use IO::Socket::INET; $| = 1; $SIG{CHLD} = 'IGNORE';
my $s = IO::Socket::INET->new(LocalAddr => '127.0.0.1', LocalPort => 8000, Listen => 50, ReuseAddr => 1) or die;
print "up\n";
while (my $c = $s->accept) {
    next if fork;
    while (sysread($c, my $d, 65536)) {
        my $o = 0;
        while ($o < length $d) { $o += syswrite($c, $d, length($d) - $o, $o) }
    }
    syswrite($c, 'END'); exit;
}
"""


async def serve(sb: Sandbox) -> None:
    """An echo server on port 8000 that says END at the end of its input. (The base image has perl.)"""
    await sb.files.write("/echo.pl", PERL)
    process = await sb.processes.start(["perl", "/echo.pl"])
    async with asyncio.timeout(240):
        async for chunk in process.stream():
            if b"up" in chunk.data:
                return
    raise AssertionError((await process.logs()).stderr)


async def test_a_port_is_reached_and_forwarded(sb: Sandbox) -> None:
    with pytest.raises(Conflict, match="nothing listens"):
        await sb.ports.connect(8000)
    await serve(sb)
    assert await sb.ports.list() == [8000]
    reader, writer = await sb.ports.connect(8000)
    big = bytes(range(256)) * 20_000

    async def send() -> None:
        writer.write(big)
        await writer.drain()
        writer.write_eof()

    _, answer = await asyncio.gather(send(), reader.read(-1))
    assert answer == big + b"END"
    writer.close()
    retained_reader, retained = await sb.ports.connect(8000)
    async with sb.ports.forward(8000) as address:
        host, _, port = address.rpartition(":")

        async def one(n: int) -> bytes:
            r, w = await asyncio.open_connection(host, int(port))
            w.write(b"%d" % n)
            w.write_eof()
            try:
                return await r.read(-1)
            finally:
                w.close()

        assert await asyncio.gather(*(one(n) for n in range(20))) == [b"%dEND" % n for n in range(20)]
    with pytest.raises(OSError):
        await asyncio.open_connection(host, int(port))
    retained.write(b"still here")  # the end of a forward is no end of other connections
    assert await retained_reader.readexactly(10) == b"still here"
    retained.close()


async def test_a_stream_is_closed_however_its_carrier_ends() -> None:
    async def carry(*, stubborn: bool) -> None:
        try:
            await asyncio.sleep(1e9)
        finally:
            if stubborn:
                await asyncio.sleep(1e9)

    pairs = [socket.socketpair() for _ in range(3)]
    opened = [await asyncio.open_connection(sock=ours) for ours, _ in pairs]
    carriers: set[asyncio.Task[None]] = set()
    for number, (_, writer) in enumerate(opened):
        ports._spawn(carry(stubborn=number == 0), writer, carriers)
    first, second, third = carriers
    third.cancel()  # before its first step
    await asyncio.sleep(0)
    for task in (first, second, first, second):
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.wait({first, second, third})
    assert [writer.is_closing() for _, writer in opened] == [True] * 3 and not carriers
    for _, theirs in pairs:
        theirs.close()


async def test_a_connection_breaks_with_its_sandbox_and_the_server_comes_back(sb: Sandbox) -> None:
    await serve(sb)
    before = await sb.checkpoint()
    reader, writer = await sb.ports.connect(8000)
    writer.write(b"x")
    assert await reader.readexactly(1) == b"x"
    await sb.restore(before)
    assert await reader.read(-1) == b""
    writer.close()
    reader, writer = await sb.ports.connect(8000)
    writer.write(b"y")
    assert await reader.readexactly(1) == b"y"
    writer.close()


async def test_a_checkpoint_while_connected(sb: Sandbox) -> None:
    await serve(sb)
    reader, writer = await sb.ports.connect(8000)
    writer.write(b"x")
    assert await reader.readexactly(1) == b"x"
    held = await sb.checkpoint()
    writer.write(b"y")
    assert await reader.readexactly(1) == b"y"  # the connection lives on
    writer.close()
    await sb.restore(held)
    reader, writer = await sb.ports.connect(8000)
    writer.write(b"z")
    assert await reader.readexactly(1) == b"z"
    writer.close()


def test_listening_ports_of_a_table() -> None:
    table = """  sl  local_address rem_address   st tx_queue rx_queue
   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1
   1: 0100007F:0016 0100007F:A0D2 01 00000000:00000000 00:00000000 00000000     0        0 1
   2: 00000000000000000000000000000000:0050 00000000000000000000000000000000:0000 0A 0 0 0
   3: 0000000000000000FFFF00000300017F:1538 00000000000000000000000000000000:0000 0A 0 0 0
garbage
"""
    assert parse(table) == {("127.0.0.1", 8000), ("", 80), ("127.1.0.3", 5432)}
    assert parse("") == set()


async def test_a_server_that_begins_to_listen_between_a_refusal_and_its_reason(sb: Sandbox, monkeypatch) -> None:
    """The SDK asks again why a connection was refused; by then it is not."""
    raw = sb.ports._client.raw

    async def explained(method, path, *more, **options):
        if path.endswith("/connect"):
            monkeypatch.setattr(sb.ports._client, "raw", raw)
            await sb.processes.start(["perl", "-e", PERL], ends_turn=False)
            for _ in range(250):
                if 8000 in await sb.ports.list():
                    break
                await asyncio.sleep(0.02)
        return await raw(method, path, *more, **options)

    monkeypatch.setattr(sb.ports._client, "raw", explained)
    reader, writer = await sb.ports.connect(8000)
    writer.write(b"x")
    assert await reader.readexactly(1) == b"x"
    writer.close()
