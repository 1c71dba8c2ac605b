"""Several acts that are one turn, as the SDK offers them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import msgspec

from sandbox.errors import Protocol
from sandbox.messages import ExecResult
from sandbox.sdk.transport import Facet, Transport

if TYPE_CHECKING:
    import aiohttp

TIMEOUT = 600.0  # seconds for the turn before to be captured


class Turn(Facet):
    """All acts on the sandbox within it are one turn, judged and captured at the end::

        async with sb.turn() as turn:
            await sb.exec("make")
            await sb.files.write("/etc/motd", "built")
        print(turn.result.verdict, turn.result.checkpoint)

    A client that dies ends it. There is one at a time; a second one is refused (Conflict).
    """

    def __init__(self, client: Transport, path: str) -> None:
        self._client = client
        self._path = f"{path}/turn"
        self._stack = contextlib.AsyncExitStack()
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self.result: ExecResult | None = None  # turn, verdict, reason, checkpoint; once it has ended

    async def __aenter__(self) -> Turn:
        self._socket = await self._stack.enter_async_context(self._client.socket(self._path))
        return self

    async def __aexit__(self, *error: object) -> None:
        from aiohttp import WSMsgType

        assert self._socket is not None
        async with self._stack:
            await self._socket.send_str("end")
            async with asyncio.timeout(TIMEOUT):
                said = await self._socket.receive()
            if said.type is not WSMsgType.BINARY:
                if error[0] is None:
                    raise Protocol("the turn was cut short", hint="its acts belong to the next turn")
                return
            self.result = msgspec.msgpack.decode(said.data, type=ExecResult)
