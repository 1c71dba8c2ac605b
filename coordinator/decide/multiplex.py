"""Which training jobs share which machines, so that one job's rollout fills the other's training time. Pure.

Guarantee: no member of a group waits longer for a step than its own limit allows, by worst-case durations; all members'
states fit into the host memory of every machine that they use, so that switching never loads from disk.

A job alternates: it rolls out for R seconds on rollout machines, then trains for T seconds on training machines, and
each pair idles while the other works. Jobs of a co-execution group take turns on the same machines (RollMux,
arXiv:2512.11306)::

    rollout machine 1   [ R of a ][ R of b ]......[ R of a ][ R of b ]
    rollout machine 2   [ R of c      ]...........[ R of c      ]
    training machines             [ T a ][ T b ][ T c ]      [ T a ] ...
                        |------- one cycle -------|

With round robin each job takes one step in a cycle: ``cycle = max(natural, load)``, where ``natural = max(R + T)`` over
the members and ``load`` is the most work of one machine: the sum of R of those who use a rollout machine, or the sum
of T. That holds where any two members use the same rollout machines or none in common. Where they share some, one may
wait for a machine that waits for another machine's turn: then the cycle is that of the turns, played through.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import msgspec


class SharedJob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a job asks for. Durations are worst cases in seconds, on the machines that it asks for."""

    name: str
    rollout: float
    train: float
    rollout_nodes: int = 1
    train_nodes: int = 1
    rollout_gb: float = 0.0  # of host memory on each of its rollout machines, while others have their turn
    train_gb: float = 0.0
    slowdown: float = 2.0  # a step takes at most so many times `rollout + train`

    @property
    def alone(self) -> float:
        """Seconds of a step of this job without any other."""
        return self.rollout + self.train

    @property
    def limit(self) -> float:
        """Seconds that a step may take."""
        return self.slowdown * self.alone


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """What machines cost and hold. The default is a ratio of rents: an input of the planner, not a fact."""

    rollout_node: float = 1.0  # per hour
    train_node: float = 2.5
    rollout_gb: float = 1024.0  # host memory of one machine
    train_gb: float = 1024.0


class GroupMember(msgspec.Struct, frozen=True, gc=False):
    job: SharedJob
    nodes: tuple[int, ...]  # rollout machines of the group that it uses


class JobGroup(msgspec.Struct, frozen=True, kw_only=True, dict=True):  # dict: for what is derived
    """Jobs that share machines."""

    members: tuple[GroupMember, ...] = ()
    rollout_nodes: int = 0
    train_nodes: int = 0

    def cost(self, prices: Prices) -> float:
        """Per hour."""
        return self.rollout_nodes * prices.rollout_node + self.train_nodes * prices.train_node

    @cached_property
    def natural(self) -> float:
        return max((member.job.alone for member in self.members), default=0.0)

    @cached_property
    def load(self) -> float:
        return max([*self.node_loads, self.trained], default=0.0)

    @property
    def cycle(self) -> float:
        """Seconds in which every member takes one step."""
        short = max(self.natural, self.load)
        return short if self._apart_or_same() else max(short, played_cycle(self.members, self.rollout_nodes))

    def turns_within(self, limit: float) -> bool:
        """Whether a cycle takes at most `limit`, for a group whose `natural` and `load` do.

        As if all used one machine is a bound that costs nothing to look at.
        """
        return (
            self._apart_or_same()
            or sum(member.job.rollout for member in self.members) <= limit
            or played_cycle(self.members, self.rollout_nodes) <= limit
        )

    def _apart_or_same(self) -> bool:
        used = {member.nodes for member in self.members}
        return sum(map(len, used)) == len({node for nodes in used for node in nodes})

    @cached_property
    def limit(self) -> float:
        """Seconds that a cycle may take: what the least patient member allows."""
        return min((member.job.limit for member in self.members), default=float("inf"))

    @cached_property
    def trained(self) -> float:
        """Seconds of a cycle in which the training machines work."""
        return sum(member.job.train for member in self.members)

    @cached_property
    def train_gb(self) -> float:
        """Held in host memory by each training machine."""
        return sum(member.job.train_gb for member in self.members)

    @cached_property
    def node_loads(self) -> tuple[float, ...]:
        """Seconds of a cycle in which each rollout machine works."""
        return self._per_node([member.job.rollout for member in self.members])

    @cached_property
    def node_gb(self) -> tuple[float, ...]:
        return self._per_node([member.job.rollout_gb for member in self.members])

    def _per_node(self, amounts: Sequence[float]) -> tuple[float, ...]:
        sums = [0.0] * self.rollout_nodes
        for member, amount in zip(self.members, amounts, strict=True):
            for node in member.nodes:
                sums[node] += amount
        return tuple(sums)

    def faults(self, prices: Prices) -> list[str]:
        """What of the guarantee does not hold, in words; empty for every group that is built here."""
        said = [
            f"{member.job.name} would wait {self.cycle:.1f} s for a step, more than its {member.job.limit:.1f}"
            for member in self.members
            if self.cycle > member.job.limit * (1 + 1e-9)
        ]
        said += [
            f"rollout machine {number} would hold {held:.0f} GB"
            for number, held in enumerate(self.node_gb)
            if held > prices.rollout_gb * (1 + 1e-9)
        ]
        if self.train_gb > prices.train_gb * (1 + 1e-9):
            said.append(f"the training machines would hold {self.train_gb:.0f} GB")
        return said


