"""One sandbox, as the SDK offers it: commands, checkpoints, forks, its end."""

from __future__ import annotations

import contextlib
import signal as signals
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from sandbox.errors import PagurusError, from_body
from sandbox.messages import (
    Change,
    CheckpointInfo,
    CheckpointRequest,
    Chunk,
    CreateRequest,
    ExecRequest,
    ExecResult,
    ForkEntry,
    ForkRequest,
    LabelsRequest,
    LifetimeRequest,
    Metrics,
    RestoreRequest,
    RestoreResult,
    SandboxInfo,
    SignalRequest,
    TurnInfo,
)
from sandbox.sdk.files import Files
from sandbox.sdk.gateway import Conversation
from sandbox.sdk.network import Networking
from sandbox.sdk.ports import Ports
from sandbox.sdk.processes import Processes, Terminal, Terminals, signal_number
from sandbox.sdk.services import Services
from sandbox.sdk.sessions import Sessions
from sandbox.sdk.transport import encoded, fresh_key
from sandbox.sdk.turns import Turn

if TYPE_CHECKING:
    from sandbox.sdk.client import Client


class Creation:
    """A sandbox that is being made: await it for the sandbox, or enter it to have it removed at the end."""

    def __init__(self, client: Client, request: CreateRequest) -> None:
        self._client = client
        self.request = request
        self._sandbox: Sandbox | None = None

    def __repr__(self) -> str:
        return f"<a sandbox of {self.request.image} to be made: await it, or enter it with `async with`>"

    async def _make(self) -> Sandbox:
        info = await self._client.call("POST", "/v1/sandboxes", SandboxInfo, self.request, keyed=True)
        return Sandbox(self._client, info)

    def __await__(self) -> Generator[Any, None, Sandbox]:
        return self._make().__await__()

    async def __aenter__(self) -> Sandbox:
        self._sandbox = await self._make()
        return self._sandbox

    async def __aexit__(self, *_: object) -> None:
        if self._sandbox is not None:
            await self._sandbox.remove()


