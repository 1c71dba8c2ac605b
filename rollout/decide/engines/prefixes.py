"""Which server of a pool has seen which beginnings of token lists. Pure.

Guarantee: what `deepest` answers was remembered for that server and not forgotten since; memory is bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

BLOCK = 32  # tokens


class Prefixes:
    """``observed.remember("a", chain(ids))``, then ``observed.deepest(chain(ids))`` is ``(["a"], 64)``."""

    def __init__(self, *, limit: int = 100_000):
        """`limit` blocks of each server; the least recently used go first."""
        self._limit = limit
        self._blocks: dict[str, OrderedDict[int, None]] = {}

    def remember(self, server: str, blocks: Sequence[int]) -> None:
        existing = self._blocks.setdefault(server, OrderedDict())
        for block in blocks:
            existing[block] = None
            existing.move_to_end(block)
        while len(existing) > self._limit:
            existing.popitem(last=False)

    def forget(self, server: str) -> None:
        """Its cache is empty: it was started, or took other weights."""
        self._blocks.pop(server, None)

    def depth(self, server: str, blocks: Sequence[int]) -> int:
        """Tokens of the longest remembered beginning."""
        return BLOCK * _depth(self._blocks.get(server, {}), blocks)

    def deepest(self, blocks: Sequence[int]) -> tuple[list[str], int]:
        """The servers that hold most of these, and how many tokens that are."""
        result = {server: _depth(existing, blocks) for server, existing in self._blocks.items()}
        best = max(result.values(), default=0)
        return (sorted(server for server, depth in result.items() if depth == best) if best else []), BLOCK * best


def chain(ids: Sequence[int], begun: Sequence[int] = ()) -> list[int]:
    """One number for each whole block, that depends on all tokens up to its end. `begun`: of
    the first of these tokens."""
    result, last = list(begun), begun[-1] if begun else 0
    for start in range(len(result) * BLOCK, len(ids) - BLOCK + 1, BLOCK):
        last = hash((last, *ids[start : start + BLOCK]))
        result.append(last)
    return result


def _depth(existing: OrderedDict[int, None] | dict[int, None], blocks: Sequence[int]) -> int:
    """How many of the first blocks are known, by bisection: a known block implies those before it."""
    low, high = 0, len(blocks)
    while low < high:
        middle = (low + high + 1) // 2
        if blocks[middle - 1] in existing:
            low = middle
        else:
            high = middle - 1
    return low
