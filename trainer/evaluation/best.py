"""The best policy of a run by a figure of its evaluations: a model directory ``best`` that no newer version removes.

Guarantee: after `kill -9` at any instant ``best`` is a complete model with its figure, or is brought back as one when
the run continues; a later version replaces it only with a greater figure.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollout.weights.export import export
from sandbox import durable
from sandbox.errors import Invalid

NAME, FILE = "best", "best.json"


class BestVersion(msgspec.Struct, frozen=True, kw_only=True):
    """``best/best.json``"""

    figure: str
    value: float
    step: int
    version: int


class BestKeeper:
    """``keeper.consider(metrics, step=4, version=4)`` after each evaluation. `figure`: "" keeps none."""

    def __init__(self, run: Path, figure: str):
        self.run, self.figure = run, figure
        self._new, self._old = run / ".best-new", run / ".best-old"
        target = run / NAME
        if not target.exists():  # a kill between two renames
            for left in (self._new, self._old):
                if (left / FILE).exists():
                    left.rename(target)
                    break
        for left in (self._new, self._old):
            shutil.rmtree(left, ignore_errors=True)
        self.current = read(run)

    def consider(
        self, metrics: Mapping[str, Any], *, step: int, version: int, model: Path | None = None
    ) -> BestVersion | None:
        """The version, if it is the best by now; then its directory is on disk. `model`: a directory that has it, where
        the run's weights may no longer."""
        if not self.figure:
            return None
        value = looked_up(metrics, self.figure)
        existing = self.current if self.current is not None and self.current.figure == self.figure else None
        if not math.isfinite(value) or (existing is not None and value <= existing.value):
            return None
        made = BestVersion(figure=self.figure, value=value, step=step, version=version)
        shutil.rmtree(self._new, ignore_errors=True)
        if model is None:
            export(self.run, self._new, version)
        else:
            shutil.copytree(model, self._new)
        for path in self._new.iterdir():
            durable.sync(path)
        durable.publish(self._new / FILE, msgspec.json.format(msgspec.json.encode(made), indent=1))
        target = self.run / NAME
        if target.exists():
            target.rename(self._old)
        self._new.rename(target)
        durable.sync(self.run)
        shutil.rmtree(self._old, ignore_errors=True)
        self.current = made
        return made


def read(run: Path) -> BestVersion | None:
    try:
        return msgspec.json.decode((run / NAME / FILE).read_bytes(), type=BestVersion)
    except FileNotFoundError:
        return None


def looked_up(metrics: Mapping[str, Any], figure: str) -> float:
    """Example: "reward_held_out_by_part/repair" of metrics with that table."""
    value: Any = metrics
    for part in figure.split("/"):
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        numbers = [name for name, item in metrics.items() if isinstance(item, int | float)]
        raise Invalid(
            f"an evaluation has no figure {figure!r}", hint=f"evaluation.best is one of: {', '.join(sorted(numbers))}"
        )
    return float(value)
