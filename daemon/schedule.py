"""In which order the host takes checkpoints. Pure: no I/O, no clock, no threads.

Owns: the queue order of all checkpoint work of one host. Does not own: doing the work
(:mod:`daemon.engine`) or the time (`now` is an argument, in seconds of any one clock).

A checkpoint passes up to three stages, each with a limit of its own: ``dump`` (freeze the processes
and copy their state) or ``snapshot`` (files alone), then ``hash`` (which pages are new), then
``compress`` (store them durably). A stage may also have a share of the bandwidth, in cost units (bytes)
a second: it starts a job only while what it used is paid for, but for jobs that somebody waits for and
overdue ones, which start at once and are paid for afterwards. In each stage the next job is chosen so:

1. jobs that somebody waits for, and jobs whose deadline has passed, come first, by deadline;
2. then by fair share: each sandbox pays for what it used, in start-time fair queueing, so that one
   sandbox with many jobs cannot crowd out another with one;
3. then by deadline, then by arrival.

Guarantees: no stage runs more jobs than its limit; a stage with a queued job, a free slot and no debt
starts one; a job whose deadline has passed is overtaken only by jobs with an earlier deadline, so nothing
starves while deadlines are finite. Each operation is O(log n), amortised.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field


class Stage(enum.StrEnum):
    DUMP = "dump"
    SNAPSHOT = "snapshot"
    HASH = "hash"
    COMPRESS = "compress"


BURST = 1.0  # seconds of its share that an idle stage may save up


@dataclass(slots=True)
class Job:
    """One stage of one checkpoint."""

    id: str
    stage: Stage
    sandbox: str
    deadline: float  # when the result is probably needed
    cost: float = 1.0  # what it uses of the share: bytes, or any unit that is the same within a stage
    waited: bool = False  # somebody waits for it now
    tag: float = field(default=0.0, init=False)  # start tag of fair queueing
    order: int = field(default=0, init=False)  # arrival
    running: bool = field(default=False, init=False)


class _Lane:
    """The queue of one stage. Entries of promoted, cancelled or started jobs are skipped when met."""

    def __init__(self, limit: int, rate: float | None = None) -> None:
        self.limit = limit
        self.rate = rate  # units a second; None: as many as there are
        self.credit = 0.0 if rate is None else rate * BURST
        self.paid_until: float | None = None
        self.running = 0
        self.queued: dict[str, Job] = {}
        self.urgent: list[tuple[float, int, str]] = []
        self.fair: list[tuple[float, float, int, str]] = []
        self.due: list[tuple[float, int, str]] = []
        self.virtual = 0.0
        self.finish_tags: dict[str, float] = {}

    def add(self, job: Job) -> None:
        job.tag = max(self.virtual, self.finish_tags.get(job.sandbox, 0.0))
        self.finish_tags[job.sandbox] = job.tag + job.cost
        self.queued[job.id] = job
        heapq.heappush(self.fair, (job.tag, job.deadline, job.order, job.id))
        heapq.heappush(self.due, (job.deadline, job.order, job.id))
        if job.waited:
            heapq.heappush(self.urgent, (job.deadline, job.order, job.id))

    def promote(self, job: Job) -> None:
        job.waited = True
        heapq.heappush(self.urgent, (job.deadline, job.order, job.id))

    def pay(self, now: float) -> None:
        """Earn the share of the time that passed."""
        if self.rate is not None:
            passed = max(0.0, now - self.paid_until) if self.paid_until is not None else 0.0
            self.credit = min(self.rate * BURST, self.credit + passed * self.rate)
            self.paid_until = now

    def affordable_at(self, now: float) -> float | None:
        """When a job that nobody waits for may start, if there is one that only the share holds back."""
        if self.rate is None or not self.queued or self.running >= self.limit or self.credit > 0:
            return None
        soonest = now - self.credit / self.rate + 1e-3
        return min(soonest, self.due[0][0]) if self.due else soonest

    def pop(self, now: float) -> Job | None:
        while self.due and (self.due[0][2] not in self.queued or self.due[0][0] <= now):
            deadline, order, name = heapq.heappop(self.due)
            if name in self.queued:
                heapq.heappush(self.urgent, (deadline, order, name))
        while self.urgent:
            name = heapq.heappop(self.urgent)[-1]
            if name in self.queued:
                return self._take(name)
        if self.rate is not None and self.credit <= 0:
            return None
        while self.fair:
            name = heapq.heappop(self.fair)[-1]
            if name in self.queued:
                return self._take(name)
        self.finish_tags.clear()  # idle: forget what was used, so that the table cannot grow for ever
        return None

    def _take(self, name: str) -> Job:
        job = self.queued.pop(name)
        if self.rate is not None:
            self.credit -= job.cost
        self.virtual = max(self.virtual, job.tag)
        return job


class Schedule:
    """The queue of a host. `submit`, then `start` whenever something changed, then `finish`."""

    def __init__(self, limits: Mapping[Stage, int], rates: Mapping[Stage, float] | None = None) -> None:
        self._lanes = {stage: _Lane(limits[stage], (rates or {}).get(stage)) for stage in Stage}
        self._jobs: dict[str, Job] = {}
        self._arrivals = 0

    def submit(self, job: Job) -> None:
        """Queue `job`. Its id must be new."""
        if job.id in self._jobs:
            raise ValueError(f"job {job.id} is already known")
        self._arrivals += 1
        job.order = self._arrivals
        self._jobs[job.id] = job
        self._lanes[job.stage].add(job)

    def promote(self, name: str) -> None:
        """Somebody waits for this job. Unknown, running or promoted already: no effect."""
        job = self._jobs.get(name)
        if job is not None and not job.running and not job.waited:
            self._lanes[job.stage].promote(job)

    def start(self, now: float) -> list[Job]:
        """The jobs to start now; each counts as running until :meth:`finish`."""
        started = []
        for lane in self._lanes.values():
            lane.pay(now)
            while lane.running < lane.limit and (job := lane.pop(now)) is not None:
                job.running = True
                lane.running += 1
                started.append(job)
        return started

    def wake(self, now: float) -> float | None:
        """When to call `start` again though nothing changes; None: no need to."""
        times = [time for lane in self._lanes.values() if (time := lane.affordable_at(now)) is not None]
        return min(times, default=None)

    def finish(self, name: str) -> None:
        """The job ended, however it ended; or it is cancelled before it started."""
        job = self._jobs.pop(name)
        lane = self._lanes[job.stage]
        if job.running:
            lane.running -= 1
        else:
            lane.queued.pop(name)

    def queued(self, stage: Stage | None = None) -> int:
        return sum(len(lane.queued) for name, lane in self._lanes.items() if stage in (None, name))

    def running(self, stage: Stage | None = None) -> int:
        return sum(lane.running for name, lane in self._lanes.items() if stage in (None, name))
