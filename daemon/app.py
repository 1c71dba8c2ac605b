"""The daemon's HTTP API and its process: routes, wire formats, start and stop.

Owns: the translation between HTTP and :class:`daemon.host.Host`, the socket, logs, signals. Does not
own: any act on a sandbox. Guarantee: every refusal is a body of the closed error table; every body is
bounded; a stop leaves the sandboxes running unless asked otherwise.

The wire is MessagePack where the caller says so (``application/msgpack``) and JSON otherwise. Raw
file content travels as ``application/octet-stream``; a stream of output as one Chunk after another,
each with its length in four bytes (MessagePack) or on a line of its own (JSON).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from daemon.host import Host
from sandbox import files, paths
from sandbox.errors import Conflict, Invalid, PagurusError
from sandbox.messages import (
    CheckpointRequest,
    Chunk,
    CreateRequest,
    ExecRequest,
    ExecResult,
    ForkRequest,
    RestoreRequest,
)
from sandbox.shim import short_slice

log = logging.getLogger("pagurus.app")

BODY_MOST = 256 << 20  # bytes of one request
WAIT_MOST = 600.0  # seconds of one long poll
STREAM_BACKLOG = 32 << 20  # bytes between a command and a reader that is slower
WORKERS = 16  # threads for what blocks
PRECEDENCE = -10  # nice value of the event loop
MSGPACK = "application/msgpack"

HOST: web.AppKey[Host] = web.AppKey("host", Host)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application(host: Host) -> web.Application:
    """The API of `host`."""
    app = web.Application(client_max_size=BODY_MOST, middlewares=[_errors])
    app[HOST] = host
    app.add_routes(
        [
            web.get("/v1/health", _health),
            web.get("/v1/statistics", _statistics),
            web.get("/v1/images", _images),
            web.get("/v1/sandboxes", _list),
            web.post("/v1/sandboxes", _create),
            web.get("/v1/sandboxes/{id}", _info),
            web.delete("/v1/sandboxes/{id}", _remove),
            web.post("/v1/sandboxes/{id}/exec", _exec),
            web.post("/v1/sandboxes/{id}/stream", _stream),
            web.post("/v1/sandboxes/{id}/kill", _kill),
            web.get("/v1/sandboxes/{id}/files", _read),
            web.put("/v1/sandboxes/{id}/files", _write),
            web.get("/v1/sandboxes/{id}/entries", _entries),
            web.get("/v1/sandboxes/{id}/turns", _turns),
            web.get("/v1/sandboxes/{id}/checkpoints", _tree),
            web.post("/v1/sandboxes/{id}/checkpoints", _checkpoint),
            web.post("/v1/sandboxes/{id}/restore", _restore),
            web.post("/v1/sandboxes/{id}/fork", _fork_sandbox),
            web.get("/v1/sandboxes/{id}/diff", _diff),
            web.get("/v1/checkpoints/{id}", _wait),
            web.post("/v1/checkpoints/{id}/fork", _fork),
        ]
    )
    return app


# --------------------------------------------------------------------------- wire


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except PagurusError as error:
        if error.status >= 500:
            log.warning("%s %s: %s", request.method, request.path, error, extra={"sandbox": error.sandbox})
        return _reply(request, error.body(), error.status)
    except OSError as error:  # the host refused something that nobody foresaw: the caller hears it, the log has it all
        log.exception("%s %s", request.method, request.path)
        remedy = "see the daemon's log and `pagurus doctor`"
        return _reply(request, PagurusError(f"the host refused: {error}", remedy=remedy).body(), 500)
    except web.HTTPRequestEntityTooLarge:
        return _reply(request, Invalid(f"the body is larger than {BODY_MOST} bytes").body(), 413)
    except web.HTTPNotFound:
        return _reply(request, Invalid(f"no such route: {request.path}").body(), 404)
    except web.HTTPMethodNotAllowed as error:
        return _reply(request, Invalid(f"{request.method} is not possible on {request.path}").body(), error.status)


def _packed(request: web.Request) -> bool:
    return request.headers.get("Accept", "") == MSGPACK


def _reply(request: web.Request, value: Any, status: int = 200) -> web.Response:
    if _packed(request):
        return web.Response(body=msgspec.msgpack.encode(value), status=status, content_type=MSGPACK)
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


async def _body(request: web.Request, kind: type[Any]) -> Any:
    raw = await request.read()
    try:
        if request.content_type == MSGPACK:
            return msgspec.msgpack.decode(raw, type=kind)
        return msgspec.json.decode(raw or b"{}", type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise Invalid(f"bad {kind.__name__}: {error}") from None


def _query(request: web.Request, name: str) -> str:
    try:
        return request.query[name]
    except KeyError:
        raise Invalid(f"the query parameter {name} is missing") from None


def _number(request: web.Request, name: str, default: float, most: float) -> float:
    text = request.query.get(name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        raise Invalid(f"{name} must be a number, not {text!r}") from None
    if not 0 <= value <= most:
        raise Invalid(f"{name} must lie between 0 and {most:g}")
    return value


# --------------------------------------------------------------------------- routes


async def _health(request: web.Request) -> web.Response:
    return _reply(request, {"status": "ok", "pid": os.getpid()})


async def _statistics(request: web.Request) -> web.Response:
    return _reply(request, request.app[HOST].statistics())


async def _images(request: web.Request) -> web.Response:
    return _reply(request, await asyncio.to_thread(request.app[HOST].images.list))


async def _list(request: web.Request) -> web.Response:
    return _reply(request, request.app[HOST].sandboxes())


async def _create(request: web.Request) -> web.Response:
    return _reply(request, await request.app[HOST].create(await _body(request, CreateRequest)), 201)


async def _info(request: web.Request) -> web.Response:
    return _reply(request, request.app[HOST].loop(request.match_info["id"]).row.info())


async def _remove(request: web.Request) -> web.Response:
    await request.app[HOST].remove(request.match_info["id"])
    return _reply(request, {})


async def _exec(request: web.Request) -> web.Response:
    loop = request.app[HOST].loop(request.match_info["id"])
    return _reply(request, await loop.exec(await _body(request, ExecRequest)))


async def _stream(request: web.Request) -> web.StreamResponse:
    """Output as it comes. The command does not run ahead of a slow reader by more than the backlog."""
    loop = request.app[HOST].loop(request.match_info["id"])
    command = await _body(request, ExecRequest)
    backlog = _Backlog()

    async def run() -> ExecResult:
        result = await loop.exec(command, backlog.put)
        backlog.end(result)
        return result

    running = asyncio.ensure_future(run())
    first = asyncio.ensure_future(backlog.get())
    await asyncio.wait({running, first}, return_when=asyncio.FIRST_COMPLETED)
    if not first.done():
        await asyncio.wait({first}, timeout=0)
    if not first.done():  # refused before there was any output
        first.cancel()
        await running
    response = web.StreamResponse(headers={"Content-Type": MSGPACK if _packed(request) else "application/x-ndjson"})
    await response.prepare(request)
    try:
        chunk = await first
        while chunk.stream != "result":
            await response.write(_frame(request, chunk))
            chunk = await backlog.get()
        await response.write(_frame(request, chunk))
        await response.write_eof()
    except ConnectionError:  # the reader went away; the command still ends its turn
        log.info("the reader of a stream went away", extra={"sandbox": loop.row.id})
        backlog.close()
        await running
    return response


class _Backlog:
    """Output between a command and a reader that may be slower. Beyond STREAM_BACKLOG it is dropped and counted."""

    def __init__(self) -> None:
        self._chunks: asyncio.Queue[Chunk] = asyncio.Queue()
        self._size = 0
        self._dropped = {"stdout": 0, "stderr": 0}
        self._closed = False

    def put(self, stream: Any, data: bytes) -> None:
        if self._closed or self._size + len(data) > STREAM_BACKLOG:
            self._dropped[stream] += len(data)
            return
        self._size += len(data)
        self._chunks.put_nowait(Chunk(stream=stream, data=data))

    def end(self, result: ExecResult) -> None:
        result.stdout = result.stderr = b""
        result.stdout_dropped, result.stderr_dropped = self._dropped["stdout"], self._dropped["stderr"]
        self._chunks.put_nowait(Chunk(stream="result", result=result))

    async def get(self) -> Chunk:
        chunk = await self._chunks.get()
        self._size -= len(chunk.data)
        return chunk

    def close(self) -> None:
        self._closed = True


def _frame(request: web.Request, chunk: Chunk) -> bytes:
    if _packed(request):
        data = msgspec.msgpack.encode(chunk)
        return len(data).to_bytes(4, "big") + data
    return msgspec.json.encode(chunk) + b"\n"


async def _kill(request: web.Request) -> web.Response:
    await request.app[HOST].kill(request.match_info["id"])
    return _reply(request, {})


async def _read(request: web.Request) -> web.Response:
    loop = request.app[HOST].loop(request.match_info["id"])
    loop.need_alive()
    data = await asyncio.to_thread(files.read, loop.container.init_pid, _query(request, "path"))
    return web.Response(body=data, content_type="application/octet-stream")


async def _write(request: web.Request) -> web.Response:
    loop = request.app[HOST].loop(request.match_info["id"])
    path, mode = _query(request, "path"), request.query.get("mode", "644")
    if not mode or set(mode) - set("01234567") or int(mode, 8) > 0o7777:
        raise Invalid(f"mode must be octal permission bits, not {mode!r}")
    append = request.query.get("append") == "1"
    await loop.write(path, await request.read(), mode=int(mode, 8), append=append)
    return _reply(request, {})


async def _entries(request: web.Request) -> web.Response:
    loop = request.app[HOST].loop(request.match_info["id"])
    loop.need_alive()
    return _reply(request, await asyncio.to_thread(files.entries, loop.container.init_pid, _query(request, "path")))


async def _turns(request: web.Request) -> web.Response:
    host = request.app[HOST]
    return _reply(request, await host.services.catalogue.turns(host.loop(request.match_info["id"]).row.id))


async def _tree(request: web.Request) -> web.Response:
    return _reply(request, request.app[HOST].tree(request.match_info["id"]))


async def _checkpoint(request: web.Request) -> web.Response:
    host = request.app[HOST]
    wanted = await _body(request, CheckpointRequest)
    flight = await host.loop(request.match_info["id"]).checkpoint(wanted.label)
    await flight.settled(durable=wanted.wait == "durable")
    if flight.error is not None:
        raise flight.error
    return _reply(request, flight.row.info(), 201)


async def _restore(request: web.Request) -> web.Response:
    wanted = await _body(request, RestoreRequest)
    return _reply(request, await request.app[HOST].restore(request.match_info["id"], wanted))


async def _fork_sandbox(request: web.Request) -> web.Response:
    wanted = await _body(request, ForkRequest)
    return _reply(request, await request.app[HOST].fork_sandbox(request.match_info["id"], wanted.count), 201)


async def _fork(request: web.Request) -> web.Response:
    wanted = await _body(request, ForkRequest)
    return _reply(request, await request.app[HOST].fork(request.match_info["id"], wanted.count), 201)


async def _diff(request: web.Request) -> web.Response:
    return _reply(request, await request.app[HOST].diff(request.match_info["id"], _query(request, "checkpoint")))


async def _wait(request: web.Request) -> web.Response:
    wait = request.query.get("wait")
    if wait not in (None, "captured", "durable"):
        raise Invalid(f"wait must be captured or durable, not {wait!r}")
    timeout = _number(request, "timeout", 60.0, WAIT_MOST)
    return _reply(
        request,
        await request.app[HOST].wait_checkpoint(request.match_info["id"], wait, timeout),  # type: ignore[arg-type]
    )


# --------------------------------------------------------------------------- the process


class _JsonLines(logging.Formatter):
    """One JSON object for each record, with the sandbox and turn where there are any."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in ("sandbox", "turn"):
            if getattr(record, name, None) is not None:
                entry[name] = getattr(record, name)
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def notify(state: str) -> None:
    """Tell systemd, where it listens (``NOTIFY_SOCKET``)."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with (
            contextlib.suppress(OSError),  # whoever listened is gone: nothing to tell
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel,
        ):
            channel.connect("\0" + address[1:] if address.startswith("@") else address)
            channel.sendall(state.encode())


def listen(path: Path) -> socket.socket:
    """A Unix socket that only the daemon's user can reach. A stale one is replaced, a living one refused."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            path.unlink(missing_ok=True)
        else:
            raise Conflict(f"a daemon already listens on {path}", remedy="stop it first, or set PAGURUS_RUN")
    server = socket.socket(socket.AF_UNIX)
    old = os.umask(0o177)
    try:
        server.bind(str(path))
    finally:
        os.umask(old)
    return server


