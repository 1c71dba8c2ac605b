"""Which of the jobs that wait begins next.

Jobs are taken by priority, then in the order in which they came. A job for which there is no room now holds back all
behind it, so that a large one is not overtaken for ever by small ones. Two kinds do not hold back others: one whose
owner uses what may be used at once, and one that the cluster could never take. Which machines the parts of a job get is
for Ray to say; of jobs of several parts one at a time looks for room, so that no two have half of what they need.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

EVERYBODY = ""  # whose quota is that of owners who have none of their own
HEADROOM = 1e-6  # of a resource: sums of fractions are not exact

Amounts = Mapping[str, float]


@dataclass(frozen=True)
class QueuedJob:
    """A job that waits, or that has begun."""

    job: str
    parts: Sequence[Amounts]  # what each of its parts needs of one machine
    owner: str = ""
    priority: int = 0
    number: int = 0  # the order in which they came
    placed: bool = True  # of one that has begun: all its parts had room once

    @property
    def needs(self) -> Amounts:
        return total(self.parts)


@dataclass(frozen=True)
class QueueView:
    """`machines`: what each has in all. `begun`: jobs that were started and have not ended."""

    waiting: Sequence[QueuedJob]
    begun: Sequence[QueuedJob] = ()
    machines: Sequence[Amounts] = ()
    quotas: Mapping[str, Amounts] = field(default_factory=dict)


@dataclass(frozen=True)
class StartJob:
    job: str


@dataclass(frozen=True)
class WaitJob:
    job: str
    reason: str


def decide(view: QueueView) -> list[StartJob | WaitJob]:
    """One action for each job that waits, in the order in which they are looked at."""
    free = total(view.machines)
    used: dict[str, dict[str, float]] = {}
    for item in view.begun:
        _take(item, free, used)
    actions: list[StartJob | WaitJob] = []
    ahead = next((item.job for item in view.begun if not item.placed and len(item.parts) > 1), "")
    for item in sorted(view.waiting, key=lambda item: (-item.priority, item.number)):
        reason = _never(item, view.machines) or _beyond(item, view.quotas, used.get(item.owner, {}))
        if not reason and ahead:
            reason = f"{ahead} comes first"
        elif not reason and (missing := _missing(item.needs, free)):
            reason, ahead = f"{missing} are in use", item.job
        if reason:
            actions.append(WaitJob(item.job, reason))
        else:
            actions.append(StartJob(item.job))
            _take(item, free, used)
            ahead = item.job if len(item.parts) > 1 else ahead
    return actions


def total(machines: Iterable[Amounts]) -> dict[str, float]:
    """What they have together."""
    result: dict[str, float] = {}
    for machine in machines:
        for name, amount in machine.items():
            result[name] = result.get(name, 0.0) + amount
    return result


def _take(item: QueuedJob, free: dict[str, float], used: dict[str, dict[str, float]]) -> None:
    mine = used.setdefault(item.owner, {})
    for name, amount in item.needs.items():
        free[name] = free.get(name, 0.0) - amount
        mine[name] = mine.get(name, 0.0) + amount


def _never(item: QueuedJob, machines: Sequence[Amounts]) -> str:
    """Why no machine can take it even when nothing runs; "" when one can."""
    if not machines:
        return "no machine is there"
    for part in item.parts:
        lacks = [_missing(part, machine) for machine in machines]
        if all(lacks):
            return f"no machine has what it needs: {min(lacks, key=len)}"
    missing = _missing(item.needs, total(machines))
    return f"all machines together lack what it needs: {missing}" if missing else ""


def _beyond(item: QueuedJob, quotas: Mapping[str, Amounts], mine: Amounts) -> str:
    quota = quotas.get(item.owner, quotas.get(EVERYBODY, {}))
    over = [
        f"{name}={limit:g}"
        for name, limit in sorted(quota.items())
        if name in item.needs and mine.get(name, 0.0) + item.needs[name] > limit + HEADROOM
    ]
    return f"its owner may use {', '.join(over)} at once" if over else ""


def _missing(needs: Amounts, free: Amounts) -> str:
    return ", ".join(
        f"{name}={amount:g}" for name, amount in sorted(needs.items()) if amount > free.get(name, 0.0) + HEADROOM
    )
