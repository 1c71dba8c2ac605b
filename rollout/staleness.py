"""How old a sample may be, and what may start so that it will not be older.

Owns: the two decisions. Does not own: counting what they led to (controller). Pure.
Guarantee: a batch handed out at trainer version V holds no trajectory whose oldest policy version is below V - bound.

Two means, in this order. *Admission*: with `batch` groups per step, the group that starts as number n of those not
yet trained on is consumed at step ``n // batch`` from the next at the earliest; it may start only if that is at most
`bound` steps away. That alone makes over-staleness rare: only stragglers, overtaken by later groups, are left.
*Abort*: a group whose oldest version falls below the bound when the trainer moves on is ended at once and its prompt
queued again (so slow prompts are not filtered out: they run anew with newer weights, and the count is published).
"""

from __future__ import annotations


def may_start(*, outstanding: int, batch: int, bound: int, training: bool) -> bool:
    """May one more group start, with `outstanding` groups running or buffered and not handed out?

    `training`: the trainer works on a batch, so that the next one is consumed one version later.
    Example: batch 8, bound 1: 16 groups may be outstanding while the trainer waits, 8 more while it works.
    """
    return int(training) + outstanding // batch <= bound


def staleness(trainer: int, oldest: int | None) -> int:
    """Trainer version minus the oldest policy version in a sample; 0 for a sample without sampled tokens."""
    return 0 if oldest is None else trainer - oldest


def over_stale(*, trainer: int, oldest: int | None, bound: int) -> bool:
    return staleness(trainer, oldest) > bound
