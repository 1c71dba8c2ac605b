"""Whose sandboxes these are: every sandbox of a run carries the name of its run directory.

Guarantee: what `left` names was there before it returned; after `remove` it is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rollout.environments.base import ComposeFiles
from sandbox import Client, Sandbox
from sandbox.errors import NotFound
from sandbox.messages import AtEnd, Network, SandboxInfo, SandboxState, Statistics
from sandbox.tree import host_files

LABEL = "run"
RETAINED = "kept"  # of a run, for what lies in their checkpoints: see rollout.episode.retained
LEDGER = "book"  # of prepared ones: the machine and directory whose book names them
YOUNG = 600.0  # seconds
PREPARED = "prepared"  # of sandboxes that belong to no run: see rollout.episode.prepared


class LabellingClient:
    """The host as the rollout sees it: the client, with a label on all that it creates."""

    def __init__(self, client: Client, run: Path | str, *, idle: float | None = None):
        """`idle`: seconds after its last use after which the daemon removes a sandbox, whether or not its run remembers
        it."""
        self.client, self.run = client, str(run)
        self._end: dict[str, Any] = {} if idle is None else {"idle_timeout": idle, "at_end": AtEnd.REMOVE}

    def create(self, image: str, **options: Any) -> Any:
        return self.client.create(image, labels={LABEL: self.run}, **self._end, **options)

    async def compose(self, compose: ComposeFiles, *, network: Network) -> Any:
        """A sandbox of compose files, whose images are built and pulled where they are missing."""
        with host_files.fresh_directory() as directory:
            defaults = directory / "defaults.json"
            text = json.dumps({"services": {compose.main: compose.defaults}})
            await asyncio.to_thread(defaults.write_text, text)
            return await self.client.compose(
                [defaults, *compose.files],
                directory=compose.directory,
                main=compose.main,
                env={**os.environ, **compose.variables},
                network=network,
                copy_binds=True,
                labels={LABEL: self.run},
                **self._end,
            )

    async def get(self, sandbox: str) -> Any:
        return await self.client.get(sandbox)

    async def fork(self, checkpoint: str) -> Any:
        """One child, compared with the checkpoint before it ran. Raises what its fork met."""
        (child,) = await self.client.fork(checkpoint, verify=True, labels={LABEL: self.run})
        return child.sandbox

    async def image_digest(self, name: str) -> str:
        return (await self.client.images.get(name)).digest

    async def keep_prepared(self, sandbox: Sandbox, name: str, ledger: Path) -> None:
        await sandbox.set_labels({LABEL: None, PREPARED: name, LEDGER: f"{socket.gethostname()}:{ledger}"})

    async def collect_prepared(self) -> int:
        """Remove prepared sandboxes that no book of this machine names any more; how many they were.

        A book's directory may have been deleted. Young ones stay: they are labelled before they are in their book.
        """
        existing = await self.client.sandboxes({PREPARED: None, LEDGER: None})
        old = [info for info in existing if info.created_at < time.time() - YOUNG]
        return await self.remove(await asyncio.to_thread(_in_no_ledger, old))

    async def drop_prepared(self, name: str) -> None:
        await self.remove([info.id for info in await self.client.sandboxes({PREPARED: name})])

    async def keep(self, sandbox: Sandbox) -> None:
        await sandbox.set_labels({LABEL: None, RETAINED: self.run})

    async def retained(self) -> list[str]:
        return [info.id for info in await self.client.sandboxes({RETAINED: self.run})]

    async def statistics(self) -> Statistics:
        return await self.client.statistics()

    async def images(self) -> list[str]:
        """Names of the images that sandboxes can start from."""
        return [image.name for image in await self.client.images.list()]

    async def left(self, keep: Collection[str] = ()) -> list[str]:
        """Sandboxes of this run that a process before us left behind, but `keep`."""
        return [
            info.id
            for info in await self.client.sandboxes()
            if info.labels.get(LABEL) == self.run and info.state is not SandboxState.REMOVED and info.id not in keep
        ]

    async def remove(self, left: Collection[str]) -> int:
        """Remove these; how many they were. One that is gone is as good as removed."""

        async def remove(name: str) -> None:
            with contextlib.suppress(NotFound):
                await (await self.client.get(name)).remove()

        await asyncio.gather(*(remove(name) for name in left))
        return len(left)

    async def sweep(self) -> int:
        """Remove all sandboxes of this run; how many they were."""
        return await self.remove(await self.left())


def run_client() -> Client:
    """The daemon or the cluster of PAGURUS_HOST, as `pagurus` finds it; else the daemon of this host."""
    host, token, ca = (os.environ.get(f"PAGURUS_{name}") or None for name in ("HOST", "TOKEN", "CA"))
    return Client(host, token=token, ca=ca)


def _in_no_ledger(prepared: list[SandboxInfo]) -> list[str]:
    """Of prepared sandboxes, those that this machine's books should name and do not."""
    result = []
    for info in prepared:
        machine, _, ledger = info.labels[LEDGER].partition(":")
        if machine == socket.gethostname() and not (Path(ledger) / info.labels[PREPARED]).exists():
            result.append(info.id)
    return result
