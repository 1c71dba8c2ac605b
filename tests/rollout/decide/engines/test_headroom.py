"""Rollouts on serving engines: only what users leave."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.simulate import serving
from rollout.decide.engines.headroom import (
    CHUNK,
    Budget,
    EngineView,
    HeadroomStep,
    StepCost,
    WaitingRequest,
    headroom,
    next_step,
)

BUDGET = Budget(ttft=1.0, tpot=0.05, margin=0.0)
COST = StepCost(base=0.010, per_answer=0.001, per_prompt_token=0.0001)


def view(**changes: object) -> EngineView:
    plain: dict[str, object] = {
        "waiting": [], "last_tokens": [], "rollouts": 100, "rollout_prompt": 0, "free": 1000, "target": 0, "held": 0,
    }  # fmt: skip
    return EngineView(**(plain | changes))  # type: ignore[arg-type]


def test_without_users_rollouts_have_it_all() -> None:
    assert next_step(view(rollout_prompt=9999), BUDGET, COST, 0.0) == HeadroomStep(0, 100, CHUNK)


def test_a_running_user_leaves_the_rest_of_the_time_to_the_next_token() -> None:
    # 50 ms less 10 for the step and 1 for the user: 39 rollouts
    assert next_step(view(last_tokens=[0.0]), BUDGET, COST, 0.0) == HeadroomStep(0, 39, 0)
    assert next_step(view(last_tokens=[0.0]), BUDGET, COST, 0.030) == HeadroomStep(0, 9, 0)
    assert next_step(view(last_tokens=[0.0]), BUDGET, COST, 0.045) == HeadroomStep(0, 0, 0)


def test_a_waiting_user_leaves_what_its_prompt_does_not_need() -> None:
    # of a step of 50 ms 10 ms and 100 tokens of 0.1 ms
    assert headroom(view(waiting=[WaitingRequest(0.0, 100)]), BUDGET, COST, 0.0) == pytest.approx(0.03)
    # when it has waited for 0.97 s, 30 ms are left, of which it needs 20
    assert headroom(view(waiting=[WaitingRequest(-0.97, 100)]), BUDGET, COST, 0.0) == pytest.approx(0.01)
    # a prompt of three chunks shares among three steps what it does not need
    cheap = StepCost(base=0.010, per_answer=0.001, per_prompt_token=0.00001)
    needed = 0.03 + 3 * CHUNK * 0.00001
    assert headroom(view(waiting=[WaitingRequest(-0.95, 3 * CHUNK)]), BUDGET, cheap, 0.0) == pytest.approx(
        (0.05 - needed) / 3
    )


def test_a_burst_takes_the_cache_of_rollouts_once() -> None:
    waiting = [WaitingRequest(0.0, 600)]
    pressed = view(waiting=waiting, target=1200, free=1000, held=500)
    assert next_step(pressed, BUDGET, COST, 0.0) == HeadroomStep(CHUNK, 0, 0, cut=True)
    frozen = view(waiting=waiting, target=1200, free=1500, held=0, frozen=True)
    assert next_step(frozen, BUDGET, COST, 0.0) == HeadroomStep(CHUNK, 0, 0)


@given(
    waiting=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 2000)), max_size=4),
    last=st.lists(st.floats(0.9, 1.0), max_size=8),
    rollouts=st.integers(0, 200),
    prompt=st.integers(0, 5000),
)
def test_nobody_who_could_be_in_time_is_made_late(
    waiting: list[tuple[float, int]], last: list[float], rollouts: int, prompt: int
) -> None:
    now = 1.0
    observed = view(
        waiting=[WaitingRequest(*item) for item in waiting], last_tokens=last, rollouts=rollouts, rollout_prompt=prompt
    )
    step = next_step(observed, BUDGET, COST, now)
    users = COST.step(len(last), step.users_prompt)
    added = step.rollouts * COST.per_answer + step.rollout_prompt * COST.per_prompt_token
    for item in last:
        in_time_without = now + users <= item + BUDGET.tpot
        assert not in_time_without or now + users + added <= item + BUDGET.tpot + 1e-9
    if headroom(observed, BUDGET, COST, now) <= 0:
        assert added == 0
    assert step.users_prompt + step.rollout_prompt <= CHUNK


def test_users_are_served_in_time_beside_rollouts_and_not_in_one_queue_with_them() -> None:
    traffic = serving.bursty(1, requests=400, rate=3.5)
    budget, cost = (
        Budget(ttft=1.0, tpot=0.036, margin=0.4),
        StepCost(base=0.012, per_answer=0.00012, per_prompt_token=3e-5),
    )
    served = {mode: serving.serve(traffic, budget, cost, mode) for mode in ("alone", "headroom", "naive")}  # type: ignore[arg-type]
    assert served["alone"].violations(budget) == served["headroom"].violations(budget) == 0
    assert served["naive"].violations(budget) > 100
    assert (
        served["headroom"].rollout_tokens > 0.5 * served["naive"].rollout_tokens > served["alone"].rollout_tokens == 0
    )
    assert all(len(item.ttft) == 400 for item in served.values())
