"""Where an episode begins that does not begin at the beginning: a state in which another trajectory was.

Guarantee (I8): the tokens before the state are the other trajectory's own, with their log-probabilities and versions.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

from rollout.experts import within
from rollout.messages import Ancestor, Trajectory
from rollout.store.retained import Visit


@dataclass(frozen=True)
class Origin:
    """Example: ``Origin(store.sample("p000012", 4), book.visit("p000012", 4, 0, turn=7))``"""

    trajectory: Trajectory
    visit: Visit


def begin(trajectory: Trajectory, origin: Origin) -> None:
    """Make a fresh trajectory one that has come as far as the state of `origin`."""
    parent, visit = origin.trajectory, origin.visit
    at = visit.at
    experts = within(parent.experts, 0, at)
    trajectory.append(0, parent.tokens[:at], parent.mask[:at], parent.logprobs[:at], parent.versions[:at], experts)
    trajectory.turns = [copy.copy(turn) for turn in parent.turns[: visit.turn]]
    for turn, scored in zip(trajectory.turns, parent.score.turns if parent.score else (), strict=False):
        turn.reward -= scored  # what its own end says of these turns comes when it is scored itself
    trajectory.breaks = [item for item in parent.breaks if item < at]
    trajectory.reward, trajectory.opening, trajectory.base = visit.reward, parent.opening, parent.base
    trajectory.lineage = lineage(parent, visit.turn)


def lineage(parent: Trajectory, turn: int) -> list[Ancestor]:
    """Whose turns those before `turn` are, when a branch of `parent` begins there."""
    result: list[Ancestor] = []
    for older in parent.lineage:
        if older.turn >= turn:
            return [*result, Ancestor(older.member, older.start, turn)]
        result.append(older)
    return [*result, Ancestor(parent.index, parent.start, turn)]
