"""Inspect's sandbox provider: ``sandbox="pagurus"``, found by its entry point.

What a sandbox is made from, by the second part of ``sandbox=("pagurus", ...)``: nothing (the image ``debian``), the
name of an image, a Dockerfile, a compose file (each service a sandbox of its own; they do not reach each other), or
:class:`PagurusConfig`.

Guarantee: files are read and written as the user of the sandbox may, not as the daemon could. A failure of the platform
is a `SandboxUnavailableError` with ``pagurus/CODE:``, which Inspect never shows to a model as output of a command.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, overload

from inspect_ai.util import (
    ComposeConfig,
    ComposeService,
    ExecResult,
    OutputLimitExceededError,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
    is_compose_yaml,
    is_dockerfile,
    parse_compose_yaml,
    sandboxenv,
)
from pydantic import BaseModel, ConfigDict

from pagurus.integrations import common
from sandbox import Client, CommandNotFound, Conflict, Invalid, Network, NotFound, PagurusError, Sandbox

WRITE = 128 << 20  # bytes that one call writes
DIRECTORY, ABSENT, DENIED = 45, 44, 43
READABLE = f"""
path=$(readlink -f -- "$1") && [ -e "$path" ] || exit {ABSENT}
[ ! -d "$path" ] || exit {DIRECTORY}
[ -r "$path" ] || exit {DENIED}
printf %s "$path"
"""
WRITABLE = f"""
[ ! -d "$1" ] || exit {DIRECTORY}
mkdir -p -- "$(dirname -- "$1")" && : >> "$1" || exit {DENIED}
readlink -f -- "$1" | tr -d '\\n'
"""
_IGNORED = {"command", "entrypoint", "init", "x_default", "x_local", "hostname", "stop_grace_period"}


class PagurusConfig(BaseModel, frozen=True):
    """What the sandboxes of a task are made from: an image, or a checkpoint that each sample continues from."""

    model_config = ConfigDict(extra="forbid")

    image: str = "debian"
    checkpoint: str | None = None
    cpus: float | None = None
    memory_mb: int | None = None
    internet: bool = False
    workdir: str | None = None
    user: str | None = None
    env: dict[str, str] = {}


@sandboxenv(name="pagurus")
class PagurusSandboxEnvironment(SandboxEnvironment):
    """A sandbox of the daemon that PAGURUS_HOST, PAGURUS_TOKEN and PAGURUS_CA name; else of the local one."""

    def __init__(self, host: Client, box: Sandbox, workdir: str) -> None:
        super().__init__()
        self._host, self.box, self._workdir = host, box, workdir

    @classmethod
    def config_files(cls) -> list[str]:
        return ["compose.yaml", "Dockerfile"]

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        return PagurusConfig(**config)

    @classmethod
    async def sample_init(
        cls, task_name: str, config: BaseModel | str | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        result: dict[str, SandboxEnvironment] = {}
        try:
            for name, (target, build) in _services(config).items():
                result[name] = await cls._make(task_name, target, build)
        except BaseException:
            await cls.sample_cleanup(task_name, config, result, False)
            raise
        return result

    @classmethod
    async def _make(cls, task: str, config: PagurusConfig, build: tuple[Path, Path] | None) -> SandboxEnvironment:
        host = common.connect()
        try:
            with _available():
                image = config.image if build is None else await _built(host, *build)
                box = await common.start(
                    host,
                    tool="inspect",
                    image=image,
                    checkpoint=config.checkpoint,
                    labels={"inspect.task": task[:100]},
                    **_options(config),
                )
                if config.workdir is not None and not await box.files.exists(config.workdir):
                    await box.files.mkdir(config.workdir)
                where = await box.exec("pwd", ends_turn=False)
                return cls(host, box, where.text.strip())
        except BaseException:
            await host.close()
            raise

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: BaseModel | str | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        for item in environments.values():
            environment = item.as_type(PagurusSandboxEnvironment)
            try:
                await environment.box.remove()
            finally:
                await environment._host.close()

    @classmethod
    async def task_cleanup(cls, task_name: str, config: BaseModel | str | None, cleanup: bool) -> None:
        if not cleanup:
            async with common.connect() as host:
                await common.let_stay(host, "inspect")

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        """Remove one, or all that were made for Inspect: ``inspect sandbox cleanup pagurus``."""
        async with common.connect() as host:
            for info in await host.sandboxes({common.TOOL: "inspect"}):
                if id in (None, info.id):
                    await (await host.get(info.id)).remove()

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        as_user = f" --user {user}" if user else ""
        return SandboxConnection(type="pagurus", command=f"pagurus shell{as_user} {self.box.id}", container=self.box.id)

    # ----------------------------------------------------------------- commands

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        # A command that ran out of time is not run again: it may have done half of its work.
        limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        try:
            with _available():
                result = await self.box.exec(
                    cmd,
                    timeout=timeout,
                    stdin=input.encode() if isinstance(input, str) else input or b"",
                    cwd=self._absolute(cwd or ""),
                    env=env or {},
                    user=user,
                    output_limit=min(limit, common.MAX_OUTPUT),
                )
        except CommandNotFound as error:
            if not error.message.endswith(": no such program"):
                raise PermissionError(f"{cmd[0]}: permission denied") from None
            return ExecResult(False, 127, "", error.message)
        out, errors = common.text(result.stdout), common.text(result.stderr)
        if result.timed_out:
            raise TimeoutError(f"the command took more than {timeout} seconds")
        if result.stdout_dropped or result.stderr_dropped:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, out or errors)
        return ExecResult(result.exit_code == 0, result.exit_code, out, errors)

    # ----------------------------------------------------------------- files

    async def write_file(self, file: str, contents: str | bytes) -> None:
        path = await self._path(WRITABLE, file)
        data = contents.encode() if isinstance(contents, str) else contents
        with _available():
            await self.box.files.write(path, data[:WRITE])
            for start in range(WRITE, len(data), WRITE):
                await self.box.files.append(path, data[start : start + WRITE])

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        path = await self._path(READABLE, file)
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        with _available():
            content = await self.box.files.read(path, limit=limit + 1)
        if len(content) > limit:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return content.decode() if text else content

    def _absolute(self, path: str) -> str:
        return path if path.startswith("/") else f"{self._workdir.rstrip('/')}/{path}".rstrip("/") or "/"

    async def _path(self, script: str, file: str) -> str:
        """Where `file` is, if the user of the sandbox may do with it what `script` asks."""
        with _available():
            result = await self.box.exec(["/bin/sh", "-c", script, "sh", self._absolute(file)], ends_turn=False)
        if result.exit_code == 0:
            return result.stdout.decode()
        said = common.text(result.stderr).strip()
        if result.exit_code == ABSENT:
            raise FileNotFoundError(2, "no such file", file)
        if result.exit_code == DIRECTORY:
            raise IsADirectoryError(21, "is a directory", file)
        raise PermissionError(13, said or "permission denied", file)


@contextlib.contextmanager
def _available() -> Iterator[None]:
    """Failures of the platform as Inspect knows them. What a command did is no failure."""
    try:
        yield
    except CommandNotFound:
        raise
    except (Invalid, NotFound) as error:
        if "user" in error.message:
            raise SandboxUserUnsupportedError(str(error)) from error
        raise
    except PagurusError as error:
        raise SandboxUnavailableError(common.reason(error)) from error


def _options(config: PagurusConfig) -> dict[str, Any]:
    if config.checkpoint is not None:
        return {}
    return {
        "limits": common.limits(cpus=config.cpus, memory_mb=config.memory_mb),
        "network": Network.open() if config.internet else Network.none(),
        "workdir": config.workdir,
        "user": config.user,
        "env": config.env,
    }


# --------------------------------------------------------------------------- what a task names


def _services(config: BaseModel | str | None) -> dict[str, tuple[PagurusConfig, tuple[Path, Path] | None]]:
    """The sandboxes of a sample: their settings, and the context and Dockerfile of those that are built."""
    if config is None:
        return {"default": (PagurusConfig(), None)}
    if isinstance(config, PagurusConfig):
        return {"default": (config, None)}
    if isinstance(config, str) and is_dockerfile(config):
        return {"default": (PagurusConfig(), (Path(config).resolve().parent, Path(config).resolve()))}
    if isinstance(config, str) and not is_compose_yaml(config):
        return {"default": (PagurusConfig(image=config), None)}
    base = Path(config).resolve().parent if isinstance(config, str) else Path.cwd()
    compose = parse_compose_yaml(config) if isinstance(config, str) else config
    if not isinstance(compose, ComposeConfig):
        raise Invalid(f"a sandbox is not made from a {type(config).__name__}", hint="PagurusConfig, or a file's name")
    services = compose.services
    first = next((name for name, service in services.items() if service.x_default), None)
    first = first or ("default" if "default" in services else next(iter(services)))
    order = {first: services[first], **services}
    return {name: (_settings(name, service), _context(service, base)) for name, service in order.items()}


def _settings(name: str, service: ComposeService) -> PagurusConfig:
    existing = {"image", "build", "working_dir", "user", "environment", "network_mode", "cpus", "mem_limit"} | _IGNORED
    if refused := {field for field in service.model_fields_set if getattr(service, field) is not None} - existing:
        raise Invalid(
            f"service {name}: {', '.join(sorted(refused))}: not offered by a sandbox",
            hint="remove them from compose.yaml",
        )
    environment = service.environment or {}
    if isinstance(environment, list):
        environment = dict(entry.partition("=")[::2] for entry in environment)
    return PagurusConfig(
        image=service.image or "debian",
        cpus=None if service.cpus is None else float(service.cpus),
        memory_mb=None if service.mem_limit is None else _megabytes(str(service.mem_limit)),
        internet=service.network_mode != "none",
        workdir=service.working_dir,
        user=service.user,
        env={name: str(value or "") for name, value in environment.items()},
    )


def _context(service: ComposeService, base: Path) -> tuple[Path, Path] | None:
    if service.build is None:
        return None
    named = service.build if isinstance(service.build, str) else service.build.context or "."
    context = (base / named).resolve()
    file = None if isinstance(service.build, str) else service.build.dockerfile
    return context, context / (file or "Dockerfile")


def _megabytes(size: str) -> int:
    """
    >>> _megabytes("512m"), _megabytes("0.5gb"), _megabytes("1048576")
    (512, 512, 1)
    """
    number = size.lower().rstrip("b")
    unit = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}.get(number[-1:], 1)
    return max(1, int(float(number.rstrip("kmg")) * unit) >> 20)


async def _built(host: Client, context: Path, file: Path) -> str:
    """The image of a Dockerfile. Steps that the host keeps are not carried out again."""
    name = f"inspect-{hashlib.blake2b(f'{file}'.encode(), digest_size=8).hexdigest()}"
    try:
        await host.images.build(name, context, file=file, network=Network.open(), replace=True)
    except Conflict:  # other samples build the same
        await host.images.get(name)
    return name
