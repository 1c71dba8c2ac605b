"""How long a scoring may take: the anchor rule, and what follows a time-out. Pure.

The anchor is the longest time that a scoring of this prompt has taken that gave the full reward. One that takes much
longer will hardly give it, so its limit is min(max(2 s, 1.5 x anchor), 30 s) (RollPacker, arXiv 2509.21009).
Guarantee: no time-out is believed at the first limit: who was cut off is tried again at four times the limit, so that a
machine that is busy for a while turns no right answer into a wrong one.
"""

from __future__ import annotations

SHORTEST = 2.0  # seconds
LONGEST = 30.0
FACTOR = 1.5
AGAIN = 4.0  # times the first limit
TRIES = 3


def limit(anchor: float | None, longest: float = LONGEST) -> float:
    """Seconds of a first try. Example: ``limit(None) == 30.0 and limit(0.1) == 2.0 and limit(4.0) == 6.0``."""
    return longest if anchor is None else min(max(SHORTEST, FACTOR * anchor), longest)


def limits(anchor: float | None, longest: float = LONGEST) -> list[float]:
    """Seconds of each try at a scoring. Example: ``limits(4.0) == [6.0, 24.0, 30.0]``."""
    first = limit(anchor, longest)
    return [first, min(AGAIN * first, longest), longest]


def believed(attempt: int) -> bool:
    """Whether a command of the policy's that was cut off at this try, counted from 0, counts as too slow."""
    return attempt > 0


def raised(anchor: float | None, took: float) -> float:
    """The anchor after a scoring that gave the full reward."""
    return took if anchor is None else max(anchor, took)
