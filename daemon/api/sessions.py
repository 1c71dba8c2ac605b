"""Routes of sessions (shells that keep their state) and of turns of several acts."""

from __future__ import annotations

import contextlib

import msgspec
from aiohttp import WSMsgType, web

from daemon.api import sockets
from daemon.api.commands import streamed
from daemon.api.wire import HOST, Route, Stream, WebSocket, body, reply
from daemon.turns.turns import LiveSandbox
from sandbox.messages import (
    Chunk,
    ExecResult,
    ProcessInfo,
    SessionExecRequest,
    SessionRequest,
    SessionSignalRequest,
)

HEARTBEAT = 10.0  # seconds between signs of life: a client that died ends its turn


def _live(request: web.Request) -> LiveSandbox:
    return request.app[HOST].live(request.match_info["id"])


async def _open(request: web.Request) -> web.Response:
    """Open a shell that keeps its state from command to command."""
    return reply(request, await _live(request).sessions.open(await body(request, SessionRequest)), 201)


async def _close(request: web.Request) -> web.Response:
    """End the shell with all that it started."""
    await _live(request).sessions.close(request.match_info["session"])
    return reply(request, {})


async def _exec(request: web.Request) -> web.Response:
    """Run a command in the shell and end the turn; the same key again tells the same answer."""
    wanted = await body(request, SessionExecRequest)
    return reply(request, await _live(request).sessions.exec(request.match_info["session"], wanted))


async def _stream(request: web.Request) -> web.StreamResponse:
    """The same, with the output as it comes."""
    wanted, live, name = await body(request, SessionExecRequest), _live(request), request.match_info["session"]
    return await streamed(request, live.row.id, lambda outlet: live.sessions.exec(name, wanted, outlet))


async def _signal(request: web.Request) -> web.Response:
    """Send a signal to what the command that runs in the shell has in front; SIGINT (2) is Ctrl-C."""
    wanted = await body(request, SessionSignalRequest)
    await _live(request).sessions.signal(request.match_info["session"], wanted.signal)
    return reply(request, {})


async def _turn(request: web.Request) -> web.StreamResponse:
    """Make all acts until the connection ends one turn. The text ``end`` ends it and is answered with the result."""
    live = _live(request)
    socket = sockets.socket(request, heartbeat=HEARTBEAT)
    async with live.grouped() as group:
        await socket.prepare(request)
        asked = await socket.receive()  # anything but this text is the end of the client
    if asked.type is WSMsgType.TEXT and group.result is not None:
        encoded = msgspec.msgpack.encode(group.result)
        with contextlib.suppress(ConnectionError):
            await socket.send_bytes(encoded)
    with contextlib.suppress(ConnectionError):
        await socket.close()
    return socket


ROUTES: list[Route] = [
    Route(
        "POST",
        "/v1/sandboxes/{id}/sessions",
        _open,
        body=SessionRequest,
        answer=ProcessInfo,
        status=201,
        scope="exec",
        keyed="once",
    ),
    Route("DELETE", "/v1/sandboxes/{id}/sessions/{session}", _close, scope="exec"),
    Route(
        "POST",
        "/v1/sandboxes/{id}/sessions/{session}/exec",
        _exec,
        body=SessionExecRequest,
        answer=ExecResult,
        scope="exec",
        keyed="again",  # by its own key it is carried out once
    ),
    Route(
        "POST",
        "/v1/sandboxes/{id}/sessions/{session}/stream",
        _stream,
        body=SessionExecRequest,
        answer=Stream(Chunk),
        scope="exec",
    ),
    Route(
        "POST",
        "/v1/sandboxes/{id}/sessions/{session}/signal",
        _signal,
        body=SessionSignalRequest,
        scope="exec",
        keyed="once",
    ),
    Route("GET", "/v1/sandboxes/{id}/turn", _turn, answer=WebSocket, scope="exec"),
]
