"""A host whose daemon was taken over: whatever it answers, others and the coordinator are none the worse."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from coordinator import forward, holders
from coordinator.callers import Callers
from coordinator.decide import place, replicate
from coordinator.decide.place import PlacementRequest
from coordinator.holders import OnHost
from coordinator.members import HostMember, Members
from coordinator.state import CoordinatorState, HostRow
from daemon.auth.access import CALLER, Caller
from daemon.auth.tokens import TokenStore
from sandbox.errors import NotFound, PagurusError, Protocol, Timeout
from sandbox.messages import CheckpointInfo, CheckpointState, Verdict
from sandbox.messages.store import ImportResult
from sandbox.messages.tokens import ApiToken, NewToken
from sandbox.page import Logins
from sandbox.sdk.transport import MSGPACK

REPORT = {
    "clock": 1.0, "boot": "b", "cpus": 2, "memory_bytes": 1 << 30, "memory_free": 1 << 29, "disk_bytes": 1 << 30,
    "disk_free": 1 << 29, "load": 0.5,
}  # fmt: skip


@contextlib.asynccontextmanager
async def reported(answer: Any) -> AsyncIterator[str]:
    """The address of a host that answers everything as `answer(request)` says."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await answer(request)

    app = web.Application()
    app.router.add_route("*", "/{any:.*}", handle)
    server = TestServer(app)
    await server.start_server()
    try:
        yield str(server.make_url("")).rstrip("/")
    finally:
        await server.close()


def packed(value: object) -> web.Response:
    return web.Response(body=msgspec.msgpack.encode(value), content_type=MSGPACK)


def member(address: str, name: str = "liar") -> HostMember:
    return HostMember(name, HostRow(address=address), 5.0)


@pytest.fixture
async def members(tmp_path: Path) -> AsyncIterator[Members]:
    state = CoordinatorState(tmp_path / "state" / "cluster.sqlite")
    made = Members(state)
    yield made
    await made.close()
    await state.close()


@pytest.mark.parametrize(
    "lie",
    [
        {"cpus": 0, "load": 0.0},
        {"load": -2.0},
        {"load": float("nan")},
        {"memory_bytes": 0},
        {"disk_bytes": 0},
        {"clock": float("inf")},
        {"sandboxes": [{"id": "../s-0123456789"}]},
    ],
)
async def test_a_report_that_cannot_be_true_is_none_and_decisions_go_on(members: Members, lie: dict[str, Any]) -> None:
    said = dict(REPORT)

    async def answer(_: web.Request) -> web.Response:
        return packed(said)

    async with reported(answer) as address:
        await members.add("liar", HostRow(address=address))
        said |= lie
        await members._request(members.hosts["liar"])
        assert "cannot be read" in members.hosts["liar"].error
        assert place.ranked(members.views(), PlacementRequest()) == ["liar"]  # by what it said before
        assert replicate.decide(members.views(), [], {}, 2) == []


async def test_a_call_is_not_sent_elsewhere(members: Members) -> None:
    requested: list[str] = []

    async def elsewhere(request: web.Request) -> web.Response:
        requested.append(request.path)
        return packed({})

    async with reported(elsewhere) as secret:

        async def answer(_: web.Request) -> web.Response:
            return web.Response(status=307, headers={"Location": f"{secret}/latest/meta-data"})

        async with reported(answer) as address:
            lying = member(address)
            with pytest.raises(Protocol, match="elsewhere"):
                await lying.request()
            with pytest.raises(Protocol, match="elsewhere"):
                await lying.upstream.complete("GET", "/v1/sandboxes", {}, None, "token")
            with pytest.raises(Protocol, match="elsewhere"):
                await lying.upstream.joined("/v1/sandboxes/s-1/terminal", "token")
            await lying.upstream.close()
    assert requested == []


