"""The daemon's end of a shim: starts it, speaks to it, keeps descriptors apart.

Guarantee: answers are matched to calls in order; an event never gets lost between two calls; when the shim is gone
every waiting call raises :class:`ShimGone`.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sandbox import hints, paths
from sandbox.errors import Invalid, PagurusError, Unsupported

PACKET_MAX = 2 << 20  # as in shim.h
SOCKET_NAME = "shim.sock"
_FDS_MAX = 16
_CONNECT_TRIES, _CONNECT_PAUSE = 3000, 0.02  # seconds; a shim serves no other request while it starts a program
_SYS_SCHED_SETATTR = 314
SLICE = 100_000  # nanoseconds
FIRST = -10  # nice value


class ShimGone(PagurusError):
    """The shim ended; its sandbox cannot be reached any more."""

    code = "sandbox_dead"
    status = 410


class ShimError(PagurusError):
    """The shim could not do the request. `stage` says where, `errno` why."""

    def __init__(self, stage: str, errno: int):
        super().__init__(f"{stage}: {os.strerror(errno)}")
        self.stage = stage
        self.errno = errno


Answer = tuple[list[str], list[int]]


def _address(directory: int) -> str:
    # Socket addresses hold 107 bytes, run directories may be longer: reach them through a descriptor.
    return f"/proc/self/fd/{directory}/{SOCKET_NAME}"


def launch(run_dir: Path, cgroup: Path, joined: Sequence[Path]) -> int:
    """Start a shim that listens in `run_dir`; returns its pid. It may still be starting: connecting already works."""
    program = paths.shim()
    try:
        if (mode := program.stat().st_mode) & 0o077:
            # A command of a sandbox is this program until it executes its own: /proc/self/exe names it to be executed
            # there, by users that the host does not know.
            program.chmod(mode & 0o700)
    except FileNotFoundError as error:
        raise Unsupported(f"{program} is missing", hint=hints.parts()) from error
    except OSError as error:  # such as a read-only file system
        raise Unsupported(f"{program} may be executed by others: {error}", hint="chmod 700 it where it lies") from error
    directory = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(_address(directory))
        (run_dir / SOCKET_NAME).chmod(0o600)
        listener.listen(4)
        null, log = str(os.devnull), str(run_dir / "shim.log")
        every = [number for number in range(1, signal.NSIG) if number not in (signal.SIGKILL, signal.SIGSTOP)]
        return os.posix_spawn(
            program,
            ["pagurus-shim", str(cgroup), *map(str, joined)],
            {},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, listener.fileno(), 3),
                (os.POSIX_SPAWN_OPEN, 0, null, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
            setsigmask=[],
            setsigdef=[number for number in every if not 32 <= number <= 33],
        )
    finally:
        listener.close()
        os.close(directory)


class Shim:
    """A connection to a shim. Not for use from several event loops."""

    def __init__(self, connection: socket.socket, run_dir: Path):
        self.run_dir = run_dir
        self._socket = connection
        self._waiting: deque[asyncio.Future[Answer]] = deque()
        self._exits: dict[int, asyncio.Future[int]] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection.fileno(), self._readable)
        self._sending = asyncio.Lock()
        self._posted: set[asyncio.Task[Answer]] = set()
        self._gone = asyncio.Event()

    @classmethod
    async def connect(cls, run_dir: Path) -> Shim:
        """Connect to the shim that listens in `run_dir`. It serves one client at a time."""
        directory = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as undo:
            undo.enter_context(connection)
            connection.setblocking(False)
            with contextlib.suppress(PermissionError):
                connection.setsockopt(socket.SOL_SOCKET, 32, 4 * PACKET_MAX)  # SO_SNDBUFFORCE
            try:
                await _connect(connection, _address(directory))
            except (ConnectionRefusedError, FileNotFoundError) as error:
                raise ShimGone(f"no shim listens in {run_dir}") from error
            finally:
                os.close(directory)
            undo.pop_all()
        return cls(connection, run_dir)

    # ---------------------------------------------------------------- calls

    async def call(self, *fields: str | bytes | int, fds: Sequence[int] = ()) -> Answer:
        """Ask the shim; returns the fields after "ok" and the descriptors, which are now the caller's."""
        packet = _packet(fields)
        async with self._sending:
            if self._socket.fileno() < 0:
                raise ShimGone(f"the shim of {self.run_dir.name} is gone")
            await self._send(packet, fds)
            future: asyncio.Future[Answer] = self._loop.create_future()
            self._waiting.append(future)
        try:
            return await future
        except asyncio.CancelledError:
            _discard(future)  # the answer may be here already; one that comes later meets a cancelled future
            raise

    def post(self, *fields: str | bytes | int) -> None:
        """Ask for something whose answer no caller waits for, in its turn among the calls. A shim that is gone does
        nothing."""
        if not self._sending.locked() and self.connected:
            with contextlib.suppress(BlockingIOError):
                try:
                    self._socket.send(_packet(fields))
                except (BrokenPipeError, ConnectionResetError):
                    self._closed()
                    return
                future: asyncio.Future[Answer] = self._loop.create_future()
                self._waiting.append(future)
                future.add_done_callback(_unread)
                return
        asking = asyncio.ensure_future(self.call(*fields))
        asking.add_done_callback(_unread)
        self._posted.add(asking)
        asking.add_done_callback(self._posted.discard)

    async def _send(self, packet: bytes, fds: Sequence[int]) -> None:
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        while True:
            try:
                self._socket.sendmsg([packet], control)
                return
            except BlockingIOError:
                writable = asyncio.Event()
                self._loop.add_writer(self._socket.fileno(), writable.set)
                try:
                    await writable.wait()
                finally:
                    self._loop.remove_writer(self._socket.fileno())
            except (BrokenPipeError, ConnectionResetError) as error:
                self._closed()
                raise ShimGone(f"the shim of {self.run_dir.name} is gone") from error

    async def exited(self, pid: int) -> int:
        """Wait status of a program that this shim has started and parents."""
        return await asyncio.shield(self._exit_future(pid))

    def _exit_future(self, pid: int) -> asyncio.Future[int]:
        if pid not in self._exits:
            self._exits[pid] = self._loop.create_future()
        return self._exits[pid]

    def forget(self, pid: int) -> None:
        self._exits.pop(pid, None)

    # ---------------------------------------------------------------- packets

    def _readable(self) -> None:
        space = socket.CMSG_SPACE(_FDS_MAX * array.array("i").itemsize)
        try:
            data, ancillary, _, _ = self._socket.recvmsg(4096, space, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return
        except ConnectionResetError:
            data, ancillary = b"", []
        if not data:
            self._closed()
            return
        fds = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        self._dispatch(data.decode("utf-8", "surrogateescape").split("\0")[:-1], list(fds))

    def _dispatch(self, fields: list[str], fds: list[int]) -> None:
        kind, *rest = fields
        if kind == "event":
            future = self._exit_future(int(rest[1]))
            if not future.done():
                future.set_result(int(rest[2]))
            return
        answer = self._waiting.popleft()
        if answer.cancelled():
            _close(fds)
        elif kind == "ok":
            answer.set_result((rest, fds))
        else:
            answer.set_exception(ShimError(rest[0], int(rest[1])))

    async def gone(self) -> None:
        """Returns when the shim has ended by itself."""
        await self._gone.wait()

    def _closed(self) -> None:
        self.close()
        self._gone.set()
        gone = ShimGone(f"the shim of {self.run_dir.name} is gone", hint="pagurus restore")
        pending: list[asyncio.Future[Any]] = [*self._waiting, *self._exits.values()]
        for future in pending:
            if not future.done():
                future.set_exception(gone)
                future.exception()  # a call without a waiting caller is no mistake
        self._waiting.clear()

    @property
    def connected(self) -> bool:
        return self._socket.fileno() >= 0

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()


async def _connect(connection: socket.socket, address: str) -> None:
    """Connect, once the shim has room: daemons that were killed may have left it more connections than it keeps."""
    for _ in range(_CONNECT_TRIES):
        try:
            connection.connect(address)
            return
        except BlockingIOError:
            await asyncio.sleep(_CONNECT_PAUSE)
    raise ShimGone(f"the shim takes no connection for {_CONNECT_TRIES * _CONNECT_PAUSE:.0f} s")


def _field(part: str | bytes | int) -> bytes:
    data = os.fsencode(part) if isinstance(part, str) else part if isinstance(part, bytes) else str(part).encode()
    if b"\0" in data:
        raise Invalid("an argument, variable or path holds a NUL byte", hint="remove the byte")
    return data


def _packet(fields: Sequence[str | bytes | int]) -> bytes:
    packet = b"".join(_field(part) + b"\0" for part in fields)
    if len(packet) > PACKET_MAX:
        raise Invalid(
            f"arguments and environment of {len(packet)} bytes are too long; the limit is {PACKET_MAX}",
            hint="pass large input by stdin or a file",
        )
    return packet


def _unread(answer: asyncio.Future[Answer]) -> None:
    """No caller reads this answer, or learns that there is none."""
    if not answer.cancelled() and answer.exception() is None:
        _close(answer.result()[1])


def _discard(answer: asyncio.Future[Answer]) -> None:
    if answer.done() and not answer.cancelled() and answer.exception() is None:
        _close(answer.result()[1])


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def short_slice() -> None:
    """Ask the scheduler to run this thread for short times, but at once. For an event loop on a busy host.

    A wake-up then need not wait for another's whole time slice (3 ms). Linux 6.12 and newer; harmless before.
    """
    # struct sched_attr: size, policy (0: normal), flags, nice, priority, runtime, deadline, period
    attributes = struct.pack("=IIQiIQQQ", 48, 0, 0, os.getpriority(os.PRIO_PROCESS, 0), 0, SLICE, 0, 0)
    ctypes.CDLL(None, use_errno=True).syscall(_SYS_SCHED_SETATTR, 0, attributes, 0)


@contextlib.contextmanager
def going_first() -> Iterator[None]:
    """Let this thread run before others, at once when it is woken: a sandbox is frozen until it is done."""
    thread = threading.get_native_id()
    before = os.getpriority(os.PRIO_PROCESS, thread)
    with contextlib.suppress(OSError):  # without CAP_SYS_NICE it waits its turn
        os.setpriority(os.PRIO_PROCESS, thread, min(FIRST, before))
    short_slice()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, before)
