"""A command that runs in a sandbox: its output, its end, ending it early.

Guarantee: memory stays within the output limit whatever the command writes; a process that outlives the command and
still holds its pipes neither delays the result nor dies from SIGPIPE (the shim keeps reading).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import functools
import os
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sandbox import hints, paths, procfs
from sandbox.container.outlet import Name, Outlet
from sandbox.container.paced import Allowance, PacedReader
from sandbox.descriptors import closing
from sandbox.errors import Unsupported
from sandbox.procfs import ProcessIdentity, task_of

if TYPE_CHECKING:
    from sandbox.container.container import Container

_PIDFD_GET_INFO = 0xC040FF0B
_INFO_EXIT = 1 << 3
_TO_GROUP = 1 << 2  # of pidfd_send_signal(2): to the process group that the process leads; from Linux 6.9 on
_PIPE_SIZE = 1 << 20
_READ_SIZE = 1 << 18
_GRACE = 1.0  # seconds that a command has to end by itself after its deadline
_KILL_TIMEOUT = 10.0  # seconds for a killed command to be gone
REAP_TIMEOUT = 1.0  # seconds for a dead command's parent to take its exit code
_EXIT_CODE = 49  # of the fields of `stat`


def exit_code(status: int) -> int:
    """The shell's view of a wait status."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def exit_status(pidfd: int) -> int | None:
    """Wait status of a reaped process that need not be our child; None when the kernel does not report it."""
    info = bytearray(struct.pack("=Q", _INFO_EXIT).ljust(64, b"\0"))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError as error:
        if error.errno in (errno.ENOTTY, errno.EINVAL, errno.ESRCH):
            return None
        raise
    return struct.unpack_from("=i", info, 60)[0] if struct.unpack_from("=Q", info)[0] & _INFO_EXIT else None


def unreaped_status(pid: int, pidfd: int) -> int | None:
    """Wait status of a dead process that was not reaped; None when it was, or it lives."""
    with contextlib.suppress(OSError):
        fields = procfs.stat(pid)
        signal.pidfd_send_signal(pidfd, 0)  # its number was not reused, then
        if fields[procfs.STATE] in procfs.ENDED:
            return int(fields[_EXIT_CODE])
    return None


