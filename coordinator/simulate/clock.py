"""A virtual clock: what is to happen, in the order of its times.

Guarantee: things of the same time happen in the order in which they were requested, so a seed gives one course.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """``clock.after(2.0, begin); clock.run()``. Times are seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._todo: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Let `what` happen so much later."""
        if seconds < 0:
            raise ValueError(f"{seconds} seconds from now is in the past")
        heapq.heappush(self._todo, (self.now + seconds, next(self._count), what))

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Run until `until` is true after something happened, or nothing is left to happen."""
        while self._todo and not until():
            self.now, _, what = heapq.heappop(self._todo)
            what()
