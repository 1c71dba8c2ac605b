"""The order of checkpoint work: tables for each rule, properties for what must always hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.schedule import Job, Schedule, Stage

WIDE = dict.fromkeys(Stage, 1)


def drain(schedule: Schedule, now: float) -> list[str]:
    """Run everything, one after another, and tell the order."""
    order = []
    while started := schedule.start(now):
        for job in started:
            order.append(job.id)
            schedule.finish(job.id)
    return order


@pytest.mark.parametrize(
    ("jobs", "promoted", "now", "order"),
    [
        pytest.param([("a", "x", 5), ("b", "y", 3)], [], 0, "ba", id="earlier deadline first"),
        pytest.param([("a", "x", 5), ("b", "y", 5)], [], 0, "ab", id="then arrival"),
        pytest.param([("a", "x", 3), ("b", "y", 5)], ["b"], 0, "ba", id="somebody waits for b"),
        pytest.param([("a", "x", 9), ("b", "y", 2), ("c", "z", 5)], ["c", "a"], 0, "cab", id="waited, by deadline"),
        pytest.param([("a", "x", 1), ("b", "y", 5)], ["b"], 2, "ab", id="overdue before waited with later deadline"),
        pytest.param(
            [("a", "x", 1), ("b", "x", 1), ("c", "x", 1), ("d", "y", 9)], [], 0, "adbc", id="fair share over deadline"
        ),
    ],
)
def test_order(jobs: list[tuple[str, str, float]], promoted: list[str], now: float, order: str) -> None:
    schedule = Schedule(WIDE)
    for name, sandbox, deadline in jobs:
        schedule.submit(Job(name, Stage.DUMP, sandbox, deadline))
    for name in promoted:
        schedule.promote(name)
    assert "".join(drain(schedule, now)) == order


def test_stages_have_limits_of_their_own() -> None:
    schedule = Schedule({Stage.DUMP: 2, Stage.SNAPSHOT: 3, Stage.HASH: 1, Stage.COMPRESS: 1})
    for stage in Stage:
        for number in range(5):
            schedule.submit(Job(f"{stage}{number}", stage, f"s{number}", 1.0))
    assert len(schedule.start(0.0)) == 7
    assert [schedule.running(stage) for stage in Stage] == [2, 3, 1, 1]
    assert schedule.start(0.0) == []


def test_a_queued_job_can_be_cancelled() -> None:
    schedule = Schedule(WIDE)
    schedule.submit(Job("a", Stage.DUMP, "x", 1.0))
    schedule.submit(Job("b", Stage.DUMP, "x", 2.0))
    schedule.start(0.0)
    schedule.finish("b")
    schedule.finish("a")
    assert schedule.queued() == schedule.running() == 0
    assert schedule.start(0.0) == []


def test_an_id_is_used_once() -> None:
    schedule = Schedule(WIDE)
    schedule.submit(Job("a", Stage.DUMP, "x", 1.0))
    with pytest.raises(ValueError, match="already known"):
        schedule.submit(Job("a", Stage.COMPRESS, "x", 1.0))


ACTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("submit"), st.sampled_from(list(Stage)), st.sampled_from("xyz"), st.floats(0, 20), st.booleans()
        ),
        st.tuples(st.just("promote"), st.integers(0, 60)),
        st.tuples(st.just("finish"), st.integers(0, 60)),
        st.tuples(st.just("pass"), st.floats(0, 5)),
    ),
    max_size=60,
)


@given(ACTS, st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_limits_hold_and_no_free_slot_stays_empty(acts: list[tuple], dumps: int, snapshots: int, packs: int) -> None:
    limits = {Stage.DUMP: dumps, Stage.SNAPSHOT: snapshots, Stage.HASH: packs, Stage.COMPRESS: packs}
    schedule, now, known, running = Schedule(limits), 0.0, [], set()
    for act in acts:
        match act:
            case ("submit", stage, sandbox, deadline, waited):
                job = Job(f"j{len(known)}", stage, sandbox, now + deadline, waited=waited)
                known.append(job)
                schedule.submit(job)
            case ("promote", index) if known:
                schedule.promote(known[index % len(known)].id)
            case ("finish", index) if running:
                name = sorted(running)[index % len(running)]
                running.discard(name)
                schedule.finish(name)
            case ("pass", seconds):
                now += seconds
        for job in schedule.start(now):
            assert job.id not in running
            running.add(job.id)
        for stage in Stage:
            assert schedule.running(stage) <= limits[stage]
            assert schedule.queued(stage) == 0 or schedule.running(stage) == limits[stage]
    assert schedule.running() == len(running)


@given(st.lists(st.tuples(st.sampled_from("wxyz"), st.floats(0, 10), st.booleans()), min_size=1, max_size=40))
def test_everything_runs_exactly_once(jobs: list[tuple[str, float, bool]]) -> None:
    schedule = Schedule(WIDE)
    for number, (sandbox, deadline, waited) in enumerate(jobs):
        schedule.submit(Job(f"j{number}", Stage.COMPRESS, sandbox, deadline, waited=waited))
    assert sorted(drain(schedule, 0.0)) == sorted(f"j{number}" for number in range(len(jobs)))


@given(st.lists(st.booleans(), max_size=30))
def test_an_overdue_job_is_not_starved_by_later_ones(waited: list[bool]) -> None:
    """However many urgent jobs arrive with later deadlines, the overdue one is next."""
    schedule = Schedule(WIDE)
    schedule.submit(Job("running", Stage.DUMP, "x", 0.0))
    schedule.start(0.0)
    schedule.submit(Job("patient", Stage.DUMP, "x", 10.0))
    for number, flag in enumerate(waited):
        schedule.submit(Job(f"late{number}", Stage.DUMP, f"s{number}", 10.5 + number, waited=flag))
    schedule.finish("running")
    assert schedule.start(11.0)[0].id == "patient"


@given(st.integers(2, 30), st.integers(1, 5))
def test_a_sandbox_with_many_jobs_does_not_crowd_out_another(many: int, few: int) -> None:
    schedule = Schedule(WIDE)
    for number in range(many):
        schedule.submit(Job(f"a{number}", Stage.COMPRESS, "greedy", 50.0))
    for number in range(few):
        schedule.submit(Job(f"b{number}", Stage.COMPRESS, "modest", 90.0))
    order = drain(schedule, 0.0)
    last = max(order.index(f"b{number}") for number in range(few))
    assert last <= 2 * few


RATE = {Stage.COMPRESS: 10.0}  # units a second


def test_a_share_holds_back_what_nobody_waits_for() -> None:
    schedule = Schedule(dict.fromkeys(Stage, 9), RATE)
    for name in "abc":
        schedule.submit(Job(name, Stage.COMPRESS, name, 100.0, cost=25.0))
    assert [job.id for job in schedule.start(0.0)] == ["a"]  # the burst of 10 is overdrawn by 15
    assert schedule.wake(0.0) == pytest.approx(1.5, abs=0.01)
    assert schedule.start(1.4) == []
    schedule.promote("c")
    assert [job.id for job in schedule.start(1.4)] == ["c"]  # somebody waits: at once, paid for afterwards
    assert schedule.start(3.9) == []
    assert [job.id for job in schedule.start(schedule.wake(3.9) or 0.0)] == ["b"]
    assert schedule.wake(9.0) is None


@given(
    st.lists(st.tuples(st.floats(0, 20), st.sampled_from("wxyz"), st.floats(1, 60), st.booleans()), max_size=40),
    st.floats(1, 100),
)
def test_a_share_is_kept_and_starves_nobody(jobs: list[tuple[float, str, float, bool]], rate: float) -> None:
    """What nobody waits for never uses more than the share allows, and everything starts by its deadline."""
    schedule = Schedule(dict.fromkeys(Stage, 1000), {Stage.COMPRESS: rate})
    arrivals = sorted(
        (time, number, sandbox, cost, waited) for number, (time, sandbox, cost, waited) in enumerate(jobs)
    )
    patience, now, started, patient_cost = 30.0, 0.0, {}, 0.0
    while arrivals or schedule.queued():
        while arrivals and arrivals[0][0] <= now:
            time, number, sandbox, cost, waited = arrivals.pop(0)
            schedule.submit(Job(f"j{number}", Stage.COMPRESS, sandbox, time + patience, cost, waited))
        for job in schedule.start(now):
            started[job.id] = now
            assert now <= job.deadline + 1e-6
            if job.waited:
                assert now == pytest.approx(jobs[int(job.id[1:])][0])
            elif now < job.deadline:
                assert patient_cost <= rate * (now + 1.0) + 1e-6  # before this one, which may overdraw
                patient_cost += job.cost
        wake = schedule.wake(now)
        coming = [arrivals[0][0]] if arrivals else []
        now = max(now, min([*coming, *([wake] if wake is not None else [])], default=now))
    assert len(started) == len(jobs)


@given(st.integers(1, 4), st.integers(5, 60), st.data())
def test_nothing_starves_under_a_stream_of_urgent_jobs(limit: int, rounds: int, data: st.DataObject) -> None:
    """Urgent work arrives faster than it can be done, for ever: a patient job still starts soon after its deadline."""
    schedule = Schedule(dict.fromkeys(Stage, limit))
    schedule.submit(Job("patient", Stage.DUMP, "p", 5.0))
    running: list[str] = []
    for now in range(rounds):
        for number in range(limit + 1):
            think = data.draw(st.floats(0.1, 3.0))
            schedule.submit(Job(f"u{now}.{number}", Stage.DUMP, f"s{number}", now + think, waited=True))
        for name in running:
            schedule.finish(name)
        running = [job.id for job in schedule.start(float(now))]
        if "patient" in running:
            break
    else:
        # Ahead of it are only those whose deadline is earlier: at most what arrived until then.
        assert rounds < (limit + 1) * 6
