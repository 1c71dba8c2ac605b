"""SWE-ReX's deployment: ``PagurusDeployment(image="debian")``, for SWE-agent and whatever else speaks its runtime.

No server of SWE-ReX runs inside, so images need no Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Any

from swerex.deployment.abstract import AbstractDeployment
from swerex.deployment.hooks.abstract import CombinedDeploymentHook, DeploymentHook
from swerex.exceptions import (
    BashIncorrectSyntaxError,
    CommandTimeoutError,
    DeploymentNotStartedError,
    NonZeroExitCodeError,
    SessionDoesNotExistError,
    SessionExistsError,
)
from swerex.runtime.abstract import (
    AbstractRuntime,
    BashInterruptAction,
    BashObservation,
    CloseBashSessionResponse,
    CloseResponse,
    Command,
    CommandResponse,
    CreateBashSessionResponse,
    IsAliveResponse,
    ReadFileRequest,
    ReadFileResponse,
    UploadRequest,
    UploadResponse,
    WriteFileRequest,
    WriteFileResponse,
)

from pagurus.integrations import common
from sandbox import Client, NotFound, PagurusError, Sandbox

UNSUPPORTED = "programs that ask (is_interactive_command) need a terminal: not offered in a session of a sandbox"


class PagurusRuntime(AbstractRuntime):
    """The runtime of one sandbox."""

    def __init__(self, box: Sandbox) -> None:
        self.box = box
        self.logger = logging.getLogger("pagurus.swe-rex")
        self._sessions: dict[str, Any] = {}

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:
        state = (await self.box.refresh()).state
        return IsAliveResponse(is_alive=state == "running", message=str(state))

    async def create_session(self, request: Any) -> CreateBashSessionResponse:
        if request.session in self._sessions:
            raise SessionExistsError(f"session {request.session} already exists")
        with common.failures_named():
            session = self._sessions[request.session] = await self.box.sessions.open("/bin/bash")
            said = ""
            for source in request.startup_source:
                said += (await session.exec(f". {source}")).text
        return CreateBashSessionResponse(output=said)

    async def run_in_session(self, action: Any) -> BashObservation:
        session = self._sessions.get(action.session)
        if session is None:
            raise SessionDoesNotExistError(f"session {action.session} does not exist")
        if isinstance(action, BashInterruptAction):
            with contextlib.suppress(NotFound), common.failures_named():
                await session.signal("INT")
            return BashObservation(output="", exit_code=0)
        if action.is_interactive_command or action.is_interactive_quit or action.expect:
            raise NotImplementedError(UNSUPPORTED)
        if action.check == "raise" and await self._is_broken(action.command):
            raise BashIncorrectSyntaxError(f"bash cannot parse {action.command!r}")
        with common.failures_named():
            result = await session.exec(action.command, timeout=action.timeout, output_limit=common.MAX_OUTPUT)
        said = common.text(result.stdout + result.stderr)
        if result.timed_out:
            raise CommandTimeoutError(
                f"timeout after {action.timeout} seconds while running command {action.command!r}"
            )
        if action.check == "raise" and result.exit_code != 0:
            why = f"Command {action.command!r} failed with exit code {result.exit_code}. {action.error_msg}"
            raise NonZeroExitCodeError(f"{why.rstrip()} Here is the output:\n{said}")
        code = None if action.check == "silent" else result.exit_code
        return BashObservation(output=said.rstrip("\n"), exit_code=code)

    async def _is_broken(self, command: str) -> bool:
        """Whether bash cannot even parse this: its session would wait for the rest of it."""
        tried = await self.box.exec(["/bin/bash", "-n"], stdin=command.encode(), ends_turn=False)
        return tried.exit_code != 0

    async def close_session(self, request: Any) -> CloseBashSessionResponse:
        session = self._sessions.pop(request.session, None)
        if session is None:
            raise SessionDoesNotExistError(f"session {request.session} does not exist")
        with common.failures_named():
            await session.close()
        return CloseBashSessionResponse()

    async def execute(self, command: Command) -> CommandResponse:
        words = command.command
        if command.shell:
            words = ["/bin/sh", "-c", words if isinstance(words, str) else " ".join(words)]
        elif isinstance(words, str):
            words = [words]
        if command.merge_output_streams:
            words = ["/bin/sh", "-c", 'exec "$@" 2>&1', "sh", *words]
        with common.failures_named():
            result = await common.run(self.box, words, timeout=command.timeout, env=command.env, cwd=command.cwd)
        if result.timed_out:
            raise CommandTimeoutError(f"timeout ({command.timeout}s) exceeded while running command")
        if command.check and result.exit_code != 0:
            said = f"stdout: {common.text(result.stdout)} stderr: {common.text(result.stderr)}"
            raise NonZeroExitCodeError(f"{command.error_msg or 'Command failed'}: {result.exit_code}. {said}")
        out, errors = common.text(result.stdout), common.text(result.stderr)
        return CommandResponse(stdout=out, stderr=errors, exit_code=result.exit_code)

    async def read_file(self, request: ReadFileRequest) -> ReadFileResponse:
        try:
            content = await self.box.files.read(request.path)
        except NotFound:
            raise FileNotFoundError(request.path) from None
        return ReadFileResponse(content=content.decode(request.encoding or "utf-8", request.errors or "strict"))

    async def write_file(self, request: WriteFileRequest) -> WriteFileResponse:
        with common.failures_named():
            await self.box.files.write(request.path, request.content)
        return WriteFileResponse()

    async def upload(self, request: UploadRequest) -> UploadResponse:
        source = Path(request.source_path)
        with common.failures_named():
            if await asyncio.to_thread(source.is_dir):
                await self.box.files.upload(source, request.target_path)
            else:
                await self.box.files.write(request.target_path, await asyncio.to_thread(source.read_bytes))
        return UploadResponse()

    async def close(self) -> CloseResponse:
        for session in self._sessions.values():
            with contextlib.suppress(PagurusError):  # the sandbox ends with all of them
                await session.close()
        self._sessions.clear()
        return CloseResponse()


class PagurusDeployment(AbstractDeployment):
    """A sandbox of an image, or one that continues from a checkpoint."""

    def __init__(
        self,
        *,
        image: str = "debian",
        checkpoint: str | None = None,
        cpus: float | None = None,
        memory_mb: int | None = 2048,
        internet: bool = False,
        logger: logging.Logger | None = None,
    ) -> None:
        self.logger = logger or logging.getLogger("pagurus.swe-rex")
        self._image, self._checkpoint = image, checkpoint
        self._options: dict[str, Any] = {
            "limits": common.limits(cpus=cpus, memory_mb=memory_mb),
            "network": common.network(internet),
        }
        self._hooks = CombinedDeploymentHook()
        self._host: Client | None = None
        self._runtime: PagurusRuntime | None = None

    def add_hook(self, hook: DeploymentHook) -> None:
        self._hooks.add_hook(hook)

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:
        return await self.runtime.is_alive(timeout=timeout)

    async def start(self, *_: Any, **__: Any) -> None:
        self._hooks.on_custom_step("Starting a sandbox")
        self._host = common.connect()
        with common.failures_named():
            box = await common.start(
                self._host, tool="swe-rex", image=self._image, checkpoint=self._checkpoint, **self._options
            )
        self._runtime = PagurusRuntime(box)

    async def stop(self, *_: Any, **__: Any) -> None:
        runtime, self._runtime = self._runtime, None
        host, self._host = self._host, None
        if runtime is not None:
            await runtime.close()
            await runtime.box.remove()
        if host is not None:
            await host.close()

    @property
    def runtime(self) -> PagurusRuntime:
        if self._runtime is None:
            raise DeploymentNotStartedError
        return self._runtime
