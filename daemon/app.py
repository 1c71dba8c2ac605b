"""The daemon's process: start, serve, signals, stop.

Guarantee: a stop leaves the sandboxes running unless requested otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from daemon import config, listener, logs
from daemon.api import application
from daemon.api.idempotency import Answers
from daemon.auth import tls
from daemon.config import DaemonConfig
from daemon.e2b.serve import serve as e2b
from daemon.host.host import Host
from daemon.listener import Listeners
from daemon.notify import notify
from daemon.precedence import hurry, ordinary
from sandbox import private, structs
from sandbox.container.shim import short_slice
from sandbox.errors import Invalid, PagurusError
from sandbox.page import key_file
from sandbox.termination import termination_signals
from sandbox.tree.pool import OURS

log = logging.getLogger("pagurus.app")

WORKERS = 16  # threads for what blocks
MAX_SHUTDOWN = 50.0  # seconds; systemd/pagurus.service kills after 60
SWITCH = 0.0001  # seconds after which a thread that computes yields to the event loop

RUN = ("answers.sqlite", "captures", "criu", "pagurus.sock", "sandboxes")  # of which one lies in a run directory


async def serve(options: DaemonConfig, *, ready: Callable[[Host], None] | None = None) -> None:
    """Run the daemon until a signal asks it to end."""
    from daemon.startup import close_host, open_host

    _take_precedence()
    stop = asyncio.Event()
    for number in termination_signals():
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await asyncio.to_thread(private.directory, options.state, ours=OURS)
    sockets = _sockets(options)
    secure = await asyncio.to_thread(_tls, options)
    state, run = options.state, options.run
    private.directory(run, ours=RUN, mode=0o711)
    answers = Answers(run / "answers.sqlite")  # first: it refuses a second daemon, before that adopts anything
    own = next(item.getsockname() for item in sockets if item.family == socket.AF_UNIX)
    host = await open_host(options, own)
    gc.collect()
    gc.freeze()  # what is there now stays: looking through it again and again only takes time
    app = application(host, state / "tokens.json", answers)
    if options.e2b:
        secret = await asyncio.to_thread(key_file, state / "e2b.key")
        e2b(app, secret, options.e2b_templates, options.e2b_domain, own)
    listeners = Listeners(app, connections=options.connections)
    await listeners.open()
    for item in sockets:
        await listeners.serve(item, None if item.family == socket.AF_UNIX else secure)
        log.info("listening on %s", item.getsockname())
    notify("READY=1")
    if ready is not None:
        ready(host)
    watchdog = asyncio.ensure_future(_watchdog())
    try:
        await stop.wait()
    finally:
        _end_at_last()
        notify("STOPPING=1")
        watchdog.cancel()
        await listeners.close()
        living = 0 if options.stop_sandboxes else len(host.live_sandboxes)
        await close_host(host, stop_sandboxes=options.stop_sandboxes)
        answers.close()
        log.info("%s", farewell(living))


def _end_at_last() -> None:
    """End this process though something in it never ends, such as a thread that the kernel does not let go."""
    ending = threading.Timer(MAX_SHUTDOWN, os._exit, (1,))
    ending.daemon = True
    ending.start()


def farewell(living: int) -> str:
    """What becomes of the sandboxes when their daemon ends.

    >>> farewell(0)
    'stopped; no sandbox is left'
    """
    if not living:
        return "stopped; no sandbox is left"
    which = "1 sandbox lives" if living == 1 else f"{living} sandboxes live"
    return (
        f"stopped; {which} on, and the next daemon takes over (to end them: `pagurus rm --all` while one runs, "
        "or `pagurus daemon --stop-sandboxes`)"
    )


def _sockets(options: DaemonConfig) -> list[socket.socket]:
    """Those that systemd passed, and those that the options ask for in addition."""
    sockets = listener.inherited()
    families = {item.family for item in sockets}
    if socket.AF_UNIX not in families:
        sockets.append(listener.unix(options.socket or options.run / "pagurus.sock"))
    if options.address is not None and families <= {socket.AF_UNIX}:
        sockets.append(listener.tcp(*options.address))
    if options.address is None and families - {socket.AF_UNIX}:
        raise Invalid("systemd passed a TCP socket", hint="configure listen and TLS as well")
    return sockets


def _tls(options: DaemonConfig) -> ssl.SSLContext | None:
    if options.tls_cert is not None and options.tls_key is not None:
        return tls.context(options.tls_cert, options.tls_key)
    if not options.tls_self_signed or options.address is None:
        return None
    certificate, key = tls.self_signed(options.state / "tls", options.address[0])
    print(f"certificate {certificate}\nfingerprint {tls.fingerprint(certificate)}", flush=True)
    return tls.context(certificate, key)


def _take_precedence() -> None:
    """The event loop runs before sandboxes and trainers on a busy host: an answer needs it for a moment only.

    Its worker threads, which hash and compress, stay ordinary.
    """

    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(WORKERS, "worker", initializer=ordinary))
    if not hurry():
        log.info("no CAP_SYS_NICE: the daemon competes with its sandboxes for the processors")


_RLIMIT_MSGQUEUE = 12  # bytes of POSIX message queues; Python has no name for it
_RAISED = (resource.RLIMIT_SIGPENDING, _RLIMIT_MSGQUEUE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_NPROC)
MAX_DESCRIPTORS = 1 << 20  # as systemd/pagurus.service has it, and the kernel's default of fs.nr_open


async def _watchdog() -> None:
    """Half the interval that systemd allows (``WATCHDOG_USEC``), if it asks at all."""
    interval = int(os.environ.get("WATCHDOG_USEC", "0")) / 2e6
    while interval > 0:
        await asyncio.sleep(interval)
        notify("WATCHDOG=1")


def _allow_descriptors() -> None:
    """As many as the hard limit allows: a sandbox takes about ten, and shells begin with 1,024.

    What sandboxes have of queued signals and message queues counts together to the limit of the creator of their user
    namespaces, that is, of this process and its children. Each sandbox has a limit of its own (native/confine.c).
    And what CRIU restores has no higher hard limits than CRIU, which has this process's: a sandbox that comes from a
    daemon under systemd must find here what it had there, however this daemon was started.
    """
    _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))
    higher = {item: resource.RLIM_INFINITY for item in _RAISED} | {
        resource.RLIMIT_NOFILE: max(maximum, MAX_DESCRIPTORS)
    }
    for item, limit in higher.items():
        with contextlib.suppress(ValueError, OSError):  # no CAP_SYS_RESOURCE, in a container
            resource.setrlimit(item, (limit, limit))


def _raise_limits() -> None:
    """As systemd does where it boots the host: the kernel's own defaults bound what memory limits bound already.

    The last three count over all sandboxes, with the host's root: by default a single sandbox could take them all.
    """
    for name, limit in (
        ("kernel/pid_max", 1 << 22),
        ("fs/file-max", (1 << 63) - 1),
        ("fs/aio-max-nr", (1 << 31) - 1),
        ("fs/inotify/max_user_instances", (1 << 31) - 1),
        ("fs/inotify/max_user_watches", (1 << 31) - 1),
    ):
        path = Path("/proc/sys") / name
        with contextlib.suppress(OSError):  # not ours to say, in a container
            if int(path.read_text()) < limit:
                path.write_text(str(limit))


def main(argv: Sequence[str] | None = None) -> int:
    """``pagurus daemon``."""
    try:
        options = config.parse(argv, os.environ)
    except PagurusError as error:
        print(f"pagurus daemon: {error}", file=sys.stderr)
        return 2
    if os.geteuid() != 0:
        print(
            "pagurus daemon: it must run as root: it makes namespaces, loads BPF and runs CRIU (use sudo)",
            file=sys.stderr,
        )
        return 1
    from daemon import doctor

    try:
        doctor.check_root()
    except PagurusError as error:
        print(f"pagurus daemon: {error}", file=sys.stderr)
        return 1
    logs.to_stderr(options.log_level)
    log.info("begins")
    structs.learn()
    _allow_descriptors()
    _raise_limits()
    sys.setswitchinterval(SWITCH)
    short_slice()  # the loop works for microseconds at a time: it need not queue behind a trainer's time slices
    try:
        asyncio.run(serve(options))
    except PagurusError as error:
        print(f"pagurus daemon: {error}", file=sys.stderr)
        return 1
    return 0
