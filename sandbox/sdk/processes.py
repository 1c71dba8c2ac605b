"""Programs that outlive the call that started them: background processes and terminals.

A handle names a program of the sandbox's present state: after a restore it is the one of the checkpoint, with the log
that it had then.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal as signals
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from sandbox.errors import Closed, Invalid, PagurusError
from sandbox.messages import (
    LogChunk,
    Logs,
    ProcessInfo,
    ProcessRequest,
    ProgramKind,
    ProgramState,
    SignalRequest,
    TerminalRequest,
)
from sandbox.sdk.transport import Facet, Transport, encoded

if TYPE_CHECKING:
    import aiohttp

POLL = 60.0  # seconds of one long poll
PART = 1 << 20  # bytes of stdin in one call
TYPED_RETAINED = 1 << 16  # bytes of input that are sent again when the connection to the daemon broke
RETRIES = 40
PAUSE = 0.25  # seconds


class Processes(Facet):
    """The background processes of a sandbox."""

    area = "/processes"

    async def start(
        self,
        command: str | Sequence[str],
        *,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        user: int | str | None = None,
        service: str | None = None,
        stdin: Literal["pipe"] | None = None,
        log_limit: int = 1 << 20,
        ends_turn: bool = True,
        excluded: bool = False,
    ) -> Process:
        """Start a program and return at once. Of each output the newest `log_limit` bytes are kept.

        `service`: of a composition, where it runs; None: its main one.

        Starting is a turn: once it is captured, a restore brings the process back. Not one that is `excluded`: that it
        runs makes no checkpoint, and after a restore or in a fork it is not there. For an agent that keeps its state
        in files or gets its record again: restart it then. What it does to files, and what it starts, counts; so
        `command` is the agent itself, and a launcher in front of it would have to `exec` it.
        """
        request = ProcessRequest(
            command=command if isinstance(command, str) else list(command),
            env=env or {},
            cwd=cwd,
            user=user,
            service=service,
            stdin=stdin == "pipe",
            log_limit=log_limit,
            ends_turn=ends_turn,
            excluded=excluded,
        )
        info = await self._client.call("POST", self._path, ProcessInfo, request, keyed=True)
        return Process(self._client, self._path, info)

    async def list(self) -> list[Process]:
        """Those of the sandbox's present state, oldest first; the latest ended ones too."""
        infos = await self._client.call("GET", self._path, list[ProcessInfo])
        return [Process(self._client, self._path, info) for info in infos if info.kind is ProgramKind.PROCESS]

    async def get(self, process: str) -> Process:
        """The process with this id."""
        return Process(self._client, self._path, await self._client.call("GET", f"{self._path}/{process}", ProcessInfo))


