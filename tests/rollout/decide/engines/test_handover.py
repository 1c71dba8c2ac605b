"""Engines go over to gradients once few answers are left, and never so many that the answers are slower."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.decide.engines.handover import EARLIEST, LATEST, SLOWER, staying


@pytest.mark.parametrize(
    ("answers", "done", "each", "stay"),
    [
        (128, 0.4, 0.0, 2),  # 64 slots each
        (128, 0.1, 0.0, 8),  # too early
        (128, 0.6, 0.0, 8),  # too late
        (500, 0.4, 0.0, 8),  # all slots are wanted
        (128, 0.4, 0.0001, 5),  # 26 answers instead of 16 make a step 1 ms longer
        (128, 0.4, 0.01, 8),
        (0, 0.5, 0.0, 8),
        (1, 0.5, 0.0, 1),
    ],
)
def test_as_few_stay_as_the_answers_need(answers: int, done: float, each: float, stay: int) -> None:
    assert staying(8, answers, done, base=0.05, each=each, slots=64) == stay


@given(
    st.integers(1, 64), st.integers(0, 5000), st.floats(0, 1), st.floats(1e-3, 0.1), st.floats(0, 1e-3),
    st.integers(1, 512),
)  # fmt: skip
def test_who_stays_has_room_and_is_hardly_slower(
    engines: int, answers: int, done: float, base: float, each: float, slots: int
) -> None:
    stay = staying(engines, answers, done, base=base, each=each, slots=slots)
    assert 1 <= stay <= engines
    if stay < engines:
        assert EARLIEST <= done <= LATEST and answers <= stay * slots
        assert base + each * (answers / stay) <= SLOWER * (base + each * (answers / engines + 1))
