"""Which members of a group begin as branches of others, and where. Pure.

The first `roots` members begin at the beginning; each of the others belongs to the tree of one of them, and begins in a
state that a member of this tree was in:

- `turns`: at turns that are multiples of `every`, spread evenly over the first trajectory of its tree.
- `entropy`: before those turns of the first trajectory whose tokens had the least probable draws. The mean of -log p
  of drawn tokens estimates the policy's entropy there without bias.
- `spread`: in the state of the tree where one more continuation lowers the variance of its value most; one branch of a
  tree after another, because each is more informative.

Guarantee: a member that was lost once it had begun begins at the beginning, and so does one for which no state is left:
a group never waits for a state that is gone, and stays whole. The choice looks at no reward but with `spread`; there
the values stay those of independent continuations (see tree).
"""

from __future__ import annotations

from statistics import pvariance

from rollout.decide.tree import Forest, Leaf
from rollout.decide.view import At, Branching, GroupView, SchedulingRules, StartTrajectory, TrajectoryView

PRIOR = 0.25  # variance that is believed before anything was seen, in squares of the group's range of rewards


def starts(group: GroupView, rules: SchedulingRules) -> list[StartTrajectory]:
    """The waiting members that may start now."""
    waiting = [member for member in group.members if member.state == "waiting"]
    plan = rules.branching
    if plan is None:
        return [StartTrajectory(group.prompt, member.index) for member in waiting]
    result: list[StartTrajectory] = []
    for member in waiting:
        if member.index < plan.roots or member.starts:
            result.append(StartTrajectory(group.prompt, member.index))
            continue
        trunk = group.members[(member.index - plan.roots) % plan.roots]
        if trunk.played is None:
            continue  # unknown yet
        if plan.by == "spread":
            result += _spread(group, member, trunk, result)
        else:
            result.append(StartTrajectory(group.prompt, member.index, _along(plan, rules.size, member, trunk)))
    return result


def _along(plan: Branching, size: int, member: TrajectoryView, trunk: TrajectoryView) -> At | None:
    """A state of the first trajectory, by the member's number in its tree."""
    played = trunk.played
    assert played is not None
    number, branches = (member.index - plan.roots) // plan.roots, -(-(size - plan.roots) // plan.roots)
    states = [state for state in played.states if state.turn > 0]
    if plan.by == "turns":
        chosen = [state for state in states if state.turn % plan.every == 0]
        at = (2 * number + 1) * len(chosen) // (2 * branches) if chosen else 0
    else:
        chosen = sorted(states, key=lambda state: (-state.surprise, state.turn))
        at = number % len(chosen) if chosen else 0
    return At(trunk.index, played.start, chosen[min(at, len(chosen) - 1)].turn) if chosen else None


def _spread(
    group: GroupView, member: TrajectoryView, trunk: TrajectoryView, starting: list[StartTrajectory]
) -> list[StartTrajectory]:
    """The state about whose value another continuation says most, if no branch of this tree is on its way."""
    assert trunk.played is not None
    root = (trunk.index, trunk.played.start)
    plan_of = {start.member for start in starting if start.at is not None and _same_tree(start.at, root, group)}
    under_way = [
        item for item in group.members if item.state in ("running", "scoring") and _same_tree(item.at, root, group)
    ]
    if plan_of or under_way:
        return []
    ended = [item for item in group.members if item.played is not None]
    forest = Forest([_leaf(item) for item in ended])
    rewards = [item.played.reward for item in ended if item.played is not None]
    believed = PRIOR * max(max(rewards) - min(rewards), 1.0) ** 2
    best: tuple[tuple[float, int, int, int], At] | None = None
    for item in ended:
        played = item.played
        assert played is not None
        name = (item.index, played.start)
        if _root_of(item) != root:
            continue
        began = played.lineage[-1].turn if played.lineage else 0
        edges = [began, *forest.branched(name), played.turns]
        for state in played.states:
            if state.turn <= began:
                continue
            observed = forest.continuations(name, state.turn)
            gain = (pvariance(observed) * len(observed) + believed) / (len(observed) ** 2 * (len(observed) + 1))
            apart = min(abs(state.turn - edge) for edge in edges)
            key = (gain, apart, -item.index, -state.turn)
            if best is None or key > best[0]:
                best = key, At(item.index, played.start, state.turn)
    return [StartTrajectory(group.prompt, member.index, None if best is None else best[1])]


def _leaf(member: TrajectoryView) -> Leaf:
    played = member.played
    assert played is not None
    return Leaf((member.index, played.start), played.turns, played.reward, played.lineage)


def _root_of(member: TrajectoryView) -> tuple[int, int]:
    return _leaf(member).owner(0)


def _same_tree(at: At | None, root: tuple[int, int], group: GroupView) -> bool:
    """Does a branch from there belong to the tree of this first trajectory?"""
    if at is None:
        return False
    parent = group.members[at.member]
    return parent.played is not None and parent.played.start == at.start and _root_of(parent) == root