class Process:
    """A background process."""

    def __init__(self, client: Transport, path: str, info: ProcessInfo) -> None:
        self._client = client
        self._path = f"{path}/{info.id}"
        self._written = info.written
        self.info = info  # as of the last answer

    @property
    def id(self) -> str:
        return self.info.id

    def __repr__(self) -> str:
        return f"<Process {self.id} {self.info.state}: {self.info.command}>"

    async def refresh(self) -> ProcessInfo:
        """The process as it is now, also after a restore; what is written next follows what it has got until then."""
        self.info = await self._client.call("GET", self._path, ProcessInfo)
        self._written = self.info.written
        return self.info

    async def wait(self, timeout: float | None = None) -> int | None:
        """Its exit code (128 + signal number when killed by one) once it has ended; None after `timeout` seconds.

        Raises SandboxDead when all of its sandbox was killed, now or before; Closed when it was lost without: killed
        together with what held its outputs.
        """
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        while True:
            left = POLL if deadline is None else min(POLL, max(0.0, deadline - asyncio.get_running_loop().time()))
            path = f"{self._path}/wait?{encoded(timeout=f'{left:.3f}')}"
            self.info = await self._client.call("GET", path, ProcessInfo, timeout=left + 60)
            if self.info.state is ProgramState.EXITED:
                return self.info.exit_code
            if self.info.state is ProgramState.LOST:
                raise Closed(f"process {self.id} was lost", hint="restore the sandbox, or start it again")
            if deadline is not None and asyncio.get_running_loop().time() >= deadline:
                return None

    async def signal(self, number: int | str = signals.SIGTERM, *, group: bool = True) -> None:
        """Send a signal (``"INT"``, ``2``) to its process group (or to it alone)."""
        request = SignalRequest(signal=signal_number(number), group=group)
        self.info = await self._client.call("POST", f"{self._path}/signal", ProcessInfo, request, keyed=True)

    async def kill(self, number: int | str = signals.SIGKILL) -> None:
        """The same, with SIGKILL by default."""
        await self.signal(number)

    async def remove(self) -> None:
        """End it with all that it started, and forget its log."""
        await self._client.call("DELETE", self._path, dict[str, Any])

    async def logs(self, since: Logs | None = None) -> Logs:
        """What is kept of its outputs: all of it, or what follows an earlier answer."""
        out, errors = (since.stdout_end, since.stderr_end) if since is not None else (0, 0)
        return await self._client.call("GET", f"{self._path}/logs?{_since(out, errors)}", Logs)

    async def stream(self, since: Logs | None = None) -> AsyncIterator[LogChunk]:
        """Its outputs as they come, from the oldest byte kept, until it has closed both."""
        out, errors = (since.stdout_end, since.stderr_end) if since is not None else (0, 0)
        path = f"{self._path}/follow?{_since(out, errors)}"
        async with contextlib.aclosing(self._client.frames("GET", path, LogChunk)) as chunks:
            async for chunk in chunks:
                if chunk.ended:
                    return
                yield chunk

    async def write(self, data: bytes | str) -> None:
        """Give it stdin. Returns when it has taken all, so a process that does not read makes us wait."""
        content = data.encode() if isinstance(data, str) else bytes(data)
        for start in range(0, len(content), PART):
            part = content[start : start + PART]
            await self._send(part, close=False)

    async def close_stdin(self) -> None:
        """Nothing follows: it reads the end of its stdin."""
        await self._send(b"", close=True)

    async def _send(self, part: bytes, *, close: bool) -> None:
        query = encoded(offset=str(self._written), close="true" if close else "false")
        await self._client.raw("POST", f"{self._path}/stdin?{query}", part, "application/octet-stream")
        self._written += len(part)


def signal_number(signal: int | str) -> int:
    """
    >>> signal_number("INT"), signal_number("SIGTERM"), signal_number(9)
    (2, 15, 9)
    """
    if isinstance(signal, int):
        return int(signal)
    try:
        return int(signals.Signals[f"SIG{signal.upper().removeprefix('SIG')}"])
    except KeyError:
        raise Invalid(f"no such signal: {signal}", hint="a name such as INT, or a number") from None


def _since(out: int, errors: int) -> str:
    return encoded(stdout=str(out), stderr=str(errors))


class Terminals(Facet):
    """The terminals of a sandbox."""

    async def list(self) -> list[ProcessInfo]:
        """Those of the sandbox's present state."""
        infos = await self._client.call("GET", f"{self._path}/processes", list[ProcessInfo])
        return [info for info in infos if info.kind is ProgramKind.TERMINAL]

    async def open(
        self,
        command: str | Sequence[str] | None = None,
        *,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        user: int | str | None = None,
        service: str | None = None,
        rows: int = 24,
        columns: int = 80,
    ) -> Terminal:
        """Start a program (None: a shell) at a new terminal. Enter the result to sit down at it."""
        request = TerminalRequest(
            command=command if isinstance(command, str) or command is None else list(command),
            env=env or {},
            cwd=cwd,
            user=user,
            service=service,
            rows=rows,
            columns=columns,
        )
        info = await self._client.call("POST", f"{self._path}/terminals", ProcessInfo, request, keyed=True)
        return Terminal(self._client, self._path, info)

    async def get(self, terminal: str) -> Terminal:
        """The terminal with this id, to sit down at it again."""
        info = await self._client.call("GET", f"{self._path}/processes/{terminal}", ProcessInfo)
        return Terminal(self._client, self._path, info)


