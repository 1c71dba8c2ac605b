"""A run of `pagurus train` that ends when its time is over, evaluated before and after, on whatever computes here."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from bench.harness import aftermath
from coordinator import local
from sandbox.paths import CHECKOUT
from trainer.config import TrainConfig, open_run
from trainer.reports.metrics import read_lines

POLL_INTERVAL = 0.5  # seconds
END_TIMEOUT = 120.0  # seconds for a run that was stopped to end its roles
EVALUATION_TIMEOUT = 1800.0  # seconds for the evaluation after it
FIRST_STEP_TIMEOUT = 1800.0  # seconds that a run gets for its first step, whatever its time is


def train_for(config: TrainConfig, seconds: float, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """As many steps as fit into `seconds`, at least one, then the evaluation after them. Raises RuntimeError."""
    with aftermath.TemporaryDirectory("pagurus-timed-") as directory:
        run, _ = open_run(msgspec.structs.replace(config, out=Path(directory)))
        log = Path(directory, "log")
        try:
            _until(run, log, seconds, environment)
            done = len(_steps(run))
            if done and len(_evaluations(run)) < 2:
                _train(run, log, environment, "--steps", str(done)).wait(EVALUATION_TIMEOUT)
        finally:
            for role in ("rollout", "trainer", "engine"):
                local.restart(run, role)
        if not _steps(run):
            raise RuntimeError(f"the run took no step: {log.read_text(errors='replace')[-1500:]}")
        return _summary(run)


def _train(run: Path, log: Path, environment: Mapping[str, str] | None, *more: str) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "pagurus", "train", "--resume", str(run), *more]
    with log.open("ab") as said:
        return subprocess.Popen(argv, cwd=CHECKOUT, env={**os.environ, **(environment or {})}, stdout=said, stderr=said)


def _until(run: Path, log: Path, seconds: float, environment: Mapping[str, str] | None) -> None:
    """Until the time is over that is counted from the end of the first evaluation, or the run has ended."""
    process, began, started = _train(run, log, environment), time.monotonic(), 0.0
    while process.poll() is None:
        time.sleep(POLL_INTERVAL)
        if not started and _evaluations(run):
            started = time.monotonic()
        over = bool(started) and time.monotonic() - started > seconds and bool(_steps(run))
        late = not _steps(run) and time.monotonic() - began > FIRST_STEP_TIMEOUT
        if over or late:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(END_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _steps(run: Path) -> list[dict[str, Any]]:
    return [line for line in read_lines(run / "metrics.jsonl") if "wall" in line]


def _evaluations(run: Path) -> list[float]:
    return [line["reward_held_out"] for line in read_lines(run / "metrics.jsonl") if "reward_held_out" in line]


def _summary(run: Path) -> dict[str, Any]:
    """Figures of the steps; the first is left out of medians, for it waits for all that starts."""
    steps, evaluations = _steps(run), _evaluations(run)
    few = max(1, min(5, len(steps) // 2))
    later = steps[1:] or steps
    trained = [line["train/batch_tokens"] / line["train/seconds"] for line in later if line.get("train/seconds")]
    return {
        "steps": len(steps),
        "held_out_before": evaluations[0] if evaluations else None,
        "held_out_after": evaluations[-1] if len(evaluations) > 1 else None,
        "batch_first": round(statistics.mean(line["reward"] for line in steps[:few]), 4),
        "batch_last": round(statistics.mean(line["reward"] for line in steps[-few:]), 4),
        "train_tokens_per_s": round(statistics.median(trained), 1) if trained else None,
        "step_s": round(statistics.median(line["seconds"] for line in later), 3),
        "step_shares": {
            name: round(sum(line["wall"][name] for line in later) / sum(line["seconds"] for line in later), 3)
            for name in ("engine", "environment", "trainer", "idle")
        },
        "mismatch_kl": statistics.median(line["train/mismatch_kl"] for line in later),
        "version_bytes": round(statistics.median(line["weights"]["bytes"] for line in later)),
        "version_encode_s": round(statistics.median(line["weights"]["encode_s"] for line in later), 3),
    }
