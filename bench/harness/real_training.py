"""Complete runs of `pagurus train` in real sandboxes, on the bench's own daemon, in the form of bench.recipe's runs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from bench.harness import aftermath
from bench.harness.own_daemon import BenchHost, image
from coordinator import local
from sandbox.paths import CHECKOUT
from trainer.config import TrainConfig, open_run
from trainer.reports.metrics import read_lines

POLL_INTERVAL = 0.1  # seconds between two looks at what a run has written


@contextlib.contextmanager
def host(name: str) -> Iterator[BenchHost]:
    """A daemon with this image of the machine's; nothing is left of it."""
    with aftermath.TemporaryDirectory("pagurus-recipe-") as directory:
        made = BenchHost(Path(directory, "host"), image(name))
        try:
            made.start()
            yield made
        finally:
            made.clean()


def learn(host: BenchHost, config: TrainConfig) -> dict[str, Any]:
    """One run to its end. `wall_s` is counted from its start, the evaluation before the first step included, until each
    step was recorded; `batch` are the mean rewards of what the steps were taken on."""
    with aftermath.TemporaryDirectory("pagurus-recipe-runs-") as directory:
        run, config = open_run(msgspec.structs.replace(config, out=Path(directory)))
        log = Path(directory, "log")
        try:
            walls = _watch(host, run, log)
        finally:
            for role in ("rollout", "trainer", "engine"):  # of a run that ended before its end
                local.restart(run, role)
        steps = {line["step"]: line for line in read_lines(run / "metrics.jsonl") if "wall" in line}
        before, *_, after = [line for line in read_lines(run / "metrics.jsonl") if "reward_held_out" in line]
    made = {
        "example": config.task.name,
        "seed": config.seed,
        "staleness": config.staleness,
        "reward": {0: before["reward_held_out"], config.steps: after["reward_held_out"]},
        "batch": {step: line["reward"] for step, line in steps.items()},
        "wall_s": {0: 0.0, **{step: walls[step] for step in steps}},
        "step_tokens_per_s": _speed(list(steps.values())),
        "before": before["reward_held_out"],
        "after": after["reward_held_out"],
    }
    print(json.dumps(made), file=sys.stderr, flush=True)  # what a bench that is ended has come to
    return made


def _speed(steps: list[dict[str, Any]]) -> float:
    """Tokens of the batches' trajectories, a second of the steps on them."""
    spent = sum(line.get("train/seconds", 0.0) for line in steps)
    return round(sum(line.get("train/batch_tokens", 0.0) for line in steps) / spent, 1) if spent else 0.0


def _watch(host: BenchHost, run: Path, log: Path) -> dict[int, float]:
    """Goes with a run to its end; seconds from its start until each step was recorded."""
    argv = [sys.executable, "-m", "pagurus", "train", "--resume", str(run)]
    environment = {**os.environ, "PAGURUS_STATE": str(host.state), "PAGURUS_RUN": str(host.run)}
    walls: dict[int, float] = {}
    began = time.monotonic()
    with log.open("wb") as said, subprocess.Popen(argv, cwd=CHECKOUT, env=environment, stdout=said, stderr=said) as ran:
        try:
            while ran.poll() is None:
                time.sleep(POLL_INTERVAL)
                for line in read_lines(run / "metrics.jsonl"):
                    if "wall" in line:
                        walls.setdefault(line["step"], round(time.monotonic() - began, 1))
        finally:
            ran.kill()
    if ran.returncode:
        raise RuntimeError(f"the run ended with status {ran.returncode}:\n{log.read_text(errors='replace')[-2000:]}")
    return walls
