"""Runs checkpoint work in the order that :mod:`daemon.checkpoints.schedule` decides.

Guarantee: a job's slot is given back however the job ends; a job with a waiting caller is promoted.

Calling pattern::

    ticket = queue.submit(Stage.DUMP, sandbox="sb", deadline=now + think, work=capture)
    ...                       # the model thinks
    ticket.promote()
    await asyncio.shield(ticket.done)    # what `work` returned, or raises what it raised; the caller may leave
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from daemon.checkpoints.schedule import MIN_DUMP_SECONDS, CheckpointStage, Schedule, StageJob

RECENT = 2048  # waits of each stage that the statistics look back on


class QueuedCapture:
    """One submitted job."""

    def __init__(self, queue: CheckpointQueue, job: StageJob, work: Callable[[], Awaitable[Any]]) -> None:
        self._queue = queue
        self._work = work
        self.job = job
        self.done: asyncio.Future[Any] = queue.loop.create_future()
        self.done.add_done_callback(_retrieve)
        self.task: asyncio.Task[Any] | None = None
        self.submitted = queue.now()
        self.started: float | None = None

    def promote(self) -> None:
        """A caller waits for it."""
        self._queue.promote(self)

    def cancel(self) -> None:
        """It is no longer needed. Queued, it never starts; under way, its task is cancelled."""
        if self.task is not None:
            self.task.cancel()
        elif self._queue.holds(self):
            self.done.cancel()
            self._queue.finished(self)

    def start(self) -> None:
        self.started = self._queue.now()
        self.task = asyncio.ensure_future(self._work())
        self.task.add_done_callback(self._finalize)

    def _finalize(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or self.done.done():
            self.done.cancel()
        elif (error := task.exception()) is not None:
            self.done.set_exception(error)
        else:
            self.done.set_result(task.result())
        self._queue.finished(self)


class CheckpointQueue:
    """The checkpoint queue of a host."""

    def __init__(
        self,
        limits: Mapping[CheckpointStage, int],
        rates: Mapping[CheckpointStage, float] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._schedule = Schedule(limits, rates, processors=os.cpu_count() or 1)
        self._timer: asyncio.TimerHandle | None = None
        self._waits: dict[CheckpointStage, deque[float]] = {stage: deque(maxlen=RECENT) for stage in CheckpointStage}
        self._started: dict[CheckpointStage, int] = dict.fromkeys(CheckpointStage, 0)
        self._clock = clock
        self._tickets: dict[str, QueuedCapture] = {}
        self._ids = itertools.count(1)
        self._closed = False

    def now(self) -> float:
        return self._clock()

    def submit(
        self,
        stage: CheckpointStage,
        *,
        sandbox: str,
        deadline: float,
        work: Callable[[], Awaitable[Any]],
        waited: bool = False,
        cost: float = 1.0,
        owner: str = "",
        expected: float = MIN_DUMP_SECONDS,
    ) -> QueuedCapture:
        """Queue `work`. It starts at once when a slot of its stage is free that its owner may take."""
        if self._closed:
            raise RuntimeError("the checkpoint queue is closed")
        job = StageJob(f"{stage.value}-{next(self._ids)}", stage, sandbox, deadline, cost, waited, owner, expected)
        ticket = QueuedCapture(self, job, work)
        self._tickets[job.id] = ticket
        self._schedule.submit(job)
        self._pump()
        return ticket

    def holds(self, ticket: QueuedCapture) -> bool:
        """Whether it is queued or under way."""
        return ticket.job.id in self._tickets

    def promote(self, ticket: QueuedCapture) -> None:
        self._schedule.promote(ticket.job.id)
        if not self._closed:
            self._pump()  # the share no longer holds it back

    def finished(self, ticket: QueuedCapture) -> None:
        del self._tickets[ticket.job.id]
        self._schedule.finish(ticket.job.id, None if ticket.started is None else self.now() - ticket.started)
        if not self._closed:
            self._pump()

    def inject(self, sandbox: str) -> float:
        """Processes of this sandbox did not stop: its next job waits. Returns the seconds, at least."""
        return self._schedule.inject(sandbox, self._clock())

    def refuse(self, sandbox: str) -> float:
        """A dump of this sandbox was refused. Returns the seconds that its next job waits, at least."""
        return self._schedule.refuse(sandbox, self._clock())

    def succeeded(self, sandbox: str) -> None:
        """A checkpoint of this sandbox was taken."""
        self._schedule.succeeded(sandbox, self._clock())

    def forget(self, sandbox: str) -> None:
        """This sandbox is gone."""
        self._schedule.forget(sandbox)

    def _pump(self) -> None:
        now = self._clock()
        for job in self._schedule.start(now):
            ticket = self._tickets[job.id]
            self._waits[job.stage].append(now - ticket.submitted)
            self._started[job.stage] += 1
            ticket.start()
        if self._timer is not None:
            self._timer.cancel()
        wake = self._schedule.wake(now)
        self._timer = None if wake is None else self.loop.call_later(max(0.0, wake - now), self._pump)

    def queued(self, *stages: CheckpointStage) -> int:
        return sum(self._schedule.queued(stage) for stage in stages or CheckpointStage)

    def running(self, *stages: CheckpointStage) -> int:
        return sum(self._schedule.running(stage) for stage in stages or CheckpointStage)

    def statistics(self) -> dict[str, dict[str, float]]:
        """By stage: jobs that wait, jobs under way, jobs started ever, and how long the latest waited (ms)."""
        return {
            stage.value: {
                "queued": self.queued(stage),
                "running": self.running(stage),
                "started": self._started[stage],
                "wait_ms_p50": 1000 * quantile(self._waits[stage], 0.5),
                "wait_ms_p99": 1000 * quantile(self._waits[stage], 0.99),
            }
            for stage in CheckpointStage
        }

    async def close(self) -> None:
        """Cancel what is left. Idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        tickets = list(self._tickets.values())
        for ticket in tickets:
            ticket.cancel()
        await asyncio.gather(*(t.task for t in tickets if t.task is not None), return_exceptions=True)


def quantile(values: Iterable[float], share: float) -> float:
    """The value below which `share` of the values lie (nearest rank); 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _retrieve(future: asyncio.Future[Any]) -> None:
    """A failed job is recorded where it failed; its ticket need not be awaited."""
    if not future.cancelled():
        future.exception()
