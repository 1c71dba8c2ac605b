"""E2B's service process.Process: start, follow, feed and signal commands and terminals."""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import signal
from collections.abc import Iterator
from typing import Annotated

import msgspec
from aiohttp import web

from daemon.api.presence import while_there
from daemon.catalogue import ProgramRow
from daemon.e2b.commands import AllCommands, Command
from daemon.e2b.route import Service
from daemon.e2b.wire import STREAM, basic_user, first, last, message, messages, quoted, single, unquoted
from daemon.turns.turns import LiveSandbox
from sandbox.container.users import User
from sandbox.errors import CommandNotFound, Invalid, PagurusError, Unauthorized
from sandbox.messages import ProcessRequest, ProgramKind, TerminalRequest
from sandbox.messages.processes import Cells

COMMANDS: web.AppKey[AllCommands] = web.AppKey("e2b commands", AllCommands)
SERVICE = Service("process.Process")
LOG = 1 << 20  # bytes of each output that wait for the client
KEEPALIVE = 50.0  # seconds
_BASH = "/bin/bash"
_SIGNALS = {
    "SIGNAL_SIGTERM": signal.SIGTERM,
    "SIGNAL_SIGKILL": signal.SIGKILL,
    1: signal.SIGTERM,  # numbers of the enumeration, which proto3's JSON allows too
    15: signal.SIGTERM,
    9: signal.SIGKILL,
}
_Tag = Annotated[str, msgspec.Meta(max_length=200)]


class Config(msgspec.Struct, kw_only=True, rename="camel"):
    cmd: str = ""
    args: list[str] = []
    envs: dict[str, str] = {}
    cwd: str | None = None


class Size(msgspec.Struct, kw_only=True):
    cols: Cells = 80
    rows: Cells = 24


class Terminal(msgspec.Struct, kw_only=True):
    size: Size = msgspec.field(default_factory=Size)


class Selector(msgspec.Struct, kw_only=True):
    pid: int | None = None
    tag: str | None = None


class StartRequest(msgspec.Struct, kw_only=True):
    process: Config = msgspec.field(default_factory=Config)
    pty: Terminal | None = None
    tag: _Tag | None = None
    stdin: bool | None = None


class ProcessOnly(msgspec.Struct, kw_only=True):
    process: Selector = msgspec.field(default_factory=Selector)


class Input(msgspec.Struct, kw_only=True):
    stdin: str | None = None
    pty: str | None = None


class SendInputRequest(ProcessOnly, kw_only=True):
    input: Input = msgspec.field(default_factory=Input)


class InputData(msgspec.Struct, kw_only=True):
    input: Input = msgspec.field(default_factory=Input)


class StreamInputRequest(msgspec.Struct, kw_only=True):
    start: ProcessOnly | None = None
    data: InputData | None = None


class SendSignalRequest(ProcessOnly, kw_only=True):
    signal: str | int = 0


class UpdateRequest(ProcessOnly, kw_only=True):
    pty: Terminal | None = None


# --------------------------------------------------------------------------- who and where


async def need_user(live: LiveSandbox, name: str | None) -> User:
    """Whom a call is for. Raises Unauthorized for a user whom the sandbox does not know, as E2B does."""
    try:
        return await live.user(name)
    except Invalid as error:
        who = f"{name!r}" if name is not None else f"{live.row.user!r}"
        raise Unauthorized(f"invalid username: {who}: {error.message}") from error


def located(path: str, home: str, workdir: str) -> str:
    """`path`, absolute: ``~`` is the user's home, relative ones lie below it, none is where commands begin.

    >>> located("a/b", "/home/user", "/"), located("~/x", "/root", "/"), located("", "/root", "/app")
    ('/home/user/a/b', '/root/x', '/app')
    """
    if not path:
        return workdir
    if path == "~" or path.startswith("~/"):
        path = home + path[1:]
    return posixpath.normpath(posixpath.join(home, path))


# --------------------------------------------------------------------------- start, and follow


@SERVICE.stream("Start")
async def _start(request: web.Request, alive: LiveSandbox) -> web.StreamResponse:
    body = await first(request, StartRequest)
    deadline = _deadline(request)
    row = await _launched(alive, body, basic_user(request))
    command = request.app[COMMANDS].of(alive).begin(row, deadline, owes_turn=True)
    return await _follow(request, command, from_start=True)


@SERVICE.stream("Connect")
async def _connect(request: web.Request, alive: LiveSandbox) -> web.StreamResponse:
    body = await first(request, ProcessOnly)
    command = request.app[COMMANDS].of(alive).watched(body.process.pid, body.process.tag)
    return await _follow(request, command, from_start=False)


