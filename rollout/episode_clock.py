"""Time of a trajectory: its own, which is limited, and everybody else's, which is only measured.

Guarantee: a trajectory's clock runs only while its own commands and its environment's `step` run. Waits for the engine,
for a sandbox, a checkpoint, a restore or a restarting daemon stop it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator

from rollout.decide.blame import EpisodePhase


class TrajectoryClock:
    """The budget of one trajectory. ``async with clock.running(): ...`` raises TimeoutError when it is used up."""

    def __init__(self, budget: float, *, used: float = 0.0):
        self.budget, self.used = budget, used
        self._since: float | None = None  # on the event loop's clock; None while it is stopped
        self._stops = 0
        self._timeout: asyncio.Timeout | None = None
        self.expired = False

    @property
    def left(self) -> float:
        """Seconds that remain; never below zero."""
        running = 0.0 if self._since is None else asyncio.get_running_loop().time() - self._since
        return max(0.0, self.budget - self.used - running)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The trajectory's own time. TimeoutError when the budget is used up."""
        timeout = self._timeout = asyncio.timeout(self.left)
        try:
            async with timeout:
                self._start()
                try:
                    yield
                finally:
                    self._halt()
                    self._timeout = None
        except TimeoutError:
            self.expired = timeout.expired()  # else it is a time-out of the environment's own
            raise

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Platform time within `running`. May be entered by several tasks at once."""
        self._stops += 1
        if self._stops == 1:
            self._halt()
        try:
            yield
        finally:
            self._stops -= 1
            if self._stops == 0 and self._timeout is not None:
                self._start()

    def charge(self, seconds: float) -> None:
        """Time that was measured elsewhere: what a command took inside its sandbox."""
        self.used += seconds

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        self._since = loop.time()
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(loop.time() + max(0.0, self.budget - self.used))

    def _halt(self) -> None:
        if self._since is not None:
            self.used += asyncio.get_running_loop().time() - self._since
            self._since = None
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(None)


class PhaseMeter:
    """Trajectory-seconds per phase, of all trajectories together; what the wall time of a step is split by."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._active = dict.fromkeys(EpisodePhase, 0)
        self._seconds = dict.fromkeys(EpisodePhase, 0.0)
        self._idle = 0.0  # seconds in which no trajectory was in any phase
        self._at = clock()

    @contextlib.contextmanager
    def phase(self, phase: EpisodePhase, inside: EpisodePhase | None = None) -> Iterator[None]:
        """In `phase`; time of the surrounding phase `inside` is stopped during it."""
        self._move(phase, 1, inside, -1)
        try:
            yield
        finally:
            self._move(phase, -1, inside, 1)

    def seconds(self) -> dict[str, float]:
        """Since the start, by phase; ``idle`` for the time in which nothing ran."""
        self._update()
        return {**{phase.value: spent for phase, spent in self._seconds.items()}, "idle": self._idle}

    def _move(self, phase: EpisodePhase, by: int, inside: EpisodePhase | None, back: int) -> None:
        self._update()
        self._active[phase] += by
        if inside is not None:
            self._active[inside] += back

    def _update(self) -> None:
        now = self._clock()
        passed, self._at = now - self._at, now
        if not any(self._active.values()):
            self._idle += passed
        for phase, count in self._active.items():
            self._seconds[phase] += passed * count
