"""The virtual clock, engines as rates, and runs on them: checked against times that can be worked out by hand."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.decide.multiplex import Prices, SharedJob, alone, join
from coordinator.decide.packing import plan
from coordinator.simulate import balancing, handover, jobs, scenarios, shared
from coordinator.simulate.clock import VirtualClock
from coordinator.simulate.engines import SimulatedEngine, StepCosts
from coordinator.simulate.rollouts import Plan, RolloutSimulation, SimulatedTurn
from rollout.decide.view import SchedulingRules


def ends(rates: StepCosts, *requests: tuple[float, float, float]) -> list[float]:
    """When requests of (asked at, prompt, tokens) are answered."""
    clock, result = VirtualClock(), [0.0] * len(requests)
    engine = SimulatedEngine(clock, rates)
    for number, (at, prompt, tokens) in enumerate(requests):

        def request(number: int = number, prompt: float = prompt, tokens: float = tokens) -> None:
            engine.request(prompt=prompt, tokens=tokens, done=lambda: result.__setitem__(number, clock.now))

        clock.after(at, request)
    clock.run()
    assert engine.load == 0 and engine.tokens == pytest.approx(sum(tokens for _, _, tokens in requests))
    return result


def test_things_of_one_time_happen_in_the_order_in_which_they_were_asked_for() -> None:
    clock, observed = VirtualClock(), list[tuple[str, float]]()
    for name, seconds in (("b", 2.0), ("a", 1.0), ("c", 2.0)):
        clock.after(seconds, lambda name=name: observed.append((name, clock.now)))  # type: ignore[misc]
    clock.run()
    assert observed == [("a", 1.0), ("b", 2.0), ("c", 2.0)]
    with pytest.raises(ValueError, match="past"):
        clock.after(-1, lambda: None)


def test_one_answer_takes_its_steps_and_its_prompt_before() -> None:
    assert ends(StepCosts(base=0.01, prefill=1000), (0, 500, 100)) == pytest.approx([1.5])


def test_answers_share_the_step_and_slow_each_other_by_their_own_part() -> None:
    # 100 steps of 0.01 + 2 * 0.005 for both, then 100 of 0.015 for the longer one alone
    assert ends(StepCosts(base=0.01, per_sequence=0.005), (0, 0, 100), (0, 0, 200)) == pytest.approx([2.0, 3.5])


def test_who_finds_no_slot_waits_and_prompts_are_read_in_their_order() -> None:
    assert ends(StepCosts(base=0.01, slots=1), (0, 0, 100), (0, 0, 100)) == pytest.approx([1.0, 2.0])
    assert ends(StepCosts(base=0.01, prefill=100), (0, 100, 100), (0, 100, 100)) == pytest.approx([2.0, 3.0])


def test_a_cancelled_answer_frees_its_slot_and_is_never_done() -> None:
    clock, observed = VirtualClock(), list[str]()
    engine = SimulatedEngine(clock, StepCosts(base=0.01, slots=1))
    first = engine.request(prompt=0, tokens=100, done=lambda: observed.append("first"))
    engine.request(prompt=0, tokens=100, done=lambda: observed.append("second"))
    clock.after(0.5, lambda: engine.cancel(first))
    clock.run()
    assert observed == ["second"] and clock.now == pytest.approx(1.5) and engine.load == 0


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.floats(0, 5), st.floats(0, 500), st.floats(1, 500)), min_size=1, max_size=12),
    slots=st.integers(1, 12),
)
def test_no_answer_is_lost_or_faster_than_alone(requests: list[tuple[float, float, float]], slots: int) -> None:
    rates = StepCosts(base=0.01, per_sequence=0.001, prefill=1000, slots=slots)
    for (at, prompt, tokens), end in zip(requests, ends(rates, *requests), strict=True):
        assert end >= at + prompt / 1000 + tokens * 0.011 - 1e-6


# --------------------------------------------------------------------------- rollouts


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.integers(1, 20),
    groups=st.integers(1, 5),
    size=st.integers(1, 4),
    tail=st.sampled_from([0.0, 1.25]),
    resumes=st.booleans(),
    staleness=st.integers(0, 1),
    barrier=st.sampled_from(["none", "turn", "group"]),
    seed=st.integers(0, 99),
)
def test_every_prompt_is_trained_once(
    prompts: int, groups: int, size: int, tail: float, resumes: bool, staleness: int, barrier: str, seed: int
) -> None:
    came = RolloutSimulation(
        Plan(
            rules=SchedulingRules(
                groups=groups, size=size, tail=tail, tail_resumes=resumes, staleness=staleness, concurrency=1000
            ),
            engines=[StepCosts(base=0.01, slots=16)] * 2,
            workload=scenarios.delays(seed, variation=1.0, turns=3),
            prompts=prompts,
            trainer=5.0,
            barrier=barrier,  # type: ignore[arg-type]
        )
    ).run()
    assert Counter(number for batch in came.batches for number in batch) == Counter(range(prompts))
    assert len(came.accepted) == prompts * size and came.sampled >= came.tokens - 1e-3


def test_a_run_takes_what_its_turns_and_steps_take() -> None:
    came = RolloutSimulation(
        Plan(
            rules=SchedulingRules(groups=1, size=2, staleness=0),
            engines=[StepCosts(base=0.01)],
            workload=lambda prompt, member: [SimulatedTurn(0, 100, 3.0), SimulatedTurn(0, 100, 3.0)],
            prompts=3,
            trainer=2.0,
        )
    ).run()
    assert came.rollout_seconds == pytest.approx([8.0] * 3) and came.seconds == pytest.approx(30.0)


def test_staleness_hides_the_trainer_behind_the_next_rollouts() -> None:
    def took(staleness: int) -> float:
        plan = Plan(
            rules=SchedulingRules(groups=2, size=2, staleness=staleness, concurrency=4),
            engines=[StepCosts(base=0.01)],
            workload=lambda prompt, member: [SimulatedTurn(0, 100, 1.0)],
            prompts=40,
            trainer=2.0,
        )
        return RolloutSimulation(plan).run().seconds

    assert took(1) < 0.6 * took(0)


def test_answers_never_wait_longer_than_the_bound_of_list_scheduling() -> None:
    metrics = scenarios.queue(1)
    assert metrics["within_bound"] == metrics["runs"] == 20 and metrics["worst_of_bound"] <= 1


# --------------------------------------------------------------------------- jobs

EVEN = [SharedJob(name=name, rollout=100.0, train=100.0) for name in "ab"]


def worst(job: SharedJob, step: int) -> tuple[float, float]:
    return job.rollout, job.train


def test_two_even_jobs_take_turns_without_waiting() -> None:
    group = join(alone(EVEN[0]), EVEN[1], Prices())
    assert group is not None
    course = jobs.run(group, worst, steps=10)
    assert course.seconds == 100 + 10 * 200  # the second begins one rollout later
    assert course.slowdown == {"a": 1.0, "b": 1.0} and course.switches == 38


def shortened(seed: int, minimum: float) -> jobs.Durations:
    draw = np.random.default_rng(seed)

    def durations(job: SharedJob, step: int) -> tuple[float, float]:
        return job.rollout * float(draw.uniform(minimum, 1)), job.train * float(draw.uniform(minimum, 1))

    return durations


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000))
def test_no_job_waits_longer_than_it_may_and_no_machine_works_for_two(seed: int) -> None:
    """At worst-case durations and at shorter ones."""
    for group in plan(shared.drawn_jobs(seed, 6), Prices()):
        for minimum in (1.0, 0.5):
            course = jobs.run(group, shortened(seed, minimum), steps=24)
            assert course.steps == {member.job.name: 24 for member in group.members}
            for member in group.members:
                # a step in the mean; the first ones, before all have begun, may be a cycle off in 23
                assert course.slowdown[member.job.name] <= member.job.slowdown * 24 / 23
            by_machine: dict[tuple[str, int], list[jobs.WorkInterval]] = {}
            for phase in course.phases:
                by_machine.setdefault((phase.kind, phase.machine), []).append(phase)
            for phases in by_machine.values():
                phases.sort(key=lambda phase: phase.begin)
                assert all(a.end <= b.begin + 1e-6 for a, b in pairwise(phases))


def test_jobs_in_groups_cost_less_and_none_waits_longer_than_it_may() -> None:
    metrics = shared.mux(3, count=10, steps=6)
    assert metrics["rent_ratio_disaggregated"] > 1.2 and metrics["slowest_of_allowed"] <= 1.0
    assert metrics["control"] == 1.0


def test_engines_that_go_over_compute_gradients_of_whole_groups_alone() -> None:
    rates = StepCosts(base=0.01, slots=64)
    lengths = np.full((8, 8), 100.0)
    lengths[:4, :] = 1000.0
    machines = handover.SharedMachinePool(prompt=800.0)
    plain, moved = (
        handover.Rollout(lengths, rates, 6.0, moves=moves, machines=machines).run() for moves in (False, True)
    )
    # Half of the answers, and of the groups, are there after a second; 32 are left, which one engine holds. Seven
    # eighths of the GPUs compute from then and the switch on: a third of the tokens, 2 s of all GPUs' work.
    assert (plain.rollout, plain.complete, plain.gone) == pytest.approx((10.0, 16.0, 0.0))
    assert (moved.gone, moved.rollout, moved.hidden) == pytest.approx((1.0, 10.0, 1 / 3))
    assert moved.complete == pytest.approx(10 + 4 + handover.SWITCH)
    one = handover.SharedMachinePool(
        trained_on=1, switch=0.5, prompt=800.0
    )  # of which one trains: at its full pace, at once
    moved = handover.Rollout(lengths, rates, 12.0, moves=True, machines=one).run()
    assert (moved.hidden, moved.complete) == pytest.approx((1 / 3, 10 + 8 + 0.5))


def test_answers_that_move_to_another_engine_go_on_where_they_were() -> None:
    clock = VirtualClock()
    engine = SimulatedEngine(clock, StepCosts(base=0.01))
    request = engine.request(prompt=0, tokens=100, done=lambda: None)
    clock.after(0.3, lambda: observed.append(engine.progress(request)))
    observed = list[tuple[float, float]]()
    clock.run()
    assert observed == [pytest.approx((30.0, 70.0))]


def test_sandboxes_move_to_hosts_that_came_back_and_only_then() -> None:
    result = balancing.metrics(2, seconds=600.0)
    assert result["held_most_of_mean"] < result["held_most_of_mean_without"]
    assert result["held_deviation_of_mean"] < 0.5 * result["held_deviation_of_mean_without"]
    assert 0 < result["moves_of_revived"] <= 1.1 and result["control"] == 0
