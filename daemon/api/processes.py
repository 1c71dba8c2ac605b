"""Routes of background processes and terminals, and of what a sandbox uses."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated

import msgspec
from aiohttp import WSMsgType, web

from daemon.api import sockets
from daemon.api.presence import while_there
from daemon.api.wire import HOST, Route, Stream, WebSocket, body, content, frame, parameters, reply, streaming
from daemon.turns.terminals import Seat
from daemon.turns.turns import LiveSandbox
from sandbox.container import usage
from sandbox.errors import PagurusError
from sandbox.messages import (
    LogChunk,
    Logs,
    Metrics,
    ProcessInfo,
    ProcessRequest,
    ProgramKind,
    SignalRequest,
    TerminalRequest,
)
from sandbox.messages.processes import Cells, Offset

WAIT_MOST = 600.0  # seconds of one long poll
INPUT_MOST = 8 << 20  # bytes of stdin in one call
HEARTBEAT = 30.0  # seconds between signs of life of a terminal's connection

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=WAIT_MOST)]


class EndQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    timeout: _Seconds = 60.0


class LogQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    stdout: Offset = 0
    stderr: Offset = 0


class InputQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    offset: Offset | None = None  # of all stdin that it ever gets; a repeated call then gives nothing twice
    close: bool = False  # and nothing follows


class AttachQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    since: Offset | None = None  # output from this offset on; None: what is kept
    rows: Cells | None = None
    columns: Cells | None = None


class Written(msgspec.Struct, kw_only=True):
    """daemon -> SDK: how many bytes of stdin a process has got so far."""

    written: int


def _live(request: web.Request) -> LiveSandbox:
    return request.app[HOST].live(request.match_info["id"])


def _name(request: web.Request) -> str:
    return request.match_info["process"]


async def _start(request: web.Request) -> web.Response:
    """Start a process in the background."""
    return reply(request, await _live(request).programs.start(await body(request, ProcessRequest)), 201)


async def _list(request: web.Request) -> web.Response:
    """The background processes, sessions and terminals of a sandbox's present state."""
    return reply(request, await _live(request).programs.list())


async def _info(request: web.Request) -> web.Response:
    """One of them."""
    return reply(request, await _live(request).programs.info(_name(request)))


async def _wait(request: web.Request) -> web.Response:
    """One of them, once it has ended or some time has passed."""
    live, asked = _live(request), parameters(request, EndQuery)
    with live.attending():
        return reply(request, await live.programs.wait(_name(request), asked.timeout))


async def _logs(request: web.Request) -> web.Response:
    """What is kept of its outputs."""
    asked = parameters(request, LogQuery)
    return reply(request, await _live(request).programs.logs(_name(request), (asked.stdout, asked.stderr)))


async def _follow(request: web.Request) -> web.StreamResponse:
    """Its outputs as they come. A slow reader misses what the log no longer keeps."""
    live, name, asked = _live(request), _name(request), parameters(request, LogQuery)
    live.programs.row(name)
    response = streaming(request)
    await response.prepare(request)

    async def put(chunk: LogChunk) -> None:
        await response.write(frame(request, chunk))

    async def follow() -> None:
        try:
            await live.programs.follow(name, (asked.stdout, asked.stderr), put)
        except* PagurusError:  # it was killed with its attendant, or the sandbox was restored: nothing follows
            pass
        await put(LogChunk(ended=True))
        await response.write_eof()

    with live.attending():
        await while_there(request, follow())
    return response


async def _write(request: web.Request) -> web.Response:
    """Give it stdin."""
    programs, name, asked = _live(request).programs, _name(request), parameters(request, InputQuery)
    data = await content(request)
    written = await programs.write(name, data, asked.offset) if data or not asked.close else 0
    if asked.close:
        await programs.close_stdin(name)
    return reply(request, Written(written=written))


async def _signal(request: web.Request) -> web.Response:
    """Send a signal to its process group, or to it alone."""
    wanted = await body(request, SignalRequest)
    return reply(request, await _live(request).programs.signal(_name(request), wanted.signal, group=wanted.group))


async def _remove(request: web.Request) -> web.Response:
    """End it with all that it started, and forget its log."""
    live = _live(request)
    async with live.using():
        await live.programs.remove(_name(request))
    return reply(request, {})


