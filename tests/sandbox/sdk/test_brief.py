"""The client of short questions fails as the other one does. What it does where nothing fails: test_contract.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from sandbox import Client, Closed, ConnectionBroken, NoDaemon, NotFound, PagurusError, Timeout
from sandbox.sdk.brief import BriefClient
from sandbox.testing import FakeHost

KINDS = (Client, BriefClient)
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
async def answering(tmp_path: Path) -> AsyncIterator[Callable[[bytes | None], Awaitable[str]]]:
    """Starts what answers every question with these bytes and hangs up; with None it never answers."""
    servers: list[asyncio.Server] = []

    async def start(data: bytes | None) -> str:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            if data is None:
                await reader.read()
            else:
                writer.write(data)
                await writer.drain()
            writer.close()

        path = str(tmp_path / f"socket{len(servers)}")
        servers.append(await asyncio.start_unix_server(answer, path))
        return path

    yield start
    for server in servers:
        server.close()
        await server.wait_closed()


async def failure(kind: type[Client], address: str, request: Callable[[Client], Awaitable[Any]]) -> PagurusError:
    async with kind(address, timeout=0) as client:
        with pytest.raises(PagurusError) as caught:
            await request(client)
    return caught.value


async def test_no_daemon_is_told_the_same_way(tmp_path: Path) -> None:
    for address in (tmp_path / "nothing", tmp_path):  # not there, and no socket
        first, second = [await failure(kind, str(address), lambda host: host.sandboxes()) for kind in KINDS]
        assert type(first) is type(second) is NoDaemon and str(first) == str(second)


async def test_errors_of_the_daemon_are_the_same() -> None:
    async with FakeHost() as fake:
        first, second = [await failure(kind, fake.address, lambda host: host.get("nobody")) for kind in KINDS]
        assert type(first) is type(second) is NotFound and str(first) == str(second)


@pytest.mark.parametrize(
    "data",
    [b"", b"HTTP/1.1 200", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf"],
    ids=["hangs up", "half a head", "half a body"],
)
async def test_an_answer_that_breaks_off_is_no_answer(
    answering: Callable[[bytes | None], Awaitable[str]], data: bytes
) -> None:
    for kind in KINDS:
        assert type(await failure(kind, await answering(data), lambda host: host.sandboxes())) is ConnectionBroken


async def test_it_waits_as_long_as_it_is_told(answering: Callable[[bytes | None], Awaitable[str]]) -> None:
    address = await answering(None)
    for kind in KINDS:
        reported = await failure(
            kind, address, lambda host: host.call("GET", "/v1/health", dict[str, Any], timeout=0.05)
        )
        assert type(reported) is Timeout


async def test_whatever_a_path_holds_is_one_question(tmp_path: Path) -> None:
    """Blanks, line ends and letters that are not ASCII; what is quoted already stays as it is."""
    requested: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requested.append((await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0])
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n\x80")
        writer.close()

    server = await asyncio.start_unix_server(answer, str(tmp_path / "socket"))
    async with server, BriefClient(tmp_path / "socket") as client:
        for path in ("/v1/a b\r\nHost: evil", "/v1/é", "/v1/a%20b?label=a%3Db&x=1"):
            await client.call("GET", path, dict[str, Any])
    paths = [line.split()[1] for line in requested if len(line.split()) == 3]
    assert paths == [b"/v1/a%20b%0D%0AHost:%20evil", b"/v1/%C3%A9", b"/v1/a%20b?label=a%3Db&x=1"]


async def test_a_closed_client_asks_nothing() -> None:
    async with FakeHost() as fake:
        client = BriefClient(fake.address)
        await client.close()
        with pytest.raises(Closed):
            await client.sandboxes()
