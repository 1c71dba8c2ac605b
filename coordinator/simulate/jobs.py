"""Co-execution groups on a virtual clock: jobs take turns on machines, and what a step then costs.

Guarantee: a machine works for one job at a time; a job's rollout and training follow one another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from coordinator.decide.multiplex import JobGroup, SharedJob
from coordinator.decide.turns import MachineSlot, due
from coordinator.simulate.clock import VirtualClock

Durations = Callable[[SharedJob, int], tuple[float, float]]  # of a job's step: seconds of rollout, seconds of training


@dataclass
class WorkInterval:
    """One stretch of work, for the picture."""

    job: str
    kind: str  # rollout, tail, train
    machine: int  # of its kind
    begin: float
    end: float


@dataclass
class Course:
    """What a group did."""

    seconds: float = 0.0
    steps: dict[str, int] = field(default_factory=dict)
    slowdown: dict[str, float] = field(default_factory=dict)  # mean step of each job, in multiples of its time alone
    switches: int = 0
    phases: list[WorkInterval] = field(default_factory=list)


class TimeSlicedMachines:
    """Machines of one kind, in turns (coordinator.decide.turns)."""

    def __init__(self, target: Sequence[tuple[str, tuple[int, ...]]], steps: int):
        """`target`: of each job, in the order of their seats, the machines that it uses in each of its steps."""
        self.target, self.steps = target, steps
        self.rounds = {name: 0 for name, _ in target}
        self.busy: set[int] = set()
        self.waiting: dict[str, Callable[[], None]] = {}

    def request(self, name: str, begin: Callable[[], None]) -> None:
        self.waiting[name] = begin
        self._serve()

    def give(self, held: Sequence[int]) -> None:
        self.busy -= set(held)
        self._serve()

    def _serve(self) -> None:
        turns = [
            MachineSlot(name, self.rounds[name], slot, machines, name in self.waiting)
            for slot, (name, machines) in enumerate(self.target)
            if self.rounds[name] < self.steps
        ]
        for name in due(turns, self.busy):
            self.busy.update(dict(self.target)[name])
            self.rounds[name] += 1
            self.waiting.pop(name)()


def run(
    group: JobGroup,
    durations: Durations,
    *,
    steps: int,
    switch: float = 0.0,
    tail_from: float = 1.0,
) -> Course:
    """Every member takes `steps` steps.

    `switch`: seconds until a machine works for another job than before (warm: from host memory). `tail_from`: share of
    a rollout's time after which its stragglers fit onto the first of its machines; the others are free from then on.
    """
    return _Turns(group, durations, steps, switch, tail_from).run()


class _Turns:
    def __init__(self, group: JobGroup, durations: Durations, steps: int, switch: float, tail_from: float):
        self.group, self.durations, self.steps = group, durations, steps
        self.switch, self.tail_from = switch, tail_from
        self.clock, self.course = VirtualClock(), Course()
        self.rollout = TimeSlicedMachines([(member.job.name, member.nodes) for member in group.members], steps)
        self.train = TimeSlicedMachines([(member.job.name, (0,)) for member in group.members], steps)
        self.ends: dict[str, list[float]] = {member.job.name: [] for member in group.members}
        self.last: dict[tuple[str, int], str] = {}  # who worked on a machine

    def run(self) -> Course:
        for member in self.group.members:
            self._begin(member.job, member.nodes, 0)
        self.clock.run()
        self.course.seconds = self.clock.now
        for member in self.group.members:
            ends = self.ends[member.job.name]
            self.course.slowdown[member.job.name] = (ends[-1] - ends[0]) / max(1, len(ends) - 1) / member.job.alone
        return self.course

    def _begin(self, job: SharedJob, nodes: tuple[int, ...], step: int) -> None:
        rollout, train = self.durations(job, step)

        def rolling() -> None:
            spent = self._switched("rollout", nodes, job)
            early = spent + rollout * self.tail_from
            self._note(job, "rollout", nodes, early)
            rest = nodes[1:] if self.tail_from < 1 and len(nodes) > 1 else ()
            self.clock.after(early, lambda: self.rollout.give(rest) if rest else None)
            self.clock.after(spent + rollout, lambda: rolled(nodes[:1] if rest else nodes))

        def rolled(held: tuple[int, ...]) -> None:
            self.rollout.give(held)
            self.train.request(job.name, training)

        def training() -> None:
            spent = self._switched("train", (0,), job)
            self._note(job, "train", (0,), spent + train)
            self.clock.after(spent + train, trained)

        def trained() -> None:
            self.train.give((0,))
            done = self.course.steps[job.name] = step + 1
            self.ends[job.name].append(self.clock.now)
            if done < self.steps:
                self._begin(job, nodes, done)

        self.rollout.request(job.name, rolling)

    def _switched(self, kind: str, machines: Sequence[int], job: SharedJob) -> float:
        changed = [machine for machine in machines if self.last.get((kind, machine), job.name) != job.name]
        self.course.switches += len(changed)
        self.last |= {(kind, machine): job.name for machine in machines}
        return self.switch if changed else 0.0

    def _note(self, job: SharedJob, kind: str, machines: Sequence[int], seconds: float) -> None:
        now = self.clock.now
        self.course.phases += [WorkInterval(job.name, kind, machine, now, now + seconds) for machine in machines]