class Sandbox:
    """One sandbox. ``async with`` removes it at the end."""

    def __init__(self, client: Client, info: SandboxInfo) -> None:
        self._client = client
        self._path = f"/v1/sandboxes/{info.id}"
        self._removed = False
        self.info = info  # as of the last answer that carried it; see refresh()
        self.files = Files(client, self._path)
        self.gateway = Conversation(client, self._path)
        self.network = Networking(client, self._path)
        self.processes = Processes(client, self._path)
        self.sessions = Sessions(client, self._path)
        self.terminals = Terminals(client, self._path)
        self.ports = Ports(client, self._path)
        self.services = Services(client, self._path, self.exec)

    @property
    def id(self) -> str:
        return self.info.id

    def __repr__(self) -> str:
        name = f" {self.info.name!r}" if self.info.name else ""
        return f"<Sandbox {self.id}{name} of {self.info.image}, {self.info.state}>"

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.remove()

    async def refresh(self) -> SandboxInfo:
        """The sandbox as it is now."""
        self.info = await self._client.call("GET", self._path, SandboxInfo)
        return self.info

    # ----------------------------------------------------------------- commands

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = 60.0,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: int | str | None = None,
        service: str | None = None,
        output_limit: int = 1 << 20,
        ends_turn: bool = True,
        key: str | None = None,
    ) -> ExecResult:
        """Run a command (a string for ``/bin/sh -c``, or an argument vector) and end the turn.

        `user`: ``"name"``, ``"name:group"``, ``"1000:1000"`` or a uid, by the sandbox's ``/etc/passwd`` and
        ``/etc/group``; None: the default user of the sandbox. `service`: of a composition, where it runs; None: its
        main one.

        Returns when the command has ended or `timeout` seconds have passed (then it has been killed and
        `timed_out` is set). A command that fails is a result. Of each output the first `output_limit` bytes are kept,
        at most 16 MiB; what is larger is for `stream`. The next act on the sandbox waits until this turn is captured.

        `key`: of the caller's choice, for a call that another process may have made already: the same call under the
        same key is carried out once, and answered to both.
        """
        request = _request(command, timeout, stdin, cwd, env, user, service, output_limit, ends_turn)
        return await self._client.call("POST", f"{self._path}/exec", ExecResult, request, keyed=key or True)

    def stream(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = None,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: int | str | None = None,
        service: str | None = None,
        ends_turn: bool = True,
    ) -> CommandStream:
        """Run a command and yield its output as it comes; the last chunk carries the result.

        It begins when the first chunk is requested, takes signals while it runs, and waits for a slow reader. When the
        reader leaves (closes this iterator, or dies), it is ended as after `timeout`, and so is its turn.
        """
        request = _request(command, timeout, stdin, cwd, env, user, service, 0, ends_turn)
        return CommandStream(self._client, self._path, request)

    @contextlib.asynccontextmanager
    async def pty(
        self, command: str | Sequence[str] | None = None, *, rows: int = 24, columns: int = 80, **options: Any
    ) -> AsyncIterator[Terminal]:
        """A program (None: a shell) at a terminal that ends with the block. One that stays: ``sb.terminals.open``."""
        terminal = await self.terminals.open(command, rows=rows, columns=columns, **options)
        try:
            async with terminal:
                yield terminal
        finally:
            await terminal.kill()

    def turn(self) -> Turn:
        """``async with sb.turn():`` makes all acts in the block one turn, judged and captured at its end."""
        return Turn(self._client, self._path)

    async def metrics(self) -> Metrics:
        """What it uses now: processor seconds, memory, processes, disk."""
        return await self._client.call("GET", f"{self._path}/metrics", Metrics)

    async def set_labels(self, labels: dict[str, str | None]) -> SandboxInfo:
        """Set labels, and remove those with None."""
        self.info = await self._client.call("PATCH", f"{self._path}/labels", SandboxInfo, LabelsRequest(labels=labels))
        return self.info

    async def extend(self, seconds: float | None) -> SandboxInfo:
        """Move its end: so many seconds from now, sooner or later than it was; None: it does not end by itself."""
        request = LifetimeRequest(seconds=seconds)
        self.info = await self._client.call("PUT", f"{self._path}/lifetime", SandboxInfo, request)
        return self.info

    async def turns(self) -> list[TurnInfo]:
        """What its turns did, oldest first."""
        return await self._client.call("GET", f"{self._path}/turns", list[TurnInfo])

    # ----------------------------------------------------------------- checkpoints

    async def captured(self, of: ExecResult | CheckpointInfo | str) -> CheckpointInfo:
        """Wait until the checkpoint of a turn is captured: from then on it can be restored."""
        return await self._client.checkpoint(checkpoint_of(of), wait="captured")

    async def durable(self, of: ExecResult | CheckpointInfo | str) -> CheckpointInfo:
        """Wait until the checkpoint of a turn survives the loss of power."""
        return await self._client.checkpoint(checkpoint_of(of), wait="durable")

    async def checkpoint(
        self, label: str | None = None, *, wait: Literal["captured", "durable"] = "captured"
    ) -> CheckpointInfo:
        """A checkpoint of the state as it is now."""
        request = CheckpointRequest(label=label, wait=wait)
        return await self._client.call("POST", f"{self._path}/checkpoints", CheckpointInfo, request, keyed=True)

    async def tree(self) -> list[CheckpointInfo]:
        """Its checkpoints and those that they descend from, oldest first."""
        return await self._client.call("GET", f"{self._path}/checkpoints", list[CheckpointInfo])

    async def restore(self, to: CheckpointInfo | str | None = None, *, verify: bool = False) -> RestoreResult:
        """Back to a checkpoint (None: the latest), in place. Also revives a dead sandbox.

        `verify` compares the restored processes with the checkpoint before they run; NotEqual if they differ.
        """
        request = RestoreRequest(checkpoint=None if to is None else checkpoint_id(to), verify=verify)
        return await self._client.call("POST", f"{self._path}/restore", RestoreResult, request, keyed=True)

    async def fork(self, count: int = 1, *, verify: bool = False, labels: dict[str, str] | None = None) -> list[Fork]:
        """`count` new sandboxes that continue from the state as it is now. See :meth:`Client.fork`."""
        request = ForkRequest(count=count, verify=verify, labels=labels)
        entries = await self._client.call("POST", f"{self._path}/fork", list[ForkEntry], request, keyed=True)
        return forks(self._client, entries)

    async def diff(self, since: CheckpointInfo | str, *, why: bool = False) -> list[Change]:
        """How the file tree differs from a checkpoint. `why`: with the call that changed each, where it is known."""
        requested = encoded(checkpoint=checkpoint_id(since), why=str(why).lower())
        return await self._client.call("GET", f"{self._path}/diff?{requested}", list[Change])

    # ----------------------------------------------------------------- ending

    async def kill(self) -> None:
        """Kill all its processes; restore() brings it back."""
        await self._client.call("POST", f"{self._path}/kill", dict[str, Any])

    async def remove(self) -> None:
        """Remove it with its checkpoints, but for what forks of it need. Idempotent."""
        if not self._removed:
            await self._client.call("DELETE", self._path, dict[str, Any])
            self._removed = True


