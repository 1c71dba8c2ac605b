"""Routes of the ports of a sandbox."""

from __future__ import annotations

import contextlib

from aiohttp import WSMsgType, web

from daemon.api import sockets
from daemon.api.route import Area, WebSocket
from daemon.turns import ports
from daemon.turns.turns import LiveSandbox
from sandbox.errors import Invalid

AREA = Area()
HEARTBEAT = 30.0  # seconds between signs of life
END = "end"  # as text: nothing more comes from this side


@AREA("GET", "/v1/sandboxes/{id}/ports")
async def _list(live: LiveSandbox) -> list[int]:
    """The TCP ports on which something in the sandbox listens."""
    return await ports.listening(live)


@AREA("GET", "/v1/sandboxes/{id}/ports/{port}/connect", answer=WebSocket, scope="exec")
async def _connect(request: web.Request, live: LiveSandbox, port: str) -> web.StreamResponse:
    """Connect to a port of the sandbox: binary messages are the bytes, the text ``end`` closes one direction."""
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65_535):
        raise Invalid(f"not a port: {port[:16]!r}", hint="a number from 1 to 65535")
    with live.attending():
        inside = await ports.connect(live, int(port))
        with contextlib.ExitStack() as undo:
            undo.enter_context(inside)
            socket = sockets.socket(request, heartbeat=HEARTBEAT)
            await socket.prepare(request)
            undo.pop_all()

        async def receive() -> bytes | None:
            message = await socket.receive()
            if message.type is WSMsgType.BINARY:
                return message.data or await receive()
            return b"" if message.type is WSMsgType.TEXT and message.data == END else None

        async def ended() -> None:
            await socket.send_str(END)

        await ports.carry(inside, receive, socket.send_bytes, ended)
        with contextlib.suppress(ConnectionError):
            await socket.close()
    return socket