async def serve(*, socket_path: Path, stop_sandboxes: bool, ready: Callable[[Host], None] | None = None) -> None:
    """Run the daemon until SIGTERM or SIGINT."""
    from daemon.recovery import close_host, open_host

    _take_precedence()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = listen(socket_path)
    host = await open_host(paths.state(), paths.run())
    runner = web.AppRunner(application(host), access_log=None, handle_signals=False)
    await runner.setup()
    await web.SockSite(runner, server, backlog=512).start()
    log.info("listening on %s", socket_path)
    notify("READY=1")
    if ready is not None:
        ready(host)
    watchdog = asyncio.ensure_future(_watchdog())
    try:
        await stop.wait()
    finally:
        notify("STOPPING=1")
        watchdog.cancel()
        await runner.cleanup()
        await close_host(host, stop_sandboxes=stop_sandboxes)
        server.close()


def _take_precedence() -> None:
    """The event loop runs before sandboxes and trainers on a busy host: an answer needs it for a moment only.

    Its worker threads, which hash and compress, stay ordinary.
    """

    def ordinary() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 0)

    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(WORKERS, "worker", initializer=ordinary))
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), PRECEDENCE)
    except PermissionError:
        log.info("no CAP_SYS_NICE: the daemon competes with its sandboxes for the processors")


