"""Routes of the ports of a sandbox."""

from __future__ import annotations

import contextlib

from aiohttp import WSMsgType, web

from daemon.api import sockets
from daemon.api.wire import HOST, Route, WebSocket, reply
from daemon.turns import ports
from sandbox.errors import Invalid

HEARTBEAT = 30.0  # seconds between signs of life
END = "end"  # as text: nothing more comes from this side


async def _list(request: web.Request) -> web.Response:
    """The TCP ports on which something in the sandbox listens."""
    return reply(request, await ports.listening(request.app[HOST].live(request.match_info["id"])))


async def _connect(request: web.Request) -> web.StreamResponse:
    """Connect to a port of the sandbox: binary messages are the bytes, the text ``end`` closes one direction."""
    live, text = request.app[HOST].live(request.match_info["id"]), request.match_info["port"]
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65_535):
        raise Invalid(f"not a port: {text[:16]!r}")
    with live.attending():
        inside = await ports.connect(live, int(text))
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


ROUTES: list[Route] = [
    Route("GET", "/v1/sandboxes/{id}/ports", _list, answer=list[int]),
    Route("GET", "/v1/sandboxes/{id}/ports/{port}/connect", _connect, answer=WebSocket, scope="exec"),
]
