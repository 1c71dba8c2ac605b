"""What is recorded while a run goes: one line per step, one line per turn, TensorBoard events.

Owns: `metrics.jsonl`, `turns.jsonl`, `tensorboard/` of a run folder. Does not own: what the figures mean.
Guarantee: a line is written whole or, after a kill, ignored by `read_lines`; a resumed run appends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollout import Trajectory


class Recorder:
    """Appends to the files of a run folder. A context manager."""

    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter  # seconds to import: only a run pays

        self.folder = folder
        self._metrics = (folder / "metrics.jsonl").open("ab")
        self._turns = (folder / "turns.jsonl").open("ab")
        self._board = SummaryWriter(str(folder / "tensorboard"))

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.close()
        self._turns.close()
        self._board.close()

    def step(self, step: int, figures: Mapping[str, Any]) -> None:
        """One line of `metrics.jsonl`; numbers go to TensorBoard as well, nested ones as `name/key`."""
        self._metrics.write(msgspec.json.encode({"step": step, **figures}) + b"\n")
        self._metrics.flush()
        for name, value in figures.items():
            for tag, number in _numbers(name, value):
                self._board.add_scalar(tag, number, step)
        self._board.flush()

    def turns(self, step: int, trajectories: Iterable[Trajectory]) -> None:
        """One line of `turns.jsonl` per turn: what the timeline is drawn from."""
        for trajectory in trajectories:
            name = f"{trajectory.prompt}/{trajectory.index}"
            for turn in trajectory.turns:
                line = {"step": step, "trajectory": name, **msgspec.to_builtins(turn)}
                self._turns.write(msgspec.json.encode(line) + b"\n")
        self._turns.flush()


def _numbers(name: str, value: Any) -> Iterable[tuple[str, float]]:
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
