"""Which parts of the platform refuse, as the trajectories report it."""

from __future__ import annotations

import asyncio
import time

from rollout.decide import breaker
from rollout.decide.blame import TrajectoryFailure, part
from rollout.decide.view import PartView, WaitReason


class Refusals:
    """``refusals.note(failure)`` when a part failed a trajectory, ``refusals.over("host")`` when it served one."""

    def __init__(self, changed: asyncio.Event):
        self._parts: dict[str, PartView] = {}
        self._changed = changed

    @property
    def views(self) -> list[PartView]:
        return list(self._parts.values())

    @property
    def waits(self) -> list[WaitReason]:
        """Who waits for which part now."""
        return breaker.waits(self.views, time.time())

    def note(self, failure: TrajectoryFailure) -> PartView:
        name = part(failure)
        existing = self._parts[name] = breaker.note(self._parts.get(name), name, str(failure), time.time())
        return existing

    def over(self, *parts: str) -> None:
        if [name for name in parts if self._parts.pop(name, None) is not None]:
            self._changed.set()
