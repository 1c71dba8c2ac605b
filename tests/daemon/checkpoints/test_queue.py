"""The engine runs jobs within the limits, in the order of the schedule, and gives every slot back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from daemon.checkpoints.queue import CheckpointQueue
from daemon.checkpoints.schedule import CheckpointStage

LIMITS = dict.fromkeys(CheckpointStage, 1)


async def within(ticket: Any, work: Callable[[], Awaitable[Any]]) -> Any:
    async with ticket:
        return await work()


async def test_a_waiter_promotes_its_job() -> None:
    queue, gate, order = CheckpointQueue(LIMITS, clock=lambda: 0.0), asyncio.Event(), []

    def work(name: str):
        async def run() -> str:
            order.append(name)
            await gate.wait()
            return name

        return run

    tickets = {n: queue.submit(CheckpointStage.DUMP, sandbox=n, deadline=d) for n, d in [("a", 1), ("b", 2), ("c", 3)]}
    done = {name: asyncio.ensure_future(within(ticket, work(name))) for name, ticket in tickets.items()}
    tickets["c"].promote()
    await asyncio.sleep(0)
    gate.set()
    assert await done["c"] == "c"
    assert await done["b"] == "b"
    assert order == ["a", "c", "b"]
    assert queue.queued() == queue.running() == 0


async def test_a_failure_belongs_to_the_caller_and_frees_the_slot() -> None:
    queue = CheckpointQueue(LIMITS)
    first = queue.submit(CheckpointStage.COMPRESS, sandbox="a", deadline=1)
    second = queue.submit(CheckpointStage.COMPRESS, sandbox="b", deadline=2)
    with pytest.raises(OSError, match="disk"):
        async with first:
            raise OSError("disk")
    async with second:
        assert queue.running() == 1
    assert queue.queued() == queue.running() == 0


async def test_who_leaves_the_queue_or_a_slot_leaves_it_to_the_next() -> None:
    queue, forever = CheckpointQueue(LIMITS), asyncio.Event()
    tickets = [queue.submit(CheckpointStage.DUMP, sandbox=str(n), deadline=n) for n in range(3)]
    tasks = [asyncio.ensure_future(within(ticket, forever.wait)) for ticket in tickets]
    await asyncio.sleep(0)
    for task in tasks[:2]:  # one that works, one that waits
        task.cancel()
    await asyncio.wait(tasks[:2])
    await asyncio.sleep(0)
    assert [ticket.started is not None for ticket in tickets] == [True, False, True]
    tasks[2].cancel()
    await asyncio.wait(tasks)
    assert queue.queued() == queue.running() == 0


@pytest.mark.parametrize("steps", range(4))
async def test_who_is_given_a_slot_as_it_leaves_gives_it_back(steps: int) -> None:
    queue, forever = CheckpointQueue(LIMITS), asyncio.Event()
    tickets = [queue.submit(CheckpointStage.DUMP, sandbox=name, deadline=1) for name in "ab"]
    works, waits = (asyncio.ensure_future(within(ticket, forever.wait)) for ticket in tickets)
    await asyncio.sleep(0)
    works.cancel()
    for _ in range(steps):
        await asyncio.sleep(0)
    waits.cancel()
    await asyncio.wait([works, waits])
    assert queue.queued() == queue.running() == 0
    async with queue.submit(CheckpointStage.DUMP, sandbox="c", deadline=1):
        assert queue.running() == 1


async def test_close_cancels_what_runs_and_what_waits() -> None:
    queue, forever = CheckpointQueue(LIMITS), asyncio.Event()
    tickets = [queue.submit(CheckpointStage.DUMP, sandbox=str(n), deadline=n) for n in range(3)]
    tasks = [asyncio.ensure_future(within(ticket, forever.wait)) for ticket in tickets]
    await asyncio.sleep(0)
    await queue.close()
    assert all(task.cancelled() for task in tasks)
    with pytest.raises(RuntimeError, match="closed"):
        queue.submit(CheckpointStage.DUMP, sandbox="x", deadline=1)


async def test_a_share_lets_a_job_start_when_it_is_paid_for() -> None:
    queue, started = CheckpointQueue(LIMITS, {CheckpointStage.COMPRESS: 1000.0}), []

    async def work() -> None:
        started.append(queue.now())

    began = queue.now()
    tickets = [
        queue.submit(CheckpointStage.COMPRESS, sandbox=str(number), deadline=began + 60, cost=1050.0)
        for number in range(3)
    ]
    await asyncio.gather(*(within(ticket, work) for ticket in tickets))
    assert started[1] - began >= 0.045  # the first had a burst of 1000, and overdrew it by 50
    assert started[2] - began >= 1.095  # the second by 1050 more
    result = queue.statistics()["compress"]
    assert (result["queued"], result["running"], result["started"]) == (0, 0, 3)
    assert result["wait_ms_p99"] >= result["wait_ms_p50"] > 0
