"""A client's run, as the SDK offers it: sandboxes that end with the client, however it ends."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandbox.errors import PagurusError
from sandbox.messages import CheckpointInfo, SandboxInfo
from sandbox.messages.runs import RUN_LABEL, RunEnded, RunInfo, RunRequest
from sandbox.sdk.transport import part

if TYPE_CHECKING:
    from sandbox.sdk.client import Client
    from sandbox.sdk.handle import Creation, Fork

RENEWALS = 4  # in the time of one lease, so that a slow one ends nothing


class Run:
    """Sandboxes that live no longer than this client::

        async with host.run(lease=60) as run:
            sb = await run.create("debian")

    They are removed at the end of the block; and when the client dies or is cut off, within `lease` seconds, whatever
    call is under way. Their forks belong to the run as well. A client whose loop is blocked for longer than the
    lease has lost them.
    """

    def __init__(self, client: Client, run: str | None, lease: float) -> None:
        self._client = client
        self._task: asyncio.Task[None] | None = None
        self.id = run or f"run-{secrets.token_hex(6)}"
        self.lease = lease
        self.trouble: PagurusError | None = None  # why the latest renewal failed

    def __repr__(self) -> str:
        return f"<Run {self.id}, {self.lease:g} s>"

    async def __aenter__(self) -> Run:
        await self.begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()

    async def begin(self) -> None:
        """Begin it, and renew its lease from now on."""
        await self.renew()
        self._task = asyncio.get_running_loop().create_task(self._renewing())

    async def leave(self) -> None:
        """Renew it no more: its sandboxes end after the lease, unless another client renews it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None

    async def end(self) -> int:
        """End it with its sandboxes; how many there were."""
        await self.leave()
        return (await self._client.call("DELETE", f"/v1/runs/{part(self.id)}", RunEnded)).removed

    async def renew(self) -> None:
        """Raises Conflict when it has ended."""
        await self._client.call("PUT", f"/v1/runs/{part(self.id)}", RunInfo, RunRequest(lease=self.lease))

    async def _renewing(self) -> None:
        while True:
            await asyncio.sleep(self.lease / RENEWALS)
            try:
                await self.renew()
                self.trouble = None
            except PagurusError as error:  # a daemon that is started again gives a whole lease
                self.trouble = error

    def create(self, image: str, *, labels: dict[str, str] | None = None, **options: Any) -> Creation:
        """A new sandbox of the run. See :meth:`Client.create`."""
        return self._client.create(image, labels=self.labelled(labels), **options)

    def compose(
        self, paths: str | Path | Sequence[str | Path] = ".", *, labels: dict[str, str] | None = None, **options: Any
    ) -> Creation:
        """A new sandbox of the run, of compose files. See :meth:`Client.compose`."""
        return self._client.compose(paths, labels=self.labelled(labels), **options)

    async def fork(
        self, checkpoint: str | CheckpointInfo, count: int = 1, *, labels: dict[str, str] | None = None, **options: Any
    ) -> list[Fork]:
        """Sandboxes of the run that continue from a checkpoint. See :meth:`Client.fork`."""
        return await self._client.fork(checkpoint, count, labels=self.labelled(labels), **options)

    async def sandboxes(self) -> list[SandboxInfo]:
        """Those of the run."""
        return await self._client.sandboxes({RUN_LABEL: self.id})

    def labelled(self, labels: dict[str, str] | None = None) -> dict[str, str]:
        """These labels, and the one that makes a sandbox one of the run."""
        return {**(labels or {}), RUN_LABEL: self.id}