class CommandStream:
    """A command whose output is streamed: iterate for its chunks."""

    def __init__(self, client: Client, path: str, request: ExecRequest) -> None:
        self._client = client
        self._path = path
        self._command = request.command
        self._key = request.key = fresh_key()
        self._chunks = _chunks(client, f"{path}/stream", request)

    def __repr__(self) -> str:
        return f"<CommandStream {self._command!r:.80}: iterate for its output>"

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        return await anext(self._chunks)

    async def aclose(self) -> None:
        """Leave it: the command is ended."""
        await self._chunks.aclose()

    async def signal(self, number: int | str = signals.SIGTERM, *, group: bool = True) -> None:
        """Send a signal (``"INT"``, ``2``) to the command with all that it started, or to it alone.

        Raises NotFound when it has ended or not begun.
        """
        request = SignalRequest(signal=signal_number(number), group=group)
        path = f"{self._path}/exec/{self._key}/signal"
        await self._client.call("POST", path, dict[str, Any], request, keyed=True)


async def _chunks(client: Client, path: str, request: ExecRequest) -> AsyncGenerator[Chunk, None]:
    """Apart from Running, which holds it: so that a loop that is left ends it at once."""
    async with contextlib.aclosing(client.frames("POST", path, Chunk, request)) as chunks:
        async for chunk in chunks:
            yield chunk
            if chunk.stream == "result":
                return


class Fork:
    """One child of a fork: a `sandbox`, or the `error` that this child alone met."""

    def __init__(self, sandbox: Sandbox | None, error: PagurusError | None) -> None:
        self._sandbox = sandbox
        self.error = error

    def __repr__(self) -> str:
        return f"<Fork {self._sandbox!r}>" if self.error is None else f"<Fork failed: {self.error}>"

    @property
    def sandbox(self) -> Sandbox:
        """The new sandbox; raises if this child failed."""
        if self._sandbox is None:
            assert self.error is not None
            raise self.error
        return self._sandbox


def _request(
    command: str | Sequence[str],
    timeout: float | None,
    stdin: bytes,
    cwd: str | None,
    env: dict[str, str] | None,
    user: int | str | None,
    service: str | None,
    output_limit: int,
    ends_turn: bool,
) -> ExecRequest:
    if not isinstance(command, str | Sequence):
        raise TypeError(f"a command is a string or a sequence of strings, not {type(command).__name__}")
    return ExecRequest(
        command=command if isinstance(command, str) else list(command),
        timeout=timeout,
        stdin=stdin,
        cwd=cwd,
        env=env or {},
        user=user,
        service=service,
        output_limit=output_limit,
        ends_turn=ends_turn,
    )


def checkpoint_id(checkpoint: str | CheckpointInfo) -> str:
    return checkpoint if isinstance(checkpoint, str) else checkpoint.id


def checkpoint_of(of: ExecResult | CheckpointInfo | str) -> str:
    if isinstance(of, ExecResult):
        if of.checkpoint is None:
            raise PagurusError("this command ended no turn, so it has no checkpoint", hint="call checkpoint()")
        return of.checkpoint
    return checkpoint_id(of)


def forks(client: Client, entries: Iterable[ForkEntry]) -> list[Fork]:
    return [
        Fork(Sandbox(client, entry.sandbox) if entry.sandbox else None, from_body(entry.error) if entry.error else None)
        for entry in entries
    ]
