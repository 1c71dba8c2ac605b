"""Over how many GPUs an engine is spread, or how many sequences share its cache: chosen by preemptions. Pure.

Guarantee: a power of two from 1 to `limit`; it changes by one factor of two at a time.

When the cache of an engine is full, its newest answers are put back and read again later: preemptions. An engine on
twice the GPUs has more than twice the cache, for its weights are there once; but there are half as many engines
(RollPacker, arXiv:2509.21009). An engine that has one device has the other half of that choice: half the sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

GROWN = 1.05  # times the preemptions of the step before
CALM = 4  # steps


def degree(now: int, preemptions: Sequence[int], *, limit: int) -> int:
    """Of the next step. `preemptions`: of each step since it was `now`, oldest first, after the last one before that.

    >>> degree(2, [3, 4], most=8)
    4
    """
    if len(preemptions) > 1 and preemptions[-1] > GROWN * preemptions[-2]:
        return min(2 * now, limit)
    here = preemptions[1:]
    if len(here) >= CALM and not any(here[-CALM:]):
        return max(now // 2, 1)
    return now


class Planner:
    """``planner.ended(preemptions)`` after each step; `degree` is that of the next."""

    def __init__(self, limit: int):
        self.degree, self.limit = 1, limit
        self._observed = [0]

    def ended(self, preemptions: int) -> None:
        self._observed.append(preemptions)
        chosen = degree(self.degree, self._observed, limit=self.limit)
        if chosen != self.degree:
            self.degree, self._observed = chosen, self._observed[-1:]