@pytest.mark.parametrize("status", [200, 500])
async def test_an_answer_without_an_end_is_not_held(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    monkeypatch.setattr(forward, "MAX_ANSWER", 2 << 20)
    monkeypatch.setattr(holders, "MAX_HAVE", 2 << 20)
    sent = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        while True:
            await response.write(bytes(1 << 16))
            sent += 1 << 16

    async with reported(answer) as address:
        lying = member(address)
        for query in (
            lambda: lying.request(),
            lambda: lying.upstream.complete("GET", "/v1/sandboxes", {}, None, None),
            lambda: OnHost(lying).has(nothing()),
        ):
            async with asyncio.timeout(60):
                with pytest.raises(Protocol, match="an answer of more than"):
                    await query()
        await lying.upstream.close()


async def nothing() -> AsyncIterator[bytes]:
    yield b""


@pytest.mark.parametrize("already", [False, True])
async def test_a_state_of_another_sandbox_is_no_copy_and_is_not_removed(already: bool) -> None:
    """Counted as one, it would be removed with the next copy: a host could have others' checkpoints removed."""
    removed: list[str] = []
    info = CheckpointInfo(
        id="c-0000000002", sandbox="s-0000000002", state=CheckpointState.DURABLE, verdict=Verdict.BOTH
    )

    async def answer(request: web.Request) -> web.Response:
        if request.method == "DELETE":
            removed.append(request.path)
            return packed(None)
        await request.read()
        return packed(ImportResult(checkpoint=info, already=already))

    async with reported(answer) as address:
        honest = member(address)
        for sandbox, checkpoint in (("s-0000000001", info.id), (info.sandbox, "c-0000000001")):
            with pytest.raises(Protocol, match="instead of"):
                await OnHost(honest).take(sandbox, checkpoint, nothing(), "")
        await OnHost(honest).take(info.sandbox, info.id, nothing(), "")
        await honest.upstream.close()
    assert removed == ([] if already else [f"/v1/checkpoints/{info.id}"] * 2)


INFO = CheckpointInfo(id="c-0123456789", sandbox="s-0123456789", state=CheckpointState.DURABLE, verdict=Verdict.BOTH)


async def result(members: Members, *answers: Any) -> list[str]:
    """Which of hosts that answer so are said to have the checkpoint."""

    async def token(_: HostMember) -> None:
        return None

    async with contextlib.AsyncExitStack() as stack:
        for number, answer in enumerate(answers):
            made = member(await stack.enter_async_context(reported(answer)), str(number))
            made.lease = dataclasses.replace(made.lease, last_seen_at=time.monotonic() + 60)
            members.hosts[made.name] = made
            stack.push_async_callback(made.upstream.close)
        async with asyncio.timeout(60):
            return list(await members.holders(INFO.id, token))


async def honest(_: web.Request) -> web.Response:
    return packed(INFO)


async def another_one(_: web.Request) -> web.Response:
    return packed(msgspec.structs.replace(INFO, id="c-9999999999"))


async def broken(_: web.Request) -> web.Response:
    return web.Response(status=500)


async def hanging(_: web.Request) -> web.Response:
    await asyncio.sleep(3600)
    raise AssertionError


@pytest.mark.parametrize("other", [another_one, broken, hanging])
async def test_a_checkpoint_is_found_whatever_another_host_says(
    members: Members, monkeypatch: pytest.MonkeyPatch, other: Any
) -> None:
    monkeypatch.setattr("coordinator.members.ANSWER", 1.0)
    assert await result(members, honest, other) == ["0"]


async def test_that_nobody_has_it_is_not_said_while_one_host_does_not_say(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.members.ANSWER", 1.0)
    with pytest.raises(PagurusError, match="status 500"):
        await result(members, broken)
    with pytest.raises(Timeout, match="has not answered"):
        await result(members, hanging)
    with pytest.raises(NotFound):
        await result(members, another_one)


async def test_a_host_that_makes_no_token_keeps_no_call_to_another_waiting(
    members: Members, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("coordinator.members.ANSWER", 2.0)
    callers = Callers(TokenStore(tmp_path / "tokens.json", clock=time.time), Logins(bytes(32)), members)
    requested = asyncio.Event()

    async def makes(_: web.Request) -> web.Response:
        token = ApiToken(id="0123456789ab", name="t", scope="exec", owner="o", created_at=0.0)
        return packed(NewToken(token=token, text="shown"))

    async def hangs(request: web.Request) -> web.Response:
        requested.set()
        return await hanging(request)

    CALLER.set(Caller(token="0123456789ab", owner="o", scope="exec", everything=False))
    async with reported(makes) as one, reported(hangs) as two:
        good, bad = member(one, "good"), member(two, "bad")
        waiting = asyncio.create_task(callers.token(bad))
        await requested.wait()
        assert await callers.token(good) == "shown" and not waiting.done()
        with pytest.raises(Timeout, match="host bad"):
            await waiting
        await good.upstream.close()
        await bad.upstream.close()
