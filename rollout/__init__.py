"""Environments, trajectories, rewards, the engines and their client, scheduling of rollouts, the sample buffer.

Importing this package loads none of its modules: each name is loaded when it is first used. No torch comes with any of
them: only `rollout.engine.embedded.model`, `.core` and `.embedded` load it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_HOMES = {
    "Batch": "messages",
    "Environment": "environments.base",
    "EpisodeLimits": "episode.spec",
    "Faults": "chaos",
    "Final": "rewards",
    "Group": "messages",
    "Observation": "environments.base",
    "Recovery": "messages",
    "RolloutConfig": "config",
    "RolloutController": "controller",
    "Score": "rewards",
    "Trajectory": "messages",
    "TurnRecord": "messages",
    "reward": "rewards",
    "run_trajectory": "episode.manager",
}


def __getattr__(name: str) -> Any:
    if (home := _HOMES.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = result = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    return result


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
