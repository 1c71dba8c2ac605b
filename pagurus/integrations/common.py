"""What all plug-ins share: the way to the daemon, a sandbox by image or checkpoint, commands as tools run them.

Guarantee: a sandbox ends with the process that made it, however that ends, unless it was requested to stay: a thread
renews the run, so a loop that blocks loses nothing. A failure of the platform is never given out as the result of a
command. Its text begins with ``pagurus/CODE:``, where CODE is from the closed table of :mod:`sandbox.errors`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sandbox import Client, ExecResult, Limits, Network, PagurusError, Sandbox, sync
from sandbox.messages.runs import RUN_LABEL

MAX_OUTPUT = 16 << 20  # bytes of each output of a command: what the daemon keeps at most
TOOL = "pagurus.tool"  # label: the tool that a sandbox was made for
LEASE = 300.0  # seconds for which sandboxes outlive a process that died, where PAGURUS_LEASE says nothing
_runs: dict[int, tuple[sync.Client, sync.Run]] = {}  # by process: a fork of one has a run of its own
_beginning = threading.Lock()


def connect() -> Client:
    """The daemon of PAGURUS_HOST (a socket or an address), with PAGURUS_TOKEN and PAGURUS_CA; else the local one."""
    return Client(_variable("HOST"), token=_variable("TOKEN"), ca=_variable("CA"))


def connect_blocking() -> sync.Client:
    """The same, for tools without asyncio."""
    return sync.Client(_variable("HOST"), token=_variable("TOKEN"), ca=_variable("CA"))


def _variable(name: str) -> str | None:
    return os.environ.get(f"PAGURUS_{name}") or None


def run_of_process() -> sync.Run:
    """The run of this process, which a thread renews: PAGURUS_RUN, or one of its own. Blocks at the first call."""
    with _beginning:
        if (existing := _runs.get(os.getpid())) is not None:
            return existing[1]
        host = connect_blocking()
        run = host.run(_variable("RUN"), lease=float(_variable("LEASE") or LEASE))
        run.begin()
        _runs[os.getpid()] = host, run
        return run


@atexit.register
def leave_run() -> None:
    """Renew it no more. Its sandboxes that are left end after the lease."""
    host, run = _runs.pop(os.getpid(), (None, None))
    if host is not None and run is not None:
        run.leave()
        host.close()


async def let_stay(host: Client, tool: str) -> None:
    """The sandboxes that this process made for `tool` do not end with it."""
    run = await asyncio.to_thread(run_of_process)
    for info in await host.sandboxes({RUN_LABEL: run.id, TOOL: tool}):
        await (await host.get(info.id)).set_labels({RUN_LABEL: None})


def reason(error: PagurusError) -> str:
    """How every plug-in names a failure of the platform.

    >>> reason(PagurusError("no room"))
    'pagurus/internal: no room'
    """
    return f"pagurus/{error.code}: {error}"


@contextlib.contextmanager
def failures_named() -> Iterator[None]:
    """Raise RuntimeError for failures of the platform, with the name that distinguishes them from the task's."""
    try:
        yield
    except PagurusError as error:
        raise RuntimeError(reason(error)) from error


def limits(*, cpus: float | None = None, memory_mb: float | None = None, disk_mb: float | None = None) -> Limits:
    """Limits as tools give them. Tools know no limit of processes, so it is the host's."""
    given: dict[str, Any] = {"processes": None}
    if cpus:
        given["cpus"] = float(cpus)
    if memory_mb:
        given["memory"] = f"{int(memory_mb)}MiB"
    if disk_mb:
        given["disk"] = f"{int(disk_mb)}MiB"
    return Limits(**given)


async def marks(tool: str, labels: Mapping[str, str] | None = None, *, keep: bool = False) -> dict[str, str]:
    """The labels of a sandbox for `tool`."""
    return await asyncio.to_thread(_marks, tool, labels, keep=keep)


def _marks(tool: str, labels: Mapping[str, str] | None, *, keep: bool) -> dict[str, str]:
    made = {TOOL: tool, **(labels or {})}
    return made if keep else run_of_process().labelled(made)


async def start(
    host: Client,
    *,
    tool: str,
    image: str | None = None,
    checkpoint: str | None = None,
    labels: Mapping[str, str] | None = None,
    keep: bool = False,
    **options: Any,
) -> Sandbox:
    """A sandbox for `tool`: from a checkpoint if one is named, else from an image. `keep`: it outlives this process."""
    made = await marks(tool, labels, keep=keep)
    if checkpoint is not None:
        return (await host.fork(checkpoint, labels=made))[0].sandbox
    return await host.create(image or "debian", labels=made, **options)


async def compose(
    host: Client, paths: Sequence[Path], *, tool: str, labels: Mapping[str, str] | None = None, **options: Any
) -> Sandbox:
    """A sandbox for `tool` of the services of compose files."""
    return await host.compose(paths, labels=await marks(tool, labels), **options)


def start_blocking(
    host: Any,
    *,
    tool: str,
    image: str | None = None,
    checkpoint: str | None = None,
    labels: Mapping[str, str] | None = None,
    keep: bool = False,
    **options: Any,
) -> Any:
    """The same, for tools without asyncio."""
    made = _marks(tool, labels, keep=keep)
    if checkpoint is not None:
        return host.fork(checkpoint, labels=made)[0].sandbox
    return host.create(image or "debian", labels=made, **options)


async def run(
    box: Sandbox,
    command: str | Sequence[str],
    *,
    timeout: float | None = None,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    user: str | int | None = None,
    stdin: bytes = b"",
    service: str | None = None,
) -> ExecResult:
    """A command as tools run it: a text by bash, as a login shell does not; with all of its output."""
    words = ["/bin/bash", "-c", command] if isinstance(command, str) else list(command)
    return await box.exec(
        words,
        timeout=timeout,
        cwd=cwd,
        env=dict(env or {}),
        user=user,
        stdin=stdin,
        service=service,
        output_limit=MAX_OUTPUT,
    )


def text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def network(internet: bool) -> Network:
    return Network.open() if internet else Network.none()
