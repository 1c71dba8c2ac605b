"""Routes of the ports of a sandbox."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import WSMsgType, web

from daemon.api import sockets
from daemon.api.route import Area, WebSocket
from daemon.auth.access import CALLER, Caller
from daemon.turns import ports
from daemon.turns.turns import LiveSandbox
from sandbox.errors import Invalid, Unsupported
from sandbox.messages.network import PortLink

AREA = Area()


@dataclass(frozen=True)
class PortLinks:
    """How a browser reaches ports. `path`: of a sandbox and a port, for the caller of the call under way."""

    domain: str
    path: Callable[[str, int, Caller], str]


LINKS: web.AppKey[PortLinks] = web.AppKey("links of ports", PortLinks)
HEARTBEAT = 30.0  # seconds between signs of life
END = "end"  # as text: nothing more comes from this side


@AREA("GET", "/v1/sandboxes/{id}/ports")
async def _list(live: LiveSandbox) -> list[int]:
    """The TCP ports on which something in the sandbox listens."""
    return await ports.listening(live)


@AREA("GET", "/v1/sandboxes/{id}/ports/{port}/link", scope="exec")
async def _link(request: web.Request, live: LiveSandbox, port: str) -> PortLink:
    """Where a browser finds a port of the sandbox, with what lets it in."""
    number = _number(port)
    if (links := request.app.get(LINKS)) is None:
        raise Unsupported(
            "this daemon shows no ports to browsers", hint="start it without --no-e2b, or forward the port"
        )
    name = f"{number}-{live.row.id.replace('-', '')}"
    return PortLink(name=name, domain=links.domain, path=links.path(live.row.id, number, CALLER.get()))


@AREA("GET", "/v1/sandboxes/{id}/ports/{port}/connect", answer=WebSocket, scope="exec")
async def _connect(request: web.Request, live: LiveSandbox, port: str) -> web.StreamResponse:
    """Connect to a port of the sandbox: binary messages are the bytes, the text ``end`` closes one direction."""
    number = _number(port)
    with live.attending():
        inside = await ports.connect(live, number)
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


def _number(port: str) -> int:
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65_535):
        raise Invalid(f"not a port: {port[:16]!r}", hint="a number from 1 to 65535")
    return int(port)
