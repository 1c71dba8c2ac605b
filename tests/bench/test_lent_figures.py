"""Why a token was late, and users in slices."""

from __future__ import annotations

import pytest

from bench.harness.lent_engine import MODES, Seen, StepSeen, Token, slices
from bench.harness.lent_figures import cause
from bench.harness.lent_foretold import foretold, measured
from coordinator.simulate.serving import Traffic
from rollout.decide.engines.slack import Budget

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


def test_the_simulation_foretells_rollouts_from_steps_of_slices_without_both() -> None:
    """Steps take 10 ms, as long again for 200 answers or 500 tokens; a second in a slice that does not count. Tokens
    are 1 ms old when the next step begins, 0.1 ms more for each user and 0.01 ms for each rollout."""
    steps, now = [StepSeen(0.0, 1.0, 0.0, False)], 1.0
    alone, empty = ([(count, tokens) for count in counts for tokens in (0, 100, 400)] for counts in ((2, 8), (40, 48)))
    middle = 0.0
    for part, each in ((alone, 0.0001), (empty, 0.00001)):
        for count, tokens in part * 60:
            seconds = 0.010 + 0.00005 * count + 0.00002 * tokens
            age = 0.001 + each * count
            steps.append(StepSeen(now, now + seconds, 0.0, False, count, tokens, count, age))
            now += seconds + 0.0005
        middle = middle or now
    steps.append(StepSeen(now + 1.0, now + 2.0, 0.0, False, 40, 0))
    ran = measured(steps, [(1.0, middle)], [(middle, now)])
    took, rest, age = ran(8, 0, 400)
    assert (took, rest, age) == pytest.approx((0.0184, 0.0005, 0.0018))
    assert ran(0, 48, 0).took == pytest.approx(0.0124)
    assert ran(20, 40, 0).age == pytest.approx(0.001 + 0.002 + 0.0004)

    users = Traffic(arrivals=[0.1 * n for n in range(100)], prompts=[40] * 100, answers=[8] * 100)
    seen = {name: Seen(slices=[(1.0, middle)], seconds=10.0, rollout_tokens=20_000) for name in MODES}
    seen["naive"].empty_slices = [(middle, now)]
    budget = Budget(ttft=0.5, tpot=0.1, margin=0.2)
    over = foretold(users, 30.0, budget, steps, seen)
    # All that there is room for: 48 answers a step, and 400 tokens to read for each 100.
    assert over["naive"] == pytest.approx(over["slack"], rel=0.05) and 1.0 < over["slack"] < 1.8
