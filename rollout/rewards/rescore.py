"""Score old trajectories again: nothing is played."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from rollout.messages import Trajectory
from rollout.rewards.messages import ScorerFailed
from rollout.rewards.service import RewardService
from sandbox.errors import PagurusError


class RescoredTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    trajectory: str
    before: float  # what the scorer said when it was played
    after: float | None  # None: it could not be scored
    reason: str = ""


async def rescore(rewards: RewardService, trajectories: Sequence[Trajectory]) -> list[RescoredTrajectory]:
    """Each that has a final state, by its own function as the code of that is now."""

    async def one(trajectory: Trajectory) -> RescoredTrajectory:
        name = f"{trajectory.prompt}/{trajectory.index}"
        before = 0.0 if trajectory.score is None else trajectory.score.total
        try:
            score = await rewards.score(trajectory)
        except (ScorerFailed, PagurusError) as error:
            return RescoredTrajectory(trajectory=name, before=before, after=None, reason=str(error))
        return RescoredTrajectory(trajectory=name, before=before, after=score.total, reason=score.reason)

    return list(await asyncio.gather(*(one(item) for item in trajectories if item.final is not None)))
