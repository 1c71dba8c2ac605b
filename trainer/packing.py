"""Which sequences share a micro-batch: a pure function of their lengths.

Owns: the plan. Does not own: tensors. Guarantee: every sequence is in exactly one micro-batch; no micro-batch
is larger than the budget once padded to its longest sequence, unless one sequence alone is.
"""

from __future__ import annotations

from collections.abc import Sequence


def plan(lengths: Sequence[int], *, budget: int) -> list[list[int]]:
    """Indices per micro-batch, longest first, so that neighbours in length are padded together.

    Example: ``plan([3, 9, 4], budget=10) == [[1], [2, 0]]``.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        longest = lengths[batches[-1][0]] if batches else 0
        if batches and longest * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
