"""NeMo Gym's sandbox provider ``pagurus``, found by its entry point.

``provider_options={"checkpoint": ID}`` of a spec starts from a checkpoint; the id of a sandbox is the daemon's own.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from nemo_gym.sandbox.providers.base import (
    SandboxCreateError,
    SandboxExecResult,
    SandboxHandle,
    SandboxSpec,
    SandboxStatus,
)

from pagurus.integrations import common
from sandbox import AtEnd, Client, NotFound, PagurusError, Sandbox
from sandbox.tree import host_files

GIB = 1024  # mebibytes
STATES = {
    "creating": SandboxStatus.STARTING,
    "running": SandboxStatus.RUNNING,
    "stopped": SandboxStatus.STOPPED,
    "removed": SandboxStatus.STOPPED,
    "dead": SandboxStatus.ERROR,
}


class PagurusProvider:
    """Sandboxes of one daemon. `internet`: whether they reach the internet; a spec's provider_options may say else."""

    name = "pagurus"

    def __init__(self, internet: bool = False, image: str = "debian", **_: Any) -> None:
        self._internet, self._image = internet, image
        self._client: Client | None = None

    @property
    def _host(self) -> Client:
        if self._client is None:
            self._client = common.connect()
        return self._client

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        if spec.resources.gpu:
            raise SandboxCreateError("sandboxes have no GPUs")
        try:
            box = await self._create(spec)
        except PagurusError as error:
            raise SandboxCreateError(common.reason(error)) from error
        return SandboxHandle(sandbox_id=box.id, provider_name=self.name, raw=box)

    async def _create(self, spec: SandboxSpec) -> Sandbox:
        options, resources = spec.provider_options, spec.resources
        box = await common.start(
            self._host,
            tool="nemo-gym",
            image=spec.image or self._image,
            checkpoint=options.get("checkpoint"),
            labels=spec.metadata,
            env=spec.env,
            workdir=spec.workdir,
            lifetime=spec.ttl_s,
            at_end=AtEnd.REMOVE,
            network=common.network(bool(options.get("internet", self._internet))),
            limits=common.limits(
                cpus=resources.cpu, memory_mb=resources.memory_mib, disk_mb=(resources.disk_gib or 0) * GIB
            ),
        )
        try:
            for path, content in spec.files.items():
                await box.files.write(path, content)
            if spec.entrypoint:
                await box.processes.start(spec.entrypoint)
        except PagurusError:
            await box.remove()
            raise
        return box

    async def exec(
        self,
        handle: SandboxHandle,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: int | float | None = None,
        user: str | int | None = None,
    ) -> SandboxExecResult:
        try:
            result = await common.run(handle.raw, command, timeout=timeout_s, cwd=cwd, env=env, user=user)
        except PagurusError as error:
            return SandboxExecResult(None, common.reason(error), -1, error_type="sandbox")
        out, errors = common.text(result.stdout), common.text(result.stderr)
        return SandboxExecResult(out, errors, result.exit_code, error_type="timeout" if result.timed_out else None)

    async def upload_file(self, handle: SandboxHandle, source_path: Path, target_path: str) -> None:
        await handle.raw.files.write(target_path, await asyncio.to_thread(Path(source_path).read_bytes))

    async def download_file(self, handle: SandboxHandle, source_path: str, target_path: Path) -> None:
        content = await handle.raw.files.read(source_path)
        await asyncio.to_thread(host_files.write, target_path, content)

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        try:
            info = await handle.raw.refresh()
        except NotFound:
            return SandboxStatus.STOPPED
        return STATES.get(str(info.state), SandboxStatus.UNKNOWN)

    async def close(self, handle: SandboxHandle) -> None:
        await handle.raw.remove()

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None
