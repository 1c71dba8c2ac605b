"""Play an environment to see how good a policy is at it, without learning: ``pagurus play`` and ``pagurus eval``."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec

from rollout.decide.blame import Blame, blame
from rollout.decide.passed import at_least_one, interval
from rollout.engine.client import Sampling
from rollout.engine.script import Script
from rollout.environments.base import Environment
from rollout.episode.manager import EpisodeManager
from rollout.episode.origin import Origin
from rollout.episode.parts import Generator
from rollout.episode.spec import EpisodeSpec
from rollout.labels import LabellingClient
from rollout.messages import Trajectory
from rollout.rewards.service import RewardService
from sandbox.errors import Invalid

LATE = (0.1, 0.2, 0.4)  # seconds in which a sandbox may still appear whose caller was cancelled
STARTS = 3  # of an episode that the platform lost


class PassRate(msgspec.Struct, frozen=True, kw_only=True):
    """pass@k: the mean over the seeds, and its 95 % interval."""

    k: int
    mean: float
    low: float
    high: float


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """What was played. Example: ``Evaluation(seeds=20, samples=4, ...).rates[0].mean``"""

    seeds: int  # of which each sample could be played
    samples: int  # of each seed
    reward: float  # mean
    rates: list[PassRate]  # pass@1, and pass@k for the number of samples
    lost: int = 0  # episodes that the platform or the environment failed: their seeds are not counted
    turns: float = 0.0  # mean
    killed: int = 0  # times that a sandbox died and was restored
    reasons: list[str] = []  # why episodes were lost, the first few


@contextlib.asynccontextmanager
async def scored_host(
    client: Callable[[], Any], *, workers: int = 2, label: str = ""
) -> AsyncIterator[tuple[LabellingClient, RewardService]]:
    """A host for episodes that no store knows, and what scores them.

    `label`: of their sandboxes, instead of one of this process's; those that have it already are removed first.
    """
    async with client() as connected:
        host = LabellingClient(connected, label or f"play-{os.getpid()}")
        if label:
            await host.sweep()
        async with RewardService(host, workers=workers) as rewards:
            try:
                yield host, rewards
            except BaseException:
                await asyncio.shield(_sweep_late(host))
                raise
            await asyncio.shield(host.sweep())


async def _sweep_late(host: LabellingClient) -> None:
    """Remove what the episodes had, and what the daemon was still making when they were cancelled."""
    for pause in LATE:
        await host.sweep()
        await asyncio.sleep(pause)
    await host.sweep()


async def play(
    episodes: EpisodeManager,
    spec: EpisodeSpec,
    sampling: Sampling,
    slots: asyncio.Semaphore | None = None,
    origin: Origin | None = None,
) -> Trajectory:
    """One episode, from the state `origin` on if there is one; begun again where the platform failed. It needs its
    slot until it is left to be scored."""
    while True:
        async with slots or contextlib.nullcontext():
            trajectory = await episodes.run(spec, sampling, origin=origin)
        await episodes.score(trajectory)
        lost = trajectory.failure is not None and blame(trajectory.failure) is Blame.PLATFORM
        if not lost or spec.start + 1 >= STARTS:
            return trajectory
        spec = msgspec.structs.replace(spec, start=spec.start + 1)


def oracle_of(environment: Callable[[], Environment]) -> Callable[[int], Generator]:
    """Who says of each seed what its environment says is right."""

    def engine(seed: int) -> Generator:
        env, seed = environment().of(seed)
        actions = env.oracle(seed)
        if actions is None:
            raise Invalid(f"the environment has no oracle for seed {seed}", hint="define `oracle` in the environment")
        return Script(actions)

    return engine


async def evaluate(
    episodes: EpisodeManager,
    seeds: Sequence[int],
    sampling: Sampling,
    *,
    samples: int = 1,
    concurrency: int = 4,
    pass_at: float = 1.0,
    on_end: Callable[[Trajectory], None] = lambda _: None,
    engine: Callable[[int], Generator] | None = None,
) -> Evaluation:
    """Play each seed `samples` times, `concurrency` at once. An episode passes with a reward of `pass_at`.

    `engine`: of a seed, instead of that of `episodes`.
    """
    played = await play_all(
        episodes, seeds, sampling, samples=samples, concurrency=concurrency, on_end=on_end, engine=engine
    )
    return scored([played[at : at + samples] for at in range(0, len(played), samples)], pass_at=pass_at)


async def play_all(
    episodes: EpisodeManager,
    seeds: Sequence[int],
    sampling: Sampling,
    *,
    samples: int,
    concurrency: int,
    on_end: Callable[[Trajectory], None] = lambda _: None,
    engine: Callable[[int], Generator] | None = None,
) -> list[Trajectory]:
    """The episodes of :func:`evaluate`, samples of a seed one after another."""
    slots = asyncio.Semaphore(concurrency)

    async def one(seed: int, index: int) -> Trajectory:
        spec = EpisodeSpec(prompt=f"eval-{seed}", seed=seed, index=index)
        plays = episodes if engine is None else dataclasses.replace(episodes, engine=engine(seed))
        trajectory = await play(plays, spec, sampling, slots)
        on_end(trajectory)
        return trajectory

    return await asyncio.gather(*(one(seed, index) for seed in seeds for index in range(samples)))


def scored(by_seed: Sequence[Sequence[Trajectory]], *, pass_at: float = 1.0) -> Evaluation:
    """What trajectories say of their policy. Of a seed of which any could not be scored nothing counts."""
    complete = [item for item in by_seed if all(trajectory.scored for trajectory in item)]
    lost = [trajectory for item in by_seed for trajectory in item if not trajectory.scored]
    samples = len(by_seed[0]) if by_seed else 0
    passed = [sum(trajectory.reward >= pass_at for trajectory in item) for item in complete]
    counted = [trajectory for item in complete for trajectory in item]
    rates = []
    for k in sorted({1, samples} - {0}):
        mean, low, high = interval([at_least_one(samples, number, k) for number in passed])
        rates.append(PassRate(k=k, mean=mean, low=low, high=high))
    number = max(1, len(counted))
    return Evaluation(
        seeds=len(complete),
        samples=samples,
        reward=sum(trajectory.reward for trajectory in counted) / number,
        rates=rates,
        lost=len(lost),
        turns=sum(len(trajectory.turns) for trajectory in counted) / number,
        killed=sum(trajectory.killed for trajectory in counted),
        reasons=sorted({trajectory.reason for trajectory in lost})[:5],
    )
