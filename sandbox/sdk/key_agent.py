"""An agent of keys for ``RUN --mount=type=ssh``: programs in the sandbox ask the one of who builds.

Guarantee: keys stay with the agent; the sandbox gets answers of at most MAX_MESSAGE bytes to questions of its own, for
as long as the command of that RUN lasts.

::

    program ─socket─▶ relay ─frames─▶ this module ─socket─▶ agent
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from pathlib import Path

from sandbox.errors import Invalid
from sandbox.sdk.handle import Sandbox
from sandbox.sdk.processes import Process

RELAY = "/.pagurus/relay"
MAX_MESSAGE = 256 << 10  # bytes, as in agents
START_TIMEOUT = 60.0  # seconds
_READY = 0xFFFFFFFF
_FRAME = struct.Struct("<II")  # connection, size


class _Agent:
    """The connections of one relay to an agent."""

    def __init__(self, agent: Path) -> None:
        self._agent = agent
        self._open: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}

    async def answer(self, connection: int, question: bytes) -> bytes:
        """Its answer, with its length in front; nothing where the connection ended."""
        try:
            if connection not in self._open:
                self._open[connection] = await asyncio.open_unix_connection(self._agent)
            reader, writer = self._open[connection]
            writer.write(question)
            await writer.drain()
            length = await reader.readexactly(4)
            size = int.from_bytes(length, "big")
            return length + await reader.readexactly(size) if size <= MAX_MESSAGE else b""
        except (OSError, EOFError):
            return b""

    def end(self, connection: int) -> None:
        if connection in self._open:
            self._open.pop(connection)[1].close()

    def close(self) -> None:
        for connection in [*self._open]:
            self.end(connection)


@contextlib.asynccontextmanager
async def forwarded(sandbox: Sandbox, path: str, agent: Path, mode: int, owner: str) -> AsyncIterator[None]:
    """During it `path` is a socket of the sandbox behind which this agent answers. Raises Invalid."""
    try:
        await _reach(agent)
    except OSError as error:
        raise Invalid(f"no agent of keys answers at {agent}: {error.strerror}", hint="start ssh-agent") from error
    command = [RELAY, path, f"{mode:o}", *owner.split(":")]
    process = await sandbox.processes.start(command, user=0, cwd="/", stdin="pipe", ends_turn=False)
    ready = asyncio.Event()
    pump = asyncio.ensure_future(_pump(process, agent, ready))
    try:
        starting = asyncio.ensure_future(ready.wait())
        await asyncio.wait({starting, pump}, timeout=START_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
        starting.cancel()
        if not ready.is_set():
            raise Invalid(f"no socket can be made at {path}", hint="another target of at most 107 characters")
        yield
    finally:
        pump.cancel()
        await asyncio.gather(pump, return_exceptions=True)
        await process.remove()


async def _reach(agent: Path) -> None:
    _, writer = await asyncio.open_unix_connection(agent)
    writer.close()


async def _pump(process: Process, agent: Path, ready: asyncio.Event) -> None:
    """Answer the questions of the relay until it ends."""
    pending, there = bytearray(), _Agent(agent)
    with contextlib.closing(there):
        async for chunk in process.stream():
            if chunk.stream != "stdout":
                continue
            pending += chunk.data
            while len(pending) >= _FRAME.size:
                connection, size = _FRAME.unpack_from(pending)
                if len(pending) < _FRAME.size + size:
                    break
                question = bytes(pending[_FRAME.size : _FRAME.size + size])
                del pending[: _FRAME.size + size]
                if connection == _READY:
                    ready.set()
                elif not size:
                    there.end(connection)
                else:
                    answer = await there.answer(connection, question)
                    await process.write(_FRAME.pack(connection, len(answer)) + answer)
