"""Why a token was late, and users in slices."""

from __future__ import annotations

import pytest

from bench.harness.lent_engine import Token, slices
from bench.harness.lent_figures import StepSeen, cause
from coordinator.simulate.serving import Traffic

PROMISED = 0.05


def late(began: float, ended: float, predicted: float) -> StepSeen:
    return StepSeen(began, ended, predicted, late=True)


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([late(10.00, 10.02, 0.02), late(10.06, 10.08, 0.02)], "outside"),  # 40 ms of it nothing ran
        ([late(10.00, 10.08, 0.02)], "machine"),
        ([late(10.00, 10.08, 0.08)], "decision"),
        ([late(10.00, 10.04, 0.04), late(10.04, 10.08, 0.03)], "decision"),  # both were as long as expected
        ([late(9.90, 10.08, 0.03)], "machine"),  # it began before
        ([late(9.00, 9.99, 0.01), late(10.00, 10.08, 0.08), late(10.09, 11.0, 0.01)], "decision"),
        ([], "outside"),
        ([StepSeen(10.00, 10.08, 0.02, late=False)], "outside"),  # nobody waited long for what it computed
    ],
)
def test_why_a_token_was_late(steps: list[StepSeen], why: str) -> None:
    assert cause(Token(came=10.08, wait=0.08), PROMISED, steps) == why


def test_slices_have_every_user_once() -> None:
    traffic = Traffic(arrivals=[0.5, 29.0, 30.5, 95.0], prompts=[1, 2, 3, 4], answers=[5, 6, 7, 8])
    parts = slices(traffic, 30.0)
    assert [part.arrivals for part in parts] == [[0.5, 29.0], [0.5], [5.0]]
    assert [token for part in parts for token in part.prompts] == [1, 2, 3, 4]
    assert [token for part in parts for token in part.answers] == [5, 6, 7, 8]
