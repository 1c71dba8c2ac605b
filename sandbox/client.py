"""The SDK: a typed, asynchronous client of a sandbox host's daemon.

Owns: the connection, the Python surface of DESIGN's section on surfaces. Does not own: any behaviour
of a sandbox, which lives in the daemon. Guarantee: every failure is an error of :mod:`sandbox.errors`;
no class is looked up by a name that the other side supplied.

::

    async with Client() as host:
        async with await host.create("debian") as sb:
            result = await sb.exec("make test", timeout=60)
            await sb.captured(result)
            print(result.exit_code, result.verdict, result.checkpoint)
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Generator, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import aiohttp
import msgspec

from sandbox import paths
from sandbox.errors import CheckpointFailed, Closed, ErrorBody, PagurusError, Protocol, Timeout, from_body
from sandbox.messages import (
    Change,
    CheckpointInfo,
    CheckpointRequest,
    CheckpointState,
    Chunk,
    CreateRequest,
    ExecRequest,
    ExecResult,
    FileInfo,
    ForkEntry,
    ForkRequest,
    Limits,
    Network,
    RestoreRequest,
    RestoreResult,
    SandboxInfo,
    Statistics,
    TurnInfo,
)

T = TypeVar("T")
MSGPACK = "application/msgpack"
POLL = 60.0  # seconds of one long poll; a longer wait polls again
FRAME_MOST = 64 << 20  # bytes of one streamed chunk


class Client:
    """A sandbox host. `address` is the daemon's socket, or a URL where a daemon listens on TCP.

    Opens on first use; use ``async with`` or call :meth:`close`.
    """

    def __init__(self, address: str | Path | None = None, *, token: str | None = None, connections: int = 256):
        text = str(address) if address is not None else str(paths.api_socket())
        self._url = text.rstrip("/") if text.startswith(("http://", "https://")) else None
        self._socket = None if self._url else text
        self._base = self._url or "http://daemon"
        self._headers = {"Accept": MSGPACK, **({"Authorization": f"Bearer {token}"} if token else {})}
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Sandboxes live on. Idempotent."""
        self._closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None

    # ----------------------------------------------------------------- sandboxes

    def create(
        self,
        image: str,
        *,
        name: str | None = None,
        limits: Limits | None = None,
        network: Network | None = None,
        env: dict[str, str] | None = None,
        workdir: str = "/",
        labels: dict[str, str] | None = None,
        durable_answers: bool = False,
    ) -> Creation:
        """A new sandbox: ``sb = await host.create(...)``, or ``async with host.create(...) as sb``."""
        request = CreateRequest(
            image=image,
            name=name,
            limits=limits or Limits(),
            network=network or Network.none(),
            env=env or {},
            workdir=workdir,
            labels=labels or {},
            durable_answers=durable_answers,
        )
        return Creation(self, request)

    async def get(self, sandbox: str) -> Sandbox:
        """The sandbox with this id or name."""
        return Sandbox(self, await self.call("GET", f"/v1/sandboxes/{sandbox}", SandboxInfo))

    async def sandboxes(self) -> list[SandboxInfo]:
        return await self.call("GET", "/v1/sandboxes", list[SandboxInfo])

    async def images(self) -> list[str]:
        return await self.call("GET", "/v1/images", list[str])

    async def statistics(self) -> Statistics:
        return await self.call("GET", "/v1/statistics", Statistics)

    async def health(self) -> dict[str, Any]:
        return await self.call("GET", "/v1/health", dict[str, Any])

    # ----------------------------------------------------------------- checkpoints

    async def checkpoint(
        self, checkpoint: str | CheckpointInfo, *, wait: Literal["captured", "durable"] | None = None
    ) -> CheckpointInfo:
        """A checkpoint as it is now, or once it is captured or durable; raises if it failed."""
        path = f"/v1/checkpoints/{_id(checkpoint)}"
        if wait is None:
            return await self.call("GET", path, CheckpointInfo)
        done = {CheckpointState.DURABLE} | ({CheckpointState.CAPTURED} if wait == "captured" else set())
        while True:
            info = await self.call("GET", f"{path}?wait={wait}&timeout={POLL}", CheckpointInfo, timeout=POLL + 30)
            if info.state in done:
                return info
            if info.error is not None:
                raise CheckpointFailed(info.error, sandbox=info.sandbox, turn=info.turn)

    async def fork(self, checkpoint: str | CheckpointInfo, count: int = 1) -> list[Fork]:
        """`count` new sandboxes that continue from a checkpoint. Each succeeds or fails alone."""
        path = f"/v1/checkpoints/{_id(checkpoint)}/fork"
        return _forks(self, await self.call("POST", path, list[ForkEntry], ForkRequest(count=count)))

    # ----------------------------------------------------------------- the wire

    async def call(
        self, method: str, path: str, answer: type[T], body: Any = None, *, timeout: float | None = None
    ) -> T:
        """One request; the decoded answer, or the error that the daemon raised."""
        data = None if body is None else msgspec.msgpack.encode(body)
        raw = await self._raw(method, path, data, MSGPACK, timeout)
        try:
            return msgspec.msgpack.decode(raw, type=answer)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise Protocol(f"{method} {path}: the daemon's answer cannot be read: {error}") from error

    async def _raw(self, method: str, path: str, data: bytes | None, kind: str, timeout: float | None = None) -> bytes:
        async with self._request(method, path, data, kind, timeout) as response:
            return await response.read()

    @contextlib.asynccontextmanager
    async def _request(
        self, method: str, path: str, data: bytes | None, kind: str, timeout: float | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        limit = aiohttp.ClientTimeout(total=timeout, sock_connect=30)
        headers = {"Content-Type": kind} if data is not None else {}
        try:
            async with self._open().request(
                method, self._base + path, data=data, headers=headers, timeout=limit
            ) as response:
                if response.status >= 400:
                    raise _error(response.status, await response.read(), f"{method} {path}")
                yield response
        except TimeoutError as error:
            raise Timeout(f"{method} {path} took longer than {timeout} s") from error
        except aiohttp.ClientConnectorError as error:
            raise PagurusError(
                f"no daemon at {self._url or self._socket}: {error.os_error.strerror or error}",
                remedy="start one with `pagurus daemon`",
            ) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise Protocol(
                f"{method} {path}: {error or type(error).__name__}", remedy="is the daemon alive?"
            ) from error

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:
            raise Closed("the client is closed")
        if self._session is None:
            connector = (
                aiohttp.UnixConnector(self._socket, limit=self._connections)
                if self._socket
                else aiohttp.TCPConnector(limit=self._connections)
            )
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, auto_decompress=False)
        return self._session


