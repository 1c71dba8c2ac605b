"""A model directory that plays an environment: the same tokens, template and loop of turns as in training.

Owns: an engine of its own for the time of playing. Does not own: which episodes (rollout.evaluate).
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from rollout import tokenizer
from rollout.engine.client import Sampling
from rollout.engine.launch import KINDS
from rollout.engine.supervisor import EngineSupervisor
from rollout.environments.base import Environment
from rollout.environments.images import build_missing
from rollout.episode.manager import EpisodeManager
from rollout.episode.renderer import ChatRenderer, has_template
from rollout.episode.spec import EpisodeLimits
from rollout.evaluate import scored_host
from rollout.plan import read_plan
from rollout.pool.serve import of_model
from sandbox import Client
from sandbox.errors import Invalid


@asynccontextmanager
async def engine_of(
    model: str,
    environment: Callable[[], Environment],
    client: Callable[[], Any],
    *,
    engine: str,
    length: int,
    build: Callable[[Client], Awaitable[object]],
) -> AsyncIterator[EpisodeManager]:
    """What plays episodes with a run's newest version, with one of its versions (``runs/latest@7``), or with any
    Hugging Face directory. `build` makes the images that are needed, first."""
    if engine not in KINDS:
        raise Invalid(f"no engine {engine!r}", hint="embedded or vllm")
    with tempfile.TemporaryDirectory(prefix="pagurus-play-") as home:
        place, target = named(model)
        directory, version = await asyncio.to_thread(of_model, place, Path(home), target)
        renderer = await asyncio.to_thread(ChatRenderer.load, directory) if has_template(directory) else None
        launch = KINDS[engine](length=length)
        async with (
            EngineSupervisor(launch, directory, version, log=Path(home) / "engine.log") as server,
            scored_host(client) as (host, rewards),
        ):
            await build(host.client)
            yield EpisodeManager(
                environment=environment,
                host=host,
                rewards=rewards,
                engine=server,
                tokenizer=tokenizer.load(directory),
                renderer=renderer,
                limits=EpisodeLimits(max_length=length),
            )


@asynccontextmanager
async def engine_of_run(
    run: Path, version: int | None, client: Callable[[], Any]
) -> AsyncIterator[tuple[EpisodeManager, Sampling]]:
    """What plays the environment of a run as the run does, with a version of its policy (None: the newest)."""
    plan = read_plan(run)
    config = plan.config

    model = str(run) if version is None else f"{run}@{version}"
    environment, length = plan.environments(run).environment, config.limits.max_length

    async def build(host: Client) -> None:
        await build_missing(host, environment().builds())

    async with engine_of(model, environment, client, engine=plan.engine, length=length, build=build) as made:
        made.limits, made.scoring = config.limits, plan.scoring
        stops = sorted({*config.sampling.stop_token_ids, *(made.renderer.stops if made.renderer else [])})
        yield made, msgspec.structs.replace(config.sampling, stop_token_ids=stops)


def named(model: str) -> tuple[Path, int | None]:
    """A directory, and the version of it that is meant.

    >>> named("runs/latest@7"), named("runs/a@home")
    ((PosixPath('runs/latest'), 7), (PosixPath('runs/a@home'), None))
    """
    place, at, version = model.rpartition("@")
    return (Path(place), int(version)) if at and version.isdecimal() else (Path(model), None)
