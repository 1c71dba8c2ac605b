"""What callers and a full disk can do to the coordinator: nothing that ends it, or that it tells and does not keep."""

from __future__ import annotations

import asyncio
import dataclasses
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from coordinator import app, state
from coordinator.api.routes import Routes
from coordinator.callers import Callers
from coordinator.copies import Copies
from coordinator.failover import Failover
from coordinator.jobs.keeper import Jobs
from coordinator.members import HostMember, Members, SandboxPlace
from coordinator.moves import Moves
from coordinator.phases import PhaseScheduler, SharedCapacity
from coordinator.state import CoordinatorState, CopyRow, HostRow, MoveRow
from daemon.auth.shares import Shares
from daemon.auth.tokens import TokenStore
from sandbox.errors import NoSpace
from sandbox.messages.cluster import HostedSandbox, HostReport
from sandbox.page import Logins
from tests.support.daemon_host import until

ID = "s-0123456789"
ROW = HostedSandbox(id=ID)
Full = Callable[[bool], object]


@pytest.fixture
async def members(tmp_path: Path) -> AsyncIterator[Members]:
    """Over two hosts that do not answer."""
    made = Members(CoordinatorState(tmp_path / "state" / "cluster.sqlite"), leasing=True)
    for name in ("one", "two"):
        made.hosts[name] = HostMember(name, HostRow(address=str(tmp_path / name)), made.ttl)
    yield made
    await made.close()
    await made.state.close()


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch, members: Members) -> Full:
    """``full(True)``: the file takes nothing more."""
    monkeypatch.setattr("sandbox.database._FULL", (sqlite3.SQLITE_READONLY,))

    return lambda target: members.state._writer.connection.execute(f"PRAGMA query_only = {target}")


# --------------------------------------------------------------------------- a full disk


async def test_what_a_full_disk_did_not_take_is_not_known(members: Members, full: Full) -> None:
    ledgers = members.state
    await ledgers.put_home(ID, "one")
    await ledgers.put_move(ID, MoveRow(source="one", target="two", sandbox=ROW))
    full(True)
    with pytest.raises(NoSpace):
        await ledgers.put_copy(ID, CopyRow(checkpoint="c-1", host="two", source="one", sandbox=ROW))
    with pytest.raises(NoSpace):
        await ledgers.put_home("s-9876543210", "two")
    with pytest.raises(NoSpace):
        await ledgers.put_move(ID, MoveRow(source="two", target="one", sandbox=ROW))
    assert (ledgers.copies[ID], ledgers.homes, ledgers.moves[ID].source) == ({}, {ID: "one"}, "one")
    await ledgers.decided("place", "v", "a")  # the log of decisions keeps nothing from taking place
    full(False)
    await ledgers.put_home(ID, "two")
    assert ledgers.homes[ID] == "two"


async def test_a_full_disk_ends_no_part_and_the_sandboxes_of_a_lost_host_come_back_when_there_is_room(
    members: Members, monkeypatch: pytest.MonkeyPatch, full: Full
) -> None:
    monkeypatch.setattr("coordinator.app.AGAIN", 0.01)
    monkeypatch.setattr("coordinator.failover.RETRY_DELAY", 0.01)
    copies = Copies(members)
    failover = Failover(members, copies, Moves(members, copies))
    came: list[str] = []

    async def arrived(sandbox: str, *_: object) -> None:
        await members.state.put_home(sandbox, "two")
        came.append(sandbox)
        del members.places[sandbox]

    monkeypatch.setattr(failover, "_arrive", arrived)
    await members.state.put_copy(ID, CopyRow(checkpoint="c-1", host="two", source="one", sandbox=ROW))
    members.places[ID] = SandboxPlace("one", ROW, time.monotonic())
    one, two = members.hosts["one"], members.hosts["two"]
    one.lease = state_of(one, ends_at=0.0, refused=True)
    two.lease = state_of(two, last_seen_at=time.monotonic() + 600)
    two.report = HostReport(clock=1, boot="b", cpus=1, memory_bytes=2, memory_free=1, disk_bytes=2, disk_free=1, load=0)
    full(True)
    parts = [
        asyncio.create_task(app.lasting(item)) for item in (failover, PhaseScheduler(members.state, SharedCapacity()))
    ]
    await asyncio.sleep(1.0)
    assert not any(item.done() for item in parts) and not came
    full(False)
    await until(lambda: came == [ID], "it comes back", 60)
    for item in parts:
        item.cancel()
    await asyncio.gather(*parts, return_exceptions=True)


def state_of(member: HostMember, **fields: object):  # type: ignore[no-untyped-def]
    return dataclasses.replace(member.lease, **fields)  # type: ignore[arg-type]


# --------------------------------------------------------------------------- callers


async def test_of_one_callers_answers_the_newest_are_kept_and_of_anothers_all(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "ANSWERS", 1 << 20)
    monkeypatch.setattr(state, "CALLS", 100)
    ledgers = members.state
    await ledgers.put_answer("quiet key", ID, b"mine")
    await ledgers.put_call("quiet key", "one")
    for number in range(200):
        await ledgers.put_answer(f"loud {number}", ID, bytes(64 << 10))
        await ledgers.put_call(f"loud {number}", "one")
    retained = [number for number in range(200) if await ledgers.answer(f"loud {number}") is not None]
    assert 0 < len(retained) <= 19 and retained == list(range(200 - len(retained), 200))
    assert await ledgers.answer("quiet key") == b"mine"
    calls = sorted(int(call.split()[1]) for call in ledgers.calls if call.startswith("loud"))
    assert 0 < len(calls) <= 110 and calls == list(range(200 - len(calls), 200))
    assert ledgers.calls["quiet key"] == "one"


async def test_the_calls_of_one_owner_hold_no_more_than_a_part_of_the_memory(members: Members, tmp_path: Path) -> None:
    tokens = TokenStore(tmp_path / "tokens.json", clock=time.time)
    copies = Copies(members)
    jobs = Jobs(tmp_path / "state")
    routes = Routes(
        members,
        Callers(tokens, Logins(bytes(32)), members),
        copies,
        Moves(members, copies),
        jobs,
        PhaseScheduler(members.state, SharedCapacity()),
    )
    routes._memory = Shares("in memory", 1 << 20)
    server = TestServer(routes.application())
    await server.start_server()
    loud, quiet = (tokens.create(name=name, scope="exec")[1] for name in ("loud", "quiet"))
    stay = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield bytes(700 << 10)
        await stay.wait()
        yield bytes(1)

    async def call(session: aiohttp.ClientSession, token: str) -> int:
        async with session.post(
            server.make_url("/v1/sandboxes"), data=body(), headers={"Authorization": f"Bearer {token}"}
        ) as answer:
            return answer.status

    try:
        async with aiohttp.ClientSession() as session:
            first = asyncio.create_task(call(session, loud))
            await until(lambda: routes._memory.held.total() >= 700 << 10, "it holds a body")
            assert await call(session, loud) == 429
            second = asyncio.create_task(call(session, quiet))
            await until(lambda: routes._memory.held.total() >= 1400 << 10, "another owner has a part of its own")
            stay.set()
            assert (await first, await second) == (400, 400)  # zeros are no request
            assert routes._memory.held.total() == 0
    finally:
        await server.close()
        await jobs.close()
