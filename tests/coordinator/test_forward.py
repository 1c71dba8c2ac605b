"""What is under way to a host ends when the host is lost, wherever it waits: no packet of such a host says so."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from coordinator.forward import HostConnection
from sandbox.errors import ConnectionBroken
from tests.support.daemon_host import until

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
PART = b"10000\r\n" + bytes(1 << 16) + b"\r\n"


class Host:
    """Gives `gives` parts of an answer and no end, reads what it is sent or does not, then says nothing more."""

    def __init__(self, *, gives: int = 0, reads: bool = True) -> None:
        self.gives, self.reads = gives, reads
        self.taken = 0
        self.gone = asyncio.Event()

    @contextlib.asynccontextmanager
    async def reached(self) -> AsyncIterator[HostConnection]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        upstream = HostConnection(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        try:
            yield upstream
        finally:
            self.gone.set()
            await upstream.close()
            server.close()
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            if self.gives:
                writer.write(HEAD + PART * self.gives)
                await writer.drain()
            while self.reads and (came := await reader.read(1 << 16)):
                self.taken += len(came)
            await self.gone.wait()
        writer.transport.abort()


async def carried(source: HostConnection, target: HostConnection) -> None:
    """A stream from one host to another, as copies go."""

    async def parts(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
        while part := await stream.readany():  # type: ignore[attr-defined]
            yield part

    async with (
        source.answered("POST", "/given", {}, b"", None) as given,
        target.answered("POST", "/taken", {}, parts(given.content), None) as taken,  # type: ignore[arg-type]
    ):
        await taken.read()


@pytest.mark.parametrize("lost", ["source", "target"])
async def test_a_copy_ends_when_either_host_is_lost(lost: str) -> None:
    giving = Host(gives=3 if lost == "source" else 400)
    taking = Host(reads=lost == "source")
    async with giving.reached() as source, taking.reached() as target:
        copy = asyncio.create_task(carried(source, target))
        if lost == "source":
            await until(lambda: taking.taken >= 3 << 16, "what was given has arrived")
        else:
            await asyncio.sleep(0.5)  # until no buffer takes more
        assert not copy.done()
        await (source if lost == "source" else target).drop()
        with pytest.raises(ConnectionBroken, match="lost"):
            async with asyncio.timeout(10):
                await copy


async def test_an_answer_of_which_a_part_came_ends_when_the_host_is_lost() -> None:
    async with Host(gives=1).reached() as upstream:
        requested = asyncio.create_task(upstream.raw("GET", "/v1/host", None, ""))
        await asyncio.sleep(0.2)
        await upstream.drop()
        with pytest.raises(ConnectionBroken):
            async with asyncio.timeout(10):
                await requested


async def test_a_host_that_comes_back_is_asked_anew_and_an_own_time_limit_stays_one() -> None:
    host = Host(gives=1)
    async with host.reached() as upstream:
        for _ in range(2):
            await upstream.drop()
            async with upstream.answered("GET", "/again", {}, None, None) as result:
                assert len(await result.content.readexactly(1 << 16)) == 1 << 16
        with pytest.raises(TimeoutError):
            async with upstream.breakable("GET", "/"), asyncio.timeout(0.01):
                await host.gone.wait()
