"""One model directory as an address that agents can ask: engine servers, a pool over them, the doors in front."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rollout.engine.client import Sampling
from rollout.engine.launch import Launch
from rollout.episode.renderer import ChatRenderer
from rollout.pool.endpoints import Endpoints
from rollout.pool.recorder import SampleRecorder
from rollout.pool.started import started
from rollout.weights.export import export
from rollout.weights.store import is_store
from sandbox.errors import NotFound


@asynccontextmanager
async def serving(
    model: Path, launch: Launch, home: Path, *, engines: int = 1, length: int = 1024, port: int = 0
) -> AsyncIterator[Endpoints]:
    """`home` is a scratch directory; logs of the engines are there."""
    directory, version = await asyncio.to_thread(of_model, model, home)
    renderer = await asyncio.to_thread(ChatRenderer.load, directory)
    async with started([launch] * engines, directory, version, run=home) as pool:
        endpoints = Endpoints(
            SampleRecorder(pool, renderer, length=length), model=model.name, sampling=Sampling(max_tokens=length)
        )
        endpoints.port = port
        async with endpoints:
            yield endpoints


def of_model(model: Path, home: Path, version: int | None = None) -> tuple[Path, int]:
    """A model directory itself, as version 0; of a run, a version (None: the newest), put together in `home`."""
    if is_store(model / "weights"):
        return home / "model", export(model, home / "model", version)
    if not (model / "config.json").exists():
        raise NotFound(f"{model} is no model: it has no config.json", hint="name a Hugging Face directory, or a run")
    return model, 0
