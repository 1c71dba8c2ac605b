"""What is recorded while a run goes: one line per step, one line per turn.

Guarantee: a line is written whole or, after a kill, ignored by `read_lines`; a resumed run appends.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollout import Trajectory
from trainer.reports.trackers import Tracker

log = logging.getLogger("pagurus.trainer.metrics")


class MetricsRecorder:
    """Appends to the files of a run directory, and passes them to trackers. A context manager."""

    def __init__(self, directory: Path, trackers: Sequence[Tracker] = ()):
        self.directory, self._trackers = directory, trackers
        self._metrics = (directory / "metrics.jsonl").open("ab")
        self._turns = (directory / "turns.jsonl").open("ab")

    def __enter__(self) -> MetricsRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.close()
        self._turns.close()
        for tracker in self._trackers:
            tracker.close()

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One line of `metrics.jsonl`; trackers get the numbers in it, nested ones as `name/key`."""
        self._metrics.write(msgspec.json.encode({"step": step, **metrics}) + b"\n")
        self._metrics.flush()
        numbers = dict(pair for name, value in metrics.items() for pair in _numbers(name, value))
        for tracker in self._trackers:
            try:
                tracker.log(step, numbers)
            except Exception as error:  # noqa: BLE001  its server is away: the run continues, metrics.jsonl has them
                log.warning("%s did not take the figures of step %d: %s", type(tracker).__name__, step, error)

    def turns(self, step: int, trajectories: Iterable[Trajectory]) -> None:
        """One line of `turns.jsonl` per turn: what the timeline is drawn from."""
        for trajectory in trajectories:
            name = f"{trajectory.prompt}/{trajectory.index}"
            for turn in trajectory.turns:
                line = {"step": step, "trajectory": name, **msgspec.to_builtins(turn)}
                self._turns.write(msgspec.json.encode(line) + b"\n")
        self._turns.flush()


def _numbers(name: str, value: object) -> Iterable[tuple[str, float]]:
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int | float):
        yield name, float(value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(f"{name}/{key}", inner)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file of JSON objects."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    return [msgspec.json.decode(line) for line in lines[:-1] if line]  # a line without its end was cut by a kill
