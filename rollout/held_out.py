"""Held-out episodes: played to measure a policy, never trained on, known to no store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import msgspec

from rollout.config import RolloutConfig
from rollout.decide import breaker
from rollout.decide.blame import Blame, EpisodePhase, TrajectoryFailure, blame
from rollout.decide.view import PartView
from rollout.engine.client import Sampling
from rollout.episode.manager import EpisodeManager
from rollout.episode.spec import EpisodeSpec
from rollout.messages import Trajectory
from sandbox.errors import EngineFailed


async def play_all(
    episodes: EpisodeManager,
    seeds: Iterable[int],
    sampling: Sampling,
    config: RolloutConfig,
    *,
    refused: Callable[[TrajectoryFailure], PartView],
    samples: int = 1,
) -> list[Trajectory]:
    """So many episodes of each seed, one seed after the other, as many at once as the configuration allows."""
    slots = asyncio.Semaphore(config.concurrency)
    specs = [EpisodeSpec(prompt=f"eval-{seed}", seed=seed, index=i) for seed in seeds for i in range(samples)]
    return await asyncio.gather(*(_play(episodes, item, sampling, slots, refused, config) for item in specs))


async def _play(
    episodes: EpisodeManager,
    spec: EpisodeSpec,
    sampling: Sampling,
    slots: asyncio.Semaphore,
    refused: Callable[[TrajectoryFailure], PartView],
    config: RolloutConfig,
) -> Trajectory:
    """One episode; again, after a pause, for as long as it is the platform that fails and `timeout` lasts. What a
    refusing host or engine ended does not count as a start."""
    while True:
        async with slots:
            trajectory = await episodes.run(spec, sampling)
        await episodes.score(trajectory)
        failure = trajectory.failure
        if failure is None or blame(failure) is not Blame.PLATFORM or spec.start + 1 >= config.starts:
            return trajectory
        existing = refused(failure)
        if (part := breaker.hopeless([existing], timeout=config.timeout, now=time.time())) is not None:
            raise EngineFailed(f"{part.part} has refused everything: {part.reason}", hint="see `pagurus doctor`")
        again = spec.start + (failure.phase not in (EpisodePhase.CREATE, EpisodePhase.GENERATE))
        spec = msgspec.structs.replace(spec, start=again)
        await asyncio.sleep(max(0.0, breaker.retry_at(existing) - time.time()))
