"""Inspect's sandbox provider: ``sandbox="pagurus"``, found by its entry point.

What a sandbox is made from, by the second part of ``sandbox=("pagurus", ...)``: nothing (the image ``debian``), the
name of an image, a Dockerfile, a compose file (one sandbox, whose services are Inspect's sandboxes), or
:class:`PagurusConfig`.

Guarantee: files are read and written as the user of the sandbox may, not as the daemon could. A failure of the platform
is a `SandboxUnavailableError` with ``pagurus/CODE:``, which Inspect never shows to a model as output of a command.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, overload

from inspect_ai.util import (
    ComposeConfig,
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

    def __init__(self, host: Client, box: Sandbox, workdir: str, service: str | None = None) -> None:
        super().__init__()
        self._host, self.box, self._workdir, self._service = host, box, workdir, service

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
        if isinstance(config, ComposeConfig) or (isinstance(config, str) and is_compose_yaml(config)):
            return await cls._compose(task_name, config, metadata)
        return {"default": await cls._make(task_name, *_named(config))}

    @classmethod
    async def _compose(
        cls, task: str, config: ComposeConfig | str, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """Each service of a compose file is a sandbox of Inspect's; the default one is first."""
        host = common.connect()
        box: Sandbox | None = None
        try:
            with _available(), _compose_file(config) as (file, directory):
                box = await common.compose(
                    host,
                    [file],
                    tool="inspect",
                    labels={"inspect.task": task[:100]},
                    env={**os.environ, **_variables(metadata)},
                    main=_default_service(config),
                    directory=directory,
                    copy_binds=True,
                    network=Network.open(),
                )
                names = [info.name for info in await box.services.list()]
                main = _default_service(config) or names[0]
                result: dict[str, SandboxEnvironment] = {}
                for name in sorted(names, key=lambda name: name != main):
                    where = await box.exec(["/bin/sh", "-c", "pwd"], service=name, ends_turn=False)
                    result[name] = cls(host, box, where.text.strip(), name)
                return result
        except BaseException:
            if box is not None:
                await box.remove()
            await host.close()
            raise

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
        named = f" --service {self._service}" if self._service else ""
        command = f"pagurus shell{as_user}{named} {self.box.id}"
        return SandboxConnection(type="pagurus", command=command, container=self.box.id)

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
                    service=self._service,
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
            await self.box.files.write(path, data[:WRITE], service=self._service)
            for start in range(WRITE, len(data), WRITE):
                await self.box.files.append(path, data[start : start + WRITE], service=self._service)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        path = await self._path(READABLE, file)
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        with _available():
            content = await self.box.files.read(path, limit=limit + 1, service=self._service)
        if len(content) > limit:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return content.decode() if text else content

    def _absolute(self, path: str) -> str:
        return path if path.startswith("/") else f"{self._workdir.rstrip('/')}/{path}".rstrip("/") or "/"

    async def _path(self, script: str, file: str) -> str:
        """Where `file` is, if the user of the sandbox may do with it what `script` asks."""
        with _available():
            command = ["/bin/sh", "-c", script, "sh", self._absolute(file)]
            result = await self.box.exec(command, service=self._service, ends_turn=False)
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


def _named(config: BaseModel | str | None) -> tuple[PagurusConfig, tuple[Path, Path] | None]:
    """The settings of the one sandbox of a sample, and the context and Dockerfile if it is built."""
    if config is None:
        return PagurusConfig(), None
    if isinstance(config, PagurusConfig):
        return config, None
    if isinstance(config, str) and is_dockerfile(config):
        return PagurusConfig(), (Path(config).resolve().parent, Path(config).resolve())
    if isinstance(config, str):
        return PagurusConfig(image=config), None
    raise Invalid(f"a sandbox is not made from a {type(config).__name__}", hint="PagurusConfig, or a file's name")


def _default_service(config: ComposeConfig | str) -> str | None:
    """The one that is marked, or called so; else the first one counts."""
    services = (parse_compose_yaml(config) if isinstance(config, str) else config).services
    marked = next((name for name, service in services.items() if service.x_default), None)
    return marked or ("default" if "default" in services else next(iter(services)))


def _variables(metadata: dict[str, str]) -> dict[str, str]:
    """What a sample's metadata are in a compose file."""
    return {f"SAMPLE_METADATA_{name.replace(' ', '_').upper()}": str(value) for name, value in metadata.items()}


@contextlib.contextmanager
def _compose_file(config: ComposeConfig | str) -> Iterator[tuple[Path, Path]]:
    """A compose file, and which directory its paths begin at."""
    if isinstance(config, str):
        file = Path(config).resolve()
        yield file, file.parent
        return
    with tempfile.TemporaryDirectory(prefix="pagurus-inspect-") as directory:
        file = Path(directory, "compose.yaml")
        file.write_text(config.model_dump_json(by_alias=True, exclude_none=True).replace("$", "$$"))
        yield file, Path.cwd()


async def _built(host: Client, context: Path, file: Path) -> str:
    """The image of a Dockerfile. Steps that the host keeps are not carried out again."""
    name = f"inspect-{hashlib.blake2b(f'{file}'.encode(), digest_size=8).hexdigest()}"
    try:
        await host.images.build(name, context, file=file, network=Network.open(), replace=True)
    except Conflict:  # other samples build the same
        await host.images.get(name)
    return name
