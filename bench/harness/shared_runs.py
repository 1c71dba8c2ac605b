"""Runs of `pagurus train` that take turns on two machines: a processor for rollouts, another for training.

``python -m bench.harness.shared_runs RUN`` is the supervisor of one run, with its roles bound to their machines.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.harness import aftermath
from bench.harness.own_daemon import BenchHost, image, launch
from coordinator import local
from coordinator.decide.multiplex import Prices, SharedJob, alone, join
from coordinator.simulate import jobs
from rollout.decide.view import LeasePrompts
from rollout.plan import SharePlan
from rollout.store import decisions, stages
from sandbox.paths import CHECKOUT
from trainer.config import TrainConfig, open_run

ROLLOUT, TRAIN = "0", "1"  # processors
LAKE = CHECKOUT / "examples" / "frozen_lake"  # it needs no sandbox: what takes time is the engine and the trainer
BALANCED: dict[str, Any] = {
    "groups": 16,
    "size": 16,
    "objective": "grpo",
}  # training takes about as long as rolling out
SHORT: dict[str, Any] = {"groups": 4, "size": 8, "objective": "grpo"}
LONG = 400.0  # seconds of one comparison


@dataclass
class Phase:
    """As the coordinator's book has it."""

    run: str
    kind: str
    number: int
    requested: float
    begun: float
    ended: float


@dataclass
class Observed:
    """What became of runs that were started together."""

    phases: list[Phase]
    cold: list[float]  # of each run
    kills: int

    @property
    def cycle(self) -> float:
        """Seconds of a step, the median over all runs; without the first of each, in which the others also start."""
        ends: dict[str, list[float]] = {}
        for item in self.phases:
            if item.kind == "train":
                ends.setdefault(item.run, []).append(item.ended)
        return statistics.median(after - before for of in ends.values() for before, after in pairwise(sorted(of)[1:]))

    @property
    def machine_seconds(self) -> float:
        """Of both machines, for one step of one run."""
        return 2 * self.cycle / len(self.cold)

    def of(self, kind: str) -> list[float]:
        return [item.ended - item.begun for item in self.phases if item.kind == kind and item.number > 0]


class Place:
    """``with Place(image) as place: place.play(2, 6)``"""

    def __init__(self, base: str):
        self.base = base

    def __enter__(self) -> Place:
        self._directory = aftermath.TemporaryDirectory("pagurus-turns-")
        self.directory = Path(self._directory.name)
        self.host = BenchHost(self.directory / "host", image(self.base))
        self.model = wider(self.directory / "model")
        try:
            with bound(ROLLOUT):
                self.host.start()
        except RuntimeError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.host.clean()
        self._directory.cleanup()

    def play(
        self, count: int, steps: int, *, kills: int = 0, shape: Sequence[float] = (100.0, 100.0), **options: Any
    ) -> Observed:
        """So many runs at once. `kills` of the coordinator meanwhile. `shape`: what a run says of its phases. `options`
        of the runs."""
        home = self.directory / f"{count}-{kills}-{time.monotonic_ns()}"
        home.mkdir()
        socket = self.host.run / home.name / "cluster.sock"
        start = ("--state", str(home / "state"), "--run", str(socket.parent), "--share", "rollout=1,train=1")

        def coordinator() -> subprocess.Popen[bytes]:
            return launch(home, home, home / "coordinator.log", *start, module="coordinator")

        share = SharePlan(rollout=shape[0], train=shape[1], slowdown=10.0, at=str(socket))
        runs = [self._prepare(home / f"run-{n}", n, steps, share, options) for n in range(count)]
        process, begun = coordinator(), time.time()
        existing = {**os.environ, "PAGURUS_STATE": str(self.host.state), "PAGURUS_RUN": str(self.host.run)}
        supervisors = []
        try:
            for run in runs:
                argv = [sys.executable, "-m", "bench.harness.shared_runs", str(run)]
                with (run / "run.log").open("ab") as log:
                    supervisors.append(subprocess.Popen(argv, cwd=CHECKOUT, env=existing, stdout=log, stderr=log))
            draw, killed = random.Random(count), 0
            while any(item.poll() is None for item in supervisors):
                if time.time() - begun > LONG:
                    raise RuntimeError(f"the runs take too long: {tails(runs)}")
                time.sleep(0.1 if killed >= kills else draw.uniform(0.0, 1.0))
                if killed < kills:
                    process.kill()
                    process.wait()
                    process, killed = coordinator(), killed + 1
            if any(item.returncode for item in supervisors):
                raise RuntimeError(f"a run failed: {tails(runs)}")
            return Observed(read(home / "state" / "cluster.sqlite"), [cold(run) for run in runs], killed)
        finally:
            for item in supervisors:
                if item.poll() is None:
                    item.send_signal(signal.SIGTERM)
            for item in supervisors:
                item.wait()
            process.kill()
            process.wait()

    def _prepare(self, out: Path, seed: int, steps: int, share: SharePlan, options: dict[str, Any]) -> Path:
        config = TrainConfig(
            task=LAKE, model=self.model, steps=steps, held_out=1, faults=0, pace=0.0, seed=seed, out=out,
            share=share, staleness=0, trackers=(), **options,
        )  # fmt: skip
        return open_run(config)[0]


