"""Routes of sessions (shells that keep their state) and of turns of several acts."""

from __future__ import annotations

import contextlib

import msgspec
from aiohttp import WSMsgType, web

from daemon.api import sockets
from daemon.api.commands import streamed
from daemon.api.route import Area, ValueStream, WebSocket
from daemon.turns.turns import LiveSandbox
from sandbox.messages import (
    Chunk,
    ExecResult,
    ProcessInfo,
    SessionExecRequest,
    SessionRequest,
    SessionSignalRequest,
)

AREA = Area()
HEARTBEAT = 10.0  # seconds between signs of life: a client that died ends its turn


@AREA("POST", "/v1/sandboxes/{id}/sessions", status=201, scope="exec", keyed="once")
async def _open(live: LiveSandbox, body: SessionRequest) -> ProcessInfo:
    """Open a shell that keeps its state from command to command."""
    return await live.sessions.open(body)


@AREA("DELETE", "/v1/sandboxes/{id}/sessions/{session}", scope="exec")
async def _close(live: LiveSandbox, session: str) -> None:
    """End the shell with all that it started."""
    await live.sessions.close(session)


@AREA(
    "POST", "/v1/sandboxes/{id}/sessions/{session}/exec", scope="exec", keyed="again"
)  # by its own key it is carried out once
async def _exec(live: LiveSandbox, session: str, body: SessionExecRequest) -> ExecResult:
    """Run a command in the shell and end the turn; the same key again returns the same answer."""
    return await live.sessions.exec(session, body)


@AREA("POST", "/v1/sandboxes/{id}/sessions/{session}/stream", answer=ValueStream(Chunk), scope="exec")
async def _stream(
    request: web.Request, live: LiveSandbox, session: str, body: SessionExecRequest
) -> web.StreamResponse:
    """The same, with the output as it comes."""
    return await streamed(request, live.row.id, lambda outlet: live.sessions.exec(session, body, outlet))


@AREA("POST", "/v1/sandboxes/{id}/sessions/{session}/signal", scope="exec", keyed="once")
async def _signal(live: LiveSandbox, session: str, body: SessionSignalRequest) -> None:
    """Send a signal to what the command that runs in the shell has in front; SIGINT (2) is Ctrl-C."""
    await live.sessions.signal(session, body.signal)


@AREA("GET", "/v1/sandboxes/{id}/turn", answer=WebSocket, scope="exec")
async def _turn(request: web.Request, live: LiveSandbox) -> web.StreamResponse:
    """Make all acts until the connection ends one turn. The text ``end`` ends it and is answered with the result."""
    socket = sockets.socket(request, heartbeat=HEARTBEAT)
    async with live.grouped() as group:
        await socket.prepare(request)
        requested = await socket.receive()  # anything but this text is the end of the client
    if requested.type is WSMsgType.TEXT and group.result is not None:
        encoded = msgspec.msgpack.encode(group.result)
        with contextlib.suppress(ConnectionError):
            await socket.send_bytes(encoded)
    with contextlib.suppress(ConnectionError):
        await socket.close()
    return socket
