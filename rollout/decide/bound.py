"""How far rollouts may run ahead of the trainer, chosen during the run (`staleness = "auto"`). Pure.

Guarantee: the bound is between 0 and `limit`; what was measured decides, and a bound that was tried in vain is not
tried again for twice as many steps each time, unless the run has become another.

A larger bound hides rollouts behind the training and the other way round; but what is learned from is older, and weighs
less. What counts is both: the worth of a bound is ``effective sample size / seconds of a step``. A neighbour is tried
only if it can be better at best: one more can save no more than the trainer's waiting, one less can gain no more than
what the lag of a version costs now.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

import msgspec


class TrainerStepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A step of the trainer, as the rollout saw it."""

    lag: float  # versions that its samples were behind, in the mean
    ess: float  # effective sample size, as a share
    seconds: float  # since the step before
    waited: float  # of these, that the trainer waited for its batch


@dataclass
class BoundEstimate:
    """Of a bound that was measured."""

    worth: float
    at: int  # step
    timeout: int


class Bound:
    """``bound.see(step)`` after each step, then ``bound.now``"""

    def __init__(self, limit: int, *, first: int = 1, hold: int = 8, again: int = 16, margin: float = 0.05):
        """`hold` steps are measured at a bound; a neighbour is tried again after `again` steps, if it can be better by
        `margin`."""
        self.now, self.limit = min(first, limit), limit
        self._hold, self._again, self._margin = hold, again, margin
        self._observed: list[TrainerStepRecord] = []
        self._skip = 0  # steps that began before the bound was changed
        self._step = 0
        self._existing: dict[int, BoundEstimate] = {}
        self._from: int | None = None  # where a trial comes from
        self._first: TrainerStepRecord | None = (
            None  # how steps were when this bound was first measured, since it was chosen
        )

    def see(self, step: TrainerStepRecord) -> None:
        self._step += 1
        if self._skip:
            self._skip -= 1
            return
        self._observed = [*self._observed, step][-3 * self._hold :]
        if len(self._observed) < self._hold:
            return
        self._forget_if_changed()
        worth = fmean(item.ess for item in self._observed) / fmean(item.seconds for item in self._observed)
        before = self._existing.get(self.now)
        self._existing[self.now] = BoundEstimate(worth, self._step, self._again if before is None else before.timeout)
        self._choose(worth)

    def _forget_if_changed(self) -> None:
        """Another run than the one that was measured: what other bounds were worth says nothing any more."""
        last = self._observed[-self._hold :]
        ess, seconds = fmean(item.ess for item in last), fmean(item.seconds for item in last)
        mean = TrainerStepRecord(lag=0.0, ess=ess, seconds=seconds, waited=0.0)
        first = self._first = self._first or mean
        if not (0.75 * first.ess <= ess <= first.ess / 0.75 and 0.6 * first.seconds <= seconds <= first.seconds / 0.6):
            self._existing, self._from, self._observed, self._first = {}, None, last, mean

    def _choose(self, worth: float) -> None:
        if self._from is not None and worth < self._existing[self._from].worth:
            failed, back = self._existing[self.now], self._from
            failed.timeout = min(2 * failed.timeout, 8 * self._again)
            self._go(back)
            return
        self._from = None
        hopes = {bound: self._hope(bound) for bound in (self.now + 1, self.now - 1) if 0 <= bound <= self.limit}
        best = max(hopes, key=lambda bound: hopes[bound], default=self.now)
        if hopes and hopes[best] > (1 + self._margin) * worth:
            trial = self.now
            self._go(best)
            self._from = trial

    def _hope(self, bound: int) -> float:
        """What a neighbour is worth at best, or was found to be worth lately."""
        existing = self._existing.get(bound)
        if existing is not None and self._step - existing.at < existing.timeout:
            return existing.worth
        ess, lag = fmean(item.ess for item in self._observed), fmean(item.lag for item in self._observed)
        seconds, waited = fmean(item.seconds for item in self._observed), fmean(item.waited for item in self._observed)
        if bound < self.now:  # as if a version less were behind, and nothing slower
            return float(ess ** (max(0.0, lag - 1) / lag if lag else 1.0) / seconds)
        older = math.log(max(ess, 1e-6)) / max(lag, 1.0) / 2  # half a version more, and no wait
        return ess * math.exp(older) / max(seconds - waited, 1e-3 * seconds)

    def _go(self, bound: int) -> None:
        self._skip, self.now, self._from = max(self.now, bound) + 1, bound, None
        self._observed, self._first = [], None