async def _open(request: web.Request) -> web.Response:
    """Start a program at a terminal."""
    return reply(request, await _live(request).programs.open_terminal(await body(request, TerminalRequest)), 201)


async def _attach(request: web.Request) -> web.StreamResponse:
    """Sit down at a terminal: raw bytes both ways, control messages as text.

    From the daemon: binary messages are output; ``{"start": OFFSET, "written": N}`` says where it begins and how much
    input arrived so far; ``{"exit": CODE}`` ends it. To the daemon: binary messages are input, ``{"rows": R,
    "columns": C}`` resizes.
    """
    live, name, asked = _live(request), _name(request), parameters(request, AttachQuery)
    live.programs.row(name, ProgramKind.TERMINAL)
    socket = sockets.socket(request, heartbeat=HEARTBEAT)
    seat = Seat(live, name, since=asked.since)
    async with seat.taken():
        if asked.rows and asked.columns:
            await seat.resize(asked.rows, asked.columns)
        await socket.prepare(request)
        output = asyncio.ensure_future(seat.output(socket.send_bytes, socket.send_str))
        typing = asyncio.ensure_future(_typed(socket, seat))
        try:
            await asyncio.wait({output, typing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (output, typing):
                task.cancel()
            await asyncio.gather(output, typing, return_exceptions=True)
            with contextlib.suppress(ConnectionError):
                await socket.close()
    return socket


async def _typed(socket: web.WebSocketResponse, seat: Seat) -> None:
    async for message in socket:
        if message.type is WSMsgType.BINARY:
            await seat.input(message.data)
        elif message.type is WSMsgType.TEXT:
            with contextlib.suppress(msgspec.DecodeError):
                size = msgspec.json.decode(message.data, type=_Size)
                await seat.resize(size.rows, size.columns)


class _Size(msgspec.Struct):
    rows: Cells
    columns: Cells


async def _metrics(request: web.Request) -> web.Response:
    """What a sandbox uses, from its control groups and its file tree."""
    live = _live(request)
    live.need_alive()
    return reply(request, await asyncio.to_thread(usage.read, live.container))


ROUTES: list[Route] = [
    Route(
        "POST",
        "/v1/sandboxes/{id}/processes",
        _start,
        body=ProcessRequest,
        answer=ProcessInfo,
        status=201,
        scope="exec",
        keyed="once",
    ),
    Route("GET", "/v1/sandboxes/{id}/processes", _list, answer=list[ProcessInfo]),
    Route("GET", "/v1/sandboxes/{id}/processes/{process}", _info, answer=ProcessInfo),
    Route("DELETE", "/v1/sandboxes/{id}/processes/{process}", _remove, scope="exec"),
    Route("GET", "/v1/sandboxes/{id}/processes/{process}/wait", _wait, query=EndQuery, answer=ProcessInfo),
    Route("GET", "/v1/sandboxes/{id}/processes/{process}/logs", _logs, query=LogQuery, answer=Logs),
    Route("GET", "/v1/sandboxes/{id}/processes/{process}/follow", _follow, query=LogQuery, answer=Stream(LogChunk)),
    Route(
        "POST",
        "/v1/sandboxes/{id}/processes/{process}/stdin",
        _write,
        body=bytes,
        body_most=INPUT_MOST,
        query=InputQuery,
        answer=Written,
        scope="exec",
        keyed="again",
    ),
    Route(
        "POST",
        "/v1/sandboxes/{id}/processes/{process}/signal",
        _signal,
        body=SignalRequest,
        answer=ProcessInfo,
        scope="exec",
        keyed="once",
    ),
    Route(
        "POST",
        "/v1/sandboxes/{id}/terminals",
        _open,
        body=TerminalRequest,
        answer=ProcessInfo,
        status=201,
        scope="exec",
        keyed="once",
    ),
    Route(
        "GET",
        "/v1/sandboxes/{id}/terminals/{process}/attach",
        _attach,
        query=AttachQuery,
        answer=WebSocket,
        scope="exec",
    ),
    Route("GET", "/v1/sandboxes/{id}/metrics", _metrics, answer=Metrics),
]
