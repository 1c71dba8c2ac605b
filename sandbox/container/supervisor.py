"""A long-lived program of a sandbox and its attendant (native/attend.c): background process, shell, terminal.

Guarantee: a client that attaches gets the attendant's state as it is in the sandbox now, whatever a former daemon had
requested; a lost attendant fails every waiting call with :class:`SupervisorGone`, never hangs it; what the sandbox puts
in place of the FIFOs can neither block the host nor make it read more than one frame's worth.

::

    daemon ── rq (FIFO) ──▶ attendant ══ pipes or terminal ══ program          all three below pid 1, in one dump
           ◀── rs (FIFO) ──
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import re
import secrets
import signal
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sandbox import paths
from sandbox.container import spawn
from sandbox.container.paced import LARGE, PacedReader
from sandbox.container.process import Drain
from sandbox.container.shim import ShimError
from sandbox.errors import Conflict, Invalid, PagurusError, SandboxDead
from sandbox.tree.safe_path import SandboxRoot, open_kind

if TYPE_CHECKING:
    from sandbox.container.container import Container

PROGRAM = "/.pagurus/attend"
RUN_AREA = "/.pagurus/run"
MAX_OUTPUT = 16 << 20  # bytes of each output of one script in a session
MAX_TEXT = 8 << 20  # bytes of one script
CHUNK = 64 << 10
_MAX_FRAME = CHUNK + 4096
_MAX_REQUEST = 4096  # PIPE_BUF: a write is whole or not at all
_MAX_STALE = 4 << 20  # bytes of a former daemon's answers before ours must come
_TIMEOUT = 30.0  # seconds for an attendant to answer: it may be frozen for a checkpoint

_REQUEST = struct.Struct("<IBBHIIQQ")
_HEADER = struct.Struct("<IIQ")
_STATE = struct.Struct("<16s9Q4Q4Q")
_DATA = struct.Struct("<QQQ")


class Mode(enum.StrEnum):
    PROCESS = "process"
    SESSION = "session"
    TERMINAL = "terminal"


class _Op(enum.IntEnum):
    ATTACH = 1
    READ = 2
    INPUT = 3
    CLOSE = 4
    SIGNAL = 5
    RESIZE = 6
    TEXT = 7
    EXEC = 8
    ACK = 9
    STATE = 10
    WAIT = 11
    HOLD = 12
    FINISH = 13


class Until(enum.IntEnum):
    EXIT = 0
    DONE = 1
    CAPACITY = 2


class SupervisorGone(PagurusError):
    """The attendant is not there: it ended, was killed, or is not part of this state of the sandbox."""

    code = "not_found"
    status = 404


@dataclass(frozen=True)
class Output:
    """What is kept of one output: bytes `start` to `end` of all it ever was."""

    start: int
    end: int
    dropped: int
    ended: bool


@dataclass(frozen=True)
class SupervisorState:
    """An attendant, as it said."""

    key: bytes  # of the script that runs, or whose result is kept
    error: int  # errno of the request; 0: done
    exit_status: int | None  # wait status of the program; None while it runs
    busy: bool
    done: bool
    done_status: int  # exit code of the script
    pid: int  # of the program, inside the sandbox
    written: int  # bytes of stdin taken so far
    capacity: int
    outputs: tuple[Output, Output]


@dataclass(frozen=True)
class Data:
    """A part of an output."""

    stream: int  # 0: stdout or the terminal, 1: stderr
    start: int  # offset of its first byte; more than requested where older bytes are gone
    ended: bool  # nothing follows
    data: bytes

    @property
    def end(self) -> int:
        return self.start + len(self.data)


@dataclass(frozen=True, kw_only=True)
class Program:
    """What an attendant starts."""

    mode: Mode
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str = "/"
    uid: int = 0
    gid: int = 0
    groups: Sequence[int] = ()  # supplementary
    root: str = ""  # of a service, in which `cwd` lies; "": the sandbox's
    log_limit: int = 1 << 20  # bytes kept of each output; not of a session
    rows: int = 24
    columns: int = 80
    first: int = 7  # session: the first of two descriptors; else 0: it waits for the first client to read


@dataclass(frozen=True)
class StartedSupervisor:
    """An attendant and its program. What it says itself comes from inside the sandbox."""

    host_pid: int  # of the attendant, as the shim says
    supervisor: int  # inside the sandbox, as the attendant says
    program: int  # the same


async def start(container: Container, name: str, program: Program) -> StartedSupervisor:
    """Start an attendant under `name`, and it the program."""
    if not program.argv or not program.argv[0]:
        raise Invalid("an empty command", sandbox=container.spec.id, hint="give a program, or a line for the shell")
    argv = [
        PROGRAM,
        f"{RUN_AREA}/{name}",
        *([program.root, program.cwd] if program.root else []),
        program.mode.value,
        str(program.uid),
        ",".join(map(str, (program.gid, *program.groups))),
        str(program.log_limit),
        str(program.rows),
        str(program.columns),
        str(program.first),
        *program.argv,
    ]
    pid, said = await _first_words(container, argv, program)
    match = re.fullmatch(rb"ok (\d{1,9}) (\d{1,9})\n", said)
    if match is not None:
        return StartedSupervisor(pid, int(match[1]), int(match[2]))
    failed = re.fullmatch(rb"error (\S{1,40}) (\d{1,5})\n", said)
    if failed is None:
        if not container.alive:
            raise SandboxDead("it died since", hint=f"pagurus restore {container.spec.id}")
        raise Conflict("it was killed while it started", hint="try again", sandbox=container.spec.id)
    refused = ShimError(failed[1].decode("ascii", "replace"), int(failed[2]))
    raise spawn.refusal(container, refused, program.argv[0], program.cwd)


async def _first_words(container: Container, argv: Sequence[str], program: Program) -> tuple[int, bytes]:
    """Start it, adopted by pid 1; its pid on the host, and what it says on its stdout until it closes that."""
    joins = program.root if container.layer == paths.runtime_layer() else ""  # an older one would keep what it is given
    cwd = "/" if program.root else program.cwd
    (pid, stream, *_), fds = await spawn.start(container, 0, 0, cwd, argv, program.env, joins=joins)
    said = Drain(fds[1], 256)
    try:
        async with asyncio.timeout(_TIMEOUT):
            await said.at_end()
    except TimeoutError:
        signal.pidfd_send_signal(fds[0], signal.SIGKILL)
        return int(pid), b""
    finally:
        said.close()
        os.close(fds[0])
        os.close(fds[2])
        container.post("release", stream)
    return int(pid), bytes(said.retained)


class Supervisor:
    """A connection to one attendant. One daemon at a time; from one event loop."""

    def __init__(self, name: str, requests: int, answers: int):
        self.name = name
        self._rq, self._rs = requests, answers
        self._loop = asyncio.get_running_loop()
        self._nonce = secrets.token_bytes(16)
        self._buffer = bytearray()
        self._stale = 0
        self._attached: asyncio.Future[SupervisorState] = self._loop.create_future()
        self._waiting: dict[int, asyncio.Future[SupervisorState | Data]] = {}
        self._standing: dict[tuple[int, ...], asyncio.Future[SupervisorState | Data]] = {}
        self._seq = 0
        self._sending = asyncio.Lock()
        self._ready = asyncio.Event()
        self.closed = False
        self._reader = PacedReader(answers, self._readable)

    @classmethod
    async def connect(cls, inside: SandboxRoot, name: str) -> tuple[Supervisor, SupervisorState]:
        """Attach to the attendant `name` of the sandbox whose pid 1 this is. Raises Gone."""
        requests, answers = await asyncio.to_thread(_open_fifos, inside, name)
        supervisor = cls(name, requests, answers)
        with contextlib.ExitStack() as undo:
            undo.callback(supervisor.close)
            try:
                async with asyncio.timeout(_TIMEOUT):
                    await supervisor._send(_Op.ATTACH, data=supervisor._nonce)
                    state = await supervisor._attached
            except TimeoutError:
                raise SupervisorGone(f"{name} does not answer", hint="kill it, or restore the sandbox") from None
            undo.pop_all()
        return supervisor, state

    # ---------------------------------------------------------------- requests

    async def state(self) -> SupervisorState:
        return await self._request(_Op.STATE)

    async def wait(self, until: Until) -> SupervisorState:
        """The state, once it is so. For as long as it takes."""
        answer = await asyncio.shield(await self._some_day(_Op.WAIT, a=until))
        assert isinstance(answer, SupervisorState)
        return answer

    async def read(self, stream: int, start: int, limit: int = CHUNK, *, wait: bool) -> Data:
        """What is kept of an output from `start`. With `wait`, not before there is something, or its end."""
        if wait:
            return self.answered(await asyncio.shield(await self.reading(stream, start, limit)))
        return self.answered(await self._call(_Op.READ, a=stream, x=start, y=limit))

    async def reading(self, stream: int, start: int, limit: int = CHUNK) -> asyncio.Future[SupervisorState | Data]:
        """What :meth:`read` with `wait` will be, for :meth:`answered`. Not to be cancelled: others may wait for it."""
        return await self._some_day(_Op.READ, a=stream, b=1, x=start, y=limit)

    def answered(self, answer: SupervisorState | Data) -> Data:
        """The answer to a request to read. Raises Conflict where the attendant had no room for it."""
        if isinstance(answer, SupervisorState):
            raise Conflict(f"{self.name} serves too many readers", hint="read less at once")
        return answer

    async def write(self, data: bytes, start: int) -> SupervisorState:
        """Offer bytes `start`... of its stdin; `written` of the answer says how far it took them."""
        return await self._request(_Op.INPUT, x=start, data=data[: _MAX_REQUEST - _REQUEST.size])

    async def close_stdin(self) -> SupervisorState:
        return await self._request(_Op.CLOSE)

    async def signal(self, number: int, *, group: bool = True) -> SupervisorState:
        return await self._request(_Op.SIGNAL, a=number, b=0 if group else 1)

    async def resize(self, rows: int, columns: int) -> SupervisorState:
        return await self._request(_Op.RESIZE, x=rows, y=columns)

    async def execute(self, key: bytes, script: bytes, limit: int) -> SupervisorState:
        """Run `script` in a session, unless the script of this key runs already, or its result is kept."""
        state = await self.state()
        if (state.busy or state.done) and state.key == key:
            return state
        if len(script) > MAX_TEXT:
            raise Invalid(f"a command of {len(script)} bytes is too long", hint="put it into a file first")
        part = _MAX_REQUEST - _REQUEST.size
        for start in range(0, len(script), part):
            state = await self._request(_Op.TEXT, x=start, data=script[start : start + part])
            if state.error:
                break
        else:
            state = await self._request(_Op.EXEC, x=len(script), y=limit, data=key)
        if state.error:
            raise Conflict(f"the session refused: {os.strerror(state.error)}", hint="wait for what runs in it")
        return state

    async def acknowledge(self, key: bytes) -> SupervisorState:
        """The result of this script has been taken: what is kept of it may go."""
        return await self._request(_Op.ACK, data=key)

    async def hold(self, held: bool) -> SupervisorState:
        """Whether the program waits for us to read what it prints (a terminal in use)."""
        return await self._request(_Op.HOLD, a=int(held))

    async def finish(self) -> None:
        """Kill the program's process group, remove the FIFOs, end."""
        with contextlib.suppress(SupervisorGone):
            await self._request(_Op.FINISH)

    async def _request(self, op: _Op, **fields: Any) -> SupervisorState:
        answer = await self._call(op, **fields)
        assert isinstance(answer, SupervisorState)
        return answer

    async def _some_day(self, op: _Op, **fields: Any) -> asyncio.Future[SupervisorState | Data]:
        """A request that the attendant keeps until there is an answer. It has room for few: so who gives up waiting
        leaves it standing, and who asks the same has the same answer."""
        requested = (op, *fields.values())
        result = self._standing.get(requested)
        if result is None or result.done():
            seq, result = self._numbered()
            self._standing[requested] = result
            result.add_done_callback(lambda done: self._stands_no_more(requested, seq, done))
            try:
                await self._send(op, seq=seq, **fields)
            except BaseException:
                result.cancel()
                raise
        return result

    def _stands_no_more(self, requested: tuple[int, ...], seq: int, done: asyncio.Future[Any]) -> None:
        self._waiting.pop(seq, None)
        if self._standing.get(requested) is done:
            del self._standing[requested]
        if not done.cancelled():
            done.exception()  # it may have no waiting caller

    def _numbered(self) -> tuple[int, asyncio.Future[SupervisorState | Data]]:
        """The number of the next request, and what will be its answer."""
        self._seq = self._seq % 0xFFFFFFF0 + 1
        future: asyncio.Future[SupervisorState | Data] = self._loop.create_future()
        self._waiting[self._seq] = future
        return self._seq, future

    async def _call(self, op: _Op, **fields: Any) -> SupervisorState | Data:
        seq, future = self._numbered()
        try:
            await self._send(op, seq=seq, **fields)
            return await future
        finally:
            self._waiting.pop(seq, None)

    async def _send(
        self, op: _Op, *, a: int = 0, b: int = 0, seq: int = 0, x: int = 0, y: int = 0, data: bytes = b""
    ) -> None:
        frame = _REQUEST.pack(_REQUEST.size + len(data), op, a, b, seq, 0, x, y) + data
        async with self._sending:
            while True:
                if self.closed:
                    raise SupervisorGone(f"{self.name} is gone")
                try:
                    os.write(self._rq, frame)
                    return
                except BlockingIOError:
                    await self._writable()
                except BrokenPipeError:
                    self.close()

    async def _writable(self) -> None:
        self._ready.clear()
        self._loop.add_writer(self._rq, self._ready.set)
        try:
            await self._ready.wait()
        finally:
            if not self.closed:
                self._loop.remove_writer(self._rq)

    # ---------------------------------------------------------------- answers

    def _readable(self) -> int:
        """Reads once; how much. What answers a request has cost the sandbox as much as us."""
        try:
            data = os.read(self._rs, 1 << 18)
        except BlockingIOError:
            return 0
        if not data:
            self.close()
            return 0
        self._buffer += data
        awaited = (self._attached.done() or self._find_nonce()) and self._take_answers()
        return LARGE if awaited else len(data)

    def _take_answers(self) -> bool:
        """Hand on the answers that are here. Whether a caller waited for one."""
        awaited = False
        while len(self._buffer) >= _HEADER.size:
            size, seq, kind = _HEADER.unpack_from(self._buffer)
            if not _HEADER.size <= size <= _MAX_FRAME:
                self.close()  # whatever this is, it is not our attendant
                break
            if len(self._buffer) < size:
                break
            body = bytes(self._buffer[_HEADER.size : size])
            del self._buffer[:size]
            answer = _decoded(kind, body)
            if answer is None:
                self.close()
                break
            awaited |= self._dispatch(seq, answer)
        return awaited

    def _find_nonce(self) -> bool:
        """Drop what a former daemon did not read; True when what follows is for us."""
        at = self._buffer.find(self._nonce)
        if at < 0:
            gone = max(0, len(self._buffer) - len(self._nonce))
            del self._buffer[:gone]
            self._stale += gone
            if self._stale > _MAX_STALE:
                self.close()
            return False
        del self._buffer[: at + len(self._nonce)]
        return True

    def _dispatch(self, seq: int, answer: SupervisorState | Data) -> bool:
        future: asyncio.Future[Any] | None = self._waiting.get(seq) if seq else self._attached
        if future is None or future.done():
            return False
        future.set_result(answer)
        return True

    def close(self) -> None:
        """Let go; the attendant lives on. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._reader.stop()
        self._loop.remove_writer(self._rq)
        self._ready.set()
        os.close(self._rs)
        os.close(self._rq)
        pending: list[asyncio.Future[Any]] = [*self._waiting.values(), self._attached]
        for future in pending:
            if not future.done():
                future.set_exception(SupervisorGone(f"{self.name} is gone"))
                future.exception()  # a call without a waiting caller is no mistake


def _decoded(kind: int, body: bytes) -> SupervisorState | Data | None:
    if kind == 0 and len(body) == _STATE.size:
        key, *fields = _STATE.unpack(body)
        error, exited, status, busy, done, done_status, pid, written, capacity, *outputs = fields
        return SupervisorState(
            key=key,
            error=error,
            exit_status=status & 0xFFFF if exited else None,
            busy=bool(busy),
            done=bool(done),
            done_status=done_status & 0xFF,
            pid=pid,
            written=written,
            capacity=capacity,
            outputs=(_output(outputs[:4]), _output(outputs[4:])),
        )
    if kind == 1 and len(body) >= _DATA.size:
        stream, start, ended = _DATA.unpack_from(body)
        return Data(stream, start, bool(ended), body[_DATA.size :])
    return None


def _output(fields: list[int]) -> Output:
    start, end, dropped, ended = fields
    return Output(start, end, dropped, bool(ended))


def _open_fifos(inside: SandboxRoot, name: str) -> tuple[int, int]:
    """Both FIFOs of an attendant that lives. Without one the request end has no reader, and opening it fails."""
    fds: list[int] = []
    try:
        with inside.opened() as root:
            for file, flags in (("rs", os.O_RDONLY), ("rq", os.O_WRONLY)):
                fds.append(open_kind(root, f"{RUN_AREA}/{name}/{file}", flags | os.O_NOFOLLOW, (stat.S_IFIFO,)))
    except (OSError, PagurusError) as error:
        for fd in fds:
            os.close(fd)
        if isinstance(error, Invalid):
            raise SupervisorGone(f"{name} is gone: something else lies in its place") from error
        if isinstance(error, PagurusError):
            raise
        raise SupervisorGone(f"{name} is not there (any more)") from error
    return fds[1], fds[0]
