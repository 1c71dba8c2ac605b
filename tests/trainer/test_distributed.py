"""Ranks: several equal one, the dead and the hung are named, a killed run ends as one that was not."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollout.engine.embedded.model import save_model
from tests.support.small_model import model
from tests.trainer.test_learner import samples
from trainer.distributed.launch import Fleet
from trainer.distributed.watch import MIN_SIGNS, Beat, Heart, WaitCount, judge, read
from trainer.distributed.worker import RankWorker, WorkPlan
from trainer.errors import RankLost
from trainer.settings import ObjectiveSettings, OptimiserSettings

STEPS = 5


def plan(tmp_path: Path, name: str, **changes: object) -> WorkPlan:
    base = tmp_path / "base"
    if not base.exists():
        save_model(model(), base)
    options = {
        "model": str(base), "directory": str(tmp_path / name), "steps": STEPS, "timeout": 60.0,
        "settings": OptimiserSettings(rate=1e-2, budget=64), **changes,
    }  # fmt: skip
    return WorkPlan(**options)  # type: ignore[arg-type]


def record(fleet: Fleet, steps: int = STEPS, *, since: int = 0) -> None:
    """The log of samples that every run here is fed with."""
    for step in range(since, steps):
        fleet.log.write(step, samples(step))


def alone(tmp_path: Path, **changes: object) -> dict[str, Tensor]:
    """The weights after a run on one rank in this process."""
    torch.set_num_threads(1)
    made = plan(tmp_path, "alone", **changes)
    record(Fleet(made, ranks=1), made.steps)
    worker = RankWorker(made)
    worker.run()
    return dict(worker.learner.scorer.model.state_dict())


def ended(pid: int) -> bool:
    """Gone, or dead and waiting for whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def near(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        bool((left[name] - right[name]).norm() <= 1e-5 * right[name].norm()) for name in left
    )


@pytest.mark.parametrize(("ranks", "objective", "bf16"), [(2, "ppo", False), (4, "grpo", False), (2, "grpo", True)])
def test_several_ranks_equal_one(ranks: int, objective: str, bf16: bool, tmp_path: Path) -> None:
    settings = ObjectiveSettings(preset=objective)
    expected = alone(tmp_path, objective=settings, bf16=bf16)
    with Fleet(plan(tmp_path, "many", objective=settings, bf16=bf16), ranks=ranks) as fleet:
        record(fleet)
        results = [fleet.wait(step + 1) for step in range(STEPS)]
        collected = fleet.weights(STEPS)
    assert near(collected, expected)
    assert results[-1].saved
    assert all(result.stats["trajectories"] == 9 for result in results)


def test_a_killed_rank_is_named_and_the_run_goes_on_with_fewer(tmp_path: Path) -> None:
    expected = alone(tmp_path)
    made = plan(tmp_path, "killed")
    fleet = Fleet(made, ranks=2)
    for step in range(2):
        fleet.log.write(step, samples(step))
    with fleet:
        fleet.wait(2)
        victim = read(fleet.directory / "beats")[1]
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(RankLost, match=rf"rank 1 \(pid {victim.pid}\) was killed by signal 9"):
            fleet.wait(3)
    record(fleet)
    with Fleet(made, ranks=1) as fewer:
        fewer.wait(STEPS)
        assert near(fewer.weights(STEPS), expected)


def test_a_stopped_rank_is_named_within_the_time_that_was_set(tmp_path: Path) -> None:
    fleet = Fleet(plan(tmp_path, "stopped"), ranks=2)
    with fleet:
        fleet.log.write(0, samples(0))
        fleet.wait(1)
        while {beat.phase for beat in read(fleet.directory / "beats")} != {"wait for batch 1"}:
            fleet.check()
            time.sleep(0.05)
        fleet.silent = 6.0  # from here on: while they begin, a busy machine may be as slow
        pids = [beat.pid for beat in read(fleet.directory / "beats")]
        os.kill(pids[0], signal.SIGSTOP)
        with pytest.raises(
            RankLost, match=rf"^rank 0 \(pid {pids[0]}\) gave no sign for \d+\.\d s, in: wait for batch 1"
        ):
            fleet.wait(2)
    assert all(ended(pid) for pid in pids)


