"""The engine runs jobs within the limits, in the order of the schedule, and gives every slot back."""

from __future__ import annotations

import asyncio

import pytest

from daemon.checkpoints.queue import CheckpointQueue
from daemon.checkpoints.schedule import CheckpointStage

LIMITS = dict.fromkeys(CheckpointStage, 1)


async def test_a_waiter_promotes_its_job() -> None:
    queue, gate, order = CheckpointQueue(LIMITS, clock=lambda: 0.0), asyncio.Event(), []

    def work(name: str):
        async def run() -> str:
            order.append(name)
            await gate.wait()
            return name

        return run

    tickets = {
        n: queue.submit(CheckpointStage.DUMP, sandbox=n, deadline=d, work=work(n))
        for n, d in [("a", 1), ("b", 2), ("c", 3)]
    }
    tickets["c"].promote()
    await asyncio.sleep(0)
    gate.set()
    assert await tickets["c"].done == "c"
    assert await tickets["b"].done == "b"
    assert order == ["a", "c", "b"]
    assert queue.queued() == queue.running() == 0


async def test_a_failure_belongs_to_the_ticket_and_frees_the_slot() -> None:
    queue = CheckpointQueue(LIMITS)

    async def broken() -> None:
        raise OSError("disk")

    async def fine() -> int:
        return 7

    first = queue.submit(CheckpointStage.COMPRESS, sandbox="a", deadline=1, work=broken)
    second = queue.submit(CheckpointStage.COMPRESS, sandbox="b", deadline=2, work=fine)
    with pytest.raises(OSError, match="disk"):
        await first.done
    assert await second.done == 7


async def test_close_cancels_what_runs_and_what_waits() -> None:
    queue, forever = CheckpointQueue(LIMITS), asyncio.Event()
    tickets = [queue.submit(CheckpointStage.DUMP, sandbox=str(n), deadline=n, work=forever.wait) for n in range(3)]
    await queue.close()
    for ticket in tickets:
        with pytest.raises(asyncio.CancelledError):
            await ticket.done
    with pytest.raises(RuntimeError, match="closed"):
        queue.submit(CheckpointStage.DUMP, sandbox="x", deadline=1, work=forever.wait)


async def test_a_share_lets_a_job_start_when_it_is_paid_for() -> None:
    queue, started = CheckpointQueue(LIMITS, {CheckpointStage.COMPRESS: 1000.0}), []

    async def work() -> None:
        started.append(queue.now())

    began = queue.now()
    tickets = [
        queue.submit(CheckpointStage.COMPRESS, sandbox=str(number), deadline=began + 60, work=work, cost=1050.0)
        for number in range(3)
    ]
    await asyncio.gather(*(ticket.done for ticket in tickets))
    assert started[1] - began >= 0.045  # the first had a burst of 1000, and overdrew it by 50
    assert started[2] - began >= 1.095  # the second by 1050 more
    result = queue.statistics()["compress"]
    assert (result["queued"], result["running"], result["started"]) == (0, 0, 3)
    assert result["wait_ms_p99"] >= result["wait_ms_p50"] > 0
