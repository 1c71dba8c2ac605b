"""Advantages, packing and the surrogate loss: pure, so tables and properties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.advantages import advantages
from trainer.grpo import Loss, surrogate
from trainer.packing import plan

REWARDS = st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=8), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("groups", "values", "degenerate"),
    [
        ([[1, 0]], [[1, -1]], [False]),
        ([[1, 1], [0, 0]], [[0, 0], [0, 0]], [True, True]),
        ([[1, 0], [1, 1]], [[1, -1], [0, 0]], [False, True]),
        ([[1]], [[0]], [True]),
        ([[]], [[]], [True]),
    ],
)
def test_advantages_table(groups: list[list[float]], values: list[list[float]], degenerate: list[bool]) -> None:
    found = advantages(groups)
    assert found.degenerate == degenerate
    assert found.values == [pytest.approx(row) for row in values]


@given(REWARDS)
def test_advantages_sum_to_zero_per_group_and_have_unit_deviation(groups: list[list[float]]) -> None:
    found = advantages(groups)
    assert all(math.isclose(sum(row), 0.0, abs_tol=1e-9) for row in found.values)
    speaking = [v for row, silent in zip(found.values, found.degenerate, strict=True) if not silent for v in row]
    if speaking:
        assert math.isclose(sum(v * v for v in speaking) / len(speaking), 1.0, rel_tol=1e-6)


@given(REWARDS)
def test_better_reward_never_has_a_lower_advantage(groups: list[list[float]]) -> None:
    for rewards, row in zip(groups, advantages(groups).values, strict=True):
        for a in range(len(row)):
            for b in range(len(row)):
                assert rewards[a] <= rewards[b] or row[a] >= row[b]


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(1, 1000))
def test_every_sequence_is_packed_once_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = plan(lengths, budget=budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or max(lengths[i] for i in batch) * len(batch) <= budget


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "clipped"),
    [
        (1.0, 1.0, -1.0, False),
        (1.5, 1.0, -1.28, True),  # a likely token grows no further
        (0.5, 1.0, -0.5, False),
        (0.5, -1.0, 0.8, True),
        (1.5, -1.0, 1.5, False),  # an unlucky one may always shrink
    ],
)
def test_surrogate_clips_high(ratio: float, advantage: float, value: float, clipped: bool) -> None:
    losses, bit = surrogate(torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([advantage]), Loss())
    assert losses.item() == pytest.approx(value)
    assert bool(bit.item()) is clipped


def test_truncated_importance_weight_caps_what_a_stale_token_may_count() -> None:
    new = torch.tensor([math.log(4.0)], requires_grad=True)
    losses, _ = surrogate(new, torch.zeros(1), torch.ones(1), Loss(tis=2.0))
    assert losses.item() == pytest.approx(-2.0)
    losses.sum().backward()
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(-2.0)
