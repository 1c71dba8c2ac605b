"""Evaluations in the background: each is played and recorded once, whoever is killed, and training does not wait."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator import local
from rollout import Trajectory
from rollout.background_evaluation import LOCK, MODEL, RESULT, EvaluationOrder
from rollout.decide.blame import Cause, EpisodePhase, TrajectoryFailure
from rollout.engine.client import Sampling
from rollout.environments.mixture import Mixture, MixturePart
from rollout.labels import LABEL
from rollout.messages import Status
from rollout.plan import SuitePlan
from rollout.store.lock import OWNED
from sandbox.errors import EngineFailed, Invalid
from tests.support.daemon_host import Daemon
from tests.support.programs import Program
from tests.support.small_run import EXAMPLE, small
from trainer.config import gather, open_run
from trainer.evaluation import queue as evaluation_queue
from trainer.evaluation.best import BestVersion, read
from trainer.evaluation.evaluations import Evaluations, summary_of
from trainer.evaluation.queue import EvaluationQueue
from trainer.reports.metrics import MetricsRecorder, read_lines
from trainer.reports.report import Totals

SUITE = {"name": "again", "task": str(EXAMPLE), "episodes": 2}


async def test_held_out_episodes_that_fail_say_why(tmp_path: Path) -> None:
    said = list[str]()
    failure = TrajectoryFailure(phase=EpisodePhase.STEP, cause=Cause.RAISED, message="KeyError: 'oops'")
    lost = [Trajectory(seed=n, status="failed", failure=failure) for n in range(2)]
    with MetricsRecorder(tmp_path) as recorder:
        environments = Mixture([MixturePart(task=str(EXAMPLE))])
        made = Evaluations(tmp_path, small(tmp_path), environments, recorder, Totals(), said.append)
        with pytest.raises(EngineFailed, match=r"could be completed; 2 failed, such as step/raised: KeyError: 'oops'"):
            await made.record("before", lost, step=0, version=0)
        await made.record("before", [Trajectory(seed=2, reward=1.0), *lost], step=0, version=0)
        assert said[-1].startswith("before: 1.000, mean of 1 episodes; 2 failed, such as step/raised")
        cut = TrajectoryFailure(phase=EpisodePhase.STEP, cause=Cause.CUT)
        short = [Trajectory(seed=n, status="truncated", failure=cut) for n in range(2)]
        await made.record("before", [Trajectory(seed=2), *short], step=0, version=0)
    assert said[-1] == "before: 0.000, mean of 3 episodes; 67% ended at sampling.max_tokens or max_length"
    assert read_lines(tmp_path / "metrics.jsonl")[-1]["held_out_cut_share"] == pytest.approx(2 / 3)


def order(step: int) -> EvaluationOrder:
    return EvaluationOrder(
        run="runs/x", step=step, version=step, held_out=[7], samples=1, sampling=Sampling(), suites=[], concurrency=1
    )


class Played:
    """A queue whose processes are functions: `statuses` is what they end with; 0 leaves a result."""

    def __init__(self, run: Path, monkeypatch: pytest.MonkeyPatch, statuses: list[int]):
        self.recorded: list[int] = []
        self.queue = EvaluationQueue(run, self.record)

        async def started(directory: Path) -> tuple[int, str]:
            status = statuses.pop(0) if statuses else 0
            if status == 0:
                (directory / RESULT).write_bytes(msgspec.msgpack.encode({"": []}))
            return status, "a reason"

        def export(run: Path, directory: Path, version: int) -> None:
            directory.mkdir(parents=True)

        monkeypatch.setattr(self.queue, "_started", started)
        monkeypatch.setattr(evaluation_queue, "export", export)
        monkeypatch.setattr(evaluation_queue, "RETRY_S", 0.0)

    async def record(self, order: EvaluationOrder, model: Path, episodes: dict[str, list[Trajectory]]) -> None:
        assert model.name == MODEL and episodes == {"": []}
        self.recorded.append(order.step)


@pytest.mark.parametrize("statuses", [[], [1, 1, 0], [OWNED, OWNED, 1, 0]])
async def test_each_is_recorded_in_order(statuses: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(tmp_path, monkeypatch, statuses)
    async with played.queue as queue:
        for step in (0, 4):
            await queue.begin(order(step))
        await queue.finish()
    assert played.recorded == [0, 4]
    assert not list((tmp_path / evaluation_queue.DIRECTORY).iterdir())


async def test_one_that_cannot_be_played_ends_the_run_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(tmp_path, monkeypatch, [1] * evaluation_queue.MAX_STARTS)
    async with played.queue as queue:
        await queue.begin(order(4))
        with pytest.raises(EngineFailed, match="step 4 failed: a reason"):
            await queue.finish()
        with pytest.raises(EngineFailed):
            queue.check()
    async with (again := Played(tmp_path, monkeypatch, [])).queue as queue:  # what failed is played again
        await queue.finish()
    assert again.recorded == [4]


async def test_what_a_killed_trainer_left_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / evaluation_queue.DIRECTORY / "8" / MODEL).mkdir(parents=True)  # killed while it was written
    before = Played(tmp_path, monkeypatch, [])
    for step in (12, 4):
        await before.queue.begin(order(step))
    played = Played(tmp_path, monkeypatch, [])
    async with played.queue as queue:
        await queue.finish()
    assert played.recorded == [4, 12]
    assert not queue.has(8)


def test_the_mean_is_of_what_was_scored() -> None:
    def one(reward: float | None) -> Trajectory:
        status: Status = "failed" if reward is None else "completed"
        return Trajectory(prompt="p", index=0, seed=0, reward=reward or 0.0, status=status)

    assert summary_of([one(1.0), one(0.0), one(None)], 1) == {"episodes": 2.0, "reward": 0.5}
    assert summary_of([one(0.0), one(1.0), one(0.0), one(0.0)], 2)["pass_at_2"] == 0.5


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["evaluation.background=true", "handover=true", "pool.engines=2", "staleness=0"], "take turns"),
        (['suites=[{name="a", task="."}]'], "played in the background"),
        (["evaluation.background=true", 'suites=[{name="a", task="."}, {name="a", task="."}]'], "one name"),
        (["evaluation.background=true", 'suites=[{name="a/b", task="."}]'], "name"),
    ],
)
def test_what_cannot_be_played_is_refused(settings: list[str], reason: str) -> None:
    with pytest.raises(Invalid, match=reason):
        gather(EXAMPLE, {}, settings)


def test_a_run_is_evaluated_while_it_learns(daemon: Daemon, tmp_path: Path) -> None:
    """With both the trainer and the process of the evaluation killed on the way."""
    config = small(tmp_path / "runs", steps=3, evaluate_every=1, versions=1, suites=(SuitePlan(**SUITE),))
    evaluation = msgspec.structs.replace(config.evaluation, background=True, best="reward_held_out")
    directory, _ = open_run(msgspec.structs.replace(config, evaluation=evaluation))
    first = directory / evaluation_queue.DIRECTORY / "0"
    process = Program([sys.executable, "-m", "coordinator.local", str(directory)], cwd=EXAMPLE.parent.parent)
    try:
        for kill in (_kill_evaluation, lambda _: local.restart(directory, "trainer")):
            while process.poll() is None and not _pid(first):
                time.sleep(0.02)
            assert process.poll() is None, (directory / "trainer.log").read_text()
            kill(first)
        assert process.wait(500) == 0, (directory / "rollout.log").read_text()
    finally:
        process.end()
    lines = [line for line in read_lines(directory / "metrics.jsonl") if "reward_held_out" in line]
    assert sorted(line["step"] for line in lines) == [0, 1, 2, 3]
    assert all(line["held_out_episodes"] == 2 and line["suites"]["again"]["episodes"] == 2.0 for line in lines)
    summary = json.loads((directory / "summary.json").read_text())
    by_step = {line["step"]: line["reward_held_out"] for line in lines}
    assert (summary["reward_before"], summary["reward_after"]) == (by_step[0], by_step[3])
    assert summary["wall_split_s"].get("evaluation", 0.0) == 0.0
    best = read(directory)
    assert isinstance(best, BestVersion) and best.value == max(by_step.values())
    assert not list((directory / evaluation_queue.DIRECTORY).iterdir())
    assert not asyncio.run(_sandboxes(daemon, str(first)))


def test_a_run_that_is_ended_leaves_no_evaluation(daemon: Daemon, tmp_path: Path) -> None:
    config = small(tmp_path / "runs", held_out=50)
    evaluation = msgspec.structs.replace(config.evaluation, background=True)
    directory, _ = open_run(msgspec.structs.replace(config, evaluation=evaluation))
    first = directory / evaluation_queue.DIRECTORY / "0"
    process = Program([sys.executable, "-m", "coordinator.local", str(directory)], cwd=EXAMPLE.parent.parent)
    try:
        while process.poll() is None and not (_pid(first) and asyncio.run(_sandboxes(daemon, str(first)))):
            time.sleep(0.05)
        assert process.poll() is None, (directory / "trainer.log").read_text()
    finally:
        process.end()
    assert not _pid(first)
    assert not asyncio.run(_sandboxes(daemon, str(first)))
    assert not [item for item in Path("/proc").glob("[0-9]*") if _runs_in(item, str(first))]


def _runs_in(process: Path, directory: str) -> bool:
    try:
        return directory in (process / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return False


def _pid(directory: Path) -> int:
    """Of the process that plays an evaluation; 0: none."""
    try:
        pid = int((directory / LOCK).read_text() or 0)
        return pid if f"{directory}" in Path(f"/proc/{pid}/cmdline").read_text(errors="replace") else 0
    except (OSError, ValueError):
        return 0


def _kill_evaluation(directory: Path) -> None:
    pid = _pid(directory)
    os.kill(pid, signal.SIGKILL)
    while _pid(directory) == pid:
        time.sleep(0.02)


async def _sandboxes(daemon: Daemon, label: str) -> list[Any]:
    async with daemon.client() as host:
        return await host.sandboxes({LABEL: label})
