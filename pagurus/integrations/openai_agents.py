"""The OpenAI Agents SDK's sandbox client: ``SandboxRunConfig(client=PagurusSandboxClient(), options=...)``.

A session that is shut down keeps its sandbox with a checkpoint; `resume` brings back its processes as well as its
files, and a session whose sandbox is gone is filled from the SDK's snapshot, as everywhere.
"""

from __future__ import annotations

import contextlib
import io
import uuid
from pathlib import Path
from typing import Any, Literal

from agents.sandbox.errors import ExecTimeoutError, ExecTransportError, WorkspaceReadNotFoundError
from agents.sandbox.manifest import Manifest
from agents.sandbox.session import SandboxSession, SandboxSessionState
from agents.sandbox.session.base_sandbox_session import BaseSandboxSession
from agents.sandbox.session.runtime_helpers import RESOLVE_WORKSPACE_PATH_HELPER, RuntimeHelperScript
from agents.sandbox.session.sandbox_client import BaseSandboxClient, BaseSandboxClientOptions
from agents.sandbox.session.workspace_payloads import coerce_write_payload
from agents.sandbox.snapshot import SnapshotBase, SnapshotSpec, resolve_snapshot
from agents.sandbox.types import ExecResult, ExposedPortEndpoint, User

from pagurus.integrations import common
from sandbox import Client, NotFound, PagurusError, Sandbox
from sandbox.messages import SandboxState
from sandbox.messages.runs import RUN_LABEL

TIMEOUT = 600.0  # seconds of a command that has no time of its own


class PagurusSandboxClientOptions(BaseSandboxClientOptions):
    """What a sandbox is made of."""

    type: Literal["pagurus"] = "pagurus"
    image: str = "debian"
    checkpoint: str | None = None
    cpus: float | None = None
    memory_mb: int | None = 2048
    internet: bool = False
    exposed_ports: tuple[int, ...] = ()


class PagurusSandboxSessionState(SandboxSessionState):
    type: Literal["pagurus"] = "pagurus"
    sandbox_id: str = ""
    options: PagurusSandboxClientOptions = PagurusSandboxClientOptions()


class PagurusSandboxSession(BaseSandboxSession):
    """One sandbox, whose workspace is the root of the manifest."""

    state: PagurusSandboxSessionState

    def __init__(self, *, state: PagurusSandboxSessionState, host: Client, box: Sandbox) -> None:
        self.state, self._host, self.box = state, host, box
        self._forwarded: dict[int, tuple[Any, str, int]] = {}

    def _runtime_helpers(self) -> tuple[RuntimeHelperScript, ...]:
        return (RESOLVE_WORKSPACE_PATH_HELPER,)

    async def _validate_path_access(self, path: Path | str, *, for_write: bool = False) -> Path:
        """Links are those of the sandbox, so they are resolved there."""
        return await self._validate_remote_path_access(path, for_write=for_write)

    async def _prepare_backend_workspace(self) -> None:
        with common.failures_named():
            await self._root()

    async def _root(self) -> str:
        root = str(self.state.manifest.root)
        if not await self.box.files.exists(root):
            await self.box.files.mkdir(root)
        return root

    async def _exec_internal(self, *command: str | Path, timeout: float | None = None) -> ExecResult:
        words = [str(word) for word in command]
        root = str(self.state.manifest.root)
        try:
            result = await self.box.exec(
                words,
                cwd=root if self.state.workspace_root_ready else "/",
                env={name: str(value) for name, value in (await self._environment()).items()},
                timeout=timeout or TIMEOUT,
                output_limit=common.MAX_OUTPUT,
            )
        except PagurusError as error:
            raise ExecTransportError(command=command, cause=error, message=common.reason(error)) from error
        if result.timed_out:
            raise ExecTimeoutError(command=command, timeout_s=timeout or TIMEOUT)
        return ExecResult(stdout=result.stdout, stderr=result.stderr, exit_code=result.exit_code)

    async def _environment(self) -> dict[str, str]:
        return dict(await self.state.manifest.environment.resolve())

    def _prepare_exec_command(
        self, *command: str | Path, shell: bool | list[str], user: str | User | None
    ) -> list[str]:
        words = super()._prepare_exec_command(*command, shell=shell, user=None)
        name = user.name if isinstance(user, User) else user
        return ["su", "-s", "/bin/sh", name, "-c", 'exec "$0" "$@"', *words] if name else words

    async def read(self, path: Path, *, user: str | User | None = None) -> io.IOBase:
        if user is not None:
            await self._check_read_with_exec(path, user=user)
        place = await self._validate_path_access(path)
        try:
            return io.BytesIO(await self.box.files.read(str(place)))
        except NotFound as error:
            raise WorkspaceReadNotFoundError(path=path, cause=error) from error

    async def write(self, path: Path, data: io.IOBase, *, user: str | User | None = None) -> None:
        if user is not None:
            await self._check_write_with_exec(path, user=user)
        place = await self._validate_path_access(path, for_write=True)
        with common.failures_named():
            await self.box.files.write(str(place), coerce_write_payload(path=path, data=data).stream.read())

    async def running(self) -> bool:
        try:
            return (await self.box.refresh()).state is SandboxState.RUNNING
        except PagurusError:
            return False

    async def persist_workspace(self) -> io.IOBase:
        skipped = [f"--exclude=./{path}" for path in self._persist_workspace_skip_relpaths()]
        with common.failures_named():
            root = await self._root()
            name = f"/tmp/.pagurus-{uuid.uuid4().hex}.tar"
            made = await self.box.exec(["tar", "-C", root, *skipped, "-cf", name, "."], timeout=TIMEOUT)
            try:
                if made.exit_code != 0:
                    raise RuntimeError(f"the workspace could not be saved: {common.text(made.stderr)[-1000:]}")
                return io.BytesIO(await self.box.files.read(name))
            finally:
                await self.box.exec(["rm", "-f", name])

    async def hydrate_workspace(self, data: io.IOBase) -> None:
        with common.failures_named():
            root = await self._root()
            name = f"/tmp/.pagurus-{uuid.uuid4().hex}.tar"
            await self.box.files.write(name, data.read())
            made = await self.box.exec(["tar", "-C", root, "-xf", name], timeout=TIMEOUT)
            await self.box.exec(["rm", "-f", name])
            if made.exit_code != 0:
                raise RuntimeError(f"the workspace could not be filled: {common.text(made.stderr)[-1000:]}")

    async def _resolve_exposed_port(self, port: int) -> ExposedPortEndpoint:
        if port not in self._forwarded:
            forward = self.box.ports.forward(port)
            address = await forward.__aenter__()
            name, _, number = str(address).rpartition(":")
            self._forwarded[port] = forward, name, int(number)
        _, host, local = self._forwarded[port]
        return ExposedPortEndpoint(host=host, port=local)

    async def _shutdown_backend(self) -> None:
        """Save the state and end the processes; :meth:`PagurusSandboxClient.resume` brings both back."""
        for forward, _, _ in self._forwarded.values():
            await forward.__aexit__(None, None, None)
        self._forwarded.clear()
        if await self.running():
            with common.failures_named():
                await self.box.set_labels({RUN_LABEL: None})  # it outlives this process
                await self.box.checkpoint("stopped")
                await self.box.kill()


