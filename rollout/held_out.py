"""Held-out episodes: played to measure a policy, never trained on, known to no store.

Owns: trying again what the platform lost. Does not own: which seeds, the mean.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from rollout.decide import breaker
from rollout.decide.blame import Blame, Failure, Phase, blame
from rollout.decide.view import PartView
from rollout.engine.client import Sampling
from rollout.episode.manager import EpisodeManager
from rollout.episode.spec import EpisodeSpec
from rollout.messages import Trajectory
from sandbox.errors import EngineFailed


async def play(
    episodes: EpisodeManager,
    spec: EpisodeSpec,
    sampling: Sampling,
    slots: asyncio.Semaphore,
    *,
    refused: Callable[[Failure], PartView],
    starts: int,
    patience: float,
) -> Trajectory:
    """One episode; again, after a pause, for as long as it is the platform that fails and `patience` lasts.

    `starts`: how often it may begin, but for what a refusing host or engine ended.
    """
    while True:
        async with slots:
            trajectory = await episodes.run(spec, sampling)
        failure = trajectory.failure
        if failure is None or blame(failure) is not Blame.PLATFORM or spec.start + 1 >= starts:
            return trajectory
        known = refused(failure)
        if (part := breaker.hopeless([known], patience=patience, now=time.time())) is not None:
            raise EngineFailed(f"{part.part} has refused everything: {part.reason}", remedy="see `pagurus doctor`")
        again = spec.start + (failure.phase not in (Phase.CREATE, Phase.GENERATE))
        spec = msgspec.structs.replace(spec, start=again)
        await asyncio.sleep(max(0.0, breaker.retry_at(known) - time.time()))
