"""Environments, trajectories, rewards, the engines and their client, scheduling of rollouts, the sample buffer.

Owns: everything between an environment and a batch of samples. Does not own: gradients.
`import rollout` loads no torch: only `rollout.engine.embedded.model`, `.core` and `.embedded` do.
"""

from rollout.chaos import Faults
from rollout.config import RolloutConfig
from rollout.controller import RolloutController
from rollout.environments.base import Environment, Observation
from rollout.episode.manager import run_trajectory
from rollout.episode.spec import EpisodeLimits
from rollout.messages import Batch, Group, Recovery, Trajectory, TurnRecord
from rollout.rewards import Final, Score, reward

__all__ = [
    "Batch",
    "Environment",
    "EpisodeLimits",
    "Faults",
    "Final",
    "Group",
    "Observation",
    "Recovery",
    "RolloutConfig",
    "RolloutController",
    "Score",
    "Trajectory",
    "TurnRecord",
    "reward",
    "run_trajectory",
]
