"""The ports of a sandbox, as the SDK offers them: connect to one, or forward one to a port of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Coroutine
from typing import TYPE_CHECKING, Any

from sandbox.errors import PagurusError
from sandbox.sdk.transport import Facet, Transport

if TYPE_CHECKING:
    import aiohttp

END = "end"  # as text: nothing more comes from this side
CHUNK = 64 << 10


class Ports(Facet):
    """The TCP ports of a sandbox. Its network policy does not matter here: the way leads through the daemon."""

    def __init__(self, client: Transport, path: str) -> None:
        super().__init__(client, f"{path}/ports")
        self._carriers: set[asyncio.Task[None]] = set()

    async def list(self) -> list[int]:
        """Those on which something listens."""
        return await self._client.call("GET", self._path, list[int])

    async def connect(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to a port of the sandbox: ``reader, writer = await sb.ports.connect(8000)``."""
        async with contextlib.AsyncExitStack() as stack:
            far = await stack.enter_async_context(self._client.socket(f"{self._path}/{int(port)}/connect"))
            ours, theirs = socket.socketpair()
            reader, writer = await asyncio.open_connection(sock=ours)
            inner_reader, inner_writer = await asyncio.open_connection(sock=theirs)
            _spawn(self._carry(stack.pop_all(), far, inner_reader, inner_writer), inner_writer, self._carriers)
        return reader, writer

    @contextlib.asynccontextmanager
    async def forward(self, port: int, *, host: str = "127.0.0.1", local_port: int = 0) -> AsyncIterator[str]:
        """A port of this machine that leads to `port` of the sandbox; yields ``HOST:PORT``."""

        carriers: set[asyncio.Task[None]] = set()

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            async with contextlib.AsyncExitStack() as stack:
                try:
                    far = await stack.enter_async_context(self._client.socket(f"{self._path}/{int(port)}/connect"))
                except PagurusError:  # nothing listens now: the caller sees a closed connection, as from a real port
                    return
                await self._carry(stack.pop_all(), far, reader, writer)

        server = await asyncio.start_server(lambda r, w: _spawn(accepted(r, w), w, carriers), host, local_port)
        try:
            address = server.sockets[0].getsockname()
            yield f"{address[0]}:{address[1]}"
        finally:
            server.close()
            for task in carriers:
                task.cancel()
            await asyncio.gather(*carriers, return_exceptions=True)

    @staticmethod
    async def _carry(
        stack: contextlib.AsyncExitStack,
        far: aiohttp.ClientWebSocketResponse,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Carry bytes until both directions have ended or one broke."""
        from aiohttp import ClientError, WSMsgType

        async def outwards() -> None:
            while data := await reader.read(CHUNK):
                await far.send_bytes(data)
            await far.send_str(END)

        async def inwards() -> None:
            async for message in far:
                if message.type is WSMsgType.BINARY:
                    writer.write(message.data)
                    await writer.drain()
                elif message.type is WSMsgType.TEXT and message.data == END:
                    if writer.can_write_eof():
                        writer.write_eof()
                    return
            raise ConnectionResetError("the other side went away")

        tasks = [asyncio.ensure_future(outwards()), asyncio.ensure_future(inwards())]
        try:
            async with stack:
                await asyncio.gather(*tasks)
        except (OSError, ClientError, PagurusError):  # one side broke: so does the other
            pass
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _spawn(work: Coroutine[Any, Any, None], writer: asyncio.StreamWriter, among: set[asyncio.Task[None]]) -> None:
    """Carry on with `work`. Its end closes `writer`, also where it is cancelled before its first step or its last."""
    task = asyncio.ensure_future(work)
    among.add(task)
    task.add_done_callback(among.discard)
    task.add_done_callback(lambda _: writer.close())
