"""Jobs that share machines: what a group may hold, where a job goes, how far from the cheapest arrangement that is."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.harness.cheapest_groups import cheapest
from coordinator.decide.multiplex import JobGroup, Prices, SharedJob, alone, join, leave, place, total
from coordinator.decide.packing import in_order, plan

PRICES = Prices()


def job(name: str, rollout: float, train: float, **more: object) -> SharedJob:
    return SharedJob(name=name, rollout=rollout, train=train, **more)  # type: ignore[arg-type]


jobs_of = st.lists(
    st.builds(
        SharedJob,
        name=st.uuids().map(str),
        rollout=st.floats(1, 1000),
        train=st.floats(1, 1000),
        rollout_nodes=st.integers(1, 5),
        train_nodes=st.integers(1, 4),
        rollout_gb=st.floats(0, 1024),
        train_gb=st.floats(0, 1024),
        slowdown=st.floats(1, 4),
    ),
    max_size=7,
    unique_by=lambda item: item.name,
)


def test_two_jobs_fill_each_others_gaps_on_the_same_machines() -> None:
    group = join(alone(job("a", 100, 100)), job("b", 100, 100), PRICES)
    assert group is not None
    assert (group.rollout_nodes, group.train_nodes) == (1, 1)
    assert group.cycle == 200  # as long as one of them alone


def test_a_job_with_a_long_rollout_brings_its_own_rollout_machine() -> None:
    group = join(alone(job("a", 300, 50, slowdown=1.1)), job("b", 300, 50, slowdown=1.1), PRICES)
    assert group is not None
    assert (group.rollout_nodes, group.train_nodes, group.cycle) == (2, 1, 350)


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (job("b", 100, 250), "both trainings take 350 s, and a step of the first may take 220"),
        (job("b", 250, 10), "one step of it takes longer than the first may wait"),
        (job("b", 10, 10, slowdown=2), "it would wait for a whole step of the first"),
        (job("b", 100, 100, train_nodes=2), "it wants more training machines than there are"),
        (job("b", 100, 100, train_gb=1000), "both trainers' states do not fit into one machine"),
    ],
)
def test_a_job_that_would_break_a_promise_may_not_join(second: SharedJob, why: str) -> None:
    assert join(alone(job("a", 100, 100, slowdown=1.1, train_gb=100)), second, PRICES) is None, why


def test_a_full_memory_costs_another_rollout_machine() -> None:
    group = join(alone(job("a", 100, 100, rollout_gb=600)), job("b", 100, 100, rollout_gb=600), PRICES)
    assert group is not None and group.rollout_nodes == 2


def test_a_job_goes_where_it_costs_nothing_more() -> None:
    groups = [alone(job("long", 300, 100, slowdown=1.1)), alone(job("even", 100, 100))]
    placed = place(groups, job("new", 100, 100, slowdown=1.5), PRICES)
    assert (placed.index, placed.cost) == (1, 0)


def test_a_job_too_large_for_a_machine_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="huge needs more host memory"):
        place([], job("huge", 1, 1, train_gb=2000), PRICES)
    with pytest.raises(ValueError, match="huge needs more host memory"):
        plan([job("huge", 1, 1, rollout_gb=2000)], PRICES)


def test_a_job_that_leaves_takes_its_machines_along() -> None:
    group = join(alone(job("a", 300, 50, slowdown=1.1)), job("b", 300, 50, slowdown=1.1, rollout_nodes=2), PRICES)
    assert group is not None and group.rollout_nodes == 3
    left = leave(group, "b")
    assert left is not None and left.rollout_nodes == 1 and left.members[0].nodes == (0,)
    assert leave(left, "a") is None


def test_a_job_takes_other_machines_where_turns_on_the_fullest_would_take_too_long() -> None:
    first, second = job("a", 470, 200, rollout_nodes=2, slowdown=3.0), job("b", 400, 200, rollout_nodes=2, slowdown=3.0)
    third = job("c", 210, 180, rollout_nodes=4, train_nodes=1, slowdown=1.79)
    group: JobGroup | None = alone(third)
    for item in (second, first):
        group = group and join(group, item, PRICES)
    assert group is not None and group.rollout_nodes == 6 and not group.faults(PRICES)
    assert group.members[2].nodes == (4, 5)


@settings(max_examples=40, deadline=None)
@given(jobs_of)
def test_every_group_keeps_its_promises_and_every_job_has_one(jobs: list[SharedJob]) -> None:
    for groups in (plan(jobs, PRICES), in_order(jobs, PRICES)):
        assert [fault for group in groups for fault in group.faults(PRICES)] == []
        assert sorted(member.job.name for group in groups for member in group.members) == sorted(
            item.name for item in jobs
        )
        for group in groups:
            for member in group.members:
                assert len(set(member.nodes)) == member.job.rollout_nodes
                assert max(member.nodes) < group.rollout_nodes
                assert member.job.train_nodes <= group.train_nodes


@settings(max_examples=60, deadline=None)
@given(jobs_of)
def test_many_at_once_is_the_same_as_one_after_another(jobs: list[SharedJob]) -> None:
    groups: list[JobGroup] = []
    for item in jobs:
        placed = place(groups, item, PRICES)
        if placed.index is None:
            groups.append(placed.group)
        else:
            groups[placed.index] = placed.group
    assert total(in_order(jobs, PRICES), PRICES) == pytest.approx(total(groups, PRICES))


@settings(max_examples=25, deadline=None)
@given(jobs_of)
def test_a_plan_costs_at_most_what_one_after_another_costs(jobs: list[SharedJob]) -> None:
    assert total(plan(jobs, PRICES), PRICES) <= total(in_order(jobs, PRICES), PRICES) + 1e-9


def drawn(seed: int) -> list[SharedJob]:
    rng = random.Random(seed)
    jobs = []
    for number in range(rng.randint(2, 8)):
        rollout = rng.uniform(60, 600)
        jobs.append(
            SharedJob(
                name=f"j{number}",
                rollout=rollout,
                train=rollout * rng.uniform(0.2, 2),
                rollout_nodes=rng.choice([1, 1, 2]),
                train_nodes=rng.choice([1, 1, 2]),
                rollout_gb=rng.uniform(100, 500),
                train_gb=rng.uniform(100, 500),
                slowdown=rng.uniform(1.1, 2.5),
            )
        )
    return jobs


def test_plans_are_within_two_percent_of_the_cheapest_there_is() -> None:
    """Twenty-five drawn instances of 2 to 8 jobs; `pagurus bench scheduling` tries two hundred."""
    ours, best = 0.0, 0.0
    for seed in range(25):
        jobs = drawn(seed)
        mine, minimum = total(plan(jobs, PRICES), PRICES), cheapest(jobs, PRICES)
        assert mine >= minimum - 1e-6, f"instance {seed}: cheaper than the cheapest"
        ours, best = ours + mine, best + minimum
    assert ours <= 1.02 * best
