"""Rollouts on an engine that serves users, through the pool: users are in time, a burst sends rollouts elsewhere."""

from __future__ import annotations

import asyncio

from bench.harness.rated_engines import IdleLoop
from bench.harness.serving_engine import Harvest, harvest
from coordinator.simulate.serving import Mode, Traffic, bursty
from rollout.decide.engines.headroom import Budget, StepCost

BUDGET = Budget(ttft=1.0, tpot=0.036, margin=0.4)
COST = StepCost(base=0.012, per_answer=0.00012, per_prompt_token=3e-5)


def run(traffic: Traffic, mode: Mode, **options: int) -> Harvest:
    with asyncio.Runner(loop_factory=IdleLoop) as runner:
        return runner.run(harvest(traffic, BUDGET, COST, mode, **options))


def test_users_are_in_time_beside_rollouts_that_come_through_the_pool() -> None:
    traffic = bursty(1, requests=150, rate=3.5)
    alone, headroom, naive = (run(traffic, mode) for mode in ("alone", "headroom", "naive"))  # type: ignore[arg-type]
    assert alone.served.violations(BUDGET) == headroom.served.violations(BUDGET) == 0
    assert naive.served.violations(BUDGET) > 100
    assert headroom.served.rollout_tokens > 0.5 * naive.served.rollout_tokens > alone.served.rollout_tokens == 0
    assert all(len(item.served.ttft) == 150 for item in (alone, headroom, naive))
    assert headroom.counts["routed_colocated"] > 0 and headroom.counts["routed_prefix"] > 0 and headroom.ended > 100


def test_a_burst_takes_the_cache_once_and_the_rollouts_go_on_elsewhere() -> None:
    together = Traffic(arrivals=[8.0] * 30, prompts=[500] * 30, answers=[50] * 30)
    came = run(together, "headroom", cache=60_000, slots=30, live=40)
    assert came.served.cuts == 1
    assert came.counts["moved"] > 0 and came.counts["moved_tokens"] > 0  # with what they had got
    assert came.served.violations(BUDGET) == 0 and len(came.served.ttft) == 30
