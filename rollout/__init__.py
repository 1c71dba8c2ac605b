"""Environments, trajectories, rewards, the engines and their client, scheduling of rollouts, the sample buffer.

Owns: everything between an environment and a batch of samples. Does not own: gradients.
`import rollout` loads no torch: only `rollout.engine.embedded.model`, `.core` and `.embedded` do.
"""

from rollout.controller import RolloutConfig, RolloutController
from rollout.environment import Environment, Observation
from rollout.faults import Faults
from rollout.messages import Batch, Group, Recovery, Trajectory, TurnRecord
from rollout.trajectory import run_trajectory

__all__ = [
    "Batch",
    "Environment",
    "Faults",
    "Group",
    "Observation",
    "Recovery",
    "RolloutConfig",
    "RolloutController",
    "Trajectory",
    "TurnRecord",
    "run_trajectory",
]
