"""Tail batching: prompts with long answers are put off, and played together in rounds of their own. Pure.

Guarantee: each prompt is in exactly one batch; a prompt is put off at most once, for its second round waits for all.

A round ends when its slowest trajectory does, while most engines idle. So a short round starts more than a batch needs,
`tail` times the groups and `tail` times the members of each, takes the groups that are whole first, and puts off the
others. When a batch of those has come together, a long round plays exactly them, and waits (RollPacker,
arXiv:2509.21009, with `tail` = 1.25).

With `tail_resumes`, which is ours, the long round does not restart: finished members stay, the others continue from
their last checkpoints, and the first `size` of each group are used, as in a short round. Their first tokens are older.

::

    short round   10 groups x 10 ──▶ first 8 whole, of each the first 8 ──▶ batch
                              └────▶ 2 put off ──▶ deferred: 2, 4, 6, 8 ──▶ long round: 8 groups x 8 ──▶ batch
"""

from __future__ import annotations

import math

from rollout.decide.view import Defer, LeasePrompts, RolloutView, SchedulingRules


def members(rules: SchedulingRules, *, deferred: bool) -> int:
    """Trajectories that a group starts with."""
    if not rules.tail or (deferred and not rules.tail_resumes):
        return rules.size + (0 if rules.tail else rules.extra)
    return math.ceil(round(rules.tail * rules.size, 9))


def put_off(view: RolloutView, rules: SchedulingRules) -> list[Defer]:
    """What is still on its way when a batch is whole."""
    if len(view.buffered) < rules.groups:
        return []
    return [Defer(group.prompt) for group in view.running if not group.deferred]


def next_round(view: RolloutView, rules: SchedulingRules, *, bound: int) -> list[LeasePrompts]:
    """The groups of the next round, when none is on its way and a batch is wanted within the staleness bound.

    The last prompts of all are played in rounds of what there is.
    """
    missing = rules.groups - len(view.buffered)
    if view.running or missing <= 0 or (view.training and bound < 1):
        return []
    fresh = view.more or view.queued > 0
    if (view.deferred >= rules.groups and not view.buffered) or (view.deferred and not fresh):
        return [LeasePrompts(min(missing, view.deferred), deferred=True)]
    if not fresh:
        return []
    count = math.ceil(round(rules.tail * missing, 9))
    return [LeasePrompts(count if view.more else min(count, view.queued))]
