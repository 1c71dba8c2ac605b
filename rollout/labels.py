"""Whose sandboxes these are: every sandbox of a run carries the name of its run folder.

Owns: the label, and the removal of what an interrupted run left. Does not own: sandboxes.
Guarantee: after `sweep` no sandbox of an earlier process of this run is left on the host, but those to be kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import Any

from sandbox import Client
from sandbox.messages import SandboxState, Statistics

LABEL = "run"


class Labelled:
    """The host as the rollout sees it: the client, with a label on all that it creates."""

    def __init__(self, client: Client, run: Path):
        self.client, self.run = client, str(run)

    def create(self, image: str, **options: Any) -> Any:
        return self.client.create(image, labels={LABEL: self.run}, **options)

    async def get(self, sandbox: str) -> Any:
        return await self.client.get(sandbox)

    async def statistics(self) -> Statistics:
        return await self.client.statistics()

    async def images(self) -> list[str]:
        """Names of the images that sandboxes can start from."""
        return [image.name for image in await self.client.images.list()]

    async def sweep(self, keep: Collection[str] = ()) -> int:
        """Removes what a process of this run that was killed left behind, but `keep`; how many sandboxes that were."""
        left = [
            info
            for info in await self.client.sandboxes()
            if info.labels.get(LABEL) == self.run and info.state is not SandboxState.REMOVED and info.id not in keep
        ]

        async def remove(name: str) -> None:
            await (await self.client.get(name)).remove()

        await asyncio.gather(*(remove(info.id) for info in left))
        return len(left)
