"""When an answer may go out that waits for a copy: not before the state that it tells of has another holder."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator.copies import Copies, CopyRateLimit, MeteredStream
from coordinator.decide.lease import HostLease
from coordinator.members import HostMember, Members, SandboxPlace
from coordinator.moves import Moves
from coordinator.state import CoordinatorState, CopyRow, HostRow, MoveRow
from sandbox.errors import Timeout
from sandbox.messages import CheckpointInfo, CheckpointState, SandboxInfo, SandboxState, Verdict
from sandbox.messages.cluster import HostedSandbox, HostReport

ID = "s-1"
SIZES = {
    "clock": 1,
    "boot": "b",
    "cpus": 1,
    "memory_bytes": 2,
    "memory_free": 1,
    "disk_bytes": 2,
    "disk_free": 1,
    "load": 0,
}


def row(**reported: object) -> HostedSandbox:
    return HostedSandbox(id=ID, replicated_answers=True, **reported)  # type: ignore[arg-type]


@pytest.fixture
async def copies(tmp_path: Path) -> AsyncIterator[Copies]:
    """Over two hosts that do not answer."""
    state = CoordinatorState(tmp_path / "state" / "cluster.sqlite")
    members = Members(state, leasing=True)
    for name in ("one", "two"):
        members.hosts[name] = HostMember(name, HostRow(address=str(tmp_path / name)), members.ttl)
    yield Copies(members)
    await members.close()
    await state.close()


async def copied(copies: Copies, checkpoint: str, host: str, number: int) -> None:
    made = CopyRow(checkpoint=checkpoint, host=host, source="one", sandbox=row(), number=number)
    await copies.state.put_copy(ID, made)


async def test_what_was_done_after_a_move_that_is_taken_back_has_not_taken_place(copies: Copies) -> None:
    members, moves = copies.members, Moves(copies.members, copies)
    members.hosts["one"].lease = HostLease(members.ttl, ends_at=0.0)  # its former host is lost, too
    before = row(head="c-held", turn=4)
    members.places[ID] = SandboxPlace("two", row(head="c-held", turn=4), time.monotonic(), moved=True)  # it has arrived
    await copied(copies, "c-held", "two", 1)
    waiting = asyncio.create_task(copies.wait(ID, "c-done-at-two", "two", 5))
    await asyncio.sleep(0.1)
    await moves._back(ID, MoveRow(source="one", target="two", sandbox=before))
    assert await waiting is False
    assert (members.places[ID].host, copies.state.homes[ID]) == ("one", "one")


async def test_what_was_done_before_a_move_is_told_once_the_state_that_moved_is_copied(copies: Copies) -> None:
    copies.members.places[ID] = SandboxPlace("one", row(head="c-done", turn=5), time.monotonic())
    waiting = asyncio.create_task(copies.wait(ID, "c-done", "one", 5))
    await asyncio.sleep(0.1)
    copies.members.places[ID] = SandboxPlace("two", row(head="c-held", turn=5), time.monotonic(), moved=True)
    await asyncio.sleep(0.6)
    assert not waiting.done()
    await copied(copies, "c-held", "one", 2)
    assert await waiting is True


@pytest.mark.parametrize(("checkpoint", "turn", "took_place"), [("c-5", 5, True), ("c-7", 6, True), ("c-4", 4, False)])
async def test_a_command_took_place_if_its_host_was_lost_and_a_later_state_went_on(
    copies: Copies, checkpoint: str, turn: int, took_place: bool
) -> None:
    """Not only its own: a state that was copied for a move, after the command, has it done; asked again it would be
    done twice."""
    copies.members.places[ID] = SandboxPlace("one", row(head="c-5", turn=5), time.monotonic())
    waiting = asyncio.create_task(copies.wait(ID, "c-5", "one", 5))
    await asyncio.sleep(0.1)
    there = SandboxPlace("two", row(head=checkpoint, turn=turn), time.monotonic(), origin=checkpoint, origin_turn=turn)
    copies.members.places[ID] = there
    there.row = row(head="c-9", turn=9)  # it has done more since
    assert await waiting is took_place


async def test_a_state_after_the_same_turn_that_is_copied_stays_the_newest(copies: Copies) -> None:
    existing = row(head="c-later", turn=5, durable="c-later", durable_turn=5)
    copies.members.places[ID] = SandboxPlace("one", existing, time.monotonic())
    await copied(copies, "c-later", "two", 6)
    assert await copies.wait(ID, "c-5", "one", 5) is True
    assert existing.durable == "c-later"


async def test_a_copy_of_a_later_turn_tells_of_an_earlier_one_and_stays_the_newest(copies: Copies) -> None:
    """Of two commands at a time: the earlier state is not copied after the later one, which would undo that."""
    existing = row(head="c-6", turn=6, durable="c-6", durable_turn=6)
    copies.members.places[ID] = SandboxPlace("one", existing, time.monotonic())
    await copied(copies, "c-6", "two", 6)
    assert await copies.wait(ID, "c-5", "one", 5) is True
    assert existing.durable == "c-6"


async def test_a_former_state_that_was_restored_is_waited_for_itself(copies: Copies) -> None:
    existing = row(head="c-3", turn=3, durable="c-6", durable_turn=6)  # as the last report told
    copies.members.places[ID] = SandboxPlace("one", existing, time.monotonic())
    await copied(copies, "c-6", "two", 6)
    waiting = asyncio.create_task(copies.wait(ID, "c-3", "one"))
    await asyncio.sleep(0.6)
    assert not waiting.done()
    await copied(copies, "c-3", "two", 7)
    assert await waiting is True


async def test_what_a_host_kept_from_before_is_no_copy_until_it_counts_again(copies: Copies) -> None:
    copies.members.places[ID] = SandboxPlace(
        "one", row(head="c-1", turn=1, durable="c-1", durable_turn=1), time.monotonic()
    )
    retained = CopyRow(checkpoint="c-1", host="two", source="one", sandbox=row(), number=1, old=True)
    await copies.state.put_copy(ID, retained)
    waiting = asyncio.create_task(copies.wait(ID, "c-1", "one", 2))  # nothing changed in turn 2
    await asyncio.sleep(0.4)
    assert not waiting.done()
    await copied(copies, "c-1", "two", 2)
    assert await waiting is True


@pytest.mark.parametrize(("first", "drip"), [(0, 1), (10 << 20, 1), (10 << 20, 0)])
async def test_a_stream_that_only_drips_ends(monkeypatch: pytest.MonkeyPatch, first: int, drip: int) -> None:
    """However much came before: who sends or reads it that slowly has one of the few streams of another host."""
    monkeypatch.setattr("coordinator.copies.STALLS", 0.3)

    async def slowly() -> AsyncIterator[bytes]:
        yield bytes(first)
        while True:
            await asyncio.sleep(0.02)
            if drip:
                yield b"."

    began, passed = time.monotonic(), MeteredStream(slowly(), CopyRateLimit(None))
    with pytest.raises(Timeout, match="stalls"):
        async for _ in passed.parts():
            pass
    assert first <= passed.size < first + 100 and time.monotonic() - began < 30


async def test_a_stream_that_is_held_back_by_the_rate_of_copies_does_not_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.copies.STALLS", 0.3)

    async def quickly() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield bytes(1000)

    passed = MeteredStream(quickly(), CopyRateLimit(10_000.0))
    assert sum([len(item) async for item in passed.parts()]) == 10_000


class Answering:
    """A host that has a checkpoint on its disk; the other one is dead."""

    async def call(self, method: str, path: str, kind: type, *_: object, **__: object) -> object:
        assert path.startswith("/v1/checkpoints/c-new")
        state = CheckpointState.DURABLE
        return CheckpointInfo(id="c-new", sandbox=ID, state=state, verdict=Verdict.BOTH, durable_at=1.0, turn=6)


@pytest.mark.parametrize("lost", [False, True])
async def test_a_move_has_an_end_though_the_host_that_it_left_is_lost(
    copies: Copies, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """Its copies, and answers that wait for them, wait for that end: not for the return of a host."""
    members, moves = copies.members, Moves(copies.members, copies)
    members.hosts["one"].lease = HostLease(members.ttl, ends_at=0.0 if lost else None)
    members.places[ID] = SandboxPlace("two", row(head="c-new", turn=6), time.monotonic(), moved=True)
    await copies.state.put_move(ID, MoveRow(source="one", target="two", sandbox=row(head="c-held", turn=5)))
    members.moving.add(ID)
    dead = moves._upstream("one")

    async def arrived(sandbox: str, host: str) -> object:
        return SandboxInfo(id=ID, name="n", image="i", state=SandboxState.RUNNING, head="c-new", created_at=0.0)

    monkeypatch.setattr(moves, "_arrived", arrived)
    monkeypatch.setattr(moves, "_upstream", lambda host: Answering() if host == "two" else dead)
    await moves._try_to_settle(ID)
    assert (ID in members.moving, ID in copies.state.moves) == (not lost, not lost)
    assert copies.state.homes.get(ID, "two") == "two"


async def test_a_host_that_has_removed_what_left_it_keeps_its_lease(copies: Copies) -> None:
    """Its last report, which was asked for before, does not tell of that. A later one that names it again does."""
    members = copies.members
    left = members.hosts["one"]
    left.report, left.requested_at = HostReport(sandboxes=[row()], **SIZES), time.monotonic()  # type: ignore[arg-type]
    await members.state.put_home(ID, "two")
    assert members._strays(left) == [ID]
    members.has_left(ID, "two")
    assert members._strays(left) == [ID]
    members.has_left(ID, "one")
    assert members._strays(left) == []
    left.requested_at = time.monotonic()
    assert members._strays(left) == [ID]
