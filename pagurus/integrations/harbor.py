"""Harbor's environment: ``harbor run --env pagurus.integrations.harbor:PagurusEnvironment``.

::

    environment/Dockerfile ─▶ image, named by its content ─▶ the first trial's sandbox ─▶ checkpoint "prepared"
                                                             every further trial of that task: a fork of it
    environment/docker-compose.yaml ─▶ its services and `main` in that sandbox
    the tests arrive ─▶ checkpoint "before the tests" ─▶ final.checkpoint and pagurus.json next to the trial

Guarantee: what the agent left is saved before any file of the tests is in the sandbox. A failure of the platform is an
exception with ``pagurus/CODE:``, never the result of a command.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from harbor.environments.base import BaseEnvironment, ExecResult, SandboxBuildFailedError
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.environments.docker.compose_env import legacy_log_mount_env_vars
from harbor.environments.options import EnvironmentOptions
from harbor.models.task.config import NetworkMode, NetworkPolicy
from harbor.models.trial.paths import EnvironmentPaths

from pagurus.integrations import common
from sandbox import Client, Conflict, Invalid, Network, NotFound, PagurusError, Sandbox
from sandbox.messages.runs import RUN_LABEL
from sandbox.tree import host_files

FINAL = "final.checkpoint"  # in the trial's directory: what `Store.receive` takes
RECORD = "pagurus.json"
PREPARED = "prepared"
BEFORE_TESTS = "before the tests"
MAIN = "main"  # the service of a compose file in which the agent works


class PagurusOptions(EnvironmentOptions):
    """``--ek name=value``"""

    from_checkpoint: str | None = None  # each trial continues from this one
    reuse: bool = True  # later trials of a task are forks of its first one, as it was before its agent
    save_final: bool = True  # write the state that the agent left next to the trial


@dataclass
class _PreparedTask:
    """What a task's first trial leaves for the others."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    checkpoint: str | None = None