def _deadline(request: web.Request) -> float | None:
    """Seconds that the process has."""
    text = request.headers.get("Connect-Timeout-Ms", "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise Invalid(f"not a number of milliseconds: {text[:16]!r}")
    return int(text) / 1000 or None


async def _launched(live: LiveSandbox, body: StartRequest, name: str | None) -> ProgramRow:
    config = body.process
    if not config.cmd:
        raise Invalid("a command is missing")
    async with live.using():
        user = asyncio.ensure_future(need_user(live, name))  # looked up while the row of the command is written
        user.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may not be awaited
        who = (name or live.row.user or "root").partition(":")[0]
        env = {"USER": who, "LOGNAME": who, **live.row.env, **config.envs}
        try:
            row = await _program(live, [config.cmd, *config.args], body, env, user)
        except CommandNotFound:
            if config.cmd != _BASH:
                raise
            row = await _program(live, ["/bin/sh", *config.args], body, env, user)
        except Invalid as error:
            if error.message.startswith("working directory "):
                raise Invalid(f"cwd '{_directory(live, config, await user)}' does not exist") from error
            raise
        finally:
            user.cancel()
    return row


def _directory(live: LiveSandbox, config: Config, user: User) -> str:
    """Where a command starts: in its user's home where the sandbox has no working directory of its own."""
    return located(config.cwd or "", user.home, user.home if live.row.workdir == "/" else live.row.workdir)


async def _program(
    live: LiveSandbox, argv: list[str], body: StartRequest, env: dict[str, str], user: asyncio.Future[User]
) -> ProgramRow:
    def cwd(user: User) -> str:
        return _directory(live, body.process, user)

    tag = body.tag or ""
    if body.pty is None:
        target = ProcessRequest(command=argv, env=env)
        return await live.programs.launch(
            ProgramKind.PROCESS,
            argv,
            target,
            tag=tag,
            user=user,
            cwd=cwd,
            stdin=body.stdin is not False,
            log_limit=LOG,
            first=0,
        )
    size, locale = body.pty.size, {"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
    return await live.programs.launch(
        ProgramKind.TERMINAL,
        argv,
        TerminalRequest(command=argv, env={**locale, **env}),
        tag=tag,
        user=user,
        cwd=cwd,
        rows=size.rows,
        columns=size.cols,
        log_limit=LOG,
        first=0,
    )


async def _follow(request: web.Request, command: Command, *, from_start: bool) -> web.StreamResponse:
    """The events of a command, until it has ended or the client leaves."""
    response = web.StreamResponse(headers={"Content-Type": STREAM})
    reading = contextlib.ExitStack()

    async def put(name: str, data: bytes) -> None:
        await response.write(message({"event": {"data": {name: quoted(data)}}}))

    async def follow() -> None:
        await response.prepare(request)
        await response.write(message({"event": {"start": {"pid": command.row.pid}}}))
        with _keepalives(response):
            try:
                await command.read(put, reading, from_start=from_start)
            except PagurusError as error:
                end = last(error)
            else:
                end = message({"event": {"end": command.end()}}) + last()
        await response.write_eof(end)

    with command.live.attending(), reading:
        reading.enter_context(command.reading())  # before anything is awaited: a command may end at once
        try:
            await while_there(request, follow())
        finally:
            reading.close()
            if not command.over.is_set():
                await command.left()
    return response


@contextlib.contextmanager
def _keepalives(response: web.StreamResponse) -> Iterator[None]:
    """While a command is silent, its client hears that it is still there."""
    writing: list[asyncio.Task[None]] = []
    timer = asyncio.get_running_loop().call_later(
        KEEPALIVE, lambda: writing.append(asyncio.ensure_future(_keep_alive(response)))
    )
    try:
        yield
    finally:
        timer.cancel()
        for task in writing:
            task.cancel()


async def _keep_alive(response: web.StreamResponse) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            await response.write(message({"event": {"keepalive": {}}}))
            await asyncio.sleep(KEEPALIVE)


# --------------------------------------------------------------------------- the others


@SERVICE.call("List")
async def _list(request: web.Request, alive: LiveSandbox) -> object:
    return {"processes": [_listed(row) for row in request.app[COMMANDS].of(alive).rows()]}


def _listed(row: ProgramRow) -> dict[str, object]:
    argv = row.argv or ["/bin/sh", "-c", row.command]
    reported: dict[str, object] = {"pid": row.pid, "config": {"cmd": argv[0], "args": argv[1:]}}
    return {**reported, "tag": row.tag} if row.tag else reported


def _chosen(request: web.Request, live: LiveSandbox, selector: Selector) -> ProgramRow:
    return request.app[COMMANDS].of(live).find(selector.pid, selector.tag)


@SERVICE.call("SendInput")
async def _send_input(request: web.Request, alive: LiveSandbox) -> object:
    body = await single(request, SendInputRequest)
    row = _chosen(request, alive, body.process)
    await _feed(alive, row, body.input)
    return {}


async def _feed(live: LiveSandbox, row: ProgramRow, given: Input) -> None:
    data = unquoted((given.stdin if given.stdin is not None else given.pty) or "")
    if data:
        await live.programs.write(row.id, data, None)


@SERVICE.call("StreamInput")
async def _stream_input(request: web.Request, alive: LiveSandbox) -> web.StreamResponse:
    row: ProgramRow | None = None
    async for item in messages(request, StreamInputRequest):
        if item.start is not None:
            row = _chosen(request, alive, item.start.process)
        elif item.data is not None:
            if row is None:
                raise Invalid("the stream must begin with the process that it is for")
            await _feed(alive, row, item.data.input)
    return web.Response(body=message({}) + last(), content_type=STREAM)


@SERVICE.call("CloseStdin")
async def _close_stdin(request: web.Request, alive: LiveSandbox) -> object:
    body = await single(request, ProcessOnly)
    await alive.programs.close_stdin(_chosen(request, alive, body.process).id)
    return {}


@SERVICE.call("SendSignal")
async def _send_signal(request: web.Request, alive: LiveSandbox) -> object:
    body = await single(request, SendSignalRequest)
    if (number := _SIGNALS.get(body.signal)) is None:
        raise Invalid(f"no such signal: {str(body.signal)[:40]}", hint="SIGNAL_SIGTERM or SIGNAL_SIGKILL")
    await alive.programs.signal(_chosen(request, alive, body.process).id, number, group=True)
    return {}


@SERVICE.call("Update")
async def _update(request: web.Request, alive: LiveSandbox) -> object:
    body = await single(request, UpdateRequest)
    row = _chosen(request, alive, body.process)
    if body.pty is not None and row.kind is ProgramKind.TERMINAL:
        await (await alive.programs.supervisor(row.id)).resize(body.pty.size.rows, body.pty.size.cols)
    return {}
