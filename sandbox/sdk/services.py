"""The services of a composition, as the SDK offers them: ``sb.services``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from sandbox.errors import NotFound
from sandbox.messages import ExecResult, LogChunk, Logs, ProcessInfo, ServiceInfo, StopRequest, UpRequest
from sandbox.messages.services import ServiceState
from sandbox.sdk.processes import Process
from sandbox.sdk.transport import Facet, Transport, part

EXTRA = 60.0  # seconds beyond a time-out until no answer is expected any more
PAUSE = 0.2  # seconds until a service that is being restarted is looked at again

Execute = Callable[..., Awaitable[ExecResult]]


class Services(Facet):
    """The services of a sandbox that was made from a composition. Raises Invalid for a sandbox of one image."""

    def __init__(self, client: Transport, path: str, execute: Execute) -> None:
        super().__init__(client, path)
        self._execute = execute

    async def list(self) -> Sequence[ServiceInfo]:
        """All of them, as they are in the sandbox's present state."""
        return await self._client.call("GET", f"{self._path}/services", list[ServiceInfo])

    async def up(self, *services: str, wait: bool = True, timeout: float = 300.0) -> Sequence[ServiceInfo]:
        """Start those that do not run (all, or these with what they depend on), in order, and end the turn.

        Returns when each runs and those with a health check are healthy; without `wait`, when they run. Raises when one
        cannot be started, ends with a failure, becomes unhealthy, or is not up after `timeout` seconds.
        """
        request = UpRequest(services=[*services], timeout=timeout, wait=wait)
        path = f"{self._path}/services/up"
        return await self._client.call("POST", path, list[ServiceInfo], request, keyed=True, timeout=timeout + EXTRA)

    async def get(self, name: str) -> ServiceHandle:
        """One service. Raises NotFound."""
        infos = await self.list()
        for info in infos:
            if info.name == name:
                return ServiceHandle(self._client, self._path, info, self._execute)
        there = ", ".join(info.name for info in infos) or "none"
        raise NotFound(f"there is no service {name}", hint=f"there are: {there}")


class ServiceHandle:
    """One service. After a restore it is that of the restored state."""

    def __init__(self, client: Transport, path: str, info: ServiceInfo, execute: Execute) -> None:
        self._client, self._path, self._execute = client, path, execute
        self.info = info  # as of the last answer

    @property
    def name(self) -> str:
        return self.info.name

    def __repr__(self) -> str:
        return f"<ServiceHandle {self.name} {self.info.state}: {self.info.command}>"

    async def refresh(self) -> ServiceInfo:
        """The service as it is now."""
        infos = await self._client.call("GET", f"{self._path}/services", list[ServiceInfo])
        self.info = next(info for info in infos if info.name == self.name)
        return self.info

    async def stop(self, timeout: float | None = None) -> ServiceInfo:
        """Stop it by its signal, with SIGKILL after `timeout` seconds (None: its own). No policy starts it."""
        return await self._act("stop", timeout)

    async def restart(self, timeout: float | None = None) -> ServiceInfo:
        """Stop it and start it again, and end the turn."""
        return await self._act("restart", timeout)

    async def _act(self, verb: str, timeout: float | None) -> ServiceInfo:
        path = f"{self._path}/services/{part(self.name)}/{verb}"
        self.info = await self._client.call("POST", path, ServiceInfo, StopRequest(timeout=timeout), keyed=True)
        return self.info

    async def exec(self, command: str | Sequence[str], **options: Any) -> ExecResult:
        """Run a command in it, as :meth:`Sandbox.exec` does."""
        return await self._execute(command, service=self.name, **options)

    async def logs(self, since: Logs | None = None) -> Logs:
        """What is kept of its outputs since its last start: all of it, or what follows an earlier answer."""
        process = await self._process()
        return Logs() if process is None else await process.logs(since)

    async def stream(self) -> AsyncIterator[LogChunk]:
        """Its outputs as they come, from the oldest byte kept, also those after a restart, until it has ended."""
        last = None
        while True:
            process = await self._process()
            if process is not None and process.id != last:
                last = process.id
                async for chunk in process.stream():
                    yield chunk
            elif self.info.state in (ServiceState.CREATED, ServiceState.EXITED):
                return
            else:
                await asyncio.sleep(PAUSE)

    async def _process(self) -> Process | None:
        """The program that it is at present."""
        if (program := (await self.refresh()).program) is None:
            return None
        info = await self._client.call("GET", f"{self._path}/processes/{part(program)}", ProcessInfo)
        return Process(self._client, f"{self._path}/processes", info)
