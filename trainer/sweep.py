"""A grid of runs: every combination of the values of some settings, one after the other or some at once, and one table.

Guarantee: a grid that was interrupted continues: a point's plan is in its own directory, a run that has ended is not
begun again, and one that has not is resumed.

::

    optimiser.rate=1e-6,1e-5 seed=0,1 ─▶ 4 points ─▶ runs/sweep-9f2c/{0,1,2,3}/RUN/summary.json ─▶ table
"""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sandbox.errors import Invalid
from trainer.config import TrainConfig, gather, open_run, unfinished
from trainer.settings import flat

POLL_INTERVAL = 0.2  # seconds
RESULTS = ("reward_before", "reward_after", "wall_s")
MAX_POINTS = 4096
_OPENING, _CLOSING = "[{(", "]})"


class SweepPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Example: ``SweepPoint(number=0, settings=["optimiser.rate=1e-6", "seed=0"])``"""

    number: int
    settings: list[str]


class SweepRow(msgspec.Struct, kw_only=True):
    """A line of the table: the settings of a point, its run, and what came of it."""

    settings: dict[str, str]
    run: str = ""
    state: str = "waits"  # waits, runs, done, failed
    results: dict[str, float | None] = {}


def grid(settings: Sequence[str]) -> list[SweepPoint]:
    """Every combination. Example: ``["a=1,2", "b=x"]`` has two points: a=1 b=x, a=2 b=x."""
    axes = []
    for text in settings:
        key, sign, values = text.partition("=")
        parts = split(values)
        if not sign or not key or not all(parts):
            raise Invalid(f"{text!r} is no axis", hint="write key=value,value, such as optimiser.rate=1e-6,1e-5")
        axes.append([f"{key}={part}" for part in parts])
    points = [SweepPoint(number=at, settings=list(chosen)) for at, chosen in enumerate(itertools.product(*axes))]
    if len(points) > MAX_POINTS:
        raise Invalid(f"{len(points)} runs", hint=f"name fewer values: at most {MAX_POINTS} runs")
    return points


def split(text: str) -> list[str]:
    """At commas outside of brackets and quotes. Example: ``split("[1, 2],[3, 4]") == ["[1, 2]", "[3, 4]"]``."""
    result, depth, quote = [""], 0, ""
    for char in text:
        if char == "," and not depth and not quote:
            result.append("")
            continue
        if char in "\"'":
            quote = "" if quote == char else quote or char
        elif not quote:
            depth += (char in _OPENING) - (char in _CLOSING)
        result[-1] += char
    return [part.strip() for part in result]


def configurations(what: Path, settings: Sequence[str]) -> tuple[Path, list[tuple[SweepPoint, TrainConfig]]]:
    """The directory of the grid, and the plan of each point. All are checked before any is begun."""
    points = grid(settings)
    plans = [(point, gather(what, {}, point.settings)) for point in points]
    content = [[f"{key}={value}" for key, value in flat(plan)] for _, plan in plans]
    name = hashlib.blake2b(msgspec.json.encode(content), digest_size=4).hexdigest()
    directory = plans[0][1].out.resolve() / f"sweep-{name}"
    return directory, [
        (point, msgspec.structs.replace(plan, out=directory / str(point.number))) for point, plan in plans
    ]


class Sweep:
    """``Sweep(what, settings).run(at_once=2)``. Ctrl-C ends the running ones; the same command continues."""

    def __init__(self, what: Path, settings: Sequence[str], report: Callable[[str], None] = lambda _: None):
        self.directory, self.plans = configurations(what, settings)
        self.report = report
        self.rows = [SweepRow(settings=dict(_pair(text) for text in point.settings)) for point, _ in self.plans]
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def run(self, *, at_once: int = 1) -> list[SweepRow]:
        waiting = [number for number in range(len(self.plans)) if not self._done(number)]
        try:
            while waiting or self._running:
                while waiting and len(self._running) < at_once:
                    self._begin(waiting.pop(0))
                time.sleep(POLL_INTERVAL)
                for number in [item for item, process in self._running.items() if process.poll() is not None]:
                    self._end(number)
        finally:
            self._stop()
        return self.rows

    def _begin(self, number: int) -> None:
        plan = self.plans[number][1]
        run = unfinished(plan) or open_run(plan)[0]
        self.rows[number].run, self.rows[number].state = str(run), "runs"
        self.report(f"{' '.join(self.plans[number][0].settings) or 'one run'}: {run}")
        argv = [sys.executable, "-m", "pagurus", "train", "--resume", str(run)]
        with (run / "sweep.log").open("ab") as log:
            self._running[number] = subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def _end(self, number: int) -> None:
        process = self._running.pop(number)
        if not self._done(number):
            self.rows[number].state = "failed"
            self.report(f"failed with {process.returncode}: see {Path(self.rows[number].run) / 'sweep.log'}")

    def _done(self, number: int) -> bool:
        """Whether its newest run has a summary; notes it."""
        summary = (self.plans[number][1].out / "latest" / "summary.json").resolve()
        if not summary.exists():
            return False
        content: dict[str, Any] = msgspec.json.decode(summary.read_bytes())
        row = self.rows[number]
        row.run, row.state = str(summary.parent), "done"
        row.results = {name: content.get(name) for name in RESULTS}
        return True

    def _stop(self) -> None:
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            process.wait()


def _pair(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    return key, value
