"""What a person sees while a run goes: a few lines that stay in place.

Guarantee: works without a terminal too: one line per step, one every ten seconds in between, nothing that blinks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

RATE_OVER = 10.0  # seconds over which turns per second are averaged
SAY_INTERVAL = 10.0  # seconds between two lines where there is no terminal
BLOCKS = "▁▂▃▄▅▆▇█"


class Display:
    """``with Display(steps=20) as display: display.stage("fitting"); display.turns({"files": 3})``."""

    def __init__(self, *, steps: int, console: Console | None = None):
        self.console = console or Console()
        self.bar = Progress(
            TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=self.console,
        )  # fmt: skip
        self.task = self.bar.add_task("starting", total=None)
        self.steps = steps
        self.rewards: list[float] = []
        self.verdicts: Counter[str] = Counter()
        self.metrics: dict[str, Any] = {}
        self._turns: list[tuple[float, int]] = []
        self._stage, self._since, self._said = "starting", 0, time.monotonic()
        self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=2, transient=True)

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def stage(self, name: str, total: int | None = None) -> None:
        """A new stage begins."""
        self.bar.reset(self.task, description=name, total=total, completed=0)
        self._stage, self._since = name, sum(self.verdicts.values())
        if not self.console.is_terminal:
            self.say(f"{name} ...")

    def advance(self, completed: int) -> None:
        self.bar.update(self.task, completed=completed)

    def turns(self, verdicts: Mapping[str, int], waits: Sequence[str] = ()) -> None:
        """The turns that have ended so far, by verdict. Fewer than before: who counts them was started again. `waits`:
        who waits for what, which is said where no turn ends."""
        now, grown = time.monotonic(), sum(verdicts.values()) - self.verdicts.total()
        self.verdicts = Counter(verdicts)
        self._turns = [(at, count) for at, count in self._turns if now - at < RATE_OVER]
        if grown > 0:
            self._turns.append((now, grown))
        if not self.console.is_terminal and now - self._said >= SAY_INTERVAL:
            since = max(0, self.verdicts.total() - self._since)
            why = "" if self.rate() else "".join(f"; {wait}" for wait in waits)
            self.say(f"{self._stage}: {since} turns, {self.rate():.1f} a second{why}")

    def step(self, number: int, reward: float, metrics: dict[str, Any]) -> None:
        """An optimisation step has ended."""
        self.rewards.append(reward)
        self.metrics.update(metrics)
        self.advance(number)
        if not self.console.is_terminal:
            self.say(f"step {number}/{self.steps}: reward {reward:.2f}, {self.rate():.1f} turns/s, {self._mix()}")

    def say(self, text: str) -> None:
        """One line that stays."""
        self._said = time.monotonic()
        self.console.print(text, highlight=False, soft_wrap=True)

    def rate(self) -> float:
        """Turns per second over the last seconds."""
        now = time.monotonic()
        return sum(count for at, count in self._turns if now - at < RATE_OVER) / RATE_OVER

    def _mix(self) -> str:
        return ", ".join(f"{self.verdicts[kind]} {kind}" for kind in ("none", "files", "processes", "both"))

    def _render(self) -> Group:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim")
        grid.add_column()
        curve = "".join(BLOCKS[min(7, int(reward * 8))] for reward in self.rewards[-60:])
        latest = f"{self.rewards[-1]:.2f} " if self.rewards else ""
        grid.add_row("reward", Text(latest + curve, style="green"))
        grid.add_row("turns", f"{self.rate():.1f} per second; {self._mix()}")
        for name, value in self.metrics.items():
            grid.add_row(name, str(value))
        return Group(self.bar, grid)