class Creation:
    """A sandbox that is being made: await it for the sandbox, or enter it to have it removed at the end."""

    def __init__(self, client: Client, request: CreateRequest) -> None:
        self._client = client
        self._request = request
        self._sandbox: Sandbox | None = None

    async def _make(self) -> Sandbox:
        info = await self._client.call("POST", "/v1/sandboxes", SandboxInfo, self._request)
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

    @property
    def id(self) -> str:
        return self.info.id

    def __repr__(self) -> str:
        return f"<Sandbox {self.id} of {self.info.image}>"

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
        user: int = 0,
        output_limit: int = 1 << 20,
        ends_turn: bool = True,
    ) -> ExecResult:
        """Run a command (a string for ``/bin/sh -c``, or an argument vector) and end the turn.

        Returns when the command has ended or `timeout` seconds have passed (then it has been killed and
        `timed_out` is set). A command that fails is a result. The next act on the sandbox waits until this
        turn is captured.
        """
        request = _request(command, timeout, stdin, cwd, env, user, output_limit, ends_turn)
        return await self._client.call("POST", f"{self._path}/exec", ExecResult, request)

    async def stream(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = None,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: int = 0,
        ends_turn: bool = True,
    ) -> AsyncIterator[Chunk]:
        """Run a command and yield its output as it comes; the last chunk carries the result."""
        request = _request(command, timeout, stdin, cwd, env, user, 0, ends_turn)
        body = msgspec.msgpack.encode(request)
        async with self._client._request("POST", f"{self._path}/stream", body, MSGPACK) as response:
            try:
                while True:
                    size = int.from_bytes(await response.content.readexactly(4), "big")
                    if size > FRAME_MOST:
                        raise Protocol(f"a chunk of {size} bytes")
                    chunk = msgspec.msgpack.decode(await response.content.readexactly(size), type=Chunk)
                    yield chunk
                    if chunk.stream == "result":
                        return
            except EOFError as error:  # asyncio.IncompleteReadError
                raise Protocol("the stream broke off", remedy="is the daemon alive?", sandbox=self.id) from error

    async def turns(self) -> list[TurnInfo]:
        """What its turns did, oldest first."""
        return await self._client.call("GET", f"{self._path}/turns", list[TurnInfo])

    # ----------------------------------------------------------------- checkpoints

    async def captured(self, of: ExecResult | CheckpointInfo | str) -> CheckpointInfo:
        """Wait until the checkpoint of a turn is captured: from then on it can be restored."""
        return await self._client.checkpoint(_checkpoint_of(of), wait="captured")

    async def durable(self, of: ExecResult | CheckpointInfo | str) -> CheckpointInfo:
        """Wait until the checkpoint of a turn survives the loss of power."""
        return await self._client.checkpoint(_checkpoint_of(of), wait="durable")

    async def checkpoint(
        self, label: str | None = None, *, wait: Literal["captured", "durable"] = "captured"
    ) -> CheckpointInfo:
        """A checkpoint of the state as it is now."""
        request = CheckpointRequest(label=label, wait=wait)
        return await self._client.call("POST", f"{self._path}/checkpoints", CheckpointInfo, request)

    async def tree(self) -> list[CheckpointInfo]:
        """Its checkpoints and those that they descend from, oldest first."""
        return await self._client.call("GET", f"{self._path}/checkpoints", list[CheckpointInfo])

    async def restore(self, to: CheckpointInfo | str | None = None, *, verify: bool = False) -> RestoreResult:
        """Back to a checkpoint (None: the latest), in place. Also revives a dead sandbox.

        `verify` compares the restored processes with the checkpoint before they run; NotEqual if they differ.
        """
        request = RestoreRequest(checkpoint=None if to is None else _id(to), verify=verify)
        return await self._client.call("POST", f"{self._path}/restore", RestoreResult, request)

    async def fork(self, count: int = 1) -> list[Fork]:
        """`count` new sandboxes that continue from the state as it is now."""
        entries = await self._client.call("POST", f"{self._path}/fork", list[ForkEntry], ForkRequest(count=count))
        return _forks(self._client, entries)

    async def diff(self, since: CheckpointInfo | str) -> list[Change]:
        """How the file tree differs from a checkpoint."""
        return await self._client.call("GET", f"{self._path}/diff?checkpoint={_id(since)}", list[Change])

    # ----------------------------------------------------------------- ending

    async def kill(self) -> None:
        """Kill all its processes; restore() brings it back."""
        await self._client.call("POST", f"{self._path}/kill", dict[str, Any])

    async def remove(self) -> None:
        """Remove it with its checkpoints, but for what forks of it need. Idempotent."""
        if not self._removed:
            self._removed = True
            await self._client.call("DELETE", self._path, dict[str, Any])


