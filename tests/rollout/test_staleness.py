"""Admission and the bound on staleness."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.staleness import may_start, over_stale, staleness


@pytest.mark.parametrize(
    ("outstanding", "training", "bound", "expected"),
    [
        (0, False, 0, True),
        (7, False, 0, True),
        (8, False, 0, False),
        (0, True, 0, False),
        (15, False, 1, True),
        (16, False, 1, False),
        (7, True, 1, True),
        (8, True, 1, False),
    ],
)
def test_admission(outstanding: int, training: bool, bound: int, expected: bool) -> None:
    assert may_start(outstanding=outstanding, batch=8, bound=bound, training=training) is expected


def test_staleness_of_a_sample_without_sampled_tokens_is_none() -> None:
    assert staleness(9, None) == 0 and staleness(9, 7) == 2
    assert over_stale(trainer=9, oldest=7, bound=1) and not over_stale(trainer=9, oldest=8, bound=1)


@given(st.integers(1, 6), st.integers(0, 3), st.integers(1, 200))
def test_groups_that_finish_in_order_are_never_over_stale(batch: int, bound: int, steps: int) -> None:
    """With admission alone and no stragglers, no batch exceeds the bound, and the trainer is never starved."""
    started: list[int] = []
    for version in range(min(steps, 40)):
        while may_start(outstanding=len(started), batch=batch, bound=bound, training=False):
            started.append(version)
        assert len(started) >= batch
        consumed, started = started[:batch], started[batch:]
        assert all(staleness(version, oldest) <= bound for oldest in consumed)
        while may_start(outstanding=len(started), batch=batch, bound=bound, training=True):
            started.append(version)
