"""The order of checkpoint work: tables for each rule, properties for what must always hold."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.checkpoints.schedule import (
    BEHIND,
    BURST,
    CALM,
    EXISTING,
    MAX_PENDING,
    MIN_DUMP_SECONDS,
    PART,
    QUICK,
    UNPROVEN,
    CheckpointStage,
    Schedule,
    StageJob,
    expected,
)

WIDE = dict.fromkeys(CheckpointStage, 1)


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
        schedule.submit(StageJob(name, CheckpointStage.DUMP, sandbox, deadline))
    for name in promoted:
        schedule.promote(name)
    assert "".join(drain(schedule, now)) == order


def test_stages_have_limits_of_their_own() -> None:
    schedule = Schedule(
        {CheckpointStage.DUMP: 2, CheckpointStage.SNAPSHOT: 3, CheckpointStage.HASH: 1, CheckpointStage.COMPRESS: 1}
    )
    for stage in (CheckpointStage.DUMP, CheckpointStage.SNAPSHOT):
        for number in range(5):
            schedule.submit(StageJob(f"before{number}", stage, f"s{number}", 1.0))
            schedule.start(0.0)
            schedule.finish(f"before{number}", took=0.1)
    for stage in (CheckpointStage.DUMP, CheckpointStage.SNAPSHOT, CheckpointStage.HASH, CheckpointStage.COMPRESS):
        for number in range(5):
            schedule.submit(StageJob(f"{stage}{number}", stage, f"s{number}", 1.0))
    assert len(schedule.start(0.0)) == 7
    assert [schedule.running(stage) for stage in CheckpointStage] == [2, 3, 1, 1, 0]
    assert schedule.start(0.0) == []


def test_a_queued_job_can_be_cancelled() -> None:
    schedule = Schedule(WIDE)
    schedule.submit(StageJob("a", CheckpointStage.DUMP, "x", 1.0))
    schedule.submit(StageJob("b", CheckpointStage.DUMP, "x", 2.0))
    schedule.start(0.0)
    schedule.finish("b")
    schedule.finish("a")
    assert schedule.queued() == schedule.running() == 0
    assert schedule.start(0.0) == []


def test_an_id_is_used_once() -> None:
    schedule = Schedule(WIDE)
    schedule.submit(StageJob("a", CheckpointStage.DUMP, "x", 1.0))
    with pytest.raises(ValueError, match="already known"):
        schedule.submit(StageJob("a", CheckpointStage.COMPRESS, "x", 1.0))


QUEUED = [CheckpointStage.DUMP, CheckpointStage.SNAPSHOT, CheckpointStage.HASH, CheckpointStage.COMPRESS]
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.sampled_from(QUEUED), st.sampled_from("xyz"), st.floats(0, 20), st.booleans()),
        st.tuples(st.just("promote"), st.integers(0, 60)),
        st.tuples(st.just("finish"), st.integers(0, 60)),
        st.tuples(st.just("pass"), st.floats(0, 5)),
    ),
    max_size=60,
)


@given(ACTS, st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_limits_hold_and_no_free_slot_stays_empty(acts: list[tuple], dumps: int, snapshots: int, packs: int) -> None:
    limits = {
        CheckpointStage.DUMP: dumps,
        CheckpointStage.SNAPSHOT: snapshots,
        CheckpointStage.HASH: packs,
        CheckpointStage.COMPRESS: packs,
    }
    schedule, now, existing, running, queued = Schedule(limits), 0.0, [], set(), set()
    for act in acts:
        match act:
            case ("submit", stage, sandbox, deadline, waited):
                job = StageJob(f"j{len(existing)}", stage, sandbox, now + deadline, waited=waited)
                existing.append(job)
                queued.add(job.id)
                schedule.submit(job)
            case ("promote", index) if existing:
                schedule.promote(existing[index % len(existing)].id)
            case ("finish", index) if running:
                name = sorted(running)[index % len(running)]
                running.discard(name)
                schedule.finish(name, took=index / 30)
            case ("pass", seconds):
                now += seconds
        for job in schedule.start(now):
            assert job.id not in running
            running.add(job.id)
            queued.discard(job.id)
        for stage in limits:
            assert schedule.running(stage) <= limits[stage]
            share = max(1, limits.get(stage, 0) - 1)
            taken = Counter(job.sharer for job in existing if job.id in running and job.stage is stage)
            assert all(count <= share for count in taken.values())
            assert schedule.running(stage) == limits.get(stage) or not any(
                taken[job.sharer] < share for job in existing if job.stage is stage and job.id in queued
            )
    assert schedule.running() == len(running)


@given(st.lists(st.tuples(st.sampled_from("wxyz"), st.floats(0, 10), st.booleans()), min_size=1, max_size=40))
def test_everything_runs_exactly_once(jobs: list[tuple[str, float, bool]]) -> None:
    schedule = Schedule(WIDE)
    for number, (sandbox, deadline, waited) in enumerate(jobs):
        schedule.submit(StageJob(f"j{number}", CheckpointStage.COMPRESS, sandbox, deadline, waited=waited))
    assert sorted(drain(schedule, 0.0)) == sorted(f"j{number}" for number in range(len(jobs)))


@given(st.lists(st.booleans(), max_size=30))
def test_an_overdue_job_is_not_starved_by_later_ones(waited: list[bool]) -> None:
    """However many urgent jobs arrive with later deadlines, the overdue one is next."""
    schedule = Schedule(WIDE)
    schedule.submit(StageJob("running", CheckpointStage.DUMP, "x", 0.0))
    schedule.start(0.0)
    schedule.submit(StageJob("patient", CheckpointStage.DUMP, "x", 10.0))
    for number, flag in enumerate(waited):
        schedule.submit(StageJob(f"late{number}", CheckpointStage.DUMP, f"s{number}", 10.5 + number, waited=flag))
    schedule.finish("running")
    assert schedule.start(11.0)[0].id == "patient"


@given(st.integers(2, 30), st.integers(1, 5))
def test_a_sandbox_with_many_jobs_does_not_crowd_out_another(many: int, few: int) -> None:
    schedule = Schedule(WIDE)
    for number in range(many):
        schedule.submit(StageJob(f"a{number}", CheckpointStage.COMPRESS, "greedy", 50.0))
    for number in range(few):
        schedule.submit(StageJob(f"b{number}", CheckpointStage.COMPRESS, "modest", 90.0))
    order = drain(schedule, 0.0)
    last = max(order.index(f"b{number}") for number in range(few))
    assert last <= 2 * few


RATE = {CheckpointStage.COMPRESS: 10.0}  # units a second


def test_a_share_holds_back_what_nobody_waits_for() -> None:
    schedule = Schedule(dict.fromkeys(CheckpointStage, 9), RATE)
    for name in "abc":
        schedule.submit(StageJob(name, CheckpointStage.COMPRESS, name, 100.0, cost=25.0))
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
    schedule = Schedule(dict.fromkeys(CheckpointStage, 1000), {CheckpointStage.COMPRESS: rate})
    arrivals = sorted(
        (time, number, sandbox, cost, waited) for number, (time, sandbox, cost, waited) in enumerate(jobs)
    )
    timeout, now, started, patient_cost = 30.0, 0.0, {}, 0.0
    while arrivals or schedule.queued():
        while arrivals and arrivals[0][0] <= now:
            time, number, sandbox, cost, waited = arrivals.pop(0)
            schedule.submit(StageJob(f"j{number}", CheckpointStage.COMPRESS, sandbox, time + timeout, cost, waited))
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
    schedule = Schedule(dict.fromkeys(CheckpointStage, limit))
    schedule.submit(StageJob("patient", CheckpointStage.DUMP, "p", 5.0))
    running: list[str] = []
    for now in range(rounds):
        for number in range(limit + 1):
            think = data.draw(st.floats(0.1, 3.0))
            schedule.submit(StageJob(f"u{now}.{number}", CheckpointStage.DUMP, f"s{number}", now + think, waited=True))
        for name in running:
            schedule.finish(name)
        running = [job.id for job in schedule.start(float(now))]
        if "patient" in running:
            break
    else:
        # Ahead of it are only those whose deadline is earlier: at most what arrived until then.
        assert rounds < (limit + 1) * 6


# ---------------------------------------------------------------------- shares of the slots

TWO, SIX = {CheckpointStage.DUMP: 2}, {CheckpointStage.DUMP: 6}


def started(schedule: Schedule, now: float = 0.0) -> list[str]:
    return [job.id for job in schedule.start(now)]


def proven(*sandboxes: str) -> Schedule:
    """With sandboxes that have held a slot for a moment."""
    schedule = Schedule(TWO)
    for name in sandboxes:
        schedule.submit(StageJob(name, CheckpointStage.DUMP, name, 0.0))
        schedule.start(0.0)
        schedule.finish(name, took=0.1)
    return schedule


def held(schedule: Schedule, times: dict[str, float], size: float = MIN_DUMP_SECONDS) -> None:
    """Each of these sandboxes held a slot for so long, one after another."""
    for name, took in times.items():
        schedule.submit(StageJob(name, CheckpointStage.DUMP, name, 0.0, expected=size))
        assert started(schedule) == [name]
        schedule.finish(name, took)


def is_quick(schedule: Schedule, *sandboxes: str) -> list[bool]:
    """Whether each of these would take a part of the slots that it does not share with new ones."""
    jobs = [StageJob(f"again {name}", CheckpointStage.DUMP, name, 1.0) for name in sandboxes]
    for job in jobs:
        schedule.submit(job)
    result = [job.sharer != UNPROVEN for job in jobs]
    for job in jobs:
        schedule.finish(job.id)
    return result


def test_no_owner_takes_the_last_slot() -> None:
    schedule = proven("s0", "s1", "s2", "s3", "other")
    for number in range(4):
        schedule.submit(StageJob(f"a{number}", CheckpointStage.DUMP, f"s{number}", 1.0, waited=True, owner="t-a"))
    assert started(schedule) == ["a0"]
    schedule.submit(StageJob("b", CheckpointStage.DUMP, "other", 9.0, owner="t-b"))
    assert started(schedule) == ["b"]
    assert started(schedule, 5.0) == []  # overdue as they are
    schedule.finish("a0")
    assert started(schedule, 5.0) == ["a1"]


def test_sandboxes_of_no_owner_do_not_share() -> None:
    schedule = proven("a", "b")
    for name in "ab":
        schedule.submit(StageJob(name, CheckpointStage.DUMP, name, 1.0))
    assert started(schedule) == ["a", "b"]


def test_new_sandboxes_share_until_they_have_shown_how_long_they_take() -> None:
    schedule = proven("old")
    for name in ("new1", "new2", "old"):
        schedule.submit(StageJob(name, CheckpointStage.DUMP, name, 1.0, waited=True))
    assert started(schedule) == ["new1", "old"]
    schedule.finish("new1", took=0.1)
    assert started(schedule) == ["new2"]


def test_long_work_has_nothing_to_prove() -> None:
    schedule = Schedule({CheckpointStage.READ: 2})
    for name in "ab":
        schedule.submit(StageJob(name, CheckpointStage.READ, name, 1.0))
    assert started(schedule) == ["a", "b"]


@pytest.mark.parametrize(
    ("times", "quick"),
    [
        pytest.param({"a": 0.2}, "a", id="a moment"),
        pytest.param({"a": 0.3, "b": 0.01}, "b", id="longer, on a host that is not slow"),
        pytest.param({"a": 3.0, "b": 0.3, "c": 9.0}, "ab", id="on one that is twenty times as slow for all"),
        pytest.param(
            {"a": 0.1, "b": 5.0, "c": 5.0, "d": 5.0}, "a", id="most are slow, and one shows that the host is not"
        ),
        pytest.param({"a": 9.0}, "a", id="nobody else to compare with"),
    ],
)
def test_what_holds_a_slot_long_shares_with_its_like_but_for_what_the_host_is_slow(
    times: dict[str, float], quick: str
) -> None:
    schedule = Schedule(SIX)
    held(schedule, times)
    assert is_quick(schedule, *times) == [name in quick for name in times]


def test_what_has_much_to_dump_is_not_quick_before_and_after_it_was_dumped() -> None:
    schedule = Schedule(SIX)
    large = expected(400, 0)
    held(schedule, {"large": 0.1}, large)
    schedule.submit(StageJob("again", CheckpointStage.DUMP, "large", 1.0, expected=large))
    schedule.submit(StageJob("other", CheckpointStage.DUMP, "new", 1.0))
    assert {job.sharer for job in schedule.start(0.0)} == {UNPROVEN}


@given(st.lists(st.floats(0.015, 5), min_size=2, max_size=EXISTING), st.floats(1, 100))
def test_a_host_that_slows_all_down_makes_none_slow(times: list[float], slower: float) -> None:
    before, after = Schedule(SIX), Schedule(SIX)
    named = {f"s{number}": took for number, took in enumerate(times)}
    held(before, named)
    held(after, {name: slower * took for name, took in named.items()})
    for was, now in zip(is_quick(before, *named), is_quick(after, *named), strict=True):
        assert now or not was


def test_what_takes_long_lets_others_go_first_but_not_for_ever() -> None:
    schedule = Schedule(WIDE)
    large = expected(800, 0)
    schedule.submit(StageJob("under way", CheckpointStage.DUMP, "x", 0.0))
    assert [job.id for job in schedule.start(0.0)] == ["under way"]
    schedule.submit(StageJob("large", CheckpointStage.DUMP, "large", 0.1, waited=True, expected=large))
    for now in range(1, 20):
        schedule.submit(StageJob(f"small {now}", CheckpointStage.DUMP, "small", now + 0.2, waited=True))
        schedule.finish("under way" if now == 1 else f"small {now - 1}")
        (job,) = schedule.start(float(now))
        if job.id == "large":
            break
    assert 2 < now <= 0.1 + BEHIND * large


def test_who_held_a_slot_long_ago_says_nothing_of_the_host_of_now() -> None:
    schedule = Schedule(SIX)
    held(schedule, {"old": 0.01})
    held(schedule, {f"s{number}": 2.0 for number in range(EXISTING)})
    assert is_quick(schedule, "s0", "s1") == [True, True]


def test_half_of_what_a_sandbox_was_like_is_forgotten_each_time() -> None:
    schedule = Schedule(TWO)
    held(schedule, {"quick": MIN_DUMP_SECONDS})
    for took, quick in ((0.2, False), (0.4, True), (0.2, False), (0.1, False), (0.1, True)):
        schedule.submit(StageJob("new", CheckpointStage.DUMP, "new", 0.0, waited=True))
        schedule.submit(StageJob("a", CheckpointStage.DUMP, "a", 1.0, waited=True))
        assert started(schedule) == (["new", "a"] if quick else ["new"])
        schedule.finish("new")
        started(schedule)
        schedule.finish("a", took)


def test_a_cancelled_job_of_a_sharer_at_its_most_never_starts() -> None:
    schedule = Schedule(TWO)
    for name in "ab":
        schedule.submit(StageJob(name, CheckpointStage.DUMP, name, 1.0, owner="t"))
    assert started(schedule) == ["a"]
    schedule.finish("b")
    schedule.finish("a")
    assert started(schedule) == []
    assert schedule.queued() == schedule.running() == 0


def test_a_struck_sandbox_waits_twice_as_long_each_time() -> None:
    schedule, now = Schedule(TWO), 100.0
    for wait in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        assert schedule.inject("a", now) == wait
        schedule.submit(StageJob("again", CheckpointStage.DUMP, "a", now, waited=True))
        assert started(schedule, now) == []
        assert schedule.queued(CheckpointStage.DUMP) == 1
        assert schedule.wake(now) == now + wait
        now += wait
        assert started(schedule, now) == ["again"]
        schedule.finish("again")
    schedule.submit(StageJob("other", CheckpointStage.DUMP, "b", now))
    assert started(schedule, now) == ["other"]
    schedule.finish("other", took=0.1)
    schedule.inject("a", now)
    schedule.succeeded("a", now)
    schedule.submit(StageJob("free", CheckpointStage.DUMP, "a", now))
    schedule.submit(StageJob("new", CheckpointStage.DUMP, "c", now))
    schedule.submit(StageJob("proven", CheckpointStage.DUMP, "b", now))
    assert sorted(started(schedule, now)) == ["free", "proven"]  # at once, but it shares with what is new
    schedule.finish("free", took=0.1)
    schedule.succeeded("a", now + 1000)
    assert schedule.inject("a", now + 1000) == 1.0  # the first again
    schedule.forget("a")
    schedule.submit(StageJob("last", CheckpointStage.DUMP, "a", now))
    assert schedule.wake(now) is None


def test_who_is_refused_again_and_again_has_one_job_a_second() -> None:
    schedule, now = Schedule(TWO), 100.0
    for wait in (0.0, 0.0, 0.0, 1.0, 1.0):
        assert schedule.refuse("a", now) == wait
        schedule.submit(StageJob("again", CheckpointStage.DUMP, "a", now, waited=True))
        assert started(schedule, now) == ([] if wait else ["again"])
        now += wait
        assert started(schedule, now) == (["again"] if wait else [])
        schedule.finish("again", took=0.01)
    schedule.succeeded("a", now)
    assert schedule.refuse("a", now) == 0.0  # the first again
    schedule.submit(StageJob("next", CheckpointStage.DUMP, "a", now))
    schedule.submit(StageJob("new", CheckpointStage.DUMP, "c", now))
    assert sorted(started(schedule, now)) == ["new", "next"]  # and it is known to be quick


def test_a_refused_sandbox_that_is_struck_waits_for_the_longer_one() -> None:
    schedule = Schedule(TWO)
    schedule.inject("a", 0.0)
    schedule.inject("a", 0.0)
    for _ in range(4):
        assert schedule.refuse("a", 0.0) in (0.0, 2.0)
    assert schedule.inject("a", 2.0) == 4.0


def test_a_strike_is_forgotten_after_a_while() -> None:
    schedule = Schedule(TWO)
    schedule.inject("a", 0.0)
    schedule.inject("b", 1000.0)
    schedule.submit(StageJob("a", CheckpointStage.DUMP, "a", 1000.0))
    assert started(schedule, 1000.0) == ["a"]


def test_a_job_that_waits_for_a_strike_can_be_promoted_and_cancelled() -> None:
    schedule = Schedule(TWO)
    schedule.inject("a", 0.0)
    for name in ("first", "second"):
        schedule.submit(StageJob(name, CheckpointStage.DUMP, "a", 9.0))
    schedule.promote("second")
    schedule.finish("first")
    assert started(schedule, 2.0) == ["second"]


# ---------------------------------------------------------------------- the budget of what takes long

LONG = expected(400, 0)


def test_what_takes_long_waits_for_its_budget_and_quick_jobs_do_not() -> None:
    schedule, begun, now = Schedule(SIX, processors=2), 0, 0.0
    held(schedule, {"quick": MIN_DUMP_SECONDS})
    while begun < 40:
        schedule.submit(StageJob("large", CheckpointStage.DUMP, f"large{begun % 4}", now, waited=True, expected=LONG))
        schedule.submit(StageJob("quick", CheckpointStage.DUMP, "quick", now + 9.0))
        names = started(schedule, now)
        assert "quick" in names
        schedule.finish("quick", took=MIN_DUMP_SECONDS)
        while "large" not in names:
            wake = schedule.wake(now)
            assert wake is not None and wake > now
            now = wake
            names = started(schedule, now)
        schedule.finish("large", took=LONG)
        begun += 1
    used, limit = begun * LONG, 2 * PART * (now + BURST)
    assert limit - LONG <= used <= limit + LONG  # all of the budget, and the last one overdraws it


@pytest.mark.parametrize(("processors", "at_once"), [(1, 1), (2, 1), (8, 4), (64, 5)])
def test_half_of_the_processors_have_one_each_of_what_takes_long(processors: int, at_once: int) -> None:
    schedule = Schedule(SIX, processors=processors)
    held(schedule, {"quick": MIN_DUMP_SECONDS})
    for number in range(6):
        schedule.submit(
            StageJob(str(number), CheckpointStage.DUMP, f"s{number}", 0.0, waited=True, expected=QUICK + 0.001)
        )
    assert len(started(schedule)) == at_once
    schedule.finish("0", took=QUICK)
    assert len(started(schedule, 1.0)) == 1


def test_a_host_without_quick_jobs_has_no_neighbours_to_spare() -> None:
    schedule, large = Schedule({**SIX, CheckpointStage.SNAPSHOT: 1}, processors=2), ["a", "b", "c"]

    def submit() -> None:
        for name in large:
            schedule.submit(StageJob(name, CheckpointStage.DUMP, name, 0.0, waited=True, expected=LONG))

    submit()
    assert started(schedule) == large
    schedule.submit(StageJob("quick", CheckpointStage.SNAPSHOT, "new", 0.0))
    assert started(schedule, 1.0) == ["quick"]
    for name in large:
        schedule.finish(name, took=LONG)
    submit()
    assert started(schedule, 10.0) == ["a"]
    assert schedule.wake(10.0) == 1.0 + CALM
    assert started(schedule, 1.0 + CALM) == ["b", "c"]


def test_what_a_job_took_beyond_what_was_expected_is_owed_but_not_for_ever() -> None:
    schedule = Schedule(SIX, processors=2)
    held(schedule, {"quick": MIN_DUMP_SECONDS, "slow": 60.0})
    schedule.submit(StageJob("slow", CheckpointStage.DUMP, "slow", 0.0, waited=True))
    assert started(schedule) == ["slow"]
    schedule.finish("slow", took=60.0)
    schedule.submit(StageJob("again", CheckpointStage.DUMP, "slow", 0.0, waited=True))
    assert started(schedule) == []
    assert schedule.wake(0.0) == pytest.approx(MAX_PENDING / (2 * PART), abs=0.01)


def test_what_waits_for_the_budget_while_no_slot_is_free_wakes_nobody() -> None:
    schedule = Schedule(TWO, processors=2)
    held(schedule, {"a": MIN_DUMP_SECONDS, "b": MIN_DUMP_SECONDS})
    schedule.submit(StageJob("long", CheckpointStage.DUMP, "long", 0.0, waited=True, expected=100.0))
    assert started(schedule) == ["long"]
    schedule.finish("long", took=100.0)
    for name in ("long", "a", "b"):
        schedule.submit(
            StageJob(
                name,
                CheckpointStage.DUMP,
                name,
                0.0,
                waited=True,
                expected=100.0 if name == "long" else MIN_DUMP_SECONDS,
            )
        )
    assert started(schedule) == ["a", "b"]
    assert schedule.wake(0.0) is None
