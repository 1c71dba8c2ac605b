"""`RolloutConfig`: the settings of a rollout.

Owns: the keys and their defaults. Does not own: what they mean (the modules that are named next to them).
"""

from __future__ import annotations

import msgspec

from rollout.decide.effects import EffectRules
from rollout.decide.keeping import KeepPlan
from rollout.decide.view import Branching, OverStale, SchedulingRules
from rollout.engine.client import Sampling
from rollout.episode.spec import EpisodeLimits


class RolloutConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Example: ``RolloutConfig(groups=8, size=8, sampling=Sampling(max_tokens=24, stop_token_ids=[1]))``"""

    groups: int = 8  # of a batch
    size: int = 8  # trajectories of a group
    extra: int = 0  # trajectories of a group beyond these: see rollout.decide.redundancy
    tail: float = 0.0  # tail batching, for example 1.25: see rollout.decide.tail
    tail_resumes: bool = False  # what tail batching puts off resumes instead of restarting
    concurrency: int = 64  # trajectories at once
    staleness: int = 1  # trainer version minus oldest policy version, at most
    adaptive: bool = False  # how much of that is used is chosen while it runs: see rollout.decide.bound
    over_stale: OverStale = "wait"  # see rollout.decide.staleness
    sampling: Sampling = Sampling()
    limits: EpisodeLimits = EpisodeLimits()
    attempts: int = 3  # failures of a prompt's environment until it is given up
    starts: int = 8  # of one trajectory
    timeout: float = 900.0  # seconds for which a part of the platform may refuse everything
    failed_reward: float | None = None  # of a trajectory that its reward function raises on; None: it has failed
    seed: int = 0
    branching: Branching | None = None  # groups as trees: see rollout.decide.branching
    effects: EffectRules | None = None  # what a trajectory must not do: see rollout.decide.effects
    visit: KeepPlan = KeepPlan()  # which states can be visited later: see rollout.decide.keeping

    @property
    def rules(self) -> SchedulingRules:
        return SchedulingRules(**{name: getattr(self, name) for name in SchedulingRules.__struct_fields__})
