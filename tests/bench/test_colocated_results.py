"""Why a token was late, and users in slices."""

from __future__ import annotations

import itertools

import pytest

from bench.harness.colocated_engine import MODES, Observed, StepObserved, Token, slices
from bench.harness.colocated_prediction import CHANGE, foretold, measured, pairs_of
from bench.harness.colocated_results import cause
from coordinator.simulate.serving import Traffic
from rollout.decide.engines.headroom import Budget

PROMISED = 0.05


def late(began: float, ended: float, predicted: float) -> StepObserved:
    return StepObserved(began, ended, predicted, late=True)


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
        ([StepObserved(10.00, 10.08, 0.02, late=False)], "outside"),  # nobody waited long for what it computed
    ],
)
def test_why_a_token_was_late(steps: list[StepObserved], why: str) -> None:
    assert cause(Token(came=10.08, wait=0.08), PROMISED, steps) == why


def test_slices_have_every_user_once() -> None:
    traffic = Traffic(arrivals=[0.5, 29.0, 30.5, 95.0], prompts=[1, 2, 3, 4], answers=[5, 6, 7, 8])
    parts = slices(traffic, 30.0)
    assert [part.arrivals for part in parts] == [[0.5, 29.0], [0.5], [5.0]]
    assert [token for part in parts for token in part.prompts] == [1, 2, 3, 4]
    assert [token for part in parts for token in part.answers] == [5, 6, 7, 8]


def test_the_simulation_foretells_a_slice_from_steps_of_others() -> None:
    """Steps take 10 ms, as long again for 200 answers or 500 tokens. Tokens are 1 ms old when the next step begins, 0.1
    ms more for each user and 0.01 ms for each rollout. In the slice that is foretold all of it takes twice as long."""
    steps, now, played = list[StepObserved](), 0.0, {mode: list[tuple[float, float]]() for mode in MODES}
    for mode, slower in itertools.product(("headroom", "naive"), (1, 1, 2)):
        began = now
        for users, rollouts, tokens in itertools.product((2, 8), (0, 20, 48), (0, 100, 400) * 20):
            reported = users if mode == "headroom" else users + rollouts  # in one queue all are users
            seconds = slower * (0.010 + 0.00005 * (users + rollouts) + 0.00002 * tokens)
            age = 0.001 + 0.0001 * reported + 0.00001 * (steps[-1].answers - steps[-1].users if steps else 0)
            steps.append(StepObserved(now, now + seconds, 0.0, False, users + rollouts, tokens, reported, age))
            now += seconds + 0.0005
        played[mode].append((began, now))
    ran = measured(pairs_of(steps, played["headroom"][:2]))
    assert ran(8, 0, 400) == pytest.approx((0.0184, 0.0005, 0.0018))
    assert ran(8, 48, 0).took == pytest.approx(0.0128)
    assert ran(20, 40, 0).age == pytest.approx(0.001 + 0.002 + 0.0004)
    (first, _), *_ = played["headroom"]
    assert min(item.step.began for item in pairs_of(steps, played["headroom"])) >= first + CHANGE

    arrivals = [0.1 * n for n in range(100)]
    traffic = Traffic(arrivals=[*arrivals, *(30 + item for item in arrivals)], prompts=[40] * 200, answers=[8] * 200)
    observed = {name: Observed(slices=played[name][1:], seconds=20.0, rollout_tokens=40_000) for name in MODES}
    for name in MODES:
        observed[name].empty_slices = played[name][:1]
    budget = Budget(ttft=0.5, tpot=0.1, margin=0.2)
    over = foretold(traffic, 30.0, budget, steps, observed)
    # All that there is room for: 48 answers a step, and 400 tokens to read for each 100.
    assert over["naive"] == pytest.approx(over["headroom"], rel=0.2) and 0.5 < over["headroom"] < 1.8

    only = {name: Observed(slices=played[name][:1], seconds=10.0, rollout_tokens=1) for name in MODES}
    with pytest.raises(ValueError, match="play more requests"):
        foretold(Traffic(arrivals=arrivals, prompts=[40] * 100, answers=[8] * 100), 30.0, budget, steps, only)
