"""Routes of background processes and terminals, and of what a sandbox uses."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated

import msgspec
from aiohttp import WSMsgType, web

from daemon.api import sockets
from daemon.api.presence import while_there
from daemon.api.route import Area, ValueStream, WebSocket
from daemon.api.wire import content, frame, streaming
from daemon.turns.terminals import TerminalVisitor
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

AREA = Area()
MAX_WAIT = 600.0  # seconds of one long poll
MAX_INPUT = 8 << 20  # bytes of stdin in one call
HEARTBEAT = 30.0  # seconds between signs of life of a terminal's connection

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT)]


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


class StdinWritten(msgspec.Struct, kw_only=True):
    """daemon -> SDK: how many bytes of stdin a process has got so far."""

    written: int


@AREA("POST", "/v1/sandboxes/{id}/processes", status=201, scope="exec", keyed="once")
async def _start(live: LiveSandbox, body: ProcessRequest) -> ProcessInfo:
    """Start a process in the background."""
    return await live.programs.start(body)


@AREA("GET", "/v1/sandboxes/{id}/processes")
async def _list(live: LiveSandbox) -> list[ProcessInfo]:
    """The background processes, sessions and terminals of a sandbox's present state."""
    return await live.programs.list()


@AREA("GET", "/v1/sandboxes/{id}/processes/{process}")
async def _info(live: LiveSandbox, process: str) -> ProcessInfo:
    """One of them."""
    return await live.programs.info(process)


@AREA("GET", "/v1/sandboxes/{id}/processes/{process}/wait")
async def _wait(live: LiveSandbox, process: str, query: EndQuery) -> ProcessInfo:
    """One of them, once it has ended or some time has passed."""
    with live.attending():
        return await live.programs.wait(process, query.timeout)


@AREA("GET", "/v1/sandboxes/{id}/processes/{process}/logs")
async def _logs(live: LiveSandbox, process: str, query: LogQuery) -> Logs:
    """What is kept of its outputs."""
    return await live.programs.logs(process, (query.stdout, query.stderr))


@AREA("GET", "/v1/sandboxes/{id}/processes/{process}/follow", answer=ValueStream(LogChunk))
async def _follow(request: web.Request, live: LiveSandbox, process: str, query: LogQuery) -> web.StreamResponse:
    """Its outputs as they come. A slow reader misses what the log no longer keeps."""
    live.programs.row(process)
    response = streaming(request)
    await response.prepare(request)

    async def put(chunk: LogChunk) -> None:
        await response.write(frame(request, chunk))

    async def follow() -> None:
        try:
            await live.programs.follow(process, (query.stdout, query.stderr), put)
        except* PagurusError:  # it was killed with its attendant, or the sandbox was restored: nothing follows
            pass
        await put(LogChunk(ended=True))
        await response.write_eof()

    with live.attending():
        await while_there(request, follow())
    return response


@AREA(
    "POST",
    "/v1/sandboxes/{id}/processes/{process}/stdin",
    body=bytes,
    max_body=MAX_INPUT,
    scope="exec",
    keyed="again",
)
async def _write(request: web.Request, live: LiveSandbox, process: str, query: InputQuery) -> StdinWritten:
    """Give it stdin."""
    data = await content(request)
    written = await live.programs.write(process, data, query.offset) if data or not query.close else 0
    if query.close:
        await live.programs.close_stdin(process)
    return StdinWritten(written=written)


@AREA("POST", "/v1/sandboxes/{id}/processes/{process}/signal", scope="exec", keyed="once")
async def _signal(live: LiveSandbox, process: str, body: SignalRequest) -> ProcessInfo:
    """Send a signal to its process group, or to it alone."""
    return await live.programs.signal(process, body.signal, group=body.group)


@AREA("DELETE", "/v1/sandboxes/{id}/processes/{process}", scope="exec")
async def _remove(live: LiveSandbox, process: str) -> None:
    """End it with all that it started, and forget its log."""
    async with live.using():
        await live.programs.remove(process)


@AREA("POST", "/v1/sandboxes/{id}/terminals", status=201, scope="exec", keyed="once")
async def _open(live: LiveSandbox, body: TerminalRequest) -> ProcessInfo:
    """Start a program at a terminal."""
    return await live.programs.open_terminal(body)


@AREA("GET", "/v1/sandboxes/{id}/terminals/{process}/attach", answer=WebSocket, scope="exec")
async def _attach(request: web.Request, live: LiveSandbox, process: str, query: AttachQuery) -> web.StreamResponse:
    """Sit down at a terminal: raw bytes both ways, control messages as text.

    From the daemon: binary messages are output; ``{"start": OFFSET, "written": N}`` says where it begins and how much
    input arrived so far; ``{"exit": CODE}`` ends it. To the daemon: binary messages are input, ``{"rows": R,
    "columns": C}`` resizes.
    """
    live.programs.row(process, ProgramKind.TERMINAL)
    socket = sockets.socket(request, heartbeat=HEARTBEAT)
    slot = TerminalVisitor(live, process, since=query.since)
    async with slot.taken():
        if query.rows and query.columns:
            await slot.resize(query.rows, query.columns)
        await socket.prepare(request)
        output = asyncio.ensure_future(slot.output(socket.send_bytes, socket.send_str))
        typing = asyncio.ensure_future(_typed(socket, slot))
        try:
            await asyncio.wait({output, typing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (output, typing):
                task.cancel()
            await asyncio.gather(output, typing, return_exceptions=True)
            with contextlib.suppress(ConnectionError):
                await socket.close()
    return socket


async def _typed(socket: web.WebSocketResponse, slot: TerminalVisitor) -> None:
    async for message in socket:
        if message.type is WSMsgType.BINARY:
            await slot.input(message.data)
        elif message.type is WSMsgType.TEXT:
            with contextlib.suppress(msgspec.DecodeError):
                size = msgspec.json.decode(message.data, type=_Size)
                await slot.resize(size.rows, size.columns)


class _Size(msgspec.Struct):
    rows: Cells
    columns: Cells


@AREA("GET", "/v1/sandboxes/{id}/metrics")
async def _metrics(alive: LiveSandbox) -> Metrics:
    """What a sandbox uses, from its control groups and its file tree."""
    return await asyncio.to_thread(usage.read, alive.container)
