"""How much a run asks of its machine: sandboxes at once, its own priority, the least time of an answer. Pure.

Guarantee: what a person chose is taken as it is; the rest follows from the cores that are free, and `reason` says how.
"""

from __future__ import annotations

from dataclasses import dataclass

SANDBOXES_PER_CORE = 8  # at PACE: a turn costs a core some 100 ms (command, checkpoint, answer)
MIN_SANDBOXES, MAX_SANDBOXES = 4, 64  # sandboxes
PACE = 0.8  # seconds
SHARE = 0.75  # of a core that others keep busy: turns are short bursts, which the kernel prefers to what runs for long
NICE, NICE_CROWDED = 5, 10  # both give way to sandboxes and their checkpoints


@dataclass(frozen=True, slots=True)
class Sizing:
    """What a run does at once. ``pace`` in seconds."""

    concurrency: int
    pace: float
    nice: int
    reason: str


def choose(cores: int, busy: float, *, concurrency: int | None = None, pace: float | None = None) -> Sizing:
    """For a machine of `cores`, of which others keep `busy` occupied.

    >>> choose(2, 0.0).concurrency, choose(2, 2.0).concurrency, choose(2, 2.0, concurrency=3).concurrency
    (16, 12, 3)
    """
    busy = min(max(busy, 0.0), float(cores))
    free = cores - busy + SHARE * busy
    fitting = min(MAX_SANDBOXES, max(MIN_SANDBOXES, int(SANDBOXES_PER_CORE * free) // 4 * 4))
    return Sizing(
        concurrency=concurrency if concurrency is not None else fitting,
        pace=pace if pace is not None else PACE,
        nice=NICE if busy < cores / 2 else NICE_CROWDED,
        reason=f"{cores} cores, others keep {busy:.1f} of them busy",
    )
