"""N forks of one checkpoint: whatever happens to one of them, the others are told as they are."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from unittest.mock import AsyncMock, MagicMock

import pytest

from daemon.auth.owner_slots import OwnerSlots
from daemon.host import host as host_module
from daemon.host.host import Host
from sandbox import NoSpace
from sandbox.messages import ForkRequest, SandboxState


class Forking(Host):
    """A host whose forks end as `fates` say: an error, or none."""

    def __init__(self, fates: list[BaseException | None]) -> None:
        self.fates = iter(fates)
        self.released: list[int] = []
        self._forking = OwnerSlots(2, reserved=1)
        self._ids = SimpleNamespace(release=self.released.append)  # type: ignore[assignment]
        self._numbers = iter(range(len(fates) + 1))
        self.collector = SimpleNamespace(pin=lambda row: contextlib.nullcontext())  # type: ignore[assignment]
        self.making = SimpleNamespace(admitted=lambda row: contextlib.nullcontext())  # type: ignore[assignment]
        unpacked = SimpleNamespace(provide=lambda row: asyncio.sleep(0))
        self.restorer = SimpleNamespace(tree_below=lambda row: None, unpacked=unpacked)  # type: ignore[assignment]

    async def restorable(self, checkpoint: str) -> SimpleNamespace:  # type: ignore[override]
        return SimpleNamespace(id=checkpoint, dump=None)

    def branch(self, *_: object) -> SimpleNamespace:  # type: ignore[override]
        number = next(self._numbers)
        if number == 3:
            raise NoSpace("no range of ids is free")
        return SimpleNamespace(owner="", uid_base=number, info=lambda: f"sandbox {number}")

    async def make(self, row: object, *_: object, **__: object) -> None:
        if (fate := next(self.fates)) is not None:
            raise fate


async def test_each_of_n_forks_succeeds_or_fails_alone() -> None:
    host = Forking([None, KeyError(4711), NoSpace("64 MiB more are needed"), OSError(5, "Input/output error")])
    entries = await host.fork("c-1", ForkRequest(count=5))
    reported = [(entry.sandbox, entry.error.message if entry.error else None) for entry in entries]
    assert reported[0] == ("sandbox 0", None)
    assert (reported[1][0], reported[1][1]) == (None, "4711")
    assert reported[2][0] is None and "64 MiB more" in (reported[2][1] or "")
    assert reported[3][0] is None and "no range of ids" in (reported[3][1] or "")
    assert reported[4][0] is None and "Input/output" in (reported[4][1] or "")
    assert host.released == [1, 2, 4]  # what failed keeps no range of ids


async def test_hooks_that_take_their_time_hold_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the sandbox's own: somebody else's fork does not wait for them."""
    monkeypatch.setattr(Forking, "make", Host.make)
    monkeypatch.setattr(Forking, "admit", lambda *_: None)
    monkeypatch.setattr(host_module, "put_sandbox", lambda row: None)
    made = {
        "owner": "",
        "mounts": [],
        "state": SandboxState.CREATING,
        "uid_base": 1,
        "image": "",
        "info": lambda: "made",
    }
    monkeypatch.setattr(Forking, "branch", lambda _, origin, request: SimpleNamespace(id=origin.id, **made))
    begun, ended = asyncio.Event(), asyncio.Event()

    async def renew(row: SimpleNamespace, *_: object) -> None:
        if row.id == "s-slow":
            begun.set()
            await ended.wait()

    host = Forking([])
    host.attachments, host.places = [], MagicMock()  # type: ignore[assignment]
    host.services = MagicMock(catalogue=MagicMock(write=AsyncMock()))
    host.restorer = MagicMock(capacity=AsyncMock(), bring_back=AsyncMock(), renew=renew, drop_tree=AsyncMock())
    slow = [
        asyncio.create_task(host._fork_one(SimpleNamespace(id="s-slow", files=None), ForkRequest())) for _ in range(3)
    ]  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        await begun.wait()
        quick = await host._fork_one(SimpleNamespace(id="s-quick", files=None), ForkRequest())  # type: ignore[arg-type]
    assert quick.error is None
    assert not any(task.done() for task in slow)
    ended.set()
    assert [entry.error for entry in await asyncio.gather(*slow)] == [None] * 3


async def test_an_owner_with_a_thousand_forks_keeps_nobody_else_waiting() -> None:
    places, running, ends = OwnerSlots(5, reserved=1), [], {}

    async def fork(name: str) -> None:
        async with places.slot(name[0]):
            running.append(name)
            ends[name] = asyncio.Event()
            await ends[name].wait()
            running.remove(name)

    async def finalized() -> list[str]:
        for _ in range(10):
            await asyncio.sleep(0)
        return sorted(running)

    tasks = [asyncio.create_task(fork(f"a{number}")) for number in range(1000)]
    assert await finalized() == ["a0", "a1", "a2", "a3"]
    tasks += [asyncio.create_task(fork(f"b{number}")) for number in range(3)]
    assert await finalized() == ["a0", "a1", "a2", "a3", "b0"]
    ends["b0"].set()
    assert await finalized() == ["a0", "a1", "a2", "a3", "b1"]
    ends["a0"].set()
    assert await finalized() == ["a1", "a2", "a3", "b1"]  # more than one each has only who waits alone
    ends["a1"].set()
    assert await finalized() == ["a2", "a3", "b1", "b2"]  # who has the fewest
    tasks[4].cancel()  # it waits
    tasks[2].cancel()  # it has a place
    running.remove("a2")  # it was cancelled in it
    assert await finalized() == ["a3", "a5", "b1", "b2"]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with places.slot("c"), places.slot("c"), places.slot("c"), places.slot("c"):
        pass
    assert not places._taken and not places._waiting
