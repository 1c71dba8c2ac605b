"""Which trajectories share a beginning, and which a micro-batch on which rank: pure functions of their tokens.

Guarantee: every trajectory is in exactly one micro-batch; no micro-batch holds more tokens than the budget, unless one
trajectory alone does; every rank has as many micro-batches as the others, and those of one round cost about the same,
so that no rank waits long for another.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

Round = list[list[int]]  # for each rank the indices of its micro-batch, possibly none
MIN_PREFIX = 16  # tokens: a shorter beginning costs more to set apart than to read again


@dataclass(frozen=True, slots=True)
class Family:
    """Trajectories that begin with the same `prefix` tokens, which the model reads once. Example: Family((0, 2), 40)"""

    members: tuple[int, ...]
    prefix: int = 0

    def size(self, lengths: Sequence[int]) -> int:
        """Tokens that the model reads."""
        return self.prefix + sum(lengths[member] - self.prefix for member in self.members)


def families(tokens: Sequence[Sequence[int]], groups: Sequence[str], *, budget: int, minimum: int = 1) -> list[Family]:
    """Every trajectory once, those of one group together where they begin alike.

    No family has more than `budget` tokens, unless one trajectory alone has. `minimum`: so many families, as far as
    there are trajectories: ranks want something each.
    """
    lengths = [len(item) for item in tokens]
    by_group: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        by_group.setdefault(group or f"\0{index}", []).append(index)
    result: list[Family] = []
    for members in by_group.values():
        prefix = common([tokens[member] for member in members])
        prefix = min(prefix, min(lengths[member] for member in members) - 1)
        if len(members) == 1 or prefix < MIN_PREFIX:
            result += [Family((member,)) for member in members]
        else:
            result += _within(members, prefix, lengths, budget)
    return _split(result, lengths, minimum)


def common(tokens: Sequence[Sequence[int]]) -> int:
    """How many tokens all of these begin with alike. Example: ``common([[5, 6, 7], [5, 6, 8]]) == 2``."""
    lists = [list(item) for item in tokens]
    first, last = min(lists), max(lists)  # what these two begin with, those between them do as well
    return next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))


def _within(members: Sequence[int], prefix: int, lengths: Sequence[int], budget: int) -> list[Family]:
    result: list[Family] = []
    part: tuple[int, ...] = ()
    for member in members:
        if part and Family((*part, member), prefix).size(lengths) > budget:
            result.append(_family(part, prefix))
            part = ()
        part = (*part, member)
    return [*result, _family(part, prefix)]


def _family(members: tuple[int, ...], prefix: int) -> Family:
    return Family(members, prefix if len(members) > 1 else 0)


def _split(made: list[Family], lengths: Sequence[int], count: int) -> list[Family]:
    """The largest in halves, until there are so many."""
    heap = [(-one.size(lengths), one.members, one) for one in made if len(one.members) > 1]
    result = [one for one in made if len(one.members) == 1]
    heapq.heapify(heap)
    while heap and len(heap) + len(result) < count:
        one = heapq.heappop(heap)[2]
        middle = len(one.members) // 2
        for half in (_family(one.members[:middle], one.prefix), _family(one.members[middle:], one.prefix)):
            if len(half.members) > 1:
                heapq.heappush(heap, (-half.size(lengths), half.members, half))
            else:
                result.append(half)
    return sorted([*result, *(entry[2] for entry in heap)], key=lambda one: one.members)


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
