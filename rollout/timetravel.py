"""Back to a state of a finished trajectory: a sandbox in it, or episodes that continue from it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from rollout import evaluate
from rollout.decide.passed import interval
from rollout.engine.client import Sampling
from rollout.episode.manager import EpisodeManager
from rollout.episode.origin import Origin
from rollout.episode.spec import EpisodeSpec
from rollout.labels import LabellingClient
from rollout.store.retained import NAME, RetainedLedger, not_retained
from rollout.store.samples import SampleStore
from sandbox.errors import Conflict, NotFound


class TurnValue(msgspec.Struct, frozen=True, kw_only=True):
    """A state by its continuations: the Monte-Carlo value of it, under the policy that played on."""

    turn: int
    played: int
    reward: float  # mean
    passed: float  # share
    low: float  # 95 % interval of the share
    high: float
    lost: int = 0  # continuations that could not be scored
    reasons: list[str] = []  # why, the first few
    rewards: list[float] = []


def visitable(directory: Path, prompt: str, member: int) -> list[Origin]:
    """All states of a finished trajectory that can be visited, by turn; the last one is its end. `directory`: of the
    rollout, in which nothing is made. Raises NotFound where none is kept."""
    with closing(SampleStore(directory, create=False)) as store:
        trajectory = store.sample(prompt, member)
    if not (directory / NAME).exists():
        raise not_retained(prompt, member)
    with closing(RetainedLedger(directory)) as ledger:
        return [Origin(trajectory, visit) for visit in ledger.visits(prompt, member, trajectory.start)]


def at_turn(origins: Sequence[Origin], turn: int) -> Origin:
    """One of them."""
    for origin in origins:
        if origin.visit.turn == turn:
            return origin
    there = ", ".join(str(origin.visit.turn) for origin in origins)
    text = f"turn {turn} cannot be visited: no checkpoint holds the state before it"
    raise NotFound(text, hint=f"there are: {there}")


async def fork(host: LabellingClient, origin: Origin) -> Any:
    """A sandbox in that very state, of which the caller disposes."""
    try:
        return await host.fork(origin.visit.checkpoint)
    except (NotFound, Conflict) as error:  # no sandbox has it, or none that lives
        trajectory = origin.trajectory
        raise NotFound(
            f"checkpoint {origin.visit.checkpoint} of {trajectory.prompt}/{trajectory.index} is gone: "
            "its sandbox was removed by hand, or it was not used for as long as [visit] says",
            hint="visit a newer trajectory; `pagurus rollouts show RUN` lists them",
        ) from error


async def resample(
    episodes: EpisodeManager, origin: Origin, sampling: Sampling, *, count: int, concurrency: int, pass_at: float
) -> TurnValue:
    """Play on from a state `count` times."""
    slots, trajectory, turn = asyncio.Semaphore(concurrency), origin.trajectory, origin.visit.turn
    if turn >= len(trajectory.turns):
        raise NotFound("the episode is over in this state: nothing follows it", hint="name an earlier turn")

    async def one(number: int) -> Any:
        name = f"{trajectory.prompt}/{trajectory.index}@{turn}"
        spec = EpisodeSpec(prompt=name, seed=trajectory.seed, index=number)
        return await evaluate.play(episodes, spec, sampling, slots, origin)

    played = await asyncio.gather(*(one(number) for number in range(count)))
    rewards = [item.reward for item in played if item.scored]
    passed, low, high = interval([float(reward >= pass_at) for reward in rewards])
    return TurnValue(
        turn=turn,
        played=len(rewards),
        reward=sum(rewards) / len(rewards) if rewards else 0.0,
        passed=passed,
        low=low,
        high=high,
        lost=len(played) - len(rewards),
        reasons=sorted({item.reason for item in played if not item.scored})[:5],
        rewards=rewards,
    )
