"""tinker-cookbook's sandbox: its Harbor recipe takes :func:`sandbox_factory`.

The factory builds the task's Dockerfile once, by content. A sandbox ends with this process when it is not cleaned up.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

from tinker_cookbook.sandbox.sandbox_interface import SandboxResult, SandboxTerminatedError

from pagurus.integrations import common
from sandbox import Client, Conflict, Network, NotFound, PagurusError, Sandbox, SandboxDead

MAX_SAID = 128 << 10  # bytes of each output, where the caller says nothing


class PagurusSandbox:
    """One sandbox of the daemon that PAGURUS_HOST, PAGURUS_TOKEN and PAGURUS_CA name; else of the local one."""

    def __init__(self, host: Client, box: Sandbox) -> None:
        self._host, self.box = host, box

    @classmethod
    async def create(
        cls, *, image: str = "debian", checkpoint: str | None = None, internet: bool = False, **options: Any
    ) -> PagurusSandbox:
        host = common.connect()
        try:
            box = await common.start(
                host,
                tool="tinker-cookbook",
                image=image,
                checkpoint=checkpoint,
                limits=common.limits(memory_mb=2048),
                network=common.network(internet),
                **options,
            )
        except BaseException:
            await host.close()
            raise
        return cls(host, box)

    @property
    def sandbox_id(self) -> str:
        return self.box.id

    async def send_heartbeat(self, timeout: int = 30) -> None:
        """The run of this process is renewed by itself; this says whether the sandbox is still there."""
        try:
            await self.box.refresh()
        except PagurusError as error:
            raise SandboxTerminatedError(common.reason(error)) from error

    async def run_command(
        self, command: str, workdir: str | None = None, timeout: int = 60, max_output_bytes: int | None = None
    ) -> SandboxResult:
        try:
            result = await self.box.exec(
                ["/bin/bash", "-c", command], cwd=workdir, timeout=timeout, output_limit=max_output_bytes or MAX_SAID
            )
        except PagurusError as error:
            return _failed(error)
        errors = common.text(result.stderr)
        if result.timed_out:
            errors += f"\nthe command took more than {timeout} seconds and was killed"
        made = {"verdict": str(result.verdict or ""), "checkpoint": result.checkpoint}
        code = 124 if result.timed_out else result.exit_code
        return SandboxResult(stdout=common.text(result.stdout), stderr=errors, exit_code=code, metrics=made)

    async def read_file(self, path: str, max_bytes: int | None = None, timeout: int = 60) -> SandboxResult:
        try:
            async with asyncio.timeout(timeout):
                content = await self.box.files.read(path, limit=max_bytes or common.MAX_OUTPUT)
        except (PagurusError, TimeoutError) as error:
            return _failed(error)
        return SandboxResult(stdout=common.text(content), stderr="", exit_code=0)

    async def write_file(
        self, path: str, content: str | bytes, executable: bool = False, timeout: int = 60
    ) -> SandboxResult:
        data = content.encode() if isinstance(content, str) else content
        try:
            async with asyncio.timeout(timeout):
                await self.box.files.write(path, data, mode=0o755 if executable else 0o644)
        except (PagurusError, TimeoutError) as error:
            return _failed(error)
        return SandboxResult(stdout="", stderr="", exit_code=0)

    async def cleanup(self) -> None:
        try:
            await self.box.remove()
        finally:
            await self._host.close()


def _failed(error: Exception) -> SandboxResult:
    """What the caller may continue with is a result, as in the other sandboxes of the cookbook; a dead sandbox is
    none."""
    if isinstance(error, SandboxDead):
        raise SandboxTerminatedError(common.reason(error)) from error
    said = common.reason(error) if isinstance(error, PagurusError) else f"{type(error).__name__}: {error}"
    return SandboxResult(stdout="", stderr=said, exit_code=-1)


_prepared: dict[tuple[int, str], asyncio.Task[str]] = {}  # by event loop and content of the environment


async def sandbox_factory(env_dir: Path, timeout: int) -> PagurusSandbox:
    """A sandbox for the Harbor recipe, from the Dockerfile of the task."""
    name = f"tinker-{await asyncio.to_thread(_digest, Path(env_dir))}"
    key = id(asyncio.get_running_loop()), name
    if key not in _prepared:
        _prepared[key] = asyncio.ensure_future(_built(name, Path(env_dir)))
    image = await _prepared[key]
    return await PagurusSandbox.create(image=image, lifetime=float(timeout))


async def _built(name: str, env_dir: Path) -> str:
    async with common.connect() as host:
        try:
            return (await host.images.get(name)).name
        except NotFound:
            pass
        try:
            await host.images.build(name, env_dir, network=Network.open())
        except Conflict:  # another process has built the same since
            await host.images.get(name)
    return name


def _digest(env_dir: Path) -> str:
    made = hashlib.sha256()
    for file in sorted(path for path in env_dir.rglob("*") if path.is_file()):
        made.update(f"{file.relative_to(env_dir)}\0{file.stat().st_mode:o}\0".encode() + file.read_bytes())
    return made.hexdigest()[:24]
