"""Groups for many jobs at once, or again for all jobs after some have ended. Pure.

Owns: the order in which jobs are placed, the search for a cheaper arrangement. Does not own: what a group may hold
(coordinator.decide.multiplex).
Guarantee: every group that comes out keeps the guarantee of a co-execution group; the result is never dearer than
placing the jobs one by one as they came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import permutations

import numpy as np

from coordinator.decide.multiplex import Group, Job, Prices, alone, fits_alone, join, leave, place, total

SEARCH_UP_TO = 40  # jobs for which arrangements are searched after the first one
ROUNDS = 8  # of that search
SHUFFLES = 48  # orders to begin with, beside the sorted ones; drawn, but always the same
IMPROVED = 6  # of the first arrangements, the cheapest ones
ALL_ORDERS_UP_TO = 4  # jobs that are placed anew in every order

ORDERS: tuple[Callable[[Job], float], ...] = (
    lambda job: 0.0,  # as they came
    lambda job: -job.train,
    lambda job: -job.rollout,
    lambda job: -job.alone,
    lambda job: job.limit,
    lambda job: -job.train_nodes,
    lambda job: -job.rollout_nodes,
    lambda job: job.rollout - job.train,
)


def plan(jobs: Sequence[Job], prices: Prices) -> list[Group]:
    """Groups that hold all jobs, as cheap as a search of bounded length finds.

    Raises ValueError for a job that does not fit into one machine of each kind.
    """
    for job in jobs:
        if not fits_alone(job, prices):
            raise ValueError(f"{job.name} needs more host memory than one machine has")
    if len(jobs) > SEARCH_UP_TO:
        return in_order(jobs, prices)
    shuffles = np.random.default_rng(len(jobs)).permuted(np.tile(np.arange(len(jobs)), (SHUFFLES, 1)), axis=1)
    orders = [sorted(jobs, key=order) for order in ORDERS] + [[jobs[n] for n in each] for each in shuffles]
    tried = sorted((_spread([], order, prices) for order in orders), key=lambda groups: total(groups, prices))
    different = {groups_of(groups): groups for groups in reversed(tried)}
    best = sorted(different.values(), key=lambda groups: total(groups, prices))[:IMPROVED]
    return min((improve(groups, prices) for groups in best), key=lambda groups: total(groups, prices), default=[])


def groups_of(groups: Sequence[Group]) -> frozenset[frozenset[str]]:
    """Who is together with whom."""
    return frozenset(frozenset(member.job.name for member in group.members) for group in groups)


def improve(groups: list[Group], prices: Prices) -> list[Group]:
    """Takes one or two groups apart and places their jobs anew among all, as long as that is cheaper."""
    for _ in range(ROUNDS):
        best = min(_changed(groups, prices), key=lambda each: total(each, prices), default=groups)
        if total(best, prices) >= total(groups, prices) - 1e-9:
            break
        groups = best
    return groups


def _changed(groups: list[Group], prices: Prices) -> list[list[Group]]:
    found = []
    for first in range(len(groups)):
        for second in range(first, len(groups)):
            rest = [group for index, group in enumerate(groups) if index not in (first, second)]
            parts = [groups[first]] if first == second else [groups[first], groups[second]]
            jobs = [member.job for part in parts for member in part.members]
            found += [_spread(rest, order, prices) for order in _orders(jobs)]
        for member in groups[first].members:
            smaller = leave(groups[first], member.job.name)
            rest = [group for index, group in enumerate(groups) if index != first]
            found.append(_spread([*rest, *([repacked(smaller, prices)] if smaller else [])], [member.job], prices))
    return found


def _orders(jobs: Sequence[Job]) -> Iterable[Sequence[Job]]:
    if len(jobs) <= ALL_ORDERS_UP_TO:
        return permutations(jobs)
    return [sorted(jobs, key=order) for order in ORDERS[1:]]


def repacked(group: Group, prices: Prices) -> Group:
    """The same jobs on as few rollout machines as placing them anew, the longest first, needs."""
    jobs = sorted((member.job for member in group.members), key=lambda job: (-job.train_nodes, -job.rollout))
    again: Group | None = alone(jobs[0])
    for job in jobs[1:]:
        again = again and join(again, job, prices)
    return again if again is not None and again.cost(prices) < group.cost(prices) else group


def _spread(groups: list[Group], jobs: Sequence[Job], prices: Prices) -> list[Group]:
    groups = list(groups)
    for job in jobs:
        placed = place(groups, job, prices)
        if placed.index is None:
            groups.append(placed.group)
        else:
            groups[placed.index] = placed.group
    return groups


def in_order(jobs: Sequence[Job], prices: Prices) -> list[Group]:
    """Each job into the group in which it costs least in addition (`multiplex.place`), one after another."""
    table = Table(prices, jobs)
    for job in jobs:
        table.place(job)
    return table.groups


class Table:
    """What `multiplex.place` looks at, of all groups at once, so that thousands of jobs are placed in a moment.

    Columns are groups. Groups that none of `jobs` could join any more are taken out of the columns.
    """

    def __init__(self, prices: Prices, jobs: Sequence[Job]):
        self.prices = prices
        self.groups: list[Group] = []
        self._least_train = min((job.train for job in jobs), default=0.0)
        widest = max((job.rollout_nodes for job in jobs), default=1)
        self._open: list[int] = []
        self._rows = np.zeros((6, 64))
        self._loads = np.full((64, widest * 2), np.inf)  # [column, rollout machine]; inf: there is none
        self._memory = np.zeros_like(self._loads)

    def place(self, job: Job) -> None:
        """As `multiplex.place`, and keeps the result."""
        best: tuple[tuple[float, float], int, Group] | None = None
        for column, more, left in self._best(job):
            if best is not None and (more, left) >= best[0]:
                break
            group = self.groups[self._open[column]]
            joined = join(group, job, self.prices)
            if joined is None:
                continue
            cost = joined.rollout_nodes - group.rollout_nodes, joined.limit - joined.load
            if best is None or cost < best[0]:
                best = cost, column, joined
        if best is None:
            self.groups.append(alone(job))
            self._show(len(self.groups) - 1, len(self._open))
        else:
            _, column, joined = best
            self.groups[self._open[column]] = joined
            self._show(self._open[column], column)

    def _best(self, job: Job) -> Iterable[tuple[int, float, float]]:
        """Columns that may do, the cheapest first; of each, new rollout machines and room that is left at best."""
        count = len(self._open)
        if not count:
            return ()
        limit, trained, held, natural, load, machines = self._rows[:, :count]
        bound = np.minimum(limit, job.limit)
        fits = (trained <= bound - job.train) & (held <= self.prices.train_gb - job.train_gb)
        fits &= (machines >= job.train_nodes) & (np.maximum(natural, job.alone) <= bound) & (load <= bound)
        (columns,) = fits.nonzero()
        if not len(columns):
            return ()
        loads, bound = self._loads[columns], bound[columns]
        room = loads <= (bound - job.rollout)[:, None]
        room &= self._memory[columns] <= self.prices.rollout_gb - job.rollout_gb
        more = np.maximum(job.rollout_nodes - room.sum(axis=1), 0)
        highest = np.where(room, loads, 0.0).max(axis=1) + job.rollout  # of the fullest machine that it can use
        left = bound - np.maximum(np.maximum(load[columns], trained[columns] + job.train), highest)
        order = np.lexsort((left, more))
        return zip(columns[order].tolist(), more[order].tolist(), left[order].tolist(), strict=True)

    def _show(self, index: int, column: int) -> None:
        """Writes a group into a column, or takes the column out when the group is full."""
        group = self.groups[index]
        trained = sum(member.job.train for member in group.members)
        limit = group.limit
        if limit - trained < self._least_train:
            self._drop(column)
            return
        if column == len(self._open):
            self._open.append(index)
        if column >= self._rows.shape[1]:
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)], axis=1)
            self._loads = np.concatenate([self._loads, np.full_like(self._loads, np.inf)])
            self._memory = np.concatenate([self._memory, np.zeros_like(self._memory)])
        if group.rollout_nodes > self._loads.shape[1]:
            wide = (len(self._loads), group.rollout_nodes)
            self._loads = np.concatenate([self._loads, np.full(wide, np.inf)], axis=1)
            self._memory = np.concatenate([self._memory, np.zeros(wide)], axis=1)
        held = sum(member.job.train_gb for member in group.members)
        loads = group.node_loads()
        self._rows[:, column] = (limit, trained, held, group.natural, max(*loads, trained), group.train_nodes)
        self._loads[column] = np.inf
        self._loads[column, : group.rollout_nodes] = loads
        self._memory[column, : group.rollout_nodes] = group.node_gb()

    def _drop(self, column: int) -> None:
        """The last column takes its place."""
        if column >= len(self._open):
            return
        last = len(self._open) - 1
        self._open[column] = self._open[last]
        self._rows[:, column] = self._rows[:, last]
        self._loads[column], self._memory[column] = self._loads[last], self._memory[last]
        self._open.pop()
