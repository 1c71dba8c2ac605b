"""The engine runs jobs within the limits, in the order of the schedule, and gives every slot back."""

from __future__ import annotations

import asyncio

import pytest

from daemon.engine import Engine
from daemon.schedule import Stage

LIMITS = {Stage.DUMP: 1, Stage.SNAPSHOT: 1, Stage.PACK: 1}


async def test_a_waiter_promotes_its_job() -> None:
    engine, gate, order = Engine(LIMITS, clock=lambda: 0.0), asyncio.Event(), []

    def work(name: str):
        async def run() -> str:
            order.append(name)
            await gate.wait()
            return name

        return run

    tickets = {
        n: engine.submit(Stage.DUMP, sandbox=n, deadline=d, work=work(n)) for n, d in [("a", 1), ("b", 2), ("c", 3)]
    }
    waiter = asyncio.ensure_future(tickets["c"].wait())
    await asyncio.sleep(0)
    gate.set()
    assert await waiter == "c"
    assert await tickets["b"].done == "b"
    assert order == ["a", "c", "b"]
    assert engine.queued() == engine.running() == 0


async def test_a_failure_belongs_to_the_ticket_and_frees_the_slot() -> None:
    engine = Engine(LIMITS)

    async def broken() -> None:
        raise OSError("disk")

    async def fine() -> int:
        return 7

    first = engine.submit(Stage.PACK, sandbox="a", deadline=1, work=broken)
    second = engine.submit(Stage.PACK, sandbox="b", deadline=2, work=fine)
    with pytest.raises(OSError, match="disk"):
        await first.wait()
    assert await second.wait() == 7


async def test_close_cancels_what_runs_and_what_waits() -> None:
    engine, forever = Engine(LIMITS), asyncio.Event()
    tickets = [engine.submit(Stage.DUMP, sandbox=str(n), deadline=n, work=forever.wait) for n in range(3)]
    assert not await engine.drain(timeout=0)
    await engine.close()
    for ticket in tickets:
        with pytest.raises(asyncio.CancelledError):
            await ticket.done
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(Stage.DUMP, sandbox="x", deadline=1, work=forever.wait)


async def test_drain_waits_for_all() -> None:
    engine, done = Engine(LIMITS), []

    async def work() -> None:
        await asyncio.sleep(0)
        done.append(1)

    for number in range(5):
        engine.submit(Stage.SNAPSHOT, sandbox=str(number), deadline=1, work=work)
    assert await engine.drain()
    assert len(done) == 5