class PagurusSandboxClient(BaseSandboxClient[PagurusSandboxClientOptions | None]):
    """Sandboxes of the daemon that PAGURUS_HOST, PAGURUS_TOKEN and PAGURUS_CA name; else of the local one."""

    backend_id = "pagurus"
    supports_default_options = True

    def __init__(self) -> None:
        super().__init__()
        self._host = common.connect()

    async def create(
        self,
        *,
        snapshot: SnapshotSpec | SnapshotBase | None = None,
        manifest: Manifest | None = None,
        options: PagurusSandboxClientOptions | None = None,
    ) -> SandboxSession:
        chosen = options or PagurusSandboxClientOptions()
        state = PagurusSandboxSessionState(
            manifest=self._validate_manifest_for_create(manifest or Manifest()),
            snapshot=resolve_snapshot(snapshot, str(uuid.uuid4())),
            exposed_ports=chosen.exposed_ports,
            options=chosen,
        )
        return await self._session(state)

    async def _session(self, state: PagurusSandboxSessionState, box: Sandbox | None = None) -> SandboxSession:
        """A session, of a new sandbox where none is given."""
        preserved, chosen = box is not None, state.options
        if box is None:
            with common.failures_named():
                box = await common.start(
                    self._host,
                    tool="openai-agents",
                    image=chosen.image,
                    checkpoint=chosen.checkpoint,
                    limits=common.limits(cpus=chosen.cpus, memory_mb=chosen.memory_mb),
                    network=common.network(chosen.internet),
                )
            state.sandbox_id, state.workspace_root_ready = box.id, False
        inner = PagurusSandboxSession(state=state, host=self._host, box=box)
        inner._set_start_state_preserved(preserved)
        return self._wrap_session(inner)

    async def delete(self, session: SandboxSession) -> SandboxSession:
        inner = session._inner
        if not isinstance(inner, PagurusSandboxSession):
            raise TypeError("a session of PagurusSandboxClient is needed")
        with common.failures_named(), contextlib.suppress(NotFound):
            await inner.box.remove()
        return session

    async def resume(self, state: SandboxSessionState) -> SandboxSession:
        if not isinstance(state, PagurusSandboxSessionState):
            raise TypeError("a state of PagurusSandboxClient is needed")
        state.assert_path_grants_rebound()
        with common.failures_named():
            try:
                box = await self._host.get(state.sandbox_id)
            except NotFound:
                return await self._session(state)
            if (await box.refresh()).state is SandboxState.DEAD:
                await box.restore()
                await box.set_labels({**await common.marks("openai-agents")})
        return await self._session(state, box)

    def deserialize_session_state(self, payload: dict[str, object]) -> SandboxSessionState:
        return self._deserialize_session_state_payload(payload, PagurusSandboxSessionState)

    async def close(self) -> None:
        """End the connection to the daemon."""
        await self._host.close()
