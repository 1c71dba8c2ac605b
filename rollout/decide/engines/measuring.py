"""What an answer costs its server, measured where requests are routed. Pure: the router passes the time."""

from __future__ import annotations

from collections import deque
from statistics import fmean, median
from typing import Protocol

from rollout.decide.engines.affinity import MeasuredAnswer


class Busy(Protocol):
    """A server, as the router counts its requests."""

    @property
    def hardware(self) -> str: ...

    load: int  # requests
    readers: int  # of these, that have not got a token yet
    reading: int  # tokens of their prompts that it did not hold


RECENT, FEWEST = 64, 8  # measurements of a number of answers that are kept, that are enough
NARROW = 0.25  # of their mean: a deviation of numbers of answers that says half of what each adds


class StepTimes:
    """``steps.see(31, 0.02)``, then ``steps.line()``: through medians, for some steps take longer for other reasons."""

    def __init__(self) -> None:
        self._observed: dict[int, deque[float]] = {}

    def see(self, answers: int, seconds: float) -> None:
        self._observed.setdefault(answers, deque(maxlen=RECENT)).append(seconds)

    def line(self) -> tuple[float, float]:
        """Seconds of a step without any answer, and those that each adds. Both 0 while nothing is known.

        Numbers of answers that hardly differ say little of what each adds: then it is taken for less.
        """
        existing = [
            (answers, median(result), len(result))
            for answers, result in self._observed.items()
            if len(result) >= FEWEST
        ]
        if not existing:
            return 0.0, 0.0
        all_answers, medians, counts = zip(*existing, strict=True)
        mean, step = fmean(all_answers, counts), fmean(medians, counts)
        spread = sum(counts) * (NARROW * mean) ** 2 + sum(count * (at - mean) ** 2 for at, _, count in existing)
        slope = sum(count * (at - mean) * result for at, result, count in existing) / spread
        slope = min(max(slope, 0.0), step / mean)
        return step - slope * mean, slope


class AnswerTimer:
    """``each = AnswerTimer(server, "calculator", new=9, read=99, now=now)``; `piece` with each piece; `leave` at
    last."""

    def __init__(self, server: Busy, kind: str, *, new: int, read: int, now: float, steps: StepTimes | None = None):
        """`read`: tokens of its prompt that the server does not hold; `new`: that no server holds. `steps` are
        given."""
        self.server, self.kind, self.new, self.read, self._steps = server, kind, new, read, steps
        self._requested, self._ahead, self._alongside = now, server.reading, server.load - 1
        self._first_at = self._last = now
        self._first = self._sampled = self._load = 0
        self._reads = True
        server.readers += 1
        server.reading += read

    def piece(self, tokens: int, now: float) -> None:
        """So many tokens came; 0: it begins to sample."""
        load = self.server.load
        if self._steps is not None and tokens and load == self._load and not self.server.readers:
            self._steps.see(load, (now - self._last) / tokens)
        self._last, self._load = now, 0 if self.server.readers else load  # 0: prompts are read before the next piece
        if self._reads:
            self._first, self._first_at, self._alongside = tokens, now, self.server.load - 1
            self._was_read()
        self._sampled += tokens

    def leave(self) -> None:
        """The server is not busy with it any more."""
        if self._reads:
            self._was_read()

    @property
    def answered(self) -> MeasuredAnswer:
        """Of a whole answer."""
        return MeasuredAnswer(
            kind=self.kind,
            hardware=self.server.hardware,
            new=self.new,
            read=self.read,
            ahead=self._ahead,
            read_s=self._first_at - self._requested,
            first=self._first,
            sampled=self._sampled,
            sampled_s=self._last - self._first_at,
            alongside=(self._alongside + self.server.load - 1) / 2,
        )

    def _was_read(self) -> None:
        self._reads = False
        self.server.readers -= 1
        self.server.reading -= self.read
