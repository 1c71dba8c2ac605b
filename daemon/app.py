"""The daemon's process: start, sockets, logs, signals, stop.

Owns: the process and what systemd hears of it. Does not own: routes (:mod:`daemon.api`), any act on a
sandbox (:mod:`daemon.host`). Guarantee: a stop leaves the sandboxes running unless asked otherwise.
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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aiohttp import web

from daemon.api import application
from daemon.host import Host
from sandbox import paths
from sandbox.errors import Conflict, PagurusError
from sandbox.shim import short_slice

log = logging.getLogger("pagurus.app")

WORKERS = 16  # threads for what blocks
PRECEDENCE = -10  # nice value of the event loop


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
