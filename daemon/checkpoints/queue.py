"""Runs checkpoint work in the order that :mod:`daemon.checkpoints.schedule` decides.

Guarantee: a job's slot is given back however the job ends; a job with a waiting caller is promoted.

Calling pattern::

    ticket = queue.submit(Stage.DUMP, sandbox="sb", deadline=now + think)
    async with ticket:        # waits for its slot; a caller that needs the result calls ticket.promote()
        await capture()       # the slot is given back at the end
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from daemon.checkpoints.schedule import MIN_DUMP_SECONDS, CheckpointStage, Schedule, StageJob

RECENT = 2048  # waits of each stage that the statistics look back on


class QueuedCapture:
    """One submitted job. The task that enters it does the job within."""

    def __init__(self, queue: CheckpointQueue, job: StageJob) -> None:
        self._queue = queue
        self.job = job
        self.task: asyncio.Task[Any] | None = None  # that waits, or works
        self.submitted = queue.now()
        self.started: float | None = None
        self._slot: asyncio.Future[None] = queue.loop.create_future()

    def promote(self) -> None:
        """A caller waits for it."""
        self._queue.promote(self)

    def start(self) -> None:
        """It has a slot. One whose task has just been cancelled gives it back at once."""
        if not self._slot.cancelled():
            self.started = self._queue.now()
            self._slot.set_result(None)

    async def __aenter__(self) -> None:
        self.task = asyncio.current_task()
        try:
            await self._slot
        except BaseException:
            self._queue.finished(self)
            raise

    async def __aexit__(self, *_: object) -> None:
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
        waited: bool = False,
        cost: float = 1.0,
        owner: str = "",
        expected: float = MIN_DUMP_SECONDS,
    ) -> QueuedCapture:
        """Queue a job, to be entered at once. It starts when a slot of its stage is free that its owner may take."""
        if self._closed:
            raise RuntimeError("the checkpoint queue is closed")
        job = StageJob(f"{stage.value}-{next(self._ids)}", stage, sandbox, deadline, cost, waited, owner, expected)
        ticket = QueuedCapture(self, job)
        self._tickets[job.id] = ticket
        self._schedule.submit(job)
        self._pump()
        return ticket

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
        """Cancel the tasks that wait or work. Idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        tasks = [ticket.task for ticket in self._tickets.values() if ticket.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def quantile(values: Iterable[float], share: float) -> float:
    """The value below which `share` of the values lie (nearest rank); 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
