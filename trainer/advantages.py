"""How much better than its siblings each trajectory was: a pure function of rewards.

Owns: the advantage of every trajectory. Does not own: the loss. No torch, no clock.
Guarantee: within a group the advantages sum to zero; a group whose rewards are all equal has advantage 0
throughout and is named degenerate, because it says nothing about which of its trajectories was better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Advantages:
    """`values[i][j]` is the advantage of trajectory j of group i; `degenerate[i]` says that group i is silent."""

    values: list[list[float]]
    degenerate: list[bool]


def advantages(groups: Sequence[Sequence[float]], *, floor: float = 1e-6) -> Advantages:
    """Group mean, batch standard deviation (over the groups that say something).

    Example: ``advantages([[1, 0], [1, 1]]).values == [[1.0, -1.0], [0.0, 0.0]]``.
    """
    centred = [[reward - sum(group) / len(group) for reward in group] for group in groups]
    degenerate = [all(abs(value) < floor for value in group) for group in centred]
    speaking = [value for group, silent in zip(centred, degenerate, strict=True) if not silent for value in group]
    if not speaking:
        return Advantages([[0.0] * len(group) for group in groups], degenerate)
    deviation = math.sqrt(sum(value * value for value in speaking) / len(speaking))
    scale = 1.0 / max(deviation, floor)
    values = [
        [0.0] * len(group) if silent else [value * scale for value in group]
        for group, silent in zip(centred, degenerate, strict=True)
    ]
    return Advantages(values, degenerate)
