"""A group of trajectories as trees: which share turns, what each state was worth, what each segment has earned. Pure.

Guarantee: without a branch the advantage of a trajectory is its reward less the mean of the others of its group; each
turn that several trajectories share is named once, with their number; where the choice of states looks at nothing that
came after them, the sum over turns of number, advantage and gradient of log-probability has the direction of the
policy's gradient.

A branch begins in a state in which another member was: before turn u of member x. With a(x, u) for what x's own
continuation from there was worth:

- V(x, u) = mean of a(x, u) and a(b, u) of every branch b that begins there: continuations of one state are independent
  draws of the policy, however many leaves each of them has by itself (Monte-Carlo values of states by continuations:
  VinePPO, arXiv 2410.01679, section 4; branches at agents' turns: Tree-GRPO, arXiv 2509.21240).
- a(x, u) = V(x, w) with w the next turn of x at which a branch begins, else the reward of x.

A segment is what one member did between two such states s_k and s_(k+1), on a way s_0 (the beginning), ..., s_k. Its
advantage, and that of each of its tokens, is V(s_(k+1)) - B_k (values of segments: SPO, arXiv 2505.23564, section 4;
there segments are cut at tokens, here at turns). B_k is what is known of s_k without it:

- B_0 = mean of the continuations of s_0 that the way does not take.
- B_i = (sum of the n_i continuations of s_i that the way does not take + B_(i-1)) / (n_i + 1).

No continuation that follows from the segment is in it, so that no action changes its own baseline. Two continuations
of a state say little about it: hence what is known of the state before counts as one more.

A turn that k trajectories share counts k times: each of them is a draw of the policy. Counted once, the first turns of
a tree would be learned from less than the policy meets them, and the last ones more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Protocol

Name = tuple[int, int]  # of a trajectory: member of its group, attempt


class TreeStep(Protocol):
    """Turns below `turn` that no older one names are those of this trajectory."""

    @property
    def member(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def turn(self) -> int: ...


@dataclass(frozen=True)
class Leaf:
    """One trajectory. Example: ``Leaf((3, 0), 9, 1.0, [Ancestor(0, 0, 4)])`` has turns 0 to 3 of member 0."""

    name: Name
    turns: int
    reward: float
    lineage: Sequence[TreeStep] = ()

    def owner(self, turn: int) -> Name:
        """Whose turn it is."""
        return next(((item.member, item.start) for item in self.lineage if turn < item.turn), self.name)


@dataclass(frozen=True)
class TurnRange:
    """Turns `first` up to, not with, `last` of a trajectory."""

    first: int
    last: int
    before: float  # what is known, without it, of the state that it begins in
    after: float  # value of the state that it ends in

    @property
    def advantage(self) -> float:
        return self.after - self.before


class Forest:
    """``Forest(leaves).segments((0, 0))``"""

    def __init__(self, leaves: Sequence[Leaf]):
        self.leaves = {leaf.name: leaf for leaf in leaves}
        self._branches: dict[Name, dict[int, list[Name]]] = {}
        for leaf in leaves:
            for place in self._places(leaf):
                self._note(*place)
        self._values: dict[tuple[Name, int], float] = {}

    def _places(self, leaf: Leaf) -> list[tuple[Name, int, Name]]:
        """(trajectory, turn, branch): where each of its ancestors was left, and by whom."""
        names = [*((item.member, item.start) for item in leaf.lineage), leaf.name]
        return [(names[n], item.turn, names[n + 1]) for n, item in enumerate(leaf.lineage)]

    def _note(self, name: Name, turn: int, branch: Name) -> None:
        there = self._branches.setdefault(name, {}).setdefault(turn, [])
        if branch not in there:
            there.append(branch)

    @property
    def _roots(self) -> list[Name]:
        """Those that begin at the beginning; also those of which only branches are here."""
        names = {leaf.owner(0): None for leaf in self.leaves.values()}
        return list(names)

    def branched(self, name: Name) -> list[int]:
        """The turns of a trajectory at which a branch begins."""
        return sorted(self._branches.get(name, {}))

    def continuations(self, name: Name, turn: int, *, without: Name | None = None) -> list[float]:
        """What each continuation of the state before this turn was worth; all begin at turn 0, the roots."""
        names = [name, *self._branches.get(name, {}).get(turn, [])] if turn > 0 else self._roots
        return [value for item in names if item != without and (value := self._after(item, turn)) is not None]

    def value(self, name: Name, turn: int) -> float:
        """Of the state before this turn of a trajectory."""
        if (name, turn) not in self._values:
            self._values[name, turn] = fmean(self.continuations(name, turn))
        return self._values[name, turn]

    def _after(self, name: Name, turn: int) -> float | None:
        """What the trajectory's own continuation was worth; None when nothing of it is here."""
        later = [item for item in self.branched(name) if item > turn]
        if later:
            return self.value(name, later[0])
        leaf = self.leaves.get(name)
        return None if leaf is None else leaf.reward

    def segments(self, name: Name) -> list[TurnRange]:
        """A trajectory's turns, all of them, cut where branches begin."""
        leaf = self.leaves[name]
        left = {item.turn for item in leaf.lineage}
        left |= {turn for turn in range(leaf.turns) if turn in self.branched(leaf.owner(turn))}
        cuts = sorted({0} | left)
        ends = [*(self.value(self._holder(leaf, turn), turn) for turn in cuts[1:]), leaf.reward]
        result, existing = [], None
        for (first, last), after in zip(pairwise([*cuts, leaf.turns]), ends, strict=True):
            others = self.continuations(self._holder(leaf, first), first, without=leaf.owner(first))
            believed = [*others, existing] if existing is not None else others
            existing = fmean(believed) if believed else None
            result.append(TurnRange(first, last, after if existing is None else existing, after))
        return result

    @staticmethod
    def _holder(leaf: Leaf, turn: int) -> Name:
        """In whose states the one before this turn is: a branch begins in a state of whom it branches from."""
        return next(((item.member, item.start) for item in leaf.lineage if item.turn >= turn), leaf.name)

    def sharing(self, leaf: Leaf, turn: int) -> int:
        """How many trajectories have this turn."""
        return sum(turn < item.turns and item.owner(turn) == leaf.owner(turn) for item in self.leaves.values())


def counted(group: Sequence[Leaf]) -> Mapping[Name, int]:
    """From which turn on each trajectory's tokens are its own to count: those before are counted with another."""
    observed: set[tuple[Name, int]] = set()
    result: dict[Name, int] = {}
    for leaf in group:
        first = next((turn for turn in range(leaf.turns) if (leaf.owner(turn), turn) not in observed), leaf.turns)
        result[leaf.name] = first
        observed |= {(leaf.owner(turn), turn) for turn in range(leaf.turns)}
    return result
