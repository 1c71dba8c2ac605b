"""The cheapest groups there are, for a few jobs: to measure plans by.

Too slow for more than about eight jobs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from coordinator.decide.multiplex import GroupMember, JobGroup, Prices, SharedJob


def cheapest(jobs: Sequence[SharedJob], prices: Prices) -> float:
    """What the cheapest arrangement costs per hour: every set of jobs that may be a group, with its exact price, is a
    column of a covering problem in integers, which HiGHS solves. (scipy is needed for it, the extra `dev`.)"""
    columns, costs = [], []
    for size in range(1, len(jobs) + 1):
        for chosen in itertools.combinations(range(len(jobs)), size):
            some = [jobs[n] for n in chosen]
            limit = min(item.limit for item in some)
            if max(item.alone for item in some) > limit or sum(item.train for item in some) > limit:
                continue
            if sum(item.train_gb for item in some) > prices.train_gb:
                continue
            columns.append([float(n in chosen) for n in range(len(jobs))])
            nodes = fewest_nodes(some, limit, prices)
            costs.append(nodes * prices.rollout_node + max(item.train_nodes for item in some) * prices.train_node)
    item_once = LinearConstraint(np.array(columns).T, 1, 1)
    result = milp(costs, constraints=item_once, integrality=np.ones(len(costs)), bounds=Bounds(0, 1))
    if not result.success:
        raise RuntimeError(f"no arrangement was found: {result.message}")
    return float(result.fun)


def fewest_nodes(jobs: Sequence[SharedJob], limit: float, prices: Prices) -> int:
    """Rollout machines that these jobs need at least as one group: all ways to put them onto machines are tried, and
    all orders of their turns."""
    order = sorted(jobs, key=lambda item: -item.rollout)
    best = sum(item.rollout_nodes for item in order)

    def place_rest(index: int, nodes: tuple[tuple[float, float], ...], members: tuple[GroupMember, ...]) -> None:
        nonlocal best
        if len(nodes) >= best:
            return
        if index == len(order):
            turns = (JobGroup(members=item, rollout_nodes=len(nodes)) for item in itertools.permutations(members))
            if any(group.turns_within(limit) for group in turns):
                best = len(nodes)
            return
        item = order[index]
        fits = [
            n
            for n, (work, held) in enumerate(nodes)
            if work + item.rollout <= limit and held + item.rollout_gb <= prices.rollout_gb
        ]
        for used in range(min(item.rollout_nodes, len(fits)), -1, -1):
            for chosen in itertools.combinations(fits, used):
                after = list(nodes)
                for n in chosen:
                    after[n] = (after[n][0] + item.rollout, after[n][1] + item.rollout_gb)
                new = item.rollout_nodes - used
                after += [(item.rollout, item.rollout_gb)] * new
                member = GroupMember(item, (*chosen, *range(len(nodes), len(nodes) + new)))
                place_rest(index + 1, tuple(after), (*members, member))

    place_rest(0, (), ())
    return best
