"""The settings that a run and its rollout have in common, and `RolloutConfig`."""

from __future__ import annotations

from rollout.decide.effects import EffectRules
from rollout.decide.keeping import KeepPlan
from rollout.decide.view import BatchSettings, SchedulingRules
from rollout.engine.client import Sampling
from rollout.episode.spec import EpisodeLimits


class PlaySettings(BatchSettings, frozen=True, kw_only=True):
    """Settings of a run that say how its episodes are played."""

    seed: int = 0  # of everything that is drawn
    sampling: Sampling = Sampling()  # of answers
    failed_reward: float | None = None  # where a reward function raises; else the prompt fails
    effects: EffectRules | None = None  # what trajectories must not do
    visit: KeepPlan = KeepPlan()  # states to visit later


class RolloutConfig(PlaySettings, frozen=True, kw_only=True):
    """Example: ``RolloutConfig(groups=8, size=8, sampling=Sampling(max_tokens=24, stop_token_ids=[1]))``"""

    concurrency: int = 64  # as SchedulingRules has it
    staleness: int = 1
    timeout: float = 900.0
    adaptive: bool = False  # how much of the staleness is used is chosen while it runs: see rollout.decide.bound
    limits: EpisodeLimits = EpisodeLimits()

    @property
    def rules(self) -> SchedulingRules:
        return SchedulingRules(**{name: getattr(self, name) for name in SchedulingRules.__struct_fields__})