async def _watchdog() -> None:
    """Half the interval that systemd allows (``WATCHDOG_USEC``), if it asks at all."""
    interval = int(os.environ.get("WATCHDOG_USEC", "0")) / 2e6
    while interval > 0:
        await asyncio.sleep(interval)
        notify("WATCHDOG=1")


def main(argv: Sequence[str] | None = None) -> int:
    """``pagurus daemon``."""
    parser = argparse.ArgumentParser(prog="pagurus daemon", description="Run the sandbox daemon of this host.")
    parser.add_argument("--socket", type=Path, default=None, help="API socket (default: below PAGURUS_RUN)")
    parser.add_argument("--state", type=Path, default=None, help="directory that survives reboots (PAGURUS_STATE)")
    parser.add_argument("--run", type=Path, default=None, help="directory that need not (PAGURUS_RUN)")
    parser.add_argument("--stop-sandboxes", action="store_true", help="remove all sandboxes when the daemon stops")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    options = parser.parse_args(argv)
    for name, value in (("PAGURUS_STATE", options.state), ("PAGURUS_RUN", options.run)):
        if value is not None:
            os.environ[name] = str(value.absolute())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    logging.basicConfig(level=options.log_level.upper(), handlers=[handler], force=True)
    short_slice()  # the loop works for microseconds at a time: it need not queue behind a trainer's time slices
    try:
        asyncio.run(serve(socket_path=options.socket or paths.api_socket(), stop_sandboxes=options.stop_sandboxes))
    except PagurusError as error:
        print(f"pagurus daemon: {error}", file=sys.stderr)
        return 1
    return 0
