"""Groups for many jobs at once, or again for all jobs after some have ended. Pure.

Guarantee: every group that comes out keeps the guarantee of a co-execution group; the result is never dearer than
placing the jobs one by one as they came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import permutations

import numpy as np

from coordinator.decide.multiplex import JobGroup, Prices, SharedJob, alone, fits_alone, join, leave, place, total

SEARCH_UP_TO = 40  # jobs for which arrangements are searched after the first one
ROUNDS = 8  # of that search
SHUFFLES = 48  # orders to begin with, in addition to the sorted ones; drawn, but always the same
IMPROVED = 6  # of the first arrangements, the cheapest ones
ALL_ORDERS_UP_TO = 4  # jobs that are placed again in every order

LOAD, LOADS = 6, 7  # rows of a table: the group's load, and where those of its machines begin

ORDERS: tuple[Callable[[SharedJob], float], ...] = (
    lambda job: 0.0,  # as they came
    lambda job: -job.train,
    lambda job: -job.rollout,
    lambda job: -job.alone,
    lambda job: job.limit,
    lambda job: -job.train_nodes,
    lambda job: -job.rollout_nodes,
    lambda job: job.rollout - job.train,
)


def plan(jobs: Sequence[SharedJob], prices: Prices) -> list[JobGroup]:
    """Groups that hold all jobs, as cheap as a search of bounded length finds.

    Raises ValueError for a job that does not fit into one machine of each kind.
    """
    for job in jobs:
        if not fits_alone(job, prices):
            raise ValueError(f"{job.name} needs more host memory than one machine has")
    if len(jobs) > SEARCH_UP_TO:
        return in_order(jobs, prices)
    shuffles = np.random.default_rng(len(jobs)).permuted(np.tile(np.arange(len(jobs)), (SHUFFLES, 1)), axis=1)
    orders = [sorted(jobs, key=order) for order in ORDERS] + [[jobs[n] for n in item] for item in shuffles]
    tried = sorted((_spread([], order, prices) for order in orders), key=lambda groups: total(groups, prices))
    different = {groups_of(groups): groups for groups in reversed(tried)}
    best = sorted(different.values(), key=lambda groups: total(groups, prices))[:IMPROVED]
    return min((improve(groups, prices) for groups in best), key=lambda groups: total(groups, prices), default=[])


def groups_of(groups: Sequence[JobGroup]) -> frozenset[frozenset[str]]:
    """Who is together with whom."""
    return frozenset(frozenset(member.job.name for member in group.members) for group in groups)


def improve(groups: list[JobGroup], prices: Prices) -> list[JobGroup]:
    """Takes one or two groups apart and places their jobs again among all, as long as that is cheaper."""
    for _ in range(ROUNDS):
        best = min(_changed(groups, prices), key=lambda item: total(item, prices), default=groups)
        if total(best, prices) >= total(groups, prices) - 1e-9:
            break
        groups = best
    return groups


def _changed(groups: list[JobGroup], prices: Prices) -> list[list[JobGroup]]:
    result = []
    for first in range(len(groups)):
        for second in range(first, len(groups)):
            rest = [group for index, group in enumerate(groups) if index not in (first, second)]
            parts = [groups[first]] if first == second else [groups[first], groups[second]]
            jobs = [member.job for part in parts for member in part.members]
            result += [_spread(rest, order, prices) for order in _orders(jobs)]
        for member in groups[first].members:
            smaller = leave(groups[first], member.job.name)
            rest = [group for index, group in enumerate(groups) if index != first]
            result.append(_spread([*rest, *([repacked(smaller, prices)] if smaller else [])], [member.job], prices))
    return result


def _orders(jobs: Sequence[SharedJob]) -> Iterable[Sequence[SharedJob]]:
    if len(jobs) <= ALL_ORDERS_UP_TO:
        return permutations(jobs)
    return [sorted(jobs, key=order) for order in ORDERS[1:]]


def repacked(group: JobGroup, prices: Prices) -> JobGroup:
    """The same jobs on as few rollout machines as placing them again, the longest first, needs."""
    jobs = sorted((member.job for member in group.members), key=lambda job: (-job.train_nodes, -job.rollout))
    again: JobGroup | None = alone(jobs[0])
    for job in jobs[1:]:
        again = again and join(again, job, prices)
    return again if again is not None and again.cost(prices) < group.cost(prices) else group


def _spread(groups: list[JobGroup], jobs: Sequence[SharedJob], prices: Prices) -> list[JobGroup]:
    groups = list(groups)
    for job in jobs:
        placed = place(groups, job, prices)
        if placed.index is None:
            groups.append(placed.group)
        else:
            groups[placed.index] = placed.group
    return groups


def in_order(jobs: Sequence[SharedJob], prices: Prices) -> list[JobGroup]:
    """Each job into the group in which it costs least in addition (`multiplex.place`), one after another."""
    table = PackingTable(prices, jobs)
    for job in jobs:
        table.place(job)
    return table.groups


class PackingTable:
    """What `multiplex.place` looks at, of all groups at once, so that thousands of jobs are placed in a moment.

    Columns are groups. Groups that none of `jobs` could join any more are taken out of the columns. Rows: what may not
    be above what a job allows (`_candidates`), a group's load, then load and memory of each rollout machine.
    """

    def __init__(self, prices: Prices, jobs: Sequence[SharedJob]):
        self.prices = prices
        self.groups: list[JobGroup] = []
        self._minimum_train = min((job.train for job in jobs), default=0.0)
        self._open: list[int] = []  # the groups that have a column
        self._columns = np.zeros((LOADS, len(jobs)))
        self._limit = np.full((LOADS, 1), np.inf)

    def place(self, job: SharedJob) -> None:
        """As `multiplex.place`, and keeps the result."""
        best: tuple[tuple[float, float], int, JobGroup] | None = None
        for column, at_best in self._candidates(job):
            if best is not None and best[0] <= at_best:
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

    def _candidates(self, job: SharedJob) -> Iterator[tuple[int, tuple[float, float]]]:
        """Columns that may do, the cheapest first; of each, new rollout machines and room that is left at best."""
        prices, longest = self.prices, job.limit
        standby = prices.train_gb - job.train_gb
        self._limit[:LOAD, 0] = longest, longest - job.train, -job.train, standby, -job.train_nodes, -job.alone
        self._limit += 1e-9  # `join` is exact
        fits = self._columns[:LOADS, : len(self._open)] <= self._limit
        (columns,) = np.logical_and.reduce(fits).nonzero()
        if not len(columns):
            return
        rows = self._columns.take(columns, axis=1)
        bound = np.minimum(-rows[5], longest)
        loads = rows[LOADS::2] + job.rollout
        capacity = loads <= bound
        capacity &= rows[LOADS + 1 :: 2] <= prices.rollout_gb - job.rollout_gb
        more = np.maximum(job.rollout_nodes - np.add.reduce(capacity), 0)
        loads[~capacity] = 0.0
        fullest = np.maximum.reduce(loads)  # of the machines that it can use
        left = bound - np.maximum(fullest, np.maximum(rows[LOAD], rows[1] + job.train))
        for at in np.lexsort((left, more)):
            yield int(columns[at]), (float(more[at]), float(left[at]))

    def _show(self, index: int, column: int) -> None:
        """Writes a group into a column, or takes the column out when the group is full."""
        group = self.groups[index]
        limit, trained, load = group.limit, group.trained, group.load
        if limit - trained < self._minimum_train:
            self._drop(column)
            return
        if column == len(self._open):
            self._open.append(index)
        if (missing := LOADS + 2 * group.rollout_nodes - len(self._columns)) > 0:
            self._columns = np.concatenate([self._columns, np.full((missing, self._columns.shape[1]), np.inf)])
        busy = max(load, group.natural)
        none = [np.inf] * (len(self._columns) - LOADS - 2 * group.rollout_nodes)
        machines = [amount for item in zip(group.node_loads, group.node_gb, strict=True) for amount in item]
        allowed = (busy, trained, trained - limit, group.train_gb, -group.train_nodes, -limit)
        self._columns[:, column] = (*allowed, load, *machines, *none)

    def _drop(self, column: int) -> None:
        """The last column takes its place."""
        if column >= len(self._open):
            return
        last = len(self._open) - 1
        self._open[column] = self._open[last]
        self._columns[:, column] = self._columns[:, last]
        self._open.pop()
