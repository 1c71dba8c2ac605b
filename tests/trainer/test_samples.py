"""What the learner gets of a batch."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from rollout.messages import Batch, Group, Trajectory
from trainer.batches.groups import samples


def test_a_trajectory_with_a_break_is_two_samples_of_its_group() -> None:
    trajectory = Trajectory(
        prompt="p", index=3, tokens=[1, 2, 3, 4, 5, 6], mask=[0, 1, 1, 0, 0, 1], logprobs=[0, -1, -2, 0, 0, -3],
        versions=[-1, 4, 5, -1, -1, 5], reward=0.5, breaks=[3],
    )  # fmt: skip
    first, second = samples(Batch(version=5, groups=[Group(prompt="p", seed=0, trajectories=[trajectory])], oldest=5))
    assert (first.tokens, first.mask, first.logprobs) == ([1, 2, 3], [0, 0, 1], [0, -1, -2])
    assert (second.tokens, second.mask, second.logprobs) == ([4, 5, 6], [0, 0, 1], [0, 0, -3])
    assert (first.name, second.name) == ("p/3", "p/3+1") and first.reward == second.reward == 0.5
    trajectory.breaks = []
    (complete,) = samples(Batch(version=5, groups=[Group(prompt="p", seed=0, trajectories=[trajectory])], oldest=0))
    assert complete.tokens == trajectory.tokens and complete.mask == trajectory.mask
