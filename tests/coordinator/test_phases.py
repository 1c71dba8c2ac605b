"""Jobs that take turns: each phase once and in order, whoever dies when."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from coordinator.decide.turns import TurnsView, due
from coordinator.phases import GONE, NO_CAPACITY, SLOTS, PhaseScheduler, SharedCapacity, parse_share
from coordinator.state import CoordinatorState
from rollout.plan import SharePlan
from rollout.service.phases import PhaseClient as Clients
from sandbox.errors import Invalid, TooMany, Unsupported
from sandbox.messages.cluster import JobShape, PhaseAnswer, PhaseInfo, PhaseKind, PhaseRequest
from tests.support.cluster import Cluster

SHAPE = JobShape(rollout=10, train=10, slowdown=3.0)
ONE = SharedCapacity(rollout=1, train=1)


class Killed(Exception):
    """The coordinator died."""


class Mortal(CoordinatorState):
    """Dies at a write, before or after it is on disk, when `dies` says so."""

    def __init__(self, path: Path, dies: Callable[[], bool] = lambda: False):
        super().__init__(path)
        self.dies, self.dead = dies, False

    async def all_or_none(self, changes: object) -> None:
        self._live()
        await super().all_or_none(changes)  # type: ignore[arg-type]
        self._live()

    def _live(self) -> None:
        self.dead = self.dead or self.dies()
        if self.dead:
            raise Killed


@contextlib.asynccontextmanager
async def served(directory: Path, shared: SharedCapacity = ONE, **options: object) -> AsyncIterator[PhaseScheduler]:
    state = CoordinatorState(directory / "cluster.sqlite")
    try:
        yield PhaseScheduler(state, shared, **options)  # type: ignore[arg-type]
    finally:
        await state.close()


async def request(
    phases: PhaseScheduler, job: str, kind: PhaseKind, number: int, shape: JobShape = SHAPE, wait: float = 0.0
) -> PhaseAnswer:
    return await phases.request(PhaseRequest(job=job, kind=kind, number=number, shape=shape, wait=wait))


async def there(phases: PhaseScheduler) -> list[PhaseInfo]:
    return [item for item in await phases.all() if item.state != "left"]


async def test_one_rolls_out_while_the_other_trains(tmp_path: Path) -> None:
    async with served(tmp_path) as phases:
        assert (await request(phases, "a", "rollout", 0)).state == "begun"
        answer = await request(phases, "b", "rollout", 0)
        assert (answer.state, answer.reason) == ("waiting", "a works there")
        waiting = asyncio.create_task(request(phases, "b", "rollout", 0, wait=30))
        assert (await request(phases, "a", "train", 0)).state == "begun"
        assert (await waiting).state == "begun"  # as soon as a had ended
        assert (await request(phases, "a", "rollout", 1)).state == "waiting"
        assert (await request(phases, "a", "train", 0)).state == "past"  # of a process that was replaced
        await phases.leave("b")
        assert (await request(phases, "b", "rollout", 0)).state == "past"  # a word of before takes no machine
        assert (await request(phases, "a", "rollout", 1)).state == "begun"
        assert [(item.job, item.kind, item.number, item.state) for item in await there(phases)] == [
            ("a", "rollout", 1, "begun")
        ]


async def test_who_comes_later_gets_a_turn_in_the_round_that_goes_on(tmp_path: Path) -> None:
    async with served(tmp_path) as phases:
        await request(phases, "old", "rollout", 500)
        await request(phases, "new", "rollout", 0)
        assert (await request(phases, "old", "train", 500)).state == "begun"
        await request(phases, "old", "rollout", 501)
        assert (await request(phases, "new", "train", 0)).state == "begun"
        assert (await request(phases, "old", "rollout", 501)).state == "begun"
        assert (await request(phases, "new", "rollout", 1)).state == "waiting"


async def test_a_job_that_was_killed_for_good_holds_no_room(tmp_path: Path) -> None:
    now, tight = 0.0, JobShape(rollout=10, train=5, slowdown=1.0)
    async with served(tmp_path, clock=lambda: now) as phases:
        assert (await request(phases, "dead", "rollout", 3, tight)).state == "begun"
        now = 100.0
        await phases.poll()
        assert (await request(phases, "next", "rollout", 0, tight)).reason == NO_CAPACITY  # the other may come back
        now = 1 + GONE
        await request(phases, "next", "rollout", 0, tight)
        await phases.poll()
        assert (await request(phases, "next", "rollout", 0, tight)).state == "begun"
        assert [item.job for item in await there(phases)] == ["next"]
        assert (await request(phases, "dead", "rollout", 3, tight)).reason == NO_CAPACITY  # as whoever comes now
    async with served(tmp_path) as phases:
        assert [item.job for item in await there(phases)] == ["next", "dead"]


async def test_a_silent_job_is_passed_over_and_comes_back_in_its_turn(tmp_path: Path) -> None:
    now = 0.0
    async with served(tmp_path, clock=lambda: now, ttl=30.0) as phases:
        await request(phases, "a", "rollout", 0)
        await request(phases, "b", "rollout", 0)
        now = 20.0
        await request(phases, "b", "rollout", 0)
        now = 31.0
        await phases.poll()
        assert {item.job: item.state for item in await there(phases)} == {"a": "silent", "b": "begun"}
        assert (await request(phases, "a", "rollout", 0)).state == "waiting"  # it lives, and b rolls out
        await request(phases, "b", "train", 0)
        assert (await request(phases, "a", "rollout", 0)).state == "begun"
        now = 70.0
        await request(phases, "b", "train", 0)
        for number in range(1, 5):  # while a is silent
            await request(phases, "b", "rollout", number)
            await phases.poll()
            assert (await request(phases, "b", "rollout", number)).state == "begun"
            assert (await request(phases, "b", "train", number)).state == "begun"
        assert (await request(phases, "a", "train", 0)).state == "waiting"
        assert (await request(phases, "b", "rollout", 5)).state == "waiting"  # a came first into the round
        assert (await request(phases, "a", "train", 0)).state == "begun"
        assert (await request(phases, "a", "rollout", 1)).state == "begun"  # once, then it is b's turn again
        await request(phases, "a", "train", 1)
        await request(phases, "a", "rollout", 2)
        assert (await request(phases, "b", "rollout", 5)).state == "begun"


async def test_who_finds_no_room_waits_for_it(tmp_path: Path) -> None:
    big = JobShape(rollout=10, train=10, train_gb=600, rollout_gb=600, slowdown=9.0)
    async with served(tmp_path) as phases:
        assert (await request(phases, "a", "rollout", 0, big)).state == "begun"
        answer = await request(phases, "b", "rollout", 0, big)
        assert answer.state == "waiting" and "no room" in answer.reason
        impatient = JobShape(rollout=99, train=1, slowdown=1.0)
        assert "no room" in (await request(phases, "c", "rollout", 0, impatient)).reason
        await phases.leave("a")
        assert (await request(phases, "b", "rollout", 0, big)).state == "begun"
        assert (await request(phases, "c", "rollout", 0, impatient)).state == "waiting"


async def test_nothing_is_shared_unless_somebody_said_so(tmp_path: Path) -> None:
    async with served(tmp_path, parse_share(None)) as phases:
        with pytest.raises(Unsupported, match="no machines are shared"):
            await request(phases, "a", "rollout", 0)
    assert parse_share("rollout=2,train=1") == SharedCapacity(rollout=2, train=1)
    with pytest.raises(Invalid, match="rolout"):
        parse_share("rolout=2")


async def test_a_hundred_deaths_cost_no_phase_and_repeat_none(tmp_path: Path) -> None:
    """Three jobs on one machine of each kind. The coordinator dies at writes, before or after they are on disk."""
    draw, steps, deaths = random.Random(1), 60, 0
    held: dict[PhaseKind, str] = {}
    done: list[tuple[str, PhaseKind, int]] = []
    path = tmp_path / "cluster.sqlite"
    states = [Mortal(path, lambda: draw.random() < 0.15)]
    now = [PhaseScheduler(states[0], ONE)]

    async def begin(job: str, kind: PhaseKind, number: int) -> None:
        nonlocal deaths
        while True:
            phases = now[0]
            try:
                if (await request(phases, job, kind, number, wait=0.5)).state == "begun":
                    return
            except Killed:
                if phases is now[0]:  # another one begins, with what is on disk
                    deaths += 1
                    states.append(Mortal(path, (lambda: draw.random() < 0.15) if deaths < 100 else lambda: False))
                    now[0] = PhaseScheduler(states[-1], ONE)

    async def works(job: str) -> None:
        for number in range(steps):
            for kind in ("rollout", "train"):
                await begin(job, kind, number)
                other: PhaseKind = "train" if kind == "rollout" else "rollout"
                if held.get(other) == job:
                    del held[other]
                assert kind not in held, f"{held[kind]} and {job} on one machine"
                held[kind] = job
                done.append((job, kind, number))
                await asyncio.sleep(0)
                del held[kind]
        await now[0].leave(job)

    await asyncio.gather(*(works(job) for job in "abc"))
    for state in states:
        await state.close()
    assert deaths == 100
    assert len(done) == len(set(done)) == 3 * 2 * steps
    with contextlib.closing(sqlite3.connect(path)) as database:
        ((began,),) = database.execute("SELECT count(*) FROM phases").fetchall()
        decided = database.execute("SELECT row FROM decisions WHERE kind = 'turns'").fetchall()
    assert began == 3 * 2 * steps
    for (row,) in decided:  # a replay of what was decided
        logged = msgspec.json.decode(row, type=Logged)
        assert due(logged.view.turns, logged.view.busy) == logged.action
    assert decided


async def test_a_run_waits_through_deaths_of_a_real_coordinator(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "--share", "rollout=1,train=1")
    plan = SharePlan(rollout=10, train=10, slowdown=3.0, at=str(cluster.socket))
    try:
        await asyncio.to_thread(cluster.start)
        async with Clients(plan, tmp_path / "a") as first, Clients(plan, tmp_path / "b") as second:
            await first.begin("rollout", 0)
            waiting = asyncio.create_task(second.begin("rollout", 0))
            for _ in range(2):
                await asyncio.to_thread(cluster.kill)
                assert not waiting.done()  # and a, which works, notices nothing
                await asyncio.to_thread(cluster.start)
            await first.begin("train", 0)
            await asyncio.wait_for(waiting, 120)
            await first.leave()
    finally:
        await asyncio.to_thread(cluster.clean)


class Logged(msgspec.Struct):
    view: TurnsView
    action: list[str]


async def test_an_owner_has_so_many_seats_and_is_told_no_name_of_anothers_job(tmp_path: Path) -> None:
    async with served(tmp_path) as phases:
        await request(phases, "alice:first", "rollout", 0)
        for number in range(SLOTS):
            answer = await request(phases, f"bob:run:{number}", "rollout", 0)
        assert "alice" not in answer.reason
        assert (await request(phases, "bob:run:0", "rollout", 0)).state == "waiting"  # who has a seat is not refused
        with pytest.raises(TooMany):
            await request(phases, "bob:more", "rollout", 0)
        assert (await request(phases, "alice:second", "rollout", 0)).state == "waiting"
        reasons = {item.job: item.reason for item in await phases.all()}
        assert not any("alice" in reason for job, reason in reasons.items() if job.startswith("bob"))
