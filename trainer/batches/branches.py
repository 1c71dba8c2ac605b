"""What a group of which members share turns says to each token. Pure.

Guarantee: a turn that several trajectories share bears gradient in one of them; its advantage is that of its segment
times their number.
"""

from __future__ import annotations

from rollout.decide.tree import Forest, Leaf, counted
from rollout.messages import Group, Trajectory


def branched(group: Group) -> bool:
    return any(trajectory.lineage for trajectory in group.trajectories)


def segment_advantages(group: Group) -> list[tuple[list[int], list[float]]]:
    """Of each trajectory: which tokens it counts (1), and the advantage of each token; 0 where it counts none."""
    leaves = [Leaf((item.index, item.start), len(item.turns), item.reward, item.lineage) for item in group.trajectories]
    forest, own = Forest(leaves), counted(leaves)
    result = []
    for leaf, trajectory in zip(leaves, group.trajectories, strict=True):
        of_turn = [0.0] * leaf.turns
        for segment in forest.segments(leaf.name):
            for turn in range(segment.first, segment.last):
                of_turn[turn] = segment.advantage * forest.sharing(leaf, turn)
        result.append(_per_token(trajectory, of_turn, own[leaf.name]))
    return result


def _per_token(trajectory: Trajectory, of_turn: list[float], first: int) -> tuple[list[int], list[float]]:
    turns = iter([number for number, turn in enumerate(trajectory.turns) for _ in range(turn.tokens)])
    bearing, advantages = [], []
    for bit in trajectory.mask:
        turn = next(turns) if bit else -1
        bearing.append(int(turn >= first))
        advantages.append(of_turn[turn] if turn >= first else 0.0)
    return bearing, advantages
