"""Engines go over to gradients once few answers are left, and never so many that the answers are slower."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.decide.engines.handover import EARLIEST, LATEST, SLOWER, rest, staying
from rollout.decide.engines.measuring import StepTimes
from rollout.decide.policy import RolloutPolicy
from rollout.decide.view import BufferedGroup, FleetView, GroupView, Rest, RolloutView, SchedulingRules, TrajectoryView


@pytest.mark.parametrize(
    ("answers", "done", "item", "stay"),
    [
        (128, 0.4, 0.0, 2),  # 64 slots each
        (128, 0.1, 0.0, 8),  # too early
        (128, 0.6, 0.0, 8),  # too late
        (500, 0.4, 0.0, 8),  # all slots are wanted
        (128, 0.4, 0.0002, 4),  # 32 answers instead of 16 make a step 3 ms longer
        (128, 0.4, 0.01, 8),
        (0, 0.5, 0.0, 8),
        (1, 0.5, 0.0, 1),
    ],
)
def test_as_few_stay_as_the_answers_need(answers: int, done: float, item: float, stay: int) -> None:
    assert staying(8, answers, done, base=0.05, item=item, slots=64) == stay


@given(
    st.integers(1, 64), st.integers(0, 5000), st.floats(0, 1), st.floats(1e-3, 0.1), st.floats(0, 1e-3),
    st.integers(1, 512),
)  # fmt: skip
def test_who_stays_has_room_and_is_hardly_slower(
    engines: int, answers: int, done: float, base: float, item: float, slots: int
) -> None:
    stay = staying(engines, answers, done, base=base, item=item, slots=slots)
    assert 1 <= stay <= engines
    if stay < engines:
        assert EARLIEST <= done <= LATEST and answers <= stay * slots
        assert base + item * (answers / stay) <= SLOWER * (base + item * (answers / engines + 1))


FLEET = FleetView(engines=4, slots=8, base=0.02)


def observed(fleet: FleetView | None, *, ended: int, requested: bool = True, training: bool = False) -> RolloutView:
    """Ten groups of two: so many of their answers are there, two of each buffered group."""
    complete, odd = divmod(ended, 2)
    running = [
        GroupView(
            str(n),
            n,
            [TrajectoryView(0, "ended" if n == complete and odd else "running"), TrajectoryView(1, "running")],
        )
        for n in range(complete, 10)
    ]
    buffered = [BufferedGroup(str(n), n, [0, 0]) for n in range(complete)]
    return RolloutView(
        version=0,
        requested=requested,
        training=training,
        running=running,
        buffered=buffered,
        queued=0,
        more=False,
        fleet=fleet,
    )


@pytest.mark.parametrize(
    ("view", "stay"),
    [
        (observed(FLEET, ended=6), 2),  # 14 answers on their way, 8 slots each
        (observed(FLEET, ended=5), 2),
        (observed(FLEET, ended=10), 2),  # the last moment
        (observed(FLEET, ended=3), None),
        (observed(FLEET, ended=11), None),
        (observed(None, ended=6), None),  # the trainer has machines of its own
        (observed(FleetView(4, 8, 0.02, rested=True), ended=6), None),
        (observed(FleetView(4, 8), ended=6), None),  # nobody has measured a step
        (observed(FleetView(1, 16, 0.02), ended=6), None),
        (observed(FLEET, ended=6, requested=False), None),  # the trainer has something else to do
        (observed(FLEET, ended=6, training=True), None),
    ],
)
def test_engines_rest_once_while_their_trainer_waits(view: RolloutView, stay: int | None) -> None:
    assert rest(view) == (None if stay is None else Rest(stay))
    decided = RolloutPolicy(SchedulingRules(groups=10, size=2, staleness=0)).decide(view, 0.0)
    assert [action for action in decided if isinstance(action, Rest)] == ([] if stay is None else [Rest(stay)])


def test_steps_are_medians_by_the_answers_that_share_them() -> None:
    steps = StepTimes()
    assert steps.line() == (0.0, 0.0)
    for answers in (1, 11, 31):
        for number in range(20):
            late = number % 5 == 0
            steps.see(answers, 0.02 + 0.001 * answers + 0.3 * late)
    steps.see(64, 9.0)  # once says nothing
    base, item = steps.line()
    assert 0.0008 < item < 0.001 and base + 14 * item == pytest.approx(0.034, abs=0.001)


def test_what_each_answer_adds_is_not_guessed_from_numbers_that_hardly_differ() -> None:
    steps = StepTimes()
    for number in range(20):
        steps.see(31, 0.04)
        steps.see(32, 0.042 + 0.0001 * number)
    base, item = steps.line()
    assert 0 <= item < 0.0001 and base == pytest.approx(0.04, abs=0.003)
