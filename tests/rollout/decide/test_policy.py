"""Decisions as values: the same view gives the same actions; each table in full."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.decide import admission, breaker, redundancy, staleness
from rollout.decide.blame import Blame, Cause, EpisodePhase, TrajectoryFailure, blame, cause_of, part
from rollout.decide.policy import RolloutPolicy
from rollout.decide.view import (
    Abort,
    Action,
    BufferedGroup,
    Decision,
    FinishGroup,
    GiveUp,
    GroupView,
    HandOut,
    LeasePrompts,
    NoMoreBatches,
    PartView,
    ReopenGroup,
    RolloutView,
    SchedulingRules,
    StartTrajectory,
    Stop,
    TrajectoryView,
    WaitReason,
)
from sandbox.errors import TABLE

RULES = SchedulingRules(groups=2, size=2, concurrency=4, staleness=1, attempts=3, starts=3, timeout=60.0)


def view(**changes: object) -> RolloutView:
    plain: dict[str, object] = {
        "version": 3, "requested": False, "training": False, "running": [], "buffered": [], "queued": 0, "more": True,
    }  # fmt: skip
    return RolloutView(**(plain | changes))  # type: ignore[arg-type]


def group(number: int, *members: TrajectoryView, failures: int = 0) -> GroupView:
    return GroupView(f"p{number:06d}", number, list(members), failures, "why" if failures else "")


def test_every_failure_has_one_blame_and_one_part() -> None:
    for phase, cause in itertools.product(EpisodePhase, Cause):
        failure = TrajectoryFailure(phase=phase, cause=cause)
        assert blame(failure) in Blame and part(failure) in ("create", "engine", "scorer", "host")
        if (
            phase is EpisodePhase.CREATE
            and cause is not Cause.RAISED
            and cause not in (Cause.CUT, Cause.LENGTH, Cause.TURNS)
        ):
            assert blame(failure) is Blame.PLATFORM
        if phase is EpisodePhase.SCORE and cause in (Cause.SCORER, Cause.LATE, Cause.HOST):
            assert blame(failure) is Blame.PLATFORM
        if phase in (EpisodePhase.CHECKPOINT, EpisodePhase.RECOVER) and cause in (
            Cause.HOST,
            Cause.DIED,
            Cause.DIVERGED,
        ):
            assert blame(failure) is Blame.PLATFORM


@pytest.mark.parametrize("code", sorted(TABLE))
def test_no_refusal_of_the_host_or_the_engine_is_the_policys(code: str) -> None:
    for phase in (EpisodePhase.CREATE, EpisodePhase.GENERATE, EpisodePhase.CHECKPOINT, EpisodePhase.RECOVER):
        for own in (True, False):
            assert blame(TrajectoryFailure(phase=phase, cause=cause_of(code, phase, own=own))) is not Blame.POLICY


@pytest.mark.parametrize(
    ("code", "own", "whose"),
    [
        ("no_space", True, Blame.POLICY),  # the memory of the sandbox
        ("no_space", False, Blame.PLATFORM),  # the host's disk
        ("conflict", True, Blame.POLICY),  # its processes
        ("invalid", True, Blame.POLICY),
        ("command_not_found", True, Blame.POLICY),
        ("restore_failed", True, Blame.PLATFORM),
        ("timeout", True, Blame.PLATFORM),
        ("protocol", False, Blame.PLATFORM),
        ("engine_failed", False, Blame.PLATFORM),
    ],
)
def test_whose_doing_an_error_in_a_step_is(code: str, own: bool, whose: Blame) -> None:
    assert blame(TrajectoryFailure(phase=EpisodePhase.STEP, cause=cause_of(code, EpisodePhase.STEP, own=own))) is whose


def test_admission_keeps_the_bound() -> None:
    assert admission.admit(view(), batch=2, bound=1) == [LeasePrompts(4)]
    assert admission.admit(view(training=True), batch=2, bound=1) == [LeasePrompts(2)]
    assert admission.admit(view(more=False, queued=3), batch=2, bound=1) == [LeasePrompts(3)]
    full = view(running=[group(n) for n in range(3)], buffered=[BufferedGroup("p9", 9, [])])
    assert admission.admit(full, batch=2, bound=1) == []


@given(batch=st.integers(1, 8), bound=st.integers(0, 3), steps=st.integers(1, 12))
def test_what_admission_starts_is_consumed_within_the_bound(batch: int, bound: int, steps: int) -> None:
    """Groups finish in the order in which they started, and as late as they can."""
    outstanding: list[int] = []  # versions at which they started
    for version in range(steps):
        while admission.may_start(outstanding=len(outstanding), batch=batch, bound=bound, training=False):
            outstanding.append(version)
        taken, outstanding = outstanding[:batch], outstanding[batch:]
        assert len(taken) == batch and all(version - started <= bound for started in taken)
        while admission.may_start(outstanding=len(outstanding), batch=batch, bound=bound, training=True):
            outstanding.append(version)


def test_a_group_ends_whole_given_up_or_not_at_all() -> None:
    ended, running, waiting = (
        TrajectoryView(0, "ended", 3),
        TrajectoryView(1, "running", 3),
        TrajectoryView(1, "waiting", None, 3),
    )
    assert redundancy.finalize(group(1, ended, running), RULES) == []
    assert redundancy.finalize(group(1, ended, TrajectoryView(1, "ended", 3)), RULES) == [FinishGroup("p000001")]
    assert redundancy.finalize(group(1, ended, TrajectoryView(1, "ended"), TrajectoryView(2, "running")), RULES) == [
        Abort("p000001", 2, "redundant", again=False),
        FinishGroup("p000001"),
    ]
    assert redundancy.finalize(group(1, ended, waiting), RULES) == [
        GiveUp("p000001", "3 starts of one trajectory: over-stale")
    ]
    assert redundancy.finalize(group(1, ended, running, failures=3), RULES) == [GiveUp("p000001", "why")]


def test_what_is_over_stale_is_dropped_one_by_one() -> None:
    observed = view(
        running=[group(1, TrajectoryView(0, "ended", 1), TrajectoryView(1, "running", 2))],
        buffered=[BufferedGroup("p000002", 2, [1, 3, None], [0, 0, 0])],
    )
    assert staleness.drop(observed, 1) == [Abort("p000001", 0, "over-stale"), ReopenGroup("p000002", [0], "over-stale")]


def test_the_choices_come_in_order() -> None:
    policy = RolloutPolicy(RULES)
    old, new = BufferedGroup("p000001", 1, [2]), BufferedGroup("p000000", 0, [3])
    more = [LeasePrompts(2)]
    assert policy.decide(view(requested=True, buffered=[new, old]), 0.0) == [HandOut(["p000001", "p000000"], 2), *more]
    late = group(5, TrajectoryView(0, "running", 2), TrajectoryView(1, "waiting"))
    (wait, *_) = [a for a in policy.decide(view(requested=True, buffered=[new, old], running=[late]), 0.0)]
    assert wait != HandOut(["p000001", "p000000"], 2)
    for member in (
        TrajectoryView(0, "waiting", None, 0, 2),
        TrajectoryView(0, "running", 3, 0, 2),
    ):  # it will have tokens of 2
        actions = policy.decide(view(requested=True, buffered=[new, old], running=[group(5, member)]), 0.0)
        assert not any(isinstance(action, HandOut) for action in actions)
    refusing = [PartView("create", 5, 10.0, 50.0, "full")]
    assert policy.decide(view(parts=refusing, running=[group(5, TrajectoryView(0, "waiting"))]), 51.0) == [
        WaitReason("rollout", "create refuses: full", 10.0, 54.0)
    ]
    assert policy.decide(view(parts=refusing, running=[group(5, TrajectoryView(0, "waiting"))]), 54.0) == [
        StartTrajectory("p000005", 0)
    ]
    (stop,) = policy.decide(view(parts=refusing), 71.0)
    assert isinstance(stop, Stop) and "61 s: full" in stop.reason
    assert policy.decide(view(requested=True, more=False), 0.0) == [NoMoreBatches()]


@pytest.mark.parametrize("rounds", [1, 2, 3, 8])
def test_a_part_that_refused_is_tried_again_though_no_trajectory_waits(rounds: int) -> None:
    """The trajectory that it failed is gone with its group: somebody else must ask, or nothing ever starts again."""
    policy = RolloutPolicy(msgspec.structs.replace(RULES, timeout=1e9))
    refusing = PartView("create", rounds, 10.0, 50.0, "full")
    until = breaker.retry_at(refusing)
    for observed in (
        view(parts=[refusing]),
        view(parts=[refusing], requested=True),
        view(parts=[refusing], more=False, queued=1),
    ):
        before = policy.decide(observed, until - 0.01)
        assert all(isinstance(action, WaitReason) for action in before), before
        assert policy.decide(observed, until) == [LeasePrompts(1)]
    leased = view(parts=[refusing], running=[group(7, TrajectoryView(0, "waiting"), TrajectoryView(1, "waiting"))])
    started = policy.decide(leased, until)
    assert started[0] == StartTrajectory("p000007", 0) and len(started) == (1 if breaker.is_open(refusing) else 2)
    trying = view(parts=[refusing], running=[group(7, TrajectoryView(0, "running"), TrajectoryView(1, "ended", 3))])
    assert LeasePrompts(1) not in policy.decide(trying, until)


members = st.builds(
    TrajectoryView,
    st.integers(0, 3),
    st.sampled_from(["waiting", "running", "ended"]),
    st.none() | st.integers(0, 5),
    st.integers(0, 4),
    st.none() | st.integers(0, 5),
)
views = st.builds(
    RolloutView,
    version=st.integers(0, 5),
    requested=st.booleans(),
    training=st.booleans(),
    running=st.lists(st.builds(group, st.integers(0, 9), members, members, failures=st.integers(0, 4)), max_size=4),
    buffered=st.lists(
        st.builds(BufferedGroup, st.just("p000020"), st.integers(20, 29), st.lists(st.integers(0, 5)), st.just([])),
        max_size=4,
    ),
    queued=st.integers(0, 3),
    more=st.booleans(),
    parts=st.lists(
        st.builds(PartView, st.just("host"), st.integers(1, 6), st.floats(0, 9), st.floats(0, 99), st.just("x")),
        max_size=1,
    ),
)


@given(view=views, now=st.floats(0, 200), mode=st.sampled_from(["wait", "mask", "drop"]))
def test_a_decision_survives_the_log_and_is_made_again(view: RolloutView, now: float, mode: str) -> None:
    rules = msgspec.structs.replace(RULES, over_stale=mode)
    actions: list[Action] = RolloutPolicy(rules).decide(view, now)
    line = msgspec.json.encode(Decision(now=now, view=view, actions=actions))
    again = msgspec.json.decode(line, type=Decision)
    assert RolloutPolicy(rules).decide(again.view, again.now) == again.actions == actions
    starts = [action for action in actions if isinstance(action, StartTrajectory)]
    active = sum(member.state == "running" for item in view.running for member in item.members)
    assert len(starts) <= max(0, rules.concurrency - active)


@st.composite
def stories(draw: st.DrawFn) -> tuple[RolloutView, float]:
    """Views as a controller has them: every prompt once, members numbered."""
    numbers = draw(st.lists(st.integers(0, 30), unique=True, max_size=7))
    cut = draw(st.integers(0, len(numbers)))
    states = st.sampled_from(["waiting", "running", "ended"])
    age = st.none() | st.integers(0, 5)
    one = [st.builds(TrajectoryView, st.just(n), states, age, st.integers(0, 4), age) for n in (0, 1)]
    pair = st.tuples(*one)
    running = [group(number, *draw(pair), failures=draw(st.integers(0, 4))) for number in numbers[:cut]]
    buffered = [
        BufferedGroup(f"p{number:06d}", number, [draw(st.integers(0, 5))] * 2, [0, 0]) for number in numbers[cut:]
    ]
    changes = draw(views)
    return msgspec.structs.replace(changes, running=running, buffered=buffered), draw(st.floats(0, 200))


@given(story=stories(), mode=st.sampled_from(["wait", "mask", "drop"]), draining=st.booleans())
def test_only_what_is_leased_and_waits_is_started_and_only_once(
    story: tuple[RolloutView, float], mode: str, draining: bool
) -> None:
    observed, now = msgspec.structs.replace(story[0], draining=draining), story[1]
    actions = RolloutPolicy(msgspec.structs.replace(RULES, over_stale=mode)).decide(observed, now)
    starts = [(action.prompt, action.member) for action in actions if isinstance(action, StartTrajectory)]
    waiting = {(item.prompt, m.index) for item in observed.running for m in item.members if m.state == "waiting"}
    assert set(starts) <= waiting and len(set(starts)) == len(starts)
    handed = [prompt for action in actions if isinstance(action, HandOut) for prompt in action.prompts]
    assert set(handed) <= {item.prompt for item in observed.buffered} and len(set(handed)) == len(handed)
    assert not (draining and (starts or any(isinstance(action, LeasePrompts) for action in actions)))


@given(story=stories(), mode=st.sampled_from(["wait", "mask", "drop"]))
def test_where_nothing_runs_somebody_starts_or_it_is_said_until_when_all_wait(
    story: tuple[RolloutView, float], mode: str
) -> None:
    """No decision leaves a run to itself: with nobody at work and prompts left, the next look does something, or has a
    time, or it is the trainer who is waited for."""
    observed = story[0]
    still = [group for group in observed.running if all(member.state != "running" for member in group.members)]
    observed = msgspec.structs.replace(observed, running=still)
    policy = RolloutPolicy(msgspec.structs.replace(RULES, over_stale=mode))
    actions = policy.decide(observed, story[1])
    for _ in range(3):
        if any(not isinstance(action, WaitReason) for action in actions):
            return
        due = [action.until for action in actions if isinstance(action, WaitReason) and action.until is not None]
        if not due:
            break
        actions = policy.decide(observed, min(due))
    admitted = admission.admit(observed, batch=RULES.groups, bound=RULES.staleness)
    waiting = [member for group in observed.running for member in group.members if member.state == "waiting"]
    assert not waiting and not admitted
