"""How far this rollout may run ahead of its trainer, where that is chosen while it runs.

Kept in memory: a rollout that is started again measures again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean

from rollout.config import RolloutConfig
from rollout.decide.bound import Bound, TrainerStepRecord


class Ahead:
    """``ahead.handed(lags, since)`` with each batch, ``ahead.trained(ess)`` when its step is saved"""

    def __init__(self, config: RolloutConfig):
        self._bound = Bound(config.staleness) if config.adaptive else None
        self._before: float | None = None  # when the batch before was handed out
        self._open: tuple[float, float, float] | None = None  # lag, seconds, waited of the batch that is trained on

    @property
    def bound(self) -> int | None:
        """None: as the rules say."""
        return None if self._bound is None else self._bound.now

    def handed(self, lags: Sequence[int], requested: float | None) -> None:
        """A batch was handed out now. `requested`: since when the trainer waited for it."""
        now, before = time.time(), self._before
        self._before, self._open = now, None
        if before is not None and now > before and lags:
            self._open = fmean(lags), now - before, min(now - before, now - (requested or now))

    def trained(self, ess: float | None) -> None:
        """Its step is saved. `ess`: its effective sample size, as a share; None: the trainer does not know it."""
        if self._bound is not None and self._open is not None and ess is not None:
            lag, seconds, waited = self._open
            self._bound.see(TrainerStepRecord(lag=lag, ess=ess, seconds=seconds, waited=waited))
        self._open = None
