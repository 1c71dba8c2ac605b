"""Connections that a client of Docker's Engine API takes over for a command: its outputs in frames, and its input.

Guarantee: an output that the client does not read is not read from the command either.
"""

from __future__ import annotations

import asyncio
import bz2
import contextlib
import gzip
import io
import lzma
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import IO, cast

from aiohttp import web
from aiohttp.http import WebSocketReader

from daemon.gateway.listener import PausedTransport
from daemon.turns import ports
from sandbox.container.pipes import in_thread, put
from sandbox.errors import Closed, Invalid
from sandbox.tree.safe_path import SandboxRoot

HEAD_TIMEOUT = 10.0  # seconds that an output waits for a client to read that its request is granted
POLL_INTERVAL = 0.002  # seconds
MAX_INPUT = 4 << 20  # bytes of a client's input that wait for the command
_KINDS = {"stdin": 0, "stdout": 1, "stderr": 2}
RAW = "application/vnd.docker.raw-stream"
FRAMES = "application/vnd.docker.multiplexed-stream"
_XZ = b"\xfd7zXZ\0"  # how what xz packs begins


def frame(stream: str, data: bytes) -> bytes:
    """
    >>> frame("stderr", b"no")
    b'\\x02\\x00\\x00\\x00\\x00\\x00\\x00\\x02no'
    """
    return struct.pack(">BxxxI", _KINDS[stream], len(data)) + data


class TakenConnection:
    """A connection that speaks no HTTP any more. Made before anything is answered."""

    def __init__(self, request: web.BaseRequest, inside: SandboxRoot, *, terminal: bool) -> None:
        """`inside`: of the sandbox of the client. `terminal`: there is one output, which comes as it is, not framed."""
        self._inside, self._terminal = inside, terminal
        self._head = asyncio.Lock()
        self._head_read = False
        transport = cast(object, request.transport)
        if not isinstance(transport, PausedTransport):
            raise Closed("the client has left", hint="ask again")
        self._transport = transport
        self._input: asyncio.Queue[bytes] = asyncio.Queue()
        self._waiting = 0
        upgrade = request.headers.get("Upgrade", "").lower() == "tcp"
        head = "101 UPGRADED" if upgrade else "200 OK"
        more = "Connection: Upgrade\r\nUpgrade: tcp\r\n" if upgrade else ""
        transport.write(f"HTTP/1.1 {head}\r\nContent-Type: {RAW}\r\n{more}\r\n".encode())
        transport.reading.ended = self.feed_eof
        if upgrade:
            request.protocol.set_parser(cast(WebSocketReader, self))

    # ----------------------------------------------------------------- what comes; called by who reads the connection

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        self._waiting += len(data)
        self._input.put_nowait(data)
        if self._waiting > MAX_INPUT:
            self._transport.pause_reading()
        return False, b""

    def feed_eof(self) -> None:
        self._input.put_nowait(b"")

    async def read(self) -> bytes:
        """Some of the input; b"": it has ended, or the client has left."""
        data = await self._input.get()
        self._waiting -= len(data)
        if self._waiting <= MAX_INPUT:
            self._transport.resume_reading()
        return data

    # ----------------------------------------------------------------- what goes

    async def write(self, stream: str, data: bytes) -> None:
        """Returns when it is on its way. Raises Closed when the client has left."""
        await self._until_head_read()
        await self._transport.reading.writable.wait()
        if self._transport.is_closing():
            raise Closed("the client has left", hint="attach again")
        self._transport.write(data if self._terminal else frame(stream, data))

    async def _until_head_read(self) -> None:
        """Docker's Python SDK reads the head through a buffer, all else past it: what comes with it is lost."""
        async with self._head:
            peer, deadline = self._transport.get_extra_info("peername"), time.monotonic() + HEAD_TIMEOUT
            while not self._head_read and not self._transport.is_closing():
                waiting = await in_thread(_unread, self._inside, *peer[:2])
                self._head_read = waiting == 0 or time.monotonic() > deadline
                if not self._head_read:
                    await asyncio.sleep(POLL_INTERVAL)

    def close(self) -> web.StreamResponse:
        """The end of the connection; what the handler returns."""
        self._transport.close()
        return NoResponse()


def _unread(inside: SandboxRoot, address: str, port: int) -> int:
    with inside.of_process("net/tcp") as file, open(file, closefd=False) as table:
        return ports.unread(table.read(), address, port)


class NoResponse(web.StreamResponse):
    """All has been said on the connection itself."""

    async def prepare(self, request: web.BaseRequest) -> None:
        self.force_close()

    async def write_eof(self, data: bytes = b"") -> None:
        pass


async def body(request: web.BaseRequest, limit: int) -> bytes:
    """The whole of it. Raises Invalid when it is longer than `limit` bytes."""
    parts, size = [], 0
    async for part in request.content.iter_any():
        size += len(part)
        if size > limit:
            raise Invalid(f"a body of more than {limit} bytes", hint="send less")
        parts.append(part)
    return b"".join(parts)


async def fed(request: web.BaseRequest, work: Callable[[IO[bytes]], object]) -> None:
    """Have a thread read the archive that is the body of a request, packed or not, as it comes.

    Raises what `work` raises.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)

    def read() -> None:
        with io.BufferedReader(io.FileIO(reader), 1 << 18) as stream, _unpacked(stream) as archive:
            work(archive)

    reading = in_thread(read)
    try:
        with os.fdopen(writer, "wb", buffering=0) as out:
            async for part in request.content.iter_any():
                if not reading.done():  # after an error the rest is read all the same: then the answer arrives
                    with contextlib.suppress(BrokenPipeError):
                        await asyncio.to_thread(put, out, part)
    finally:
        await reading


@contextlib.contextmanager
def _unpacked(stream: io.BufferedReader[io.FileIO]) -> Iterator[IO[bytes]]:
    """What a stream holds that may be packed by gzip, bzip2 or xz, as clients send it. Raises Invalid."""
    first = stream.peek(len(_XZ))
    opened: Callable[[IO[bytes]], object] = contextlib.nullcontext
    if first.startswith(b"\x1f\x8b"):
        opened = gzip.open
    elif first.startswith(b"BZh"):
        opened = bz2.open
    elif first.startswith(_XZ):
        opened = lzma.open
    try:
        with cast(AbstractContextManager[IO[bytes]], opened(stream)) as packed:
            yield packed
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise Invalid(f"the archive cannot be unpacked: {error}", hint="pack it again") from error
