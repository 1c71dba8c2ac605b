"""How far rollouts run ahead: what is chosen of what was measured, and who heeds it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout import RolloutController
from rollout.decide.bound import Bound, TrainerStepRecord
from rollout.decide.policy import RolloutPolicy
from rollout.decide.view import LeasePrompts, RolloutView, SchedulingRules
from rollout.store import decisions
from tests.rollout.test_controller import configured, train
from tests.support.rollout_fakes import SCRIPT, FakeHost, Letters, Notebook, ScriptedEngine

LIMIT = 4
Run = Callable[[int], TrainerStepRecord]  # of a bound


def measured(*, seconds: list[float], ess: list[float], trainer: float) -> Run:
    return lambda bound: TrainerStepRecord(
        lag=0.8 * bound, ess=ess[bound], seconds=seconds[bound], waited=max(0.0, seconds[bound] - trainer)
    )


NO_NEED = measured(seconds=[10.0] * 5, ess=[1.0, 0.9, 0.8, 0.7, 0.6], trainer=10.0)
FAR_AHEAD = measured(seconds=[20.0, 15.0, 12.0, 11.0, 10.0], ess=[1.0, 0.99, 0.98, 0.97, 0.96], trainer=9.9)
BETWEEN = measured(seconds=[20.0, 12.0, 10.0, 10.0, 10.0], ess=[1.0, 0.95, 0.90, 0.7, 0.5], trainer=9.9)


def played(run: Run, steps: int, bound: Bound | None = None) -> tuple[Bound, list[int]]:
    bound, observed = bound or Bound(LIMIT), []
    for _ in range(steps):
        observed.append(bound.now)
        bound.see(run(bound.now))
    return bound, observed


@pytest.mark.parametrize(("run", "best"), [(NO_NEED, 0), (FAR_AHEAD, 4), (BETWEEN, 2)])
def test_it_finds_the_bound_that_is_worth_most_and_stays_there(run: Run, best: int) -> None:
    _, observed = played(run, 400)
    assert observed[-1] == best and observed[100:].count(best) > 0.85 * 300
    worth = [run(bound).ess / run(bound).seconds for bound in range(LIMIT + 1)]
    got = sum(run(bound).ess for bound in observed) / sum(run(bound).seconds for bound in observed)
    assert got > 0.95 * max(worth), "finding it is cheap"


def test_it_follows_a_run_that_changes() -> None:
    bound, _ = played(FAR_AHEAD, 200)
    _, observed = played(NO_NEED, 200, bound)
    assert observed[0] == 4 and observed[-1] == 0


def test_a_trial_in_vain_is_not_repeated_soon() -> None:
    _, observed = played(BETWEEN, 400)
    trials = [n for n in range(1, 400) if observed[n] != 2 and observed[n - 1] == 2]
    pauses = [b - a for a, b in zip(trials, trials[2:], strict=False)]
    assert len(trials) < 16 and pauses[-1] > pauses[0]


STEPS = st.builds(
    TrainerStepRecord, lag=st.floats(0, 9), ess=st.floats(0, 1), seconds=st.floats(1e-9, 1e6), waited=st.floats(0, 1e6)
)


@settings(max_examples=200)
@given(st.lists(STEPS, max_size=60), st.integers(0, 5))
def test_it_stays_within_its_limits_whatever_is_measured(steps: list[TrainerStepRecord], limit: int) -> None:
    bound, before = Bound(limit), min(1, limit)
    for step in steps:
        bound.see(step)
        assert 0 <= bound.now <= limit and abs(bound.now - before) <= 1
        before = bound.now


@pytest.mark.parametrize("tail", [0.0, 1.25])
def test_what_may_start_follows_the_view(tail: float) -> None:
    def leases(bound: int | None) -> list[LeasePrompts]:
        view = RolloutView(
            version=3, requested=False, training=True, running=[], buffered=[], queued=0, more=True, bound=bound
        )  # fmt: skip
        result = RolloutPolicy(SchedulingRules(groups=2, size=2, staleness=4, tail=tail)).decide(view, 0.0)
        return [action for action in result if isinstance(action, LeasePrompts)]

    assert leases(0) == []
    assert leases(1) == [LeasePrompts(3 if tail else 2)]
    assert leases(None) == [LeasePrompts(3 if tail else 8)]


@pytest.mark.asyncio
async def test_a_live_rollout_measures_its_steps_and_decides_by_what_it_logged(tmp_path: Path) -> None:
    config = configured(groups=2, size=2, staleness=3, adaptive=True)
    async with RolloutController(
        environment=Notebook, host=FakeHost(), engine=ScriptedEngine(SCRIPT), tokenizer=Letters(), config=config,
        directory=tmp_path,
    ) as rollout:  # fmt: skip
        steps: list[TrainerStepRecord] = []
        see = rollout.ahead._bound.see  # type: ignore[union-attr]
        rollout.ahead._bound.see = lambda step: (steps.append(step), see(step))[1]  # type: ignore[union-attr, method-assign]
        for _ in range(8):
            batch = await rollout.next_batch()
            await rollout.consumed(batch, ess=0.5)
            await asyncio.sleep(0)
            rollout.episodes.engine.version = rollout.version + 1  # type: ignore[attr-defined]
            await rollout.published(rollout.version + 1)
        await train(rollout, await rollout.next_batch())  # a trainer that does not know
        assert 0 <= rollout.statistics()["bound"] <= 3
    assert len(steps) == 7  # the first batch has none before it
    assert all(step.ess == 0.5 and 0 <= step.waited <= step.seconds and 0 <= step.lag <= 3 for step in steps)
    (log,) = list(tmp_path.glob(decisions.PATTERN))  # noqa: ASYNC240 - a file of this test
    views = [decision.view for _, decision in decisions.read(log)]
    assert views and all(view.bound is not None for view in views)
    replayed = decisions.replay(tmp_path)
    assert replayed.identical == replayed.decisions