@functools.cache
def pidfd_tells_exit() -> bool:
    """True on kernels (>= 6.15) whose pidfds report the exit code of another's child. Tried for real, once."""
    program = paths.shim()
    if not program.exists():
        raise Unsupported(f"{program} is missing", hint=hints.parts())
    with (
        subprocess.Popen([program], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as probe,
        closing(os.pidfd_open(probe.pid)) as pidfd,
    ):
        expected = probe.wait()  # without arguments it prints its usage
        status = exit_status(pidfd)
    return status is not None and exit_code(status) == expected


class ReapWaiter:
    """Waits for processes to be reaped by their own parent: the moment from which a pidfd reports the exit code.

    A pidfd is readable from the death on, but hangs up only when reaped; an epoll of its own distinguishes the two. A
    process of the sandbox may keep a dead one from being reaped (its tracer, or the tracer of pid 1): waiting ends
    some time after the death then.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll()
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def wait(self, pidfd: int) -> None:
        future: asyncio.Future[None] = self._loop.create_future()
        if not self._waiting:
            self._loop.add_reader(self._epoll.fileno(), self._ready)
        self._waiting[pidfd] = future
        self._epoll.register(pidfd, select.EPOLLIN)  # a hang-up is always reported
        try:
            await future
        finally:
            self._epoll.unregister(pidfd)
            del self._waiting[pidfd]
            if not self._waiting:
                self._loop.remove_reader(self._epoll.fileno())

    def _ready(self) -> None:
        for pidfd, events in self._epoll.poll(0):
            future = self._waiting.get(pidfd)
            if future is None or future.done():
                continue
            if events & select.EPOLLHUP:
                future.set_result(None)
            else:
                self._epoll.modify(pidfd, 0)
                self._loop.call_later(REAP_TIMEOUT, _finalize, future)

    def close(self) -> None:
        self._epoll.close()


def _finalize(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def readable(fd: int) -> None:
    """Returns when `fd` is readable; of a pidfd: when the process is dead."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)


class Drain:
    """Reads a pipe as it is filled, at a pace, unless stopped; keeps the first `limit` bytes and counts the rest.

    An `outlet` gets every chunk as it comes, under this name.
    """

    def __init__(
        self,
        fd: int,
        limit: int,
        outlet: Outlet | None = None,
        name: Name = "stdout",
        allowance: Allowance | None = None,
    ):
        self.retained = bytearray()
        self.dropped = 0
        self.ended = False
        self._fd = fd
        self._limit = limit
        self._outlet, self._name = outlet, name
        self._large = False
        self._end: asyncio.Event | None = None
        os.set_blocking(fd, False)
        self._reader = PacedReader(fd, self._read, allowance)

    async def at_end(self) -> None:
        """Returns when the writing end is closed everywhere."""
        self._end = asyncio.Event()
        if not self.ended:
            await self._end.wait()

    def pace(self, reading: bool) -> None:
        """Whether to read on: a writer to a pipe that is not read waits."""
        if self._fd >= 0 and not self.ended:
            if reading:
                self._reader.start()
            else:
                self._reader.stop()

    def _read(self) -> int:
        """Reads once; how much there was to read."""
        try:
            data = os.read(self._fd, _READ_SIZE)
        except BlockingIOError:
            return 0
        if not data:
            self.ended = True
            self._reader.stop()
            if self._end is not None:
                self._end.set()
            return 0
        if len(data) >= 1 << 16 and not self._large:
            self._large = True
            with contextlib.suppress(PermissionError):  # over the user's limit for pipes
                fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
        keep = min(len(data), self._limit - len(self.retained))
        self.retained += data[:keep]
        self.dropped += len(data) - keep
        if self._outlet is not None:
            self._outlet.put(self._name, data)
        return len(data)

    def finish(self) -> None:
        """Read what lies in the pipe now, then stop. What a surviving process writes later is not read here."""
        left = 0 if self.ended else _waiting(self._fd)  # no more than that: a survivor may write without end
        while left > 0 and (size := self._read()):
            left -= size
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            self._reader.stop()
            os.close(self._fd)
            self._fd = -1


def _waiting(pipe: int) -> int:
    """Bytes that lie in a pipe."""
    (size,) = struct.unpack("=i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))
    return int(size)


class Feed:
    """Writes `data` to a pipe as fast as it is read, then closes it. A reader that goes away ends it."""

    def __init__(self, fd: int, data: bytes):
        self._fd = fd
        self._rest = memoryview(data)
        self._loop = asyncio.get_running_loop()
        os.set_blocking(fd, False)
        self._loop.add_writer(fd, self._write)
        self._write()

    def _write(self) -> None:
        try:
            self._rest = self._rest[os.write(self._fd, self._rest) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._rest = self._rest[:0]
        if not self._rest:
            self.close()

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_writer(self._fd)
            os.close(self._fd)
            self._fd = -1


class RunningCommand:
    """A started command, from its descriptors (pidfd, stdout, stderr and perhaps stdin) to its end."""

    def __init__(
        self,
        container: Container,
        started: Sequence[str],
        fds: Sequence[int],
        *,
        stdin: bytes,
        limit: int,
        outlet: Outlet | None = None,
    ):
        """`started`: what the shim says of it: its pid, the number of its pipes, perhaps its pid in the sandbox."""
        pid, stream, *inner = map(int, started)
        self.pid, self.inner, self.pidfd = pid, inner[0] if inner else 0, fds[0]
        self.root = container.held_root  # of the pid 1 below which it runs
        self._container, self._stream = container, stream
        limit = limit if outlet is None else 0
        self.stdout = Drain(fds[1], limit, outlet, "stdout", container.allowance)
        self.stderr = Drain(fds[2], limit, outlet, "stderr", container.allowance)
        self._feed = Feed(fds[3], stdin) if len(fds) > 3 else None
        self._outlet = outlet
        self._done = False

    async def wait(self, timeout: float | None) -> tuple[int, bool]:
        """(wait status, timed out). A reader of its output that leaves is its deadline too."""
        outlet = self._outlet
        with contextlib.nullcontext() if outlet is None else outlet.paced(self._pace):
            try:
                async with asyncio.timeout(timeout) as deadline:
                    with contextlib.nullcontext() if outlet is None else outlet.ending(deadline):
                        return await self._end(), False
            except TimeoutError:
                await asyncio.to_thread(end_started, self.pid, self._container.tasks)
                async with asyncio.timeout(_KILL_TIMEOUT):
                    return await self._end(), True

    async def signal(self, number: int, *, group: bool) -> bool:
        """Send a signal to all that it started, or to it alone; False if none got it, since it has ended."""
        if self._done:
            return False
        return await asyncio.to_thread(signal_started, self.pid, self._container.tasks, number, group=group)

    def _pace(self, reading: bool) -> None:
        self.stdout.pace(reading)
        self.stderr.pace(reading)

    async def _end(self) -> int:
        status = await self._container.ended(self)
        self._done = True
        return status

    async def close(self) -> None:
        """Takes what lies in the pipes; the shim reads them from now on."""
        if not self._done:
            await asyncio.to_thread(kill_started, self.pid, self._container.tasks)
        self.stdout.finish()
        self.stderr.finish()
        if self._feed is not None:
            self._feed.close()
        os.close(self.pidfd)
        self._container.post("release", self._stream)


def started_by(root: int, candidates: list[int]) -> list[ProcessIdentity]:
    """Of `candidates`, those in the session of `root` or below it. Processes that made a session of their own and
    whose parent has ended are not found: they are what a command leaves behind on purpose."""
    tasks = [task for task in map(task_of, candidates) if task is not None]
    result = {task.pid for task in tasks if root in (task.pid, task.session)}
    while more := {task.pid for task in tasks if task.pid not in result and task.parent in result}:
        result |= more
    return [task for task in tasks if task.pid in result]


def kill_started(root: int, pids: Callable[[], list[int]]) -> int:
    """SIGKILL everything that the command `root` started and that is still connected to it; returns how many.

    All are stopped first: none can then fork, end, or lose its parent while the others are looked for.
    """
    stopped: set[ProcessIdentity] = set()
    for _ in range(100):
        fresh = set(started_by(root, pids())) - stopped
        if not fresh:
            break
        for task in fresh:
            _signal(task, signal.SIGSTOP)
        stopped |= fresh
    for task in stopped:
        _signal(task, signal.SIGKILL)
    return len(stopped)


def end_started(root: int, pids: Callable[[], list[int]]) -> None:
    """SIGTERM to everything that the command `root` started; after a while SIGKILL to what is left of it."""
    result = started_by(root, pids())
    for task in result:
        _signal(task, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE
    while any(task_of(task.pid) for task in result) and time.monotonic() < deadline:
        time.sleep(0.01)
    kill_started(root, pids)
    for task in result:
        _signal(task, signal.SIGKILL)


def signal_started(root: int, pids: Callable[[], list[int]], number: int, *, group: bool) -> bool:
    """Send a signal to the command `root`; with `group` to all that it started and that is still connected to it.

    Whether any of them got it.
    """
    tasks = readers_first(root, started_by(root, pids()))
    if not group:
        return any([_signal(task, number) for task in tasks if task.pid == root])
    # At once, as a terminal does: a process that is being forked gets it too; who looks for them one by one misses it.
    at_once = any([_signal(task, number, _TO_GROUP) for task in tasks if task.pid == root])
    return any([at_once, *(_signal(task, number) for task in tasks if not at_once or task.group != root)])


def interrupt(
    root: int,
    pids: Callable[[], list[int]],
    number: int,
    *,
    spared: frozenset[ProcessIdentity],
    jobs: bool,
    shell: bool,
) -> None:
    """Send a signal to what the shell `root` runs in front, with `jobs` also to what it put behind; not to `spared`.

    What an interactive shell without a terminal starts in the background ignores SIGINT: that distinguishes the two.
    With `shell` the shell itself gets a SIGINT.

    A terminal signals all at once; this goes in an order in which no process learns of the end of another before its
    own signal, since a shell continues with its next command when what it waited for ended in any other way than by
    SIGINT.
    """
    for task in readers_first(root, started_by(root, pids())):
        if task.pid == root:
            if shell:
                _signal(task, signal.SIGINT)
        elif task not in spared and (jobs or number == signal.SIGINT or not _ignores(task.pid, signal.SIGINT)):
            _signal(task, number)


def readers_first(root: int, tasks: list[ProcessIdentity]) -> list[ProcessIdentity]:
    """Parents before their children, and of these the youngest first: in a pipeline those who read are younger than
    those who write to them. `root` and what is below it come before the rest."""
    existing = {task.pid for task in tasks}
    below: dict[int, list[ProcessIdentity]] = {}
    waiting = []  # the last is next
    for task in sorted(tasks, key=lambda task: (task.started, task.pid)):
        if task.pid != root and task.parent in existing:
            below.setdefault(task.parent, []).append(task)
        else:
            waiting.append(task)
    waiting.sort(key=lambda task: task.pid == root)
    ordered = []
    while waiting:
        task = waiting.pop()
        ordered.append(task)
        waiting += below.get(task.pid, [])
    return ordered


def _ignores(pid: int, number: signal.Signals) -> bool:
    mask = procfs.status(pid, "SigIgn")
    return mask is not None and bool(int(mask, 16) >> (number - 1) & 1)


def _signal(task: ProcessIdentity, number: int, flags: int = 0) -> bool:
    """Whether it got the signal: False when it is gone, or when the kernel does not know the flag."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(task.pid)
        try:
            now = task_of(task.pid)
            if now is not None and now.started == task.started:
                signal.pidfd_send_signal(pidfd, number, None, flags)
                return True
        except OSError as error:
            if not flags or error.errno != errno.EINVAL:
                raise
        finally:
            os.close(pidfd)
    return False