class PagurusEnvironment(BaseEnvironment):
    """A sandbox of the daemon that PAGURUS_HOST, PAGURUS_TOKEN and PAGURUS_CA name; else of the local one."""

    options_model = PagurusOptions
    options: PagurusOptions
    _prepared: ClassVar[dict[tuple[int, str], _PreparedTask]] = {}  # by event loop and content of the environment

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._client: Client | None = None
        self._box: Sandbox | None = None
        self._saved: str | None = None
        super().__init__(*arguments, **options)

    @staticmethod
    def type() -> str:
        return "pagurus"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(
            disable_internet=True,
            network_allowlist=True,
            network_allowlist_hostnames=True,
            network_allowlist_wildcard_hostnames=True,
            network_allowlist_ipv4_addresses=True,
            network_allowlist_ipv4_cidrs=True,
            dynamic_network_policy=True,
            docker_compose=True,
        )

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True, fractional_cpus=True)

    @classmethod
    def preflight(cls, kwargs: dict[str, Any] | None = None) -> None:
        super().preflight(kwargs)
        try:
            asyncio.run(_answers())
        except PagurusError as error:
            raise SystemExit(common.reason(error)) from None

    def _validate_definition(self) -> None:
        if self._compose_files():
            return
        if self.task_env_config.docker_image is None and not self._dockerfile.is_file():
            raise FileNotFoundError(f"{self._dockerfile} is missing, and the task names no docker_image")

    @property
    def _dockerfile(self) -> Path:
        return Path(self.environment_dir) / "Dockerfile"

    def _compose_files(self) -> list[Path]:
        """Those of the task and of the run, in the order in which Harbor merges them."""
        own = Path(self.environment_dir) / "docker-compose.yaml"
        return [*([own] if own.is_file() else []), *self.extra_docker_compose_paths]

    @property
    def _uses_compose(self) -> bool:
        return bool(self._compose_files())

    # ----------------------------------------------------------------- the sandbox

    @property
    def box(self) -> Sandbox:
        """The sandbox of this trial."""
        if self._box is None:
            raise RuntimeError("the environment has not been started")
        return self._box

    async def start(self, force_build: bool) -> None:
        self._client = host = common.connect()
        with common.failures_named():
            if self.options.from_checkpoint is not None:
                await self._fork(host, self.options.from_checkpoint)
                return
            key = (id(asyncio.get_running_loop()), f"{self.environment_id} {self._settings()}")
            prepared = self._prepared.setdefault(key, _PreparedTask())
            if prepared.checkpoint is None or force_build or not self.options.reuse:
                async with prepared.lock:  # its trials start together: one builds, the others wait
                    if prepared.checkpoint is None or force_build or not self.options.reuse:
                        await self._create(host, force_build)
                        prepared.checkpoint = (await self.box.checkpoint(PREPARED)).id
                        return
            try:
                await self._fork(host, prepared.checkpoint)
            except (NotFound, Conflict):  # it went with the first trial's sandbox
                async with prepared.lock:
                    await self._create(host, force_build)
                    prepared.checkpoint = (await self.box.checkpoint(PREPARED)).id

    async def _fork(self, host: Client, checkpoint: str) -> None:
        self._box = await common.start(host, tool="harbor", checkpoint=checkpoint, labels=self._labels())
        await self.box.network.set(_network(self._network_policy))

    async def _create(self, host: Client, force_build: bool) -> None:
        if files := self._compose_files():
            await self._compose(host, files, force_build)
            return
        self._box = await common.start(
            host,
            tool="harbor",
            image=await self._image(host, force_build),
            labels=self._labels(),
            env=self._startup_env(),
            limits=common.limits(
                cpus=self._effective_cpus, memory_mb=self._effective_memory_mb, disk_mb=self._effective_storage_mb
            ),
            network=_network(self._network_policy),
            workdir=self.task_env_config.workdir,
        )
        await self.ensure_dirs(self._output_dirs())
        await self._upload_environment_dir_after_start()

    async def _compose(self, host: Client, files: list[Path], force_build: bool) -> None:
        """The services of the task's compose files, over what Harbor says of `main`."""
        main: dict[str, Any] = {"command": ["sh", "-c", "sleep infinity"]}
        if self._effective_cpus is not None:
            main["cpus"] = float(self._effective_cpus)
        if self._effective_memory_mb is not None:
            main["mem_limit"] = f"{self._effective_memory_mb}m"
        if self.task_env_config.docker_image is not None or self._dockerfile.is_file():
            main["image"] = await self._image(host, force_build)
        variables = legacy_log_mount_env_vars(self._mounts, host_value="source")
        with tempfile.TemporaryDirectory(prefix="pagurus-harbor-") as directory:
            below, above = Path(directory, "main.json"), Path(directory, "environment.json")
            await asyncio.to_thread(below.write_text, _compose_text(main))
            await asyncio.to_thread(above.write_text, _compose_text({"environment": self._startup_env()}))
            self._box = await common.compose(
                host,
                [below, *files, above],
                tool="harbor",
                labels=self._labels(),
                env={**os.environ, **self._startup_env(), **variables, "CONTEXT_DIR": str(self.environment_dir)},
                main=MAIN,
                directory=self.environment_dir,
                copy_binds=True,
                network=_network(self._network_policy),
            )
        await self.ensure_dirs(self._output_dirs())

    def _output_dirs(self) -> list[PurePosixPath]:
        paths = EnvironmentPaths.for_os(self.os)
        target = [paths.agent_dir, paths.verifier_dir, paths.artifacts_dir]
        return [*target, *(PurePosixPath(mount["target"]) for mount in self._mounts)]

    async def _image(self, host: Client, force_build: bool) -> str:
        """The image of the task: built, or as the host or a registry has it."""
        named = self.task_env_config.docker_image
        name = named or f"harbor-{self.environment_id[:24]}"
        with contextlib.suppress(NotFound):
            if named is not None or not force_build:
                return (await host.images.get(name)).name
        if named is not None:
            return (await host.images.pull(named)).name
        try:
            await host.images.build(name, self.environment_dir, network=Network.open(), replace=force_build)
        except Invalid as error:
            raise SandboxBuildFailedError(str(error)) from None
        except Conflict:  # another process has built the same since
            await host.images.get(name)
        return name

    def _labels(self) -> dict[str, str]:
        return {"harbor.task": self.environment_name, "harbor.session": self.session_id}

    def _settings(self) -> str:
        """What of the trial a fork has from the first one."""
        sizes = (self._effective_cpus, self._effective_memory_mb, self._effective_storage_mb)
        return repr((sizes, self.task_env_config.workdir, sorted(self._startup_env().items())))

    async def stop(self, delete: bool) -> None:
        box, self._box = self._box, None
        client, self._client = self._client, None
        try:
            if box is not None and delete:
                await box.remove()
            elif box is not None:
                await box.set_labels({RUN_LABEL: None})  # it stays
                await box.checkpoint("stopped")
                await box.kill()
        finally:
            if client is not None:
                await client.close()

    async def _apply_network_policy(self, network_policy: NetworkPolicy) -> None:
        with common.failures_named():
            await self.box.network.set(_network(network_policy))

    # ----------------------------------------------------------------- commands and files

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        return await self._exec(command, None, cwd or self.task_env_config.workdir, env, timeout_sec, user)

    async def service_exec(
        self,
        command: str,
        *,
        service: str | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        if self.is_main_service(service):
            return await self.exec(command, cwd=cwd, env=env, timeout_sec=timeout_sec, user=user)
        return await self._exec(command, service, cwd, env, timeout_sec, user)

    async def _exec(
        self,
        command: str,
        service: str | None,
        cwd: str | None,
        env: dict[str, str] | None,
        timeout_sec: int | None,
        user: str | int | None,
    ) -> ExecResult:
        with common.failures_named():
            result = await common.run(
                self.box,
                command,
                timeout=timeout_sec,
                cwd=cwd,
                env=self._merge_env(env) if service is None else env,
                user=self._resolve_user(user) if service is None else user,
                service=service,
            )
        out, errors = common.text(result.stdout), common.text(result.stderr)
        if (say := self._output_callback()) is not None:
            for stream, said in (("stdout", out), ("stderr", errors)):
                if said:
                    await say(said, stream)  # type: ignore[arg-type]
        if result.timed_out:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        return ExecResult(stdout=out, stderr=errors, return_code=result.exit_code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        source = Path(source_path)
        with common.failures_named():
            await self._save_before(target_path)
            content, mode = await asyncio.to_thread(_content, source)
            await self.box.files.write(target_path, content, mode=mode)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        with common.failures_named():
            await self._save_before(target_dir)
            await self.box.files.upload(source_dir, target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await self.service_download_file(source_path, target_path)

    async def service_download_file(
        self, source_path: str, target_path: Path | str, *, service: str | None = None
    ) -> None:
        with common.failures_named():
            content = await self.box.files.read(source_path, service=self._sidecar(service))
        await asyncio.to_thread(host_files.write, target_path, content)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self.service_download_dir(source_dir, target_dir)

    async def service_download_dir(
        self, source_dir: str, target_dir: Path | str, *, service: str | None = None
    ) -> None:
        with common.failures_named():
            await self.box.files.download(source_dir, target_dir, service=self._sidecar(service))

    def _sidecar(self, service: str | None) -> str | None:
        return None if self.is_main_service(service) else service

    # ----------------------------------------------------------------- the final state

    async def _save_before(self, target: str) -> None:
        """Save the agent's final state when the first file of the tests is about to come."""
        tests = EnvironmentPaths.for_os(self.os).tests_dir
        if self._saved is not None or not self.options.save_final or not PurePosixPath(target).is_relative_to(tests):
            return
        checkpoint = await self.box.checkpoint(BEFORE_TESTS, wait="durable")
        self._saved = checkpoint.id
        assert self._client is not None
        directory = Path(self.trial_paths.trial_dir)
        with (directory / FINAL).open("wb") as file:
            async for part in self._client.store.stream(checkpoint):
                file.write(part)
        turns = await self.box.turns()
        reported = {
            "sandbox": self.box.id,
            "checkpoint": checkpoint.id,
            "file": FINAL,
            "turns": [{"turn": turn.turn, "verdict": turn.verdict, "checkpoint": turn.checkpoint} for turn in turns],
        }
        (directory / RECORD).write_text(json.dumps(reported, indent=1) + "\n")


def _compose_text(main: dict[str, Any]) -> str:
    return json.dumps({"services": {MAIN: main}})


def _content(file: Path) -> tuple[bytes, int]:
    return file.read_bytes(), file.stat().st_mode & 0o777


async def _answers() -> None:
    async with common.connect() as host:
        await host.health()


def _network(policy: NetworkPolicy) -> Network:
    if policy.network_mode == NetworkMode.PUBLIC:
        return Network.open()
    if policy.network_mode == NetworkMode.NO_NETWORK:
        return Network.none()
    numbers = [host for host in policy.allowed_hosts if host.replace(".", "").replace("/", "").isdigit()]
    names = [host for host in policy.allowed_hosts if host not in numbers]
    return Network.allow(names=names, cidrs=numbers)
