"""Which trajectories share a micro-batch, and on which rank: a pure function of their lengths.

Guarantee: every trajectory is in exactly one micro-batch; no micro-batch holds more tokens than the budget, unless one
trajectory alone does; every rank has as many micro-batches as the others, and those of one round cost about the same,
so that no rank waits long for another.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

Round = list[list[int]]  # for each rank the indices of its micro-batch, possibly none


def plan(lengths: Sequence[int], *, budget: int, ranks: int = 1, width: int = 1024, multiple: int = 1) -> list[Round]:
    """Rounds of one micro-batch per rank, the most expensive round first.

    Longest first, each to the micro-batch that costs least so far and has room. `width` of the model weighs what
    attention costs in addition to the rest. Their number is a multiple of `multiple`: any number of ranks that divides
    it has the same micro-batches. Example: ``plan([3, 9, 4], budget=10) == [[[1]], [[2, 0]]]``.
    """
    if not lengths:
        return []
    unit = math.lcm(ranks, multiple)
    count = -(-max(1, -(-sum(lengths) // budget)) // unit) * unit
    while (bins := _fill(lengths, budget, count, width)) is None:
        count += unit
    bins.sort(key=lambda indices: (-sum(cost(lengths[i], width) for i in indices), indices))
    return [bins[at : at + ranks] for at in range(0, len(bins), ranks) if any(bins[at : at + ranks])]


def cost(length: int, width: int) -> float:
    """Of a trajectory, in tokens: linear layers plus attention, whose share grows with length over 6 widths."""
    return length * (1 + length / (6 * width))


def _fill(lengths: Sequence[int], budget: int, count: int, width: int) -> list[list[int]] | None:
    """`count` micro-batches, or None where that is too few."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0.0, at, 0) for at in range(count)]  # cost so far, number, tokens so far
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        full = []
        while heap:
            spent, at, tokens = heapq.heappop(heap)
            if not tokens or tokens + lengths[index] <= budget:
                break
            full.append((spent, at, tokens))
        else:
            return None
        bins[at].append(index)
        for entry in (*full, (spent + cost(lengths[index], width), at, tokens + lengths[index])):
            heapq.heappush(heap, entry)
    return bins
