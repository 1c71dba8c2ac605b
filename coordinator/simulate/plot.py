"""What a scenario has to show in addition to its figures: lines, or stretches of time in rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple

Line = tuple[Sequence[float], Sequence[float]]


class PlotSpan(NamedTuple):
    row: str
    begin: float
    end: float
    kind: str  # gives its colour


@dataclass(frozen=True, kw_only=True)
class Plot:
    """`title` says what is to be seen."""

    title: str
    x: str
    y: str
    lines: Mapping[str, Line] = field(default_factory=dict)
    spans: Sequence[PlotSpan] = ()
    drawn_as: Literal["line", "steps", "points"] = "line"


def counted(changes: Iterable[tuple[float, int]], until: float = float("inf")) -> Line:
    """How many there are over time, of when they became more or fewer.

    >>> counted([(0.0, 1), (0.0, 1), (2.0, -1)])
    ([0.0, 2.0], [2, 1])
    """
    existing = [(at, change) for at, change in changes if at <= until]
    totals = dict(zip((at for at, _ in existing), accumulate(change for _, change in existing), strict=True))
    return list(totals), list(totals.values())


def per_second(events: Iterable[tuple[float, float]], width: float, until: float) -> Line:
    """Of amounts at times: what came a second, in windows of `width` seconds."""
    sums = [0.0] * int(until / width)
    for at, amount in events:
        if at < width * len(sums):
            sums[int(at / width)] += amount
    return [width * (number + 0.5) for number in range(len(sums))], [item / width for item in sums]
