"""An engine as its rates: prompts are read one after another, answers are sampled side by side.

All answers on their way advance by one token per step, and a step takes ``base + per_sequence * answers`` seconds:
reading the weights once, and each answer's cache. Prompts are read before, at `prefill` tokens per second, in order.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Ticks(Protocol):
    """A clock: the virtual one, or a real one."""

    @property
    def now(self) -> float: ...

    def after(self, seconds: float, what: Callable[[], None]) -> object: ...


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Of one engine."""

    base: float  # seconds of a decoding step
    per_sequence: float = 0.0  # seconds that each answer adds to it
    prefill: float = float("inf")  # tokens per second
    slots: int = 256  # answers at once; further requests wait
    exclusive: bool = False  # nothing is sampled while a prompt is read: both need the same processors

    def step(self, answers: int) -> float:
        return self.base + self.per_sequence * answers


class SimulatedRequest:
    """One answer on its way."""

    __slots__ = ("cancelled", "done", "end", "prompt", "read", "tokens")

    def __init__(self, prompt: float, tokens: float, done: Callable[[], None], read: Callable[[], None]):
        self.prompt, self.tokens, self.done, self.read = prompt, tokens, done, read
        self.end, self.cancelled = 0.0, False


class SimulatedEngine:
    """``engine.request(prompt=512, tokens=100, done=ended)``"""

    def __init__(self, clock: Ticks, rates: StepCosts, hardware: str = ""):
        self.clock, self.rates, self.hardware = clock, rates, hardware
        self.readers = self.reading = 0  # as the router counts it: rollout.decide.engines.measuring
        self.load = 0  # requests that began and have not ended
        self.busy = 0.0  # seconds in which it sampled or read
        self.tokens = 0.0  # that it sampled
        self._position = 0.0  # tokens that an answer has got which was there from the beginning
        self._since = 0.0
        self._sampling = 0
        self._ends: list[tuple[float, int, SimulatedRequest]] = []
        self._order = 0
        self._plan = 0  # the newest; older ones are void
        self._waiting: deque[SimulatedRequest] = deque()
        self._reading: deque[SimulatedRequest] = deque()

    def request(
        self, *, prompt: float, tokens: float, done: Callable[[], None], read: Callable[[], None] = lambda: None
    ) -> SimulatedRequest:
        """`read` happens when `prompt` tokens were read, `done` when `tokens` were sampled after them."""
        request = SimulatedRequest(prompt, tokens, done, read)
        self.load += 1
        self._waiting.append(request)
        self._admit()
        return request

    def progress(self, request: SimulatedRequest) -> tuple[float, float]:
        """Tokens of an answer that are there, and those that are left."""
        if not request.end:
            return 0.0, request.tokens
        self._advance()
        left = request.end - self._position
        return request.tokens - left, left

    def cancel(self, request: SimulatedRequest) -> None:
        """It will not be `done`. Frees its slot."""
        if request.cancelled:
            return
        request.cancelled = True
        self.load -= 1
        if request.end:
            self._advance()
            self._sampling -= 1
            self._plan_next()
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._sampling + len(self._reading) < self.rates.slots:
            request = self._waiting.popleft()
            if request.cancelled:
                continue
            self._advance()
            self._reading.append(request)
            if len(self._reading) == 1:
                self._plan_next()
                self._read()

    def _read(self) -> None:
        seconds = self._reading[0].prompt / self.rates.prefill
        self.busy += seconds
        if seconds > 0:
            self.clock.after(seconds, self._was_read)
        else:
            self._was_read()

    def _was_read(self) -> None:
        self._advance()
        request = self._reading.popleft()
        if not request.cancelled:
            request.end = self._position + max(request.tokens, 1e-9)
            self._order += 1
            heapq.heappush(self._ends, (request.end, self._order, request))
            self._sampling += 1
        self._plan_next()
        if not request.cancelled:
            request.read()
        if self._reading:
            self._read()
        self._admit()

    @property
    def _paused(self) -> bool:
        return self.rates.exclusive and bool(self._reading)

    def _advance(self) -> None:
        """Up to now."""
        passed = self.clock.now - self._since
        if self._sampling and not self._paused:
            more = passed / self.rates.step(self._sampling)
            self._position += more
            self.tokens += more * self._sampling
            self.busy += passed
        self._since = self.clock.now

    def _plan_next(self) -> None:
        while self._ends and self._ends[0][2].cancelled:
            heapq.heappop(self._ends)
        self._plan += 1
        if self._ends and not self._paused:
            plan, left = self._plan, max(0.0, self._ends[0][0] - self._position)
            self.clock.after(left * self.rates.step(self._sampling), lambda: self._ended(plan))

    def _ended(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._advance()
        ended = []
        while self._ends and (self._ends[0][2].cancelled or self._ends[0][0] <= self._position + 1e-6):
            request = heapq.heappop(self._ends)[2]
            if not request.cancelled:
                ended.append(request)
                self._sampling -= 1
                self.load -= 1
        self._plan_next()
        self._admit()
        for request in ended:
            request.done()
