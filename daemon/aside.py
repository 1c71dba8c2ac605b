"""Work of seconds and more, apart from everything that callers wait for: in processes of its own.

Guarantee: a job shares neither threads nor the interpreter's lock with the daemon; when it is given up, its process
ends at once, with all that it started; a job that runs out of memory, or is killed, is an error of that job alone.

::

    run ─▶ queue (READ: a share for each owner) ─▶ idle process, or a new one ─▶ answer
                                                     └─ cancelled: killed

A message is its length in eight bytes and a pickle. Both ends are ours; what the sandbox's tree says is data in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import pickle
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from daemon.checkpoints.queue import CheckpointQueue
from daemon.checkpoints.schedule import CheckpointStage
from sandbox.container.cgroup import step_aside
from sandbox.errors import PagurusError, TooMany

T = TypeVar("T")

AT_ONCE = 2  # processes
MAX_QUEUED = 32  # jobs of one sandbox that wait
TIMEOUT = 60.0  # seconds after which a job is overdue in the queue
IDLE = 60.0  # seconds after which a process without work ends
MAX_MEMORY = 4 << 30  # bytes of each process
LENGTH = 8  # bytes
NICE = 10
_IOPRIO_SET, _IOPRIO_PROCESS, _IOPRIO_LOWEST = 251, 1, (2 << 13) | 7


class Aside:
    """See the module. One for a host."""

    def __init__(self, queue: CheckpointQueue) -> None:
        self._queue = queue
        self._idle: list[WorkerProcess] = []
        self._waiting: dict[str, int] = {}
        self._closed = False

    async def run(self, function: Callable[..., T], *arguments: Any, sandbox: str, owner: str = "") -> T:
        """What `function` returns, or raises, in a process of its own. Cancelled, it ends at once.

        `sandbox`, `owner`: on whose behalf. Raises TooMany when too many of that sandbox's jobs wait.
        """
        async with self.slot(sandbox=sandbox, owner=owner):
            return await self.do(function, *arguments)

    @contextlib.asynccontextmanager
    async def slot(self, *, sandbox: str, owner: str = "") -> AsyncIterator[None]:
        """A slot for what is done within: what it holds, others of its kind do not hold as well."""
        if self._waiting.get(sandbox, 0) >= MAX_QUEUED:
            raise TooMany(
                f"{MAX_QUEUED} requests that read whole trees wait for this sandbox", hint="wait for their answers"
            )
        ticket = self._queue.submit(
            CheckpointStage.READ,
            sandbox=sandbox,
            owner=owner,
            deadline=self._queue.now() + TIMEOUT,
            waited=True,
        )
        self._waiting[sandbox] = self._waiting.get(sandbox, 0) + 1
        try:
            async with ticket:
                yield
        finally:
            self._waiting[sandbox] -= 1
            if not self._waiting[sandbox]:
                del self._waiting[sandbox]

    async def do(self, function: Callable[..., T], *arguments: Any) -> T:
        """As `run`, for who has a slot already."""
        process = self._idle.pop() if self._idle else await WorkerProcess.start()
        with contextlib.ExitStack() as undo:
            undo.callback(process.kill)  # cancelled, or it died: never used again
            existing, value = await process.call((function, arguments))
            undo.pop_all()
        if self._closed:
            process.kill()
        else:
            self._idle.append(process)
            asyncio.get_running_loop().call_later(IDLE, self._retire, process, process.calls)
        if existing:
            return value  # type: ignore[no-any-return]
        raise value

    def _retire(self, process: WorkerProcess, calls: int) -> None:
        """End it unless it was called since."""
        if process in self._idle and process.calls == calls:
            self._idle.remove(process)
            process.kill()

    async def close(self) -> None:
        """End all processes. The queue has been closed before."""
        self._closed = True
        for process in self._idle:
            process.kill()
        self._idle.clear()


class WorkerProcess:
    """One process, which does one job after another."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self.calls = 0

    @classmethod
    async def start(cls) -> WorkerProcess:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        spawning = asyncio.ensure_future(asyncio.to_thread(_spawn, theirs))
        try:
            return cls(await asyncio.shield(spawning), reader, writer)
        except asyncio.CancelledError:
            cls(await spawning, reader, writer).kill()
            raise

    async def call(self, job: tuple[Callable[..., Any], tuple[Any, ...]]) -> tuple[bool, Any]:
        """(True, what it returned) or (False, what it raised). Raises PagurusError when it died over it."""
        self.calls += 1
        try:
            self._writer.write(_packed(job))
            await self._writer.drain()
            length = int.from_bytes(await self._reader.readexactly(LENGTH), "little")
            answer = await self._reader.readexactly(length)
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            raise PagurusError(
                f"the process that did {job[0].__name__} was killed", hint="try again; see the host's memory"
            ) from error
        return pickle.loads(answer)  # type: ignore[no-any-return]

    def kill(self) -> None:
        """End it, with all that it started."""
        self._writer.close()
        if self._process.poll() is None:  # else its number may be another's
            os.killpg(self._process.pid, signal.SIGKILL)
            asyncio.get_running_loop().run_in_executor(None, self._process.wait)  # it is gone in a moment


def _spawn(channel: socket.socket) -> subprocess.Popen[bytes]:
    """A process that listens on `channel`, leader of a group of its own."""
    with channel:
        program = [sys.executable, "-m", "daemon.aside"]
        return subprocess.Popen(program, stdin=channel.fileno(), stdout=channel.fileno(), start_new_session=True)


def _packed(value: object) -> bytes:
    data = pickle.dumps(value)
    return len(data).to_bytes(LENGTH, "little") + data


# ---------------------------------------------------------------------------- in the process


def main() -> int:
    """Do what comes in on standard input, until there is no more."""
    _step_back()
    source, sink = os.fdopen(0, "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing but answers goes there
    while length := source.read(LENGTH):
        function, arguments = pickle.loads(source.read(int.from_bytes(length, "little")))
        try:
            answer = _packed((True, function(*arguments)))
        except Exception as error:  # noqa: BLE001 - the caller's to judge
            answer = _refused(error)
        sink.write(answer)
        sink.flush()
    return 0


def _refused(error: Exception) -> bytes:
    if isinstance(error, MemoryError):
        error = PagurusError("there is more to read than fits into memory", hint="make the tree smaller")
    try:
        return _packed((False, error))
    except Exception:  # noqa: BLE001 - of a library, and not made to travel
        return _packed((False, PagurusError(f"{type(error).__name__}: {error}")))


def _step_back() -> None:
    """Behind everybody else: for the processors, the disk, memory. It ends with the daemon."""
    libc = ctypes.CDLL(None)
    threading.Thread(target=_end_with_caller, daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):  # of a terminal or a service: the daemon says when it is over
        signal.signal(number, signal.SIG_IGN)
    os.setpriority(os.PRIO_PROCESS, 0, NICE)
    with contextlib.suppress(OSError, KeyError, PagurusError):  # no such controller, or not ours: nice alone
        step_aside()
    libc.syscall(_IOPRIO_SET, _IOPRIO_PROCESS, 0, _IOPRIO_LOWEST)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY, MAX_MEMORY))


def _end_with_caller() -> None:
    """However the other end of the channel goes away, this process ends, in the middle of a job as well."""
    watcher = select.poll()
    watcher.register(0, select.POLLRDHUP)
    watcher.poll()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