def test_a_run_killed_at_random_instants_ends_with_the_same_weights(tmp_path: Path) -> None:
    """Bit by bit, on one rank, from the recorded log."""
    steps = 16
    expected = alone(tmp_path, steps=steps)
    fleet = Fleet(plan(tmp_path, "injected", steps=steps), ranks=1)
    rng = random.Random(0)
    try:
        for kill in range(2):
            record(fleet, 8 * kill + 8 - (kill == 1), since=8 * kill)  # it cannot end before it is killed
            fleet.start()
            fleet.wait(7 * kill + rng.randrange(1, 7))
            time.sleep(rng.random() * 0.1)
            os.kill(read(fleet.directory / "beats")[0].pid, signal.SIGKILL)
            with pytest.raises(RankLost, match=r"rank 0 .* was killed by signal 9"):
                fleet.wait(steps)
        record(fleet, steps, since=steps - 1)
        fleet.start()
        fleet.wait(steps)
        result = fleet.weights(steps)
    finally:
        fleet.stop()
    assert result.keys() == expected.keys()
    assert all(torch.equal(result[name], expected[name]) for name in result)


# ------------------------------------------------------------------ who is to blame


def beat(rank: int, *, at: float = 100.0, progress: int = 5, phase: str = "step 3", since: float = 99.0) -> Beat:
    return Beat(rank, 10 + rank, at, progress, phase, since)


@pytest.mark.parametrize(
    ("beats", "named"),
    [
        ([beat(0), beat(1)], []),
        ([], []),
        ([beat(0), beat(1, at=80.0)], [1]),
        ([beat(0, since=20.0, progress=6), beat(1, since=10.0, progress=5)], [1]),
        ([beat(0, since=20.0, progress=6), beat(1, since=60.0, progress=5)], []),  # it has just begun
        ([beat(0, since=10.0, phase="wait for batch 3"), beat(1, since=10.0, phase="wait for batch 3")], []),
        ([beat(0, since=10.0, phase="wait for batch 3", progress=6), beat(1, since=10.0, progress=5)], [1]),
        ([beat(0, since=10.0), beat(1, since=10.0)], [0, 1]),
    ],
)
def test_who_keeps_the_run_from_going_on(beats: list[Beat], named: list[int]) -> None:
    assert [lost.rank for lost in judge(beats, 100.0, silent=10.0, stuck=60.0)] == named


def test_a_heart_goes_on_while_its_rank_is_busy(tmp_path: Path) -> None:
    with Heart(tmp_path, 3) as heart:
        heart.phase("forward")
        first = read(tmp_path)[0]
        deadline = time.monotonic() + 30
        while read(tmp_path)[0].at == first.at and time.monotonic() < deadline:
            time.sleep(0.05)
        second = read(tmp_path)[0]
    assert (second.rank, second.phase, second.progress, second.since) == (3, "forward", 1, first.since)
    assert second.at > first.at


@pytest.mark.parametrize(
    ("periods", "phase", "slow"),
    [
        ((2, 2, 0), "step 3", 2),  # two wait in every other sign, one never
        ((2, 2, 2), "step 3", None),
        ((1, 1, 1), "step 3", None),  # the link is slow, no rank
        ((2, 2, 0), "wait for batch 3", None),
    ],
)
def test_a_slow_rank_is_the_one_that_hardly_waits(periods: tuple[int, ...], phase: str, slow: int | None) -> None:
    count = WaitCount()
    for number in range(MIN_SIGNS):
        assert count.slow() is None
        for _ in range(2):  # a sign that is read twice is one
            count.note(
                [
                    Beat(rank, 1, 0.5 * number, 1, phase, 0.0, waits=bool(period) and number % period == 0)
                    for rank, period in enumerate(periods)
                ]
            )
    found = count.slow()
    assert (None if found is None else found.rank) == slow
    if found is not None:
        assert (found.waits, found.others) == (0.0, 0.5)
        assert count.slow() is None  # it is said once


def test_a_slow_rank_is_said_with_its_host(tmp_path: Path) -> None:
    fleet = Fleet(plan(tmp_path, "many"), ranks=2)
    assert fleet.slow() == ""
    for number in range(MIN_SIGNS):
        fleet.waits.note([Beat(rank, 1, 0.5 * number, 1, "step 1", 0.0, waits=rank == 0) for rank in range(2)])
    assert fleet.slow() == ("rank 1 is slow: it waits for others in 0% of the time of steps, they in 100% at least")
