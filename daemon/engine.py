"""Runs checkpoint work in the order that :mod:`daemon.schedule` decides.

Owns: the one queue of a host and the tasks that it runs. Does not own: the order (pure, in
`schedule`), or what a job does. Guarantee: a job's slot is given back however the job ends; a job
that somebody awaits is promoted.

Calling pattern::

    ticket = engine.submit(Stage.DUMP, sandbox="sb", deadline=now + think, work=capture)
    ...                       # the model thinks
    await ticket.wait()       # promotes, then returns what `work` returned or raises what it raised
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from daemon.schedule import Job, Schedule, Stage


class Ticket:
    """One submitted job."""

    def __init__(self, engine: Engine, job: Job, work: Callable[[], Awaitable[Any]]) -> None:
        self._engine = engine
        self._work = work
        self.job = job
        self.done: asyncio.Future[Any] = engine.loop.create_future()
        self.done.add_done_callback(_retrieve)
        self.task: asyncio.Task[Any] | None = None

    def promote(self) -> None:
        """Somebody waits for it."""
        self._engine.promote(self)

    async def wait(self) -> Any:
        """Promote, then wait for the result. Cancelling the waiter does not cancel the job."""
        self.promote()
        return await asyncio.shield(self.done)

    def start(self) -> None:
        self.task = self._engine.loop.create_task(_run(self._work), name=self.job.id)
        self.task.add_done_callback(self._settle)

    def _settle(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            self.done.cancel()
        elif (error := task.exception()) is not None:
            self.done.set_exception(error)
        else:
            self.done.set_result(task.result())
        self._engine.finished(self)


async def _run(work: Callable[[], Awaitable[Any]]) -> Any:
    return await work()


class Engine:
    """The checkpoint queue of a host."""

    def __init__(self, limits: Mapping[Stage, int], *, clock: Callable[[], float] = time.monotonic) -> None:
        self.loop = asyncio.get_running_loop()
        self._schedule = Schedule(limits)
        self._clock = clock
        self._tickets: dict[str, Ticket] = {}
        self._ids = itertools.count(1)
        self._closed = False

    def now(self) -> float:
        return self._clock()

    def submit(
        self, stage: Stage, *, sandbox: str, deadline: float, work: Callable[[], Awaitable[Any]], waited: bool = False
    ) -> Ticket:
        """Queue `work`. It starts at once when a slot of its stage is free."""
        if self._closed:
            raise RuntimeError("the checkpoint engine is closed")
        job = Job(f"{stage.value}-{next(self._ids)}", stage, sandbox, deadline, waited=waited)
        ticket = Ticket(self, job, work)
        self._tickets[job.id] = ticket
        self._schedule.submit(job)
        self._pump()
        return ticket

    def promote(self, ticket: Ticket) -> None:
        self._schedule.promote(ticket.job.id)

    def finished(self, ticket: Ticket) -> None:
        del self._tickets[ticket.job.id]
        self._schedule.finish(ticket.job.id)
        if not self._closed:
            self._pump()

    def _pump(self) -> None:
        for job in self._schedule.start(self._clock()):
            self._tickets[job.id].start()

    def queued(self, *stages: Stage) -> int:
        return sum(self._schedule.queued(stage) for stage in stages or Stage)

    def running(self, *stages: Stage) -> int:
        return sum(self._schedule.running(stage) for stage in stages or Stage)

    async def drain(self, timeout: float | None = None) -> bool:
        """Wait until nothing is queued or running. False when `timeout` seconds passed first."""
        try:
            async with asyncio.timeout(timeout):
                while self._tickets:
                    await asyncio.wait([ticket.done for ticket in self._tickets.values()])
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Cancel what is left. Idempotent."""
        self._closed = True
        tickets = list(self._tickets.values())
        for ticket in tickets:
            if ticket.task is None:
                ticket.done.cancel()
                self.finished(ticket)
            else:
                ticket.task.cancel()
        await asyncio.gather(*(t.task for t in tickets if t.task is not None), return_exceptions=True)


def _retrieve(future: asyncio.Future[Any]) -> None:
    """A failed job is recorded where it failed; nobody has to await its ticket."""
    if not future.cancelled():
        future.exception()