PLAYED = 12  # cycles, of which the second half is measured


def played_cycle(members: Sequence[GroupMember], rollout_nodes: int) -> float:
    """Seconds of a cycle in the long run, with the members' turns in their order on every machine.

    As soon as a cycle is the one before, only later, all that follow are too: such a recurrence of sums and maxima
    depends on differences alone (Baccelli et al., Synchronization and Linearity, 1992).
    """
    free, train_free = [0.0] * rollout_nodes, 0.0
    ready = [0.0] * len(members)
    half = 0.0
    for cycle in range(PLAYED):
        before, last = (*free, *ready), train_free
        for index, member in enumerate(members):
            rolled = ready[index]
            for node in member.nodes:
                if free[node] > rolled:
                    rolled = free[node]
            rolled += member.job.rollout
            for node in member.nodes:
                free[node] = rolled
            train_free = ready[index] = (rolled if rolled > train_free else train_free) + member.job.train
        length = train_free - last
        if cycle < PLAYED // 2 and all(
            abs(now - then - length) < 1e-9 for now, then in zip((*free, *ready), before, strict=True)
        ):
            return length
        if cycle == PLAYED // 2 - 1:
            half = train_free
    return (train_free - half) / (PLAYED - PLAYED // 2)


def alone(job: SharedJob) -> JobGroup:
    """A group of its own."""
    return JobGroup(
        members=(GroupMember(job, tuple(range(job.rollout_nodes))),),
        rollout_nodes=job.rollout_nodes,
        train_nodes=job.train_nodes,
    )


def join(group: JobGroup, job: SharedJob, prices: Prices) -> JobGroup | None:
    """`group` with `job`, with as few more rollout machines as possible; None if its guarantee cannot hold.

    The job takes the fullest machines that still have room for it; if turns would take too long then, machines of one
    other member alone, or new ones. A job that wants more training machines than the
    group has may not join: fewer would change its durations.
    """
    limit = min(group.limit, job.limit)
    if job.train_nodes > group.train_nodes or group.trained + job.train > limit:
        return None
    if group.train_gb + job.train_gb > prices.train_gb or max(group.natural, group.load, job.alone) > limit:
        return None
    loads, memory = group.node_loads, group.node_gb
    fitting = [
        node
        for node in range(group.rollout_nodes)
        if loads[node] + job.rollout <= limit and memory[node] + job.rollout_gb <= prices.rollout_gb
    ]
    fitting.sort(key=lambda node: (-loads[node], node))
    for chosen in _choices(group, fitting, job.rollout_nodes):
        more = job.rollout_nodes - len(chosen)
        new = range(group.rollout_nodes, group.rollout_nodes + more)
        joined = JobGroup(
            members=(*group.members, GroupMember(job, (*sorted(chosen), *new))),
            rollout_nodes=group.rollout_nodes + more,
            train_nodes=group.train_nodes,
        )
        if joined.turns_within(limit):
            return joined
    return None


def _choices(group: JobGroup, fitting: Sequence[int], target: int) -> Iterable[Sequence[int]]:
    """Machines of the group for a job, those first with which it needs fewest new ones."""
    yield fitting[:target]
    of_one = [[node for node in fitting if node in member.nodes][:target] for member in group.members]
    yield from sorted([*of_one, []], key=lambda item: -len(item))


def fits_alone(job: SharedJob, prices: Prices) -> bool:
    """Whether one job's states fit into the machines at all."""
    return job.rollout_gb <= prices.rollout_gb and job.train_gb <= prices.train_gb


class JobPlacement(msgspec.Struct, frozen=True):
    """Where a job goes: to the group of that index, or to a new one (None)."""

    index: int | None
    group: JobGroup
    cost: float  # per hour, in addition to what was paid


def place(groups: Sequence[JobGroup], job: SharedJob, prices: Prices) -> JobPlacement:
    """The group in which `job` costs least in addition: packed as they are, with more rollout machines, or a new one.
    Of equal ones the fullest, so that room stays in one piece.

    Raises ValueError for a job whose states do not fit into one machine of each kind.
    """
    if not fits_alone(job, prices):
        raise ValueError(f"{job.name} needs more host memory than one machine has")
    own = alone(job)
    best = JobPlacement(None, own, own.cost(prices))
    capacity = float("inf")
    for index, group in enumerate(groups):
        joined = join(group, job, prices)
        if joined is None:
            continue
        cost, left = joined.cost(prices) - group.cost(prices), joined.limit - joined.load
        if (cost, left) < (best.cost, capacity):
            best, capacity = JobPlacement(index, joined, cost), left
    return best


def leave(group: JobGroup, name: str) -> JobGroup | None:
    """`group` without a job that ended and the machines that are no longer used; None when none is left."""
    members = [member for member in group.members if member.job.name != name]
    if not members:
        return None
    used = sorted({node for member in members for node in member.nodes})
    number = {node: index for index, node in enumerate(used)}
    return JobGroup(
        members=tuple(GroupMember(member.job, tuple(number[node] for node in member.nodes)) for member in members),
        rollout_nodes=len(used),
        train_nodes=max(member.job.train_nodes for member in members),
    )


def total(groups: Iterable[JobGroup], prices: Prices) -> float:
    """Per hour."""
    return sum(group.cost(prices) for group in groups)