class Fork:
    """One child of a fork: a `sandbox`, or the `error` that this child alone met."""

    def __init__(self, sandbox: Sandbox | None, error: str | None) -> None:
        self._sandbox = sandbox
        self.error = error

    @property
    def sandbox(self) -> Sandbox:
        """The new sandbox; raises if this child failed."""
        if self._sandbox is None:
            raise PagurusError(f"fork failed: {self.error}")
        return self._sandbox


class Files:
    """The file tree of a sandbox. Paths are absolute or relative to its root."""

    def __init__(self, client: Client, path: str) -> None:
        self._client = client
        self._path = path

    async def read(self, path: str) -> bytes:
        """The content of a regular file."""
        return await self._client._raw("GET", f"{self._path}/files?{_encoded(path=path)}", None, "")

    async def write(self, path: str, data: bytes | str, *, mode: int = 0o644, append: bool = False) -> None:
        """Write a regular file; missing parents are made. Text is UTF-8. The next turn captures it."""
        query = _encoded(path=path, mode=f"{mode:o}", append="1" if append else "0")
        content = data.encode() if isinstance(data, str) else bytes(data)
        await self._client._raw("PUT", f"{self._path}/files?{query}", content, "application/octet-stream")

    async def list(self, path: str = "/") -> list[FileInfo]:
        """The entries of a directory, by name."""
        return await self._client.call("GET", f"{self._path}/entries?{_encoded(path=path)}", list[FileInfo])


# --------------------------------------------------------------------------- helpers


def _request(
    command: str | Sequence[str],
    timeout: float | None,
    stdin: bytes,
    cwd: str | None,
    env: dict[str, str] | None,
    user: int,
    output_limit: int,
    ends_turn: bool,
) -> ExecRequest:
    return ExecRequest(
        command=command if isinstance(command, str) else list(command),
        timeout=timeout,
        stdin=stdin,
        cwd=cwd,
        env=env or {},
        user=user,
        output_limit=output_limit,
        ends_turn=ends_turn,
    )


def _id(checkpoint: str | CheckpointInfo) -> str:
    return checkpoint if isinstance(checkpoint, str) else checkpoint.id


def _checkpoint_of(of: ExecResult | CheckpointInfo | str) -> str:
    if isinstance(of, ExecResult):
        if of.checkpoint is None:
            raise PagurusError("this command ended no turn, so it has no checkpoint", remedy="call checkpoint()")
        return of.checkpoint
    return _id(of)


def _forks(client: Client, entries: Iterable[ForkEntry]) -> list[Fork]:
    return [Fork(Sandbox(client, entry.sandbox) if entry.sandbox else None, entry.error) for entry in entries]


def _encoded(**query: str) -> str:
    from urllib.parse import urlencode

    return urlencode(query)


def _error(status: int, raw: bytes, where: str) -> PagurusError:
    try:
        return from_body(msgspec.msgpack.decode(raw, type=ErrorBody))
    except (msgspec.DecodeError, msgspec.ValidationError):
        return PagurusError(f"{where}: status {status}", remedy="see the daemon's log")
