"""Groups of which more trajectories are started than are needed. Pure.

Guarantee: a group is used only when it is whole: `size` trajectories that were scored. What the platform lost is
played again, so a group never shrinks, and its mean is over as many rewards as it was meant to be: the baseline stays
unbiased. With `extra` > 0 the slowest are ended once `size` have finished; that prefers short trajectories, and is off
by default.
"""

from __future__ import annotations

from rollout.decide.view import Abort, FinishGroup, GiveUp, GroupView, SchedulingRules


def finalize(group: GroupView, rules: SchedulingRules) -> list[Abort | FinishGroup | GiveUp]:
    """Whether a group has ended, and how."""
    if group.failures >= rules.attempts:
        return [GiveUp(group.prompt, group.reason or "its environment failed")]
    ended = sum(member.state == "ended" for member in group.members)
    if ended >= rules.size:
        rest = [member for member in group.members if member.state == "running"]
        return [
            *(Abort(group.prompt, item.index, "redundant", again=False) for item in rest),
            FinishGroup(group.prompt),
        ]
    tried = max((member.starts for member in group.members if member.state == "waiting"), default=0)
    if tried >= rules.starts:
        return [GiveUp(group.prompt, f"{tried} starts of one trajectory: {group.reason or 'over-stale'}")]
    return []
