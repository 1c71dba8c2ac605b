"""The outputs of containers and of commands in them, for clients of Docker's Engine API."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import re
import time
from typing import TYPE_CHECKING

from aiohttp import web

from daemon.catalogue import ProgramRow
from daemon.docker import bodies, streams
from daemon.docker.paths import Call
from sandbox.container.process import exit_code
from sandbox.errors import CommandNotFound, Invalid, PagurusError, Unsupported
from sandbox.messages import LogChunk, ProcessRequest, ProgramKind

if TYPE_CHECKING:
    from daemon.docker.engine import PreparedExec
    from daemon.turns.turns import LiveSandbox

EXEC_LOG = 1 << 20  # bytes of each output that wait for the client
MAX_AHEAD = 1 << 20  # bytes of a log that wait for the client, while its container runs
NOT_STARTED, NO_PROGRAM = 126, 127  # exit codes of a command that cannot be started, and of one that is not there

_DATE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d)?")  # ...Z07:00, as Go writes it


def tail_of(data: bytes, lines: str) -> bytes:
    """The last lines of a log; `lines`: a number, or "all".

    >>> tail_of(b"a\\nb\\nc\\n", "2")
    b'b\\nc\\n'
    """
    if not lines.isdigit():
        return data
    count = int(lines)
    return b"".join(data.splitlines(keepends=True)[-count:]) if count else b""


def need_all(call: Call, started: float, now: float) -> None:
    """Raises Unsupported for a part of a log that is named by time: lines have none. Times in seconds since the epoch.

    Pure. Clients ask for what came since the container's start, which is all there is.
    """
    if call.flag("timestamps"):
        raise Unsupported("the lines of a log have no times", hint="leave out --timestamps")
    since, until = (_moment(call.query.get(name, "")) for name in ("since", "until"))
    if (since and since > started + 1) or (until and until < now - 1):
        raise Unsupported("the lines of a log have no times", hint="name a number of lines: --tail 100")


def _moment(said: str) -> float:
    """Seconds since the epoch, of a number of them or of a date; 0: nothing is said. Raises Invalid.

    >>> _moment("1700000000.5"), _moment("2023-11-14T22:13:20.000000001Z"), _moment("")
    (1700000000.5, 1700000000.0, 0.0)
    """
    with contextlib.suppress(ValueError):
        return float(said or 0)
    match = _DATE.fullmatch(said)
    if match is None:
        raise Invalid(f"{said[:40]!r} is no time", hint="such as 2026-01-31T08:00:00Z")
    return datetime.datetime.fromisoformat(match[1] + (match[2] or "Z")).timestamp()


async def write_logs(live: LiveSandbox, name: str, call: Call) -> web.StreamResponse:
    """What a container has printed, since its last start, and with `follow` what it prints until it ends.

    The logs of one that is removed before they are read are complete, as SDKs expect.
    """
    terminal = live.composed.composition.services[name].tty
    response = web.StreamResponse(headers={"Content-Type": streams.RAW if terminal else streams.FRAMES})
    row = live.composed.row(name)
    need_all(call, 0.0 if row is None else row.started_at, time.time())
    with contextlib.ExitStack() as attached:
        attached.enter_context(live.added.attached(name, ""))
        await response.prepare(call.request)
        if row is not None:
            log = _Log(live, row, {stream for stream in ("stdout", "stderr") if call.flag(stream)})
            reading = asyncio.ensure_future(log.read(call.query.get("tail", "all"), follow=call.flag("follow")))
            reading.add_done_callback(lambda _: attached.close())
            try:
                while (chunk := await log.next()) is not None:
                    await response.write(chunk.data if terminal else streams.frame(chunk.stream, chunk.data))
            except ConnectionError:  # the client has left
                pass
            finally:
                reading.cancel()
    with contextlib.suppress(ConnectionError):
        await response.write_eof()
    return response


class _Log:
    """The outputs of a container on their way to a client, which may be slow: once it has ended, all are read."""

    def __init__(self, live: LiveSandbox, row: ProgramRow, requested: set[str]):
        self._live, self._row, self._requested = live, row, requested
        self._read: asyncio.Queue[LogChunk | None] = asyncio.Queue()
        self._size = 0  # bytes of it

    async def read(self, tail: str, *, follow: bool) -> None:
        programs = self._live.programs
        try:
            logs = await programs.logs(self._row.id, (0, 0))
            ends = (logs.stdout_start + len(logs.stdout), logs.stderr_start + len(logs.stderr))
            out, err = tail_of(logs.stdout, tail), tail_of(logs.stderr, tail)
            await self._put(LogChunk(stream="stdout", start=ends[0] - len(out), data=out))
            await self._put(LogChunk(stream="stderr", start=ends[1] - len(err), data=err))
            if follow:
                await programs.follow(self._row.id, ends, self._put)
        except* PagurusError:  # it went with its state
            pass
        finally:
            self._read.put_nowait(None)

    async def next(self) -> LogChunk | None:
        """None: that was all."""
        chunk = await self._read.get()
        self._size -= 0 if chunk is None else len(chunk.data)
        return chunk

    async def _put(self, chunk: LogChunk) -> None:
        if not chunk.data or chunk.stream not in self._requested:
            return
        while self._size > MAX_AHEAD and self._runs():
            await self._live.composed.changed(0.05)
        self._size += len(chunk.data)
        self._read.put_nowait(chunk)

    def _runs(self) -> bool:
        row = self._live.row.programs.get(self._row.id)
        return row is not None and row.exit_status is None


async def attach(live: LiveSandbox, name: str, call: Call) -> web.StreamResponse:
    """The outputs of a container from now on, or from its next start, and its input; until it has ended."""
    before = live.composed.row(name)
    running = before is not None and before.exit_status is None
    since = (0, 0)
    if running and before is not None and not call.flag("logs"):
        outputs = (await (await live.programs.supervisor(before.id)).state()).outputs
        since = (outputs[0].end, outputs[1].end)
    said = live.composed.composition.services[name]
    connection = streams.TakenConnection(call.request, live.container.inside, terminal=said.tty)
    with live.added.attached(name, "" if before is None or running else before.id):
        row = before if running else await _next(live, name, before)
        if row is not None:
            requested = {stream for stream in ("stdout", "stderr") if call.flag(stream)}
            stdin = call.flag("stdin") and said.stdin_open
            await _pump(live, row, connection, since, requested, stdin=stdin)
    return connection.close()


async def _next(live: LiveSandbox, name: str, before: ProgramRow | None) -> ProgramRow | None:
    """The program of its next start; None: it was removed before."""
    while live.row.composition is not None and name in live.row.composition.services:
        row = live.composed.row(name)
        if row is not None and row.pid and (before is None or row.id != before.id):
            return row
        await live.composed.changed(0.05)
    return None


async def run_exec(live: LiveSandbox, prepared: PreparedExec, call: Call, *, detach: bool) -> web.StreamResponse:
    """Start a command in a container; unless detached, its outputs until they end."""
    body = prepared.body
    request = ProcessRequest(
        command=bodies.words(body.cmd) or [],
        service=prepared.container,
        env=bodies.variables(body.env),
        user=body.user or None,
        cwd=body.working_dir or None,
    )
    argv = bodies.words(body.cmd) or []
    # Before it prints: clients lose what comes together with the answer.
    connection = None if detach else streams.TakenConnection(call.request, live.container.inside, terminal=body.tty)
    try:
        async with live.using():
            row = await live.programs.launch(
                ProgramKind.PROCESS,
                argv,
                request,
                stdin=body.attach_stdin or body.tty,
                terminal=body.tty,
                log_limit=EXEC_LOG,
                first=7 if detach else 0,  # attached: its outputs wait for the client
            )
    except PagurusError as error:
        prepared.exit_code = NO_PROGRAM if isinstance(error, CommandNotFound) else NOT_STARTED
        if connection is None:
            raise
        await connection.write("stderr", f"OCI runtime exec failed: {error.message}\n".encode())
        return connection.close()
    prepared.program, prepared.attached = row.id, not detach
    work = _finish(live, prepared)
    prepared.finishing = live.services.spawn(work, f"docker exec in {live.row.id}", lasting=True)
    if connection is None:
        return web.Response(status=200)
    return await _attended(live, prepared, row, connection)


async def _attended(
    live: LiveSandbox, prepared: PreparedExec, row: ProgramRow, connection: streams.TakenConnection
) -> web.StreamResponse:
    """The outputs of a command in a container until they end, and its input."""
    live.programs.read.add(row.id)
    try:
        await _pump(live, row, connection, (0, 0), {"stdout", "stderr"}, stdin=prepared.body.attach_stdin)
        if prepared.finishing is not None:
            await asyncio.shield(prepared.finishing)  # the client asks for the exit code next
    finally:
        live.programs.read.discard(row.id)
        with contextlib.suppress(PagurusError):
            if prepared.exit_code is None:
                await (await live.programs.supervisor(row.id)).hold(False)
            else:
                await live.programs.release(row.id)
    return connection.close()


async def _finish(live: LiveSandbox, prepared: PreparedExec) -> None:
    with contextlib.suppress(PagurusError):
        await live.programs.wait(prepared.program, 1e9)
        status = live.programs.row(prepared.program).exit_status
        prepared.exit_code = None if status is None else exit_code(status)
    if prepared.exit_code is None:
        prepared.exit_code = 137  # it went with its state


async def _pump(
    live: LiveSandbox,
    row: ProgramRow,
    connection: streams.TakenConnection,
    since: tuple[int, int],
    requested: set[str],
    *,
    stdin: bool,
) -> None:
    """Both ways, until the outputs have ended or the client has left."""

    async def put(chunk: LogChunk) -> None:
        if chunk.stream in requested:
            await connection.write(chunk.stream, chunk.data)

    async def feed() -> None:
        with contextlib.suppress(PagurusError):  # it reads no more, or has ended
            while data := await connection.read():
                await live.programs.write(row.id, data, None)
            await live.programs.close_stdin(row.id)

    feeding = asyncio.ensure_future(feed()) if stdin else None
    try:
        await live.programs.follow(row.id, since, put)
    except* PagurusError:
        pass
    finally:
        if feeding is not None:
            feeding.cancel()
