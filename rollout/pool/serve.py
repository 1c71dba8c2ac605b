"""One model folder as an address that agents can ask: engine servers, a pool over them, the doors in front.

Owns: sealing a folder that nobody has sealed, the order of starting and ending. Does not own: each of the parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rollout.engine.client import Sampling
from rollout.engine.launch import Launch
from rollout.engine.manifest import NAME as MANIFEST
from rollout.engine.manifest import read_manifest, write_manifest
from rollout.episode.renderer import ChatRenderer
from rollout.pool.doors import Doors
from rollout.pool.recorder import Recorder
from rollout.pool.started import started
from sandbox.errors import NotFound


@asynccontextmanager
async def serving(
    model: Path, launch: Launch, home: Path, *, engines: int = 1, length: int = 1024, port: int = 0
) -> AsyncIterator[Doors]:
    """`home` is a scratch folder; logs of the engines are there."""
    folder, version = await asyncio.to_thread(sealed, model, home)
    renderer = await asyncio.to_thread(ChatRenderer.load, folder)
    async with started(launch, folder, version, count=engines, run=home) as pool:
        doors = Doors(Recorder(pool, renderer, length=length), model=model.name, sampling=Sampling(max_tokens=length))
        doors.port = port
        async with doors:
            yield doors


def sealed(model: Path, home: Path) -> tuple[Path, int]:
    """The folder itself, where it was published; else the same files by links, sealed as version 0."""
    newest = sorted(model.glob("weights/v[0-9]*"))  # of a run
    folder = newest[-1] if newest else model
    if not (folder / "config.json").exists():
        raise NotFound(f"{model} is no model: it has no config.json", remedy="name a Hugging Face folder, or a run")
    if (folder / MANIFEST).exists():
        return folder, read_manifest(folder).version
    linked = home / "model"
    linked.mkdir(parents=True)
    for path in folder.iterdir():
        if path.is_file():
            (linked / path.name).symlink_to(path.resolve())
    write_manifest(linked, 0)
    return linked, 0
