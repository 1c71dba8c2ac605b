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
SLACK = 1e-6  # of a resource: sums of fractions are not exact

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
    for each in view.begun:
        _take(each, free, used)
    actions: list[StartJob | WaitJob] = []
    ahead = next((each.job for each in view.begun if not each.placed and len(each.parts) > 1), "")
    for each in sorted(view.waiting, key=lambda each: (-each.priority, each.number)):
        reason = _never(each, view.machines) or _beyond(each, view.quotas, used.get(each.owner, {}))
        if not reason and ahead:
            reason = f"{ahead} comes first"
        elif not reason and (missing := _missing(each.needs, free)):
            reason, ahead = f"{missing} are in use", each.job
        if reason:
            actions.append(WaitJob(each.job, reason))
        else:
            actions.append(StartJob(each.job))
            _take(each, free, used)
            ahead = each.job if len(each.parts) > 1 else ahead
    return actions


def total(machines: Iterable[Amounts]) -> dict[str, float]:
    """What they have together."""
    found: dict[str, float] = {}
    for machine in machines:
        for name, amount in machine.items():
            found[name] = found.get(name, 0.0) + amount
    return found


def _take(each: QueuedJob, free: dict[str, float], used: dict[str, dict[str, float]]) -> None:
    mine = used.setdefault(each.owner, {})
    for name, amount in each.needs.items():
        free[name] = free.get(name, 0.0) - amount
        mine[name] = mine.get(name, 0.0) + amount


def _never(each: QueuedJob, machines: Sequence[Amounts]) -> str:
    """Why no machine can take it even when nothing runs; "" when one can."""
    if not machines:
        return "no machine is there"
    for part in each.parts:
        lacks = [_missing(part, machine) for machine in machines]
        if all(lacks):
            return f"no machine has what it needs: {min(lacks, key=len)}"
    missing = _missing(each.needs, total(machines))
    return f"all machines together lack what it needs: {missing}" if missing else ""


def _beyond(each: QueuedJob, quotas: Mapping[str, Amounts], mine: Amounts) -> str:
    quota = quotas.get(each.owner, quotas.get(EVERYBODY, {}))
    over = [
        f"{name}={limit:g}"
        for name, limit in sorted(quota.items())
        if name in each.needs and mine.get(name, 0.0) + each.needs[name] > limit + SLACK
    ]
    return f"its owner may use {', '.join(over)} at once" if over else ""


def _missing(needs: Amounts, free: Amounts) -> str:
    return ", ".join(
        f"{name}={amount:g}" for name, amount in sorted(needs.items()) if amount > free.get(name, 0.0) + SLACK
    )
