"""A model directory that plays an environment: the same tokens, template and loop of turns as in training."""

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
from rollout.engine.launch import KINDS, Launch
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
    launch: Launch,
    length: int,
    build: Callable[[Client], Awaitable[object]],
    label: str = "",
) -> AsyncIterator[EpisodeManager]:
    """What plays episodes with a run's newest version, with one of its versions (``runs/latest@7``), or with any
    Hugging Face directory. `build` makes the images that are needed, first. `label`: see `scored_host`."""
    with tempfile.TemporaryDirectory(prefix="pagurus-play-") as home:
        place, target = named(model)
        directory, version = await asyncio.to_thread(of_model, place, Path(home), target)
        renderer = await asyncio.to_thread(ChatRenderer.load, directory) if has_template(directory) else None
        async with (
            EngineSupervisor(launch, directory, version, log=Path(home) / "engine.log") as server,
            scored_host(client, label=label) as (host, rewards),
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

    with_engine = engine_of(model, environment, client, launch=kind(plan.engine, length), length=length, build=build)
    async with with_engine as made:
        made.limits, made.scoring = config.limits, plan.scoring
        yield made, with_stops(config.sampling, made)


def kind(engine: str, length: int) -> Launch:
    """How such an engine is started. Raises Invalid."""
    if engine not in KINDS:
        raise Invalid(f"no engine {engine!r}", hint="embedded or vllm")
    return KINDS[engine](length=length)


def with_stops(sampling: Sampling, episodes: EpisodeManager) -> Sampling:
    """The same, and an answer ends where the model's template says."""
    stops = {*sampling.stop_token_ids, *(episodes.renderer.stops if episodes.renderer else [])}
    return msgspec.structs.replace(sampling, stop_token_ids=sorted(stops))


def named(model: str) -> tuple[Path, int | None]:
    """A directory, and the version of it that is meant.

    >>> named("runs/latest@7"), named("runs/a@home")
    ((PosixPath('runs/latest'), 7), (PosixPath('runs/a@home'), None))
    """
    place, at, version = model.rpartition("@")
    return (Path(place), int(version)) if at and version.isdecimal() else (Path(model), None)