def wider(directory: Path) -> Path:
    """A policy that knows nothing, of a million parameters: training it takes about as long as rolling out with it."""
    from rollout.engine.embedded.model import ModelConfig, Qwen3, save_model

    start = LAKE / "start"
    config = replace(
        ModelConfig.load(start), hidden_size=256, intermediate_size=768, num_attention_heads=8, num_key_value_heads=8
    )
    policy = Qwen3(config)
    policy.initialise(0)
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(start / name, directory)
    save_model(policy, directory)
    return directory


@contextlib.contextmanager
def bound(processor: str) -> Iterator[None]:
    """What is started within works on this processor."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {int(processor)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def read(path: Path) -> list[Phase]:
    """The coordinator's book, in the order in which phases began."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        rows = database.execute("SELECT job, phase, requested, begun, ended FROM phases ORDER BY begun").fetchall()
    return [
        Phase(job, ("rollout", "train")[phase % 2], phase // 2, requested, begun, ended)
        for job, phase, requested, begun, ended in rows
    ]


def cold(run: Path) -> float:
    """Seconds from the start of the roles until the rollout, which waits for the trainer's weights, could work."""
    noted = stages.read(local.roles_of(run), role="rollout")
    at = {item.stage: item.at for item in reversed(noted)}
    return at[stages.READY] - at[stages.BEGUN]


def warm(observed: Observed) -> list[float]:
    """Seconds from the end of a run's rollout to the first trajectory of the next, of runs that waited for that."""
    leases = {run: begins(Path(run)) for run in {item.run for item in observed.phases}}
    rollouts = [item for item in observed.phases if item.kind == "rollout"]
    return [
        leases[after.run][after.number] - before.ended
        for before, after in pairwise(rollouts)
        if before.run != after.run and 0 < after.number in leases[after.run] and after.requested < before.ended
    ]


def begins(run: Path) -> dict[int, float]:
    """When the first trajectory of each version was begun."""
    result: dict[int, float] = {}
    for path in sorted((run / "rollout").glob(decisions.PATTERN)):
        for _, item in decisions.read(path):
            if any(isinstance(action, LeasePrompts) for action in item.actions):
                result.setdefault(item.view.version, item.now)
    return result


def faults(observed: Observed, runs: int, steps: int) -> list[str]:
    """Phases that are missing, out of order or beside another on one machine."""
    said = []
    for run in {item.run for item in observed.phases}:
        course = [(item.number, item.kind) for item in observed.phases if item.run == run]
        target = [(n, kind) for n in range(steps) for kind in ("rollout", "train")] + [(steps, "rollout")]
        if course != target:
            said.append(f"{run}: {course}")
    for kind in ("rollout", "train"):
        there = [item for item in observed.phases if item.kind == kind]
        said += [
            f"{after.run} began before {before.run} had ended"
            for before, after in pairwise(there)
            if after.begun < before.ended
        ]
    return said if len({item.run for item in observed.phases}) == runs else [*said, "a run is missing"]


def simulated(rollout: float, train: float, count: int, steps: int) -> float:
    """Machine-seconds of a step in multiples of those alone, where so many runs of these phases share both machines."""
    group = alone(SharedJob(name="0", rollout=rollout, train=train, slowdown=10.0))
    for n in range(1, count):
        joined = join(group, SharedJob(name=str(n), rollout=rollout, train=train, slowdown=10.0), Prices())
        assert joined is not None
        group = joined
    course = jobs.run(group, lambda job, step: (job.rollout, job.train), steps=steps)
    return statistics.mean(course.slowdown.values()) / count


def turns(base: str, *, steps: int, kills: int) -> dict[str, Any]:
    """A run alone, three that share, three of short phases that share while their coordinator is killed."""
    many = max(2, kills // 2)
    with Place(base) as place:
        one, three = place.play(1, steps, **BALANCED), place.play(3, steps, **BALANCED)
        switch = statistics.median(warm(three) or [float("nan")])
        killed = place.play(3, many, kills=kills, **SHORT) if kills else None
    rollout, train = (statistics.median(one.of(kind)) for kind in ("rollout", "train"))
    said, share = simulated(rollout, train, 3, steps), three.machine_seconds / one.machine_seconds
    cold = statistics.median(one.cold)
    result: dict[str, Any] = {
        "alone": {
            "rollout_s": round(rollout, 2),
            "train_s": round(train, 2),
            "machine_seconds_per_step": round(one.machine_seconds, 2),
        },
        "three": {
            "rollout_s": round(statistics.median(three.of("rollout")), 2),
            "train_s": round(statistics.median(three.of("train")), 2),
            "machine_seconds_per_step": round(three.machine_seconds, 2),
            "of_alone": round(share, 3),
            "simulated_of_alone": round(said, 3),
            "simulated_over_live": round(said / share, 3),
            "faults": faults(three, 3, steps),
        },
        "cold_start_s": round(cold, 2),
        "warm_switch_s": round(switch, 3),
        "warm_over_cold": round(switch / cold, 3),
    }
    if killed is not None:
        result["killed"] = {"kills": killed.kills, "phases": len(killed.phases), "faults": faults(killed, 3, many)}
    return result


def tails(runs: Sequence[Path]) -> str:
    return "\n".join(
        f"{log}: {log.read_text(errors='replace')[-1500:]}"
        for run in runs
        for log in (run / "run.log", run / "rollout.log")
        if log.exists()
    )


def main(run: Path) -> int:
    programs = local.programs(run)
    machines = {"rollout": ROLLOUT, "trainer": TRAIN}
    return local.supervise(run, {name: ["taskset", "-c", machines[name], *argv] for name, argv in programs.items()})


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
