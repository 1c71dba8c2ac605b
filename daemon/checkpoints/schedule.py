"""In which order the host takes checkpoints. Pure: no I/O, no clock, no threads.

A checkpoint passes up to three stages, each with a limit of its own: ``dump`` (freeze the processes
and copy their state) or ``snapshot`` (files alone), then ``hash`` (which pages are new), then
``compress`` (store them durably). A stage may also have a share of the bandwidth, in cost units (bytes)
a second: it starts a job only while what it used is paid for, but for jobs with a waiting caller and
overdue ones, which start at once and are paid for afterwards. In each stage the next job is chosen so:

1. jobs with a waiting caller, and jobs whose deadline has passed, come first, by deadline;
2. then by fair share: each sandbox pays for what it used, in start-time fair queueing, so that one
   sandbox with many jobs cannot crowd out another with one;
3. then by deadline, then by arrival.

A slot is held until its job has ended, so no owner may hold all of them. Of a stage's slots (where it has more than
one) all but one are the most that jobs of one sharer take at a time. The sharer of a job is the owner of the token
that its sandbox belongs to, or else its sandbox. In DUMP and SNAPSHOT all sandboxes of which it is not known that
they hold slots for a moment only are one sharer together: new ones, those with more to dump than takes QUICK seconds
on a host that does nothing else (:func:`expected`), and those that held slots for longer than that. How slow the host
is now is taken into account: a sandbox may take as many times QUICK as every other one took of what was expected of
it. So a busy host does not make a small sandbox one of the slow, and a slow one makes no other look quick. A sandbox
that was penalized lately is not known to be quick. Of jobs in DUMP and SNAPSHOT those that are expected to take long
let others go before them, for BEHIND times as long: where slots are short, each waits in proportion to what it takes.

Each dump costs its neighbours processor time, whether there are slots left or not. So those that take long (more than
QUICK seconds, by what is expected or by what the sandbox's jobs took lately) have a budget together: PART of each
processor's time, and no more of them at a time than half of the processors. A job whose budget is spent waits before
it begins, for what went beyond it; nothing is frozen until then, and only its own sandbox waits. Overdue and awaited
jobs wait as well. The budget holds while quick jobs are about; a host without any for CALM seconds has no neighbours
to spare.

A sandbox whose processes did not stop is penalized: its next job waits for a while that doubles with each strike. One
whose dumps are refused again and again, which cost the host their work all the same, has one a second.

Guarantees: no stage runs more jobs than its limit; a stage with a free slot, no debt and a queued job whose sharer
has a part left and which waits for no strike and no budget starts one; among the jobs that may start, one whose
deadline has passed is overtaken only by jobs with an earlier deadline, so nothing starves while deadlines are finite.
Each operation is O(log n), amortised, but for the queued jobs of a sharer at its most and those that wait for the
budget, which are looked at when one of their jobs ends or the budget is there again.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


class CheckpointStage(enum.StrEnum):
    DUMP = "dump"
    SNAPSHOT = "snapshot"
    HASH = "hash"
    COMPRESS = "compress"
    READ = "read"  # no stage of a checkpoint: what reads a complete tree for a caller (daemon/aside.py)


PROVING = (
    CheckpointStage.DUMP,
    CheckpointStage.SNAPSHOT,
)  # stages whose jobs take a moment, or else are in others' way
BURST = 1.0  # seconds of its share that an idle stage may save up
QUICK = 0.2  # seconds in a slot that are a moment
MIN_DUMP_SECONDS, OF_TASK, OF_BYTE = (
    0.015,
    0.001,
    0.6e-9,
)  # seconds for the dump of an idle sandbox, of each task more, of memory
BEHIND = 5.0  # seconds by which a job's deadline is later for each second that it is expected to take
EXISTING = 16  # sandboxes, those that held slots last, by which the host's slowness is known
INJECTED, MAX_INJECTED = 1.0, 30.0  # seconds that a sandbox waits after its first strike, and at most
FORGIVEN = 60.0  # seconds after such a wait in which nothing happened
REFUSED_FREE = 3  # dumps refused in a row that cost a sandbox nothing
REFUSED = 1.0  # seconds that the sandbox waits for each further one
PART = 0.125  # of each processor's time that dumps which take long may use, where there are others
MAX_PENDING = 2.0  # seconds of a processor's time beyond the budget that are remembered
CALM = 60.0  # seconds without a quick job after which the others need not wait for their budget
UNPROVEN = "\0unproven"  # the sharer that all other sandboxes are


def expected(tasks: int, size: int) -> float:
    """Seconds for a dump of so many processes and threads with `size` bytes of images, on a host without other work.

    >>> expected(3, 1 << 20) < QUICK < expected(400, 1 << 20)
    True
    """
    return MIN_DUMP_SECONDS + OF_TASK * tasks + OF_BYTE * size


@dataclass(slots=True)
class StageJob:
    """One stage of one checkpoint."""

    id: str
    stage: CheckpointStage
    sandbox: str
    deadline: float  # when the result is probably needed; of one that takes long, later by what it gives way
    cost: float = 1.0  # what it uses of the share: bytes, or any unit that is the same within a stage
    waited: bool = False  # a caller waits for it now
    owner: str = ""  # of the token that the sandbox belongs to; "": the host's own
    expected: float = MIN_DUMP_SECONDS  # seconds in its slot on a host without other work
    sharer: str = field(default="", init=False)  # whose part of the slots it takes
    long: bool = field(default=False, init=False)  # known to take long
    tag: float = field(default=0.0, init=False)  # start tag of fair queueing
    order: int = field(default=0, init=False)  # arrival
    running: bool = field(default=False, init=False)
    overdue: bool = field(default=False, init=False)


@dataclass(slots=True)
class _Injections:
    """Of one sandbox."""

    count: int
    until: float  # its next job starts no sooner


class _Budget:
    """What all jobs that take long may use of the processors, in seconds of one of them."""

    def __init__(self, processors: int) -> None:
        self.rate = PART * processors
        self.at_once = max(1, processors // 2)
        self.credit = self.rate * BURST
        self.paid_until = 0.0
        self.running = 0
        self.quick_at = -math.inf  # when a job began that is none of them

    def allows(self, now: float) -> bool:
        """Whether one more may begin."""
        self.credit = min(self.rate * BURST, self.credit + max(0.0, now - self.paid_until) * self.rate)
        self.paid_until = now
        return now >= self.quick_at + CALM or (self.running < self.at_once and self.credit > 0)

    def allows_at(self, now: float) -> float:
        """When that is at the latest, if none of them ends before and no quick job begins."""
        calm = self.quick_at + CALM
        return calm if self.running >= self.at_once else min(calm, now - self.credit / self.rate + 1e-3)

    def begin(self, seconds: float) -> None:
        """One begins, of which so much is expected."""
        self.running += 1
        self._use(seconds)

    def end(self, more: float) -> None:
        """One has ended, which took so much more than was expected of it."""
        self.running -= 1
        self._use(more)

    def _use(self, seconds: float) -> None:
        self.credit = max(-MAX_PENDING, self.credit - max(0.0, seconds))


class _Lane:
    """The queue of one stage. Entries of promoted, cancelled or started jobs are skipped when met."""

    def __init__(self, limit: int, rate: float | None = None, *, budget: _Budget | None = None) -> None:
        self.limit = limit
        self.budget = budget  # of a stage where sandboxes have to show first that they hold slots for a moment only
        self.put_off: dict[str, None] = {}  # long jobs that wait for the budget, in the order in which they came
        self.rate = rate  # units a second; None: as many as there are
        self.credit = 0.0 if rate is None else rate * BURST
        self.paid_until: float | None = None
        self.running = 0
        self.share = max(1, limit - 1)
        self.taken: Counter[str] = Counter()  # slots, by sharer
        self.parked: dict[str, dict[str, None]] = {}  # jobs of sharers that have their part, as they came
        self.usual: dict[str, float] = {}  # sandbox -> seconds that it holds a slot, the latest time counting half
        self.slowness: dict[str, float] = {}  # sandbox -> how many times as long as expected; the latest one last
        self.queued: dict[str, StageJob] = {}
        self.urgent: list[tuple[float, int, str]] = []
        self.fair: list[tuple[float, float, int, str]] = []
        self.due: list[tuple[float, int, str]] = []
        self.virtual = 0.0
        self.finish_tags: dict[str, float] = {}

    def add(self, job: StageJob) -> None:
        job.sharer = job.owner or job.sandbox
        if self.budget is not None:
            usual = self.usual.get(job.sandbox)
            job.long = job.expected > QUICK or (usual or 0.0) > QUICK * self._slow(job.sandbox)
            job.sharer = UNPROVEN if job.long or usual is None else job.sharer
        job.tag = max(self.virtual, self.finish_tags.get(job.sandbox, 0.0))
        self.finish_tags[job.sandbox] = job.tag + job.cost
        self.queued[job.id] = job
        heapq.heappush(self.due, (job.deadline, job.order, job.id))
        self._enter(job)

    def _slow(self, sandbox: str) -> float:
        """How slow the host is now, as all others found it."""
        others = (times for name, times in self.slowness.items() if name != sandbox)
        return max(1.0, min(others, default=math.inf))

    def _enter(self, job: StageJob) -> None:
        heapq.heappush(self.fair, (job.tag, job.deadline, job.order, job.id))
        if job.waited or job.overdue:
            heapq.heappush(self.urgent, (job.deadline, job.order, job.id))

    def promote(self, job: StageJob) -> None:
        heapq.heappush(self.urgent, (job.deadline, job.order, job.id))

    def pay(self, now: float) -> None:
        """Earn the share of the time that passed."""
        if self.rate is not None:
            passed = max(0.0, now - self.paid_until) if self.paid_until is not None else 0.0
            self.credit = min(self.rate * BURST, self.credit + passed * self.rate)
            self.paid_until = now

    def wake(self, now: float) -> float | None:
        """When a job may start that only the share or the budget holds back, if there is one."""
        if not self.queued or self.running >= self.limit:
            return None
        if self.budget is not None:
            return self.budget.allows_at(now) if self.put_off else None
        if self.rate is None or self.credit > 0:
            return None
        soonest = now - self.credit / self.rate + 1e-3
        return min(soonest, self.due[0][0]) if self.due else soonest

    def pop(self, now: float) -> StageJob | None:
        if self.budget and self.put_off and self.budget.allows(now):
            for name in self.put_off:
                self._enter_again(name)
            self.put_off.clear()
        while self.due and (self.due[0][2] not in self.queued or self.due[0][0] <= now):
            deadline, order, name = heapq.heappop(self.due)
            if name in self.queued:
                self.queued[name].overdue = True
                heapq.heappush(self.urgent, (deadline, order, name))
        while self.urgent:
            name = heapq.heappop(self.urgent)[-1]
            if self._free(name, now):
                return self._take(name, now)
        if self.rate is not None and self.credit <= 0:
            return None
        while self.fair:
            name = heapq.heappop(self.fair)[-1]
            if self._free(name, now):
                return self._take(name, now)
        if not self.queued:
            self.finish_tags.clear()  # idle: forget what was used, so that the table cannot grow for ever
        return None

    def _free(self, name: str, now: float) -> bool:
        """Whether this job is still queued and may start. One that has to wait for its part is put aside."""
        job = self.queued.get(name)
        if job is None:
            return False
        if self.budget and job.long and not self.budget.allows(now):
            self.put_off[name] = None
            return False
        if self.taken[job.sharer] < self.share:
            return True
        self.parked.setdefault(job.sharer, {})[name] = None
        return False

    def ended(self, job: StageJob, took: float | None) -> None:
        """A running job has ended after `took` seconds (None: it is not known)."""
        self.running -= 1
        self.taken[job.sharer] -= 1
        if not self.taken[job.sharer]:
            del self.taken[job.sharer]
        if self.budget and job.long:
            self.budget.end((took or 0.0) / self._slow(job.sandbox) - job.expected)
        if self.budget and took is not None:
            self.usual[job.sandbox] = usual = (took + self.usual.get(job.sandbox, took)) / 2
            self.slowness.pop(job.sandbox, None)
            self.slowness[job.sandbox] = usual / job.expected
            if len(self.slowness) > EXISTING:
                del self.slowness[next(iter(self.slowness))]
        for name in self.parked.pop(job.sharer, ()):
            self._enter_again(name)

    def _enter_again(self, name: str) -> None:
        if (waiting := self.queued.get(name)) is not None:
            self._enter(waiting)

    def _take(self, name: str, now: float) -> StageJob:
        job = self.queued.pop(name)
        if self.budget and job.long:
            self.budget.begin(job.expected)
        elif self.budget:
            self.budget.quick_at = now
        self.taken[job.sharer] += 1
        if self.rate is not None:
            self.credit -= job.cost
        self.virtual = max(self.virtual, job.tag)
        return job


class Schedule:
    """The queue of a host. `submit`, then `start` whenever something changed, then `finish`."""

    def __init__(
        self,
        limits: Mapping[CheckpointStage, int],
        rates: Mapping[CheckpointStage, float] | None = None,
        *,
        processors: int = 2,
    ) -> None:
        rates, budget = rates or {}, _Budget(processors)
        self._lanes = {
            stage: _Lane(limits[stage], rates.get(stage), budget=budget if stage in PROVING else None)
            for stage in limits
        }
        self._jobs: dict[str, StageJob] = {}
        self._arrivals = 0
        self._injections: dict[str, _Injections] = {}
        self._refused: Counter[str] = Counter()  # dumps of each sandbox in a row
        self._held: list[tuple[float, int, str]] = []  # jobs of penalized sandboxes, by when they enter their lane

    def submit(self, job: StageJob) -> None:
        """Queue `job`. Its id must be new."""
        if job.id in self._jobs:
            raise ValueError(f"job {job.id} is already known")
        self._arrivals += 1
        job.order = self._arrivals
        if job.stage in PROVING:
            job.deadline += BEHIND * (job.expected - MIN_DUMP_SECONDS)
        self._jobs[job.id] = job
        if (injections := self._injections.get(job.sandbox)) is not None:
            self._lanes[job.stage].usual.pop(job.sandbox, None)
            heapq.heappush(self._held, (injections.until, job.order, job.id))
        else:
            self._lanes[job.stage].add(job)

    def inject(self, sandbox: str, now: float) -> float:
        """A job of this sandbox held its slot for nothing. Returns how many seconds the next one waits at least."""
        for name in [name for name, item in self._injections.items() if now > item.until + FORGIVEN]:
            del self._injections[name]
        count = self._injections[sandbox].count + 1 if sandbox in self._injections else 1
        wait: float = min(MAX_INJECTED, INJECTED * 2 ** min(count - 1, 10))
        self._injections[sandbox] = _Injections(count, now + wait)
        return wait

    def refuse(self, sandbox: str, now: float) -> float:
        """A dump of this sandbox was refused. Returns how many seconds the next one waits at least."""
        self._refused[sandbox] += 1
        if self._refused[sandbox] <= REFUSED_FREE:
            return 0.0
        injections = self._injections.setdefault(sandbox, _Injections(0, now))
        injections.until = max(injections.until, now + REFUSED)
        return injections.until - now

    def succeeded(self, sandbox: str, now: float) -> None:
        """A job of this sandbox succeeded: the next one need not wait. The penalty is remembered for a while."""
        self._refused.pop(sandbox, None)
        if (injections := self._injections.get(sandbox)) is not None:
            if not injections.count or now > injections.until + FORGIVEN:
                del self._injections[sandbox]
            else:
                injections.until = min(injections.until, now)

    def forget(self, sandbox: str) -> None:
        """The sandbox is gone."""
        self._injections.pop(sandbox, None)
        self._refused.pop(sandbox, None)
        for lane in self._lanes.values():
            lane.usual.pop(sandbox, None)
            lane.slowness.pop(sandbox, None)

    def promote(self, name: str) -> None:
        """A caller waits for this job. Unknown, running or promoted already: no effect."""
        job = self._jobs.get(name)
        if job is None or job.running or job.waited:
            return
        job.waited = True
        if name in self._lanes[job.stage].queued:
            self._lanes[job.stage].promote(job)

    def start(self, now: float) -> list[StageJob]:
        """The jobs to start now; each counts as running until :meth:`finish`."""
        while self._held and self._held[0][0] <= now:
            if (job := self._jobs.get(heapq.heappop(self._held)[-1])) is not None:
                self._lanes[job.stage].add(job)
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
        times = [time for lane in self._lanes.values() if (time := lane.wake(now)) is not None]
        times += [self._held[0][0]] if self._held else []
        return min(times, default=None)

    def finish(self, name: str, took: float | None = None) -> None:
        """The job ended, however it ended, after `took` seconds in its slot; or it is cancelled before it started."""
        job = self._jobs.pop(name)
        lane = self._lanes[job.stage]
        if job.running:
            lane.ended(job, took)
        else:
            lane.queued.pop(name, None)  # not there yet: its sandbox is penalized

    def queued(self, stage: CheckpointStage | None = None) -> int:
        return sum(not job.running for job in self._jobs.values() if stage in (None, job.stage))

    def running(self, stage: CheckpointStage | None = None) -> int:
        return sum(lane.running for name, lane in self._lanes.items() if stage in (None, name))
