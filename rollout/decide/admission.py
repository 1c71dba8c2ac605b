"""Which new groups may start, and which waiting trajectories. Pure.

Guarantee: with `batch` groups per step, a group that starts as number n of those not yet trained on is consumed at step
``n // batch`` from the next at the earliest; it may start only if that is at most `bound` steps away. So nearly nothing
becomes over-stale: what is left are stragglers (rollout.decide.staleness).
"""

from __future__ import annotations

from rollout.decide import branching
from rollout.decide.view import LeasePrompts, RolloutView, SchedulingRules, StartTrajectory


def may_start(*, outstanding: int, batch: int, bound: int, training: bool) -> bool:
    """May one more group start, with `outstanding` groups running or buffered and not handed out?

    `training`: the trainer works on a batch, so that the next one is consumed one version later.
    Example: batch 8, bound 1: 16 groups may be outstanding while the trainer waits, 8 more while it works.
    """
    return int(training) + outstanding // batch <= bound


def admit(view: RolloutView, *, batch: int, bound: int) -> list[LeasePrompts]:
    """As many groups as the bound allows and as there are prompts for."""
    outstanding = len(view.running) + len(view.buffered)
    count = 0
    while may_start(outstanding=outstanding + count, batch=batch, bound=bound, training=view.training):
        count += 1
    if not view.more:
        count = min(count, view.queued)
    return [LeasePrompts(count)] if count > 0 else []


def fill(view: RolloutView, rules: SchedulingRules, *, slots: int) -> list[StartTrajectory]:
    """Waiting trajectories for the free slots, those of the oldest groups first."""
    waiting = [
        start
        for group in sorted(view.running, key=lambda group: group.number)
        for start in branching.starts(group, rules)
    ]
    return waiting[: max(0, slots)]