class Terminal:
    """A program at a terminal. ``async with`` sits down at it and leaves it at the end; the program lives on.

    Iterate for its output, raw bytes as they come, until the program has ended; then `exit_code` is set. A daemon
    that is restarted interrupts nothing.
    """

    def __init__(self, client: Transport, path: str, info: ProcessInfo) -> None:
        self._client = client
        self._path = path
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._stack = contextlib.AsyncExitStack()
        self._observed: int | None = None  # output up to here has been sent
        self._typed = bytearray()  # the latest input, up to byte `_end` of all
        self._end = 0
        self._size: tuple[int, int] | None = None
        self.info = info
        self.exit_code: int | None = None

    @property
    def id(self) -> str:
        return self.info.id

    def __repr__(self) -> str:
        return f"<Terminal {self.id} {self.info.state}: {self.info.command}>"

    async def __aenter__(self) -> Terminal:
        await self._attach()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _attach(self) -> None:
        from aiohttp import WSMsgType

        since = {} if self._observed is None else {"since": str(self._observed)}
        size = {} if self._size is None else {"rows": str(self._size[0]), "columns": str(self._size[1])}
        query = encoded(**since, **size)
        self._socket = await self._stack.enter_async_context(
            self._client.socket(f"{self._path}/terminals/{self.id}/attach?{query}")
        )
        said = await self._socket.receive()
        if said.type is not WSMsgType.TEXT:
            raise ConnectionResetError("the daemon closed the terminal at once")
        begin = msgspec.json.decode(said.data, type=dict[str, int])
        first, self._observed = self._observed is None, begin["start"]
        if first:
            self._end = begin["written"]
        elif 0 < (missing := self._end - begin["written"]) <= len(self._typed):
            await self._socket.send_bytes(bytes(self._typed[-missing:]))

    async def _again(self) -> None:
        """The connection broke: a new daemon has the same terminal."""
        from aiohttp import ClientError

        await self._stack.aclose()
        for attempt in range(RETRIES):
            try:
                await self._attach()
                return
            except (PagurusError, ConnectionError, ClientError):
                if attempt == RETRIES - 1:
                    raise
                await asyncio.sleep(PAUSE)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._output()

    async def _output(self) -> AsyncIterator[bytes]:
        while (data := await self.read()) is not None:
            yield data

    async def read(self) -> bytes | None:
        """The next output; None once the program has ended."""
        from aiohttp import WSMsgType

        while self.exit_code is None:
            if self._socket is None:
                raise Closed("not at the terminal", hint="use it as a context manager")
            message = await self._socket.receive()
            if message.type is WSMsgType.BINARY:
                self._observed = (self._observed or 0) + len(message.data)
                return bytes(message.data)
            if message.type is WSMsgType.TEXT:
                self.exit_code = msgspec.json.decode(message.data, type=dict[str, int]).get("exit")
            else:
                await self._again()
        return None

    async def write(self, data: bytes | str) -> None:
        """Type something."""
        from aiohttp import ClientError

        content = data.encode() if isinstance(data, str) else bytes(data)
        self._typed += content
        self._end += len(content)
        del self._typed[:-TYPED_RETAINED]
        if self._socket is None:
            raise Closed("not at the terminal", hint="use it as a context manager")
        with contextlib.suppress(ConnectionError, ClientError):  # the reader attaches again, and sends it then
            await self._socket.send_bytes(content)

    async def resize(self, rows: int, columns: int) -> None:
        """Set the size of the window."""
        from aiohttp import ClientError

        self._size = (rows, columns)
        if self._socket is not None:
            with contextlib.suppress(ConnectionError, ClientError):
                await self._socket.send_str(msgspec.json.encode({"rows": rows, "columns": columns}).decode())

    async def kill(self) -> None:
        """End the program and remove the terminal."""
        await self._client.call("DELETE", f"{self._path}/processes/{self.id}", dict[str, Any])
