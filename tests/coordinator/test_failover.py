"""Hosts that are lost, cut off and left: their sandboxes go on elsewhere, each in one place. Real daemons."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest

from coordinator.decide import balance
from coordinator.decide.balance import MovableSandbox, Move
from coordinator.decide.place import HostView
from coordinator.state import CoordinatorState, MoveRow
from sandbox import Client, Sandbox
from sandbox.errors import Conflict
from sandbox.messages import CheckpointInfo, Gateway, SandboxState
from sandbox.messages import Upstream as Address
from sandbox.messages.cluster import (
    CopyInfo,
    HeldSandbox,
    HostChange,
    HostInfo,
    HostReport,
    LeaseRequest,
    MoveRequest,
    MoveResult,
    PlaceInfo,
)
from tests.crash.whole_host import group, lose
from tests.support.cluster import Cluster, apart, frozen
from tests.support.daemon_host import ASLEEP, Daemon, missing, until
from tests.support.gateway_agent import done, start
from tests.support.gateway_upstream import Upstream

LEASE = "8"  # seconds: longer than a busy machine keeps a daemon from answering


@pytest.fixture
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A coordinator that copies, over two hosts that share nothing but the kernel."""
    if reason := missing():
        pytest.skip(reason)
    daemons = {name: apart(Daemon(tmp_path_factory.mktemp(name))) for name in ("one", "two")}
    made = Cluster(tmp_path_factory.mktemp("cluster"), "--replicate", "--lease", LEASE)
    try:
        for daemon in daemons.values():
            daemon.start()
        made.start()
        for name, daemon in daemons.items():
            made.add(name, daemon)
        yield made
    finally:
        made.clean()
        for daemon in daemons.values():
            (daemon.run / "lease").unlink(missing_ok=True)  # what stands still may end
            daemon.clean()


@pytest.fixture
async def client(pair: Cluster) -> AsyncIterator[Client]:
    async with pair.client() as made:
        yield made


async def where(client: Client, sandbox: Sandbox) -> str:
    places = await client.call("GET", "/v1/cluster/places", list[PlaceInfo])
    return next(place.host for place in places if place.sandbox == sandbox.id)


async def copied(client: Client, sandbox: Sandbox, checkpoint: str | None) -> bool:
    copies = await client.call("GET", "/v1/cluster/copies", list[CopyInfo])
    return any(copy.sandbox == sandbox.id and copy.checkpoint == checkpoint for copy in copies)


async def leased(client: Client, pair: Cluster) -> None:
    """Until both hosts have a lease."""
    await until(lambda: all((daemon.run / "lease").exists() for daemon in pair.daemons.values()), "both have a lease")


async def test_a_sandbox_outlives_its_host_as_it_was_last_told(pair: Cluster, client: Client) -> None:
    await leased(client, pair)
    sandbox = await client.create("debian", name="mine", labels={"task": "7"}, replicated_answers=True)
    host = await where(client, sandbox)
    await sandbox.exec(f"echo 1 > /log; sleep 1000 > /dev/null 2>&1 & {ASLEEP}")
    reported = await sandbox.exec("echo 2 >> /log; hostname; cat /proc/sys/kernel/domainname")
    assert await copied(client, sandbox, reported.checkpoint)  # it was, before the answer came
    lose(pair.daemons[host])
    requested = asyncio.create_task(sandbox.exec("cat /log; pgrep -c sleep; hostname; cat /proc/sys/kernel/domainname"))
    await until(lambda: _elsewhere(client, sandbox, host), "it went on elsewhere")
    await asyncio.to_thread(pair.daemons[host].start)  # an answer needs another host that holds the state
    after = await requested
    assert after.text.split() == ["1", "2", "1", *reported.text.split()]
    assert await where(client, sandbox) != host
    result = await client.get("mine")
    assert (result.id, result.info.labels, result.info.state) == (sandbox.id, {"task": "7"}, SandboxState.RUNNING)
    assert [info.id for info in await client.sandboxes()] == [sandbox.id]
    await sandbox.remove()


async def test_a_sandbox_that_no_other_host_holds_comes_back_from_the_store(pair: Cluster, client: Client) -> None:
    pair.kill()
    pair.options("--replicate-store", str(pair.root / "store"))
    pair.start()
    await leased(client, pair)
    sandbox = await client.create("debian", replicated_answers=True)
    host = await where(client, sandbox)
    other = next(name for name in pair.daemons if name != host)
    await client.call("PATCH", f"/v1/cluster/hosts/{other}", HostInfo, HostChange(draining=True))
    await sandbox.exec(f"echo 1 > /log; sleep 1000 > /dev/null 2>&1 & {ASLEEP}")
    reported = await sandbox.exec("echo 2 >> /log")
    copies = await client.call("GET", "/v1/cluster/copies", list[CopyInfo])
    assert CopyInfo(sandbox=sandbox.id, checkpoint=reported.checkpoint or "", host="(store)") in copies
    lose(pair.daemons[host])
    await client.call("PATCH", f"/v1/cluster/hosts/{other}", HostInfo, HostChange(draining=False))
    await until(lambda: _elsewhere(client, sandbox, host), "it went on elsewhere")
    assert (await sandbox.exec("cat /log; pgrep -c sleep")).text.split() == ["1", "2", "1"]
    await sandbox.remove()
    assert not (pair.root / "store" / sandbox.id).exists()


async def test_what_is_told_was_carried_out_once_whenever_the_host_dies(pair: Cluster, client: Client) -> None:
    await leased(client, pair)
    sandbox = await client.create("debian", replicated_answers=True)
    host = await where(client, sandbox)
    reported: list[str] = []

    async def work() -> None:
        for number in range(8):
            reported.append((await sandbox.exec(f"echo {number} >> /log; cat /log")).text)

    working = asyncio.create_task(work())
    await until(lambda: len(reported) >= 2, "two turns are told")
    lose(pair.daemons[host])
    await until(lambda: _elsewhere(client, sandbox, host), "it went on elsewhere")
    await asyncio.to_thread(pair.daemons[host].start)
    await working
    assert [text.split() for text in reported] == [[str(n) for n in range(count + 1)] for count in range(8)]
    await sandbox.remove()


async def test_a_host_that_is_cut_off_stands_still_before_others_act_for_it(pair: Cluster, client: Client) -> None:
    await leased(client, pair)
    sandbox = await client.create("debian")
    host = await where(client, sandbox)
    cut = pair.daemons[host]
    turn = await sandbox.exec(f"sleep 1000 > /dev/null 2>&1 & {ASLEEP}")
    await until(lambda: copied(client, sandbox, turn.checkpoint), "the state is copied")
    assert cut.process is not None and not frozen(cut, sandbox.id)
    os.kill(cut.process.pid, signal.SIGSTOP)
    try:
        await until(lambda: _elsewhere(client, sandbox, host), "it went on elsewhere")
        assert frozen(cut, sandbox.id)
        assert (await sandbox.exec("pgrep -c sleep")).text == "1\n"
    finally:
        os.kill(cut.process.pid, signal.SIGCONT)
    await until(lambda: not group(cut, sandbox.id).exists(), "what went on elsewhere is removed")
    await until(lambda: _alive(client), "the host is back")
    assert await where(client, sandbox) != host
    async with client.create("debian", labels={}) as other:  # and works
        assert (await other.exec("echo on")).text == "on\n"
    await sandbox.remove()


async def test_what_waits_for_the_sandbox_of_a_silent_host_goes_when_that_is_heard_again(
    pair: Cluster, client: Client
) -> None:
    await leased(client, pair)
    sandbox = await client.create("debian")
    host = await where(client, sandbox)
    silent = pair.daemons[host]
    (other,) = (daemon for daemon in pair.daemons.values() if daemon is not silent)
    turn = await sandbox.exec(f"sleep 1000 > /dev/null 2>&1 & {ASLEEP}")
    await until(lambda: copied(client, sandbox, turn.checkpoint), "the state is copied")
    assert silent.process is not None
    os.kill(silent.process.pid, signal.SIGSTOP)
    try:
        there = group(other, sandbox.id)
        await until(lambda: there.exists() and frozen(other, sandbox.id), "all of it is there too, and stands still")
    finally:
        os.kill(silent.process.pid, signal.SIGCONT)
    await until(lambda: not group(other, sandbox.id).exists(), "what was prepared is gone")
    assert await where(client, sandbox) == host
    assert (await sandbox.exec("pgrep -c sleep")).text == "1\n"
    await sandbox.remove()


async def test_sandboxes_stand_still_without_a_coordinator_and_go_on_with_it(pair: Cluster, client: Client) -> None:
    await leased(client, pair)
    sandbox = await client.create("debian")
    host = pair.daemons[await where(client, sandbox)]
    turn = await sandbox.exec(f"sleep 1000 > /dev/null 2>&1 & {ASLEEP}")
    pair.kill()
    await until(lambda: frozen(host, sandbox.id), "it stands still")
    pair.start()
    assert (await sandbox.exec("pgrep -c sleep")).text == "1\n"
    assert pair.daemons[await where(client, sandbox)] is host and turn.turn == 1
    await sandbox.remove()


async def test_a_sandbox_moves_while_it_is_used(pair: Cluster, client: Client) -> None:
    sandbox = await client.create("debian", name="mine")
    host = await where(client, sandbox)
    session = await sandbox.sessions.open()
    await session.exec("count=41")
    await sandbox.exec("dd if=/dev/urandom of=/data bs=1M count=8 2> /dev/null")
    number = (await sandbox.exec("touch /a /b; rm /a; stat -c %i /b /data")).text
    target = next(name for name in pair.daemons if name != host)
    required = MoveRequest(sandbox="mine", host=target)
    turns = await sandbox.turns()
    moved = await client.call("POST", "/v1/cluster/moves", MoveResult, required)
    assert await sandbox.turns() == turns and len(turns) == 3
    assert (await sandbox.exec("stat -c %i /b /data")).text == number  # programs know open files again by it
    assert (moved.sandbox, moved.host) == (sandbox.id, target) and moved.pause_ms > 0
    assert await where(client, sandbox) == target
    assert (await session.exec("echo $((count + 1))")).text == "42\n"
    assert (await sandbox.files.stat("/data")).size == 8 << 20
    assert not group(pair.daemons[host], sandbox.id).exists()
    assert (await client.call("POST", "/v1/cluster/moves", MoveResult, required)).pause_ms == 0
    await sandbox.remove()


async def test_sandboxes_move_to_a_host_that_is_emptier_and_away_from_one_to_be_emptied(
    pair: Cluster, client: Client
) -> None:
    await leased(client, pair)
    await client.call("PATCH", "/v1/cluster/hosts/two", HostInfo, HostChange(draining=True))
    made = [await client.create("debian") for _ in range(4)]
    for number, item in enumerate(made):
        await item.exec(f"echo {number} > /log; sleep 1000 > /dev/null 2>&1 & {ASLEEP}")
    busy = asyncio.create_task(made[0].exec("while [ ! -e /enough ]; do sleep 0.1; done; cat /log"))
    assert {await where(client, item) for item in made} == {"one"}
    await client.call("PATCH", "/v1/cluster/hosts/two", HostInfo, HostChange(draining=False))
    await until(lambda: _hosts_have(client, {"one": 3, "two": 1}), "one has moved")
    for number, item in enumerate(made[1:], 1):
        assert (await item.exec("cat /log; pgrep -c sleep")).text.split() == [str(number), "1"]
    await client.call("PATCH", "/v1/cluster/hosts/one", HostInfo, HostChange(draining=True))
    await until(lambda: _hosts_have(client, {"one": 1, "two": 3}), "all have moved that are not in use")
    assert await where(client, made[0]) == "one" and not busy.done()
    await made[0].files.write("/enough", b"")
    assert (await busy).text == "0\n"
    await until(lambda: _hosts_have(client, {"two": 4}), "it moved when nothing was asked of it")
    for number, item in enumerate(made):
        assert (await item.exec("cat /log; pgrep -c sleep")).text.split() == [str(number), "1"]
    with sqlite3.connect(pair.root / "state" / "cluster.sqlite") as database:
        rows = database.execute("SELECT row FROM decisions WHERE kind = 'balance'").fetchall()
    decided = [msgspec.json.decode(row, type=Decided) for (row,) in rows]
    assert sum(len(item.action) for item in decided) >= 4
    for item in decided:
        assert balance.decide(*msgspec.structs.astuple(item.view)) == item.action
    for item in made:
        await item.remove()


HOLDER = """cat > /holder.py <<'E'
import hashlib, os, time
held, turns, was = os.urandom(32 << 20), bytearray(4096 * 8), 0
digest = hashlib.sha1(held).hexdigest()
open("/ready", "w").close()
while not os.path.exists("/check"):
    turns[was * 4096 % len(turns)] = was % 251
    was += 1
    time.sleep(0.02)
open("/checked", "w").write(str(hashlib.sha1(held).hexdigest() == digest))
time.sleep(1000)
E
setsid python3 /holder.py > /dev/null 2> /wrong < /dev/null & while [ ! -e /ready ]; do sleep 0.05; done"""


async def test_a_copy_tells_less_than_all_pages_and_a_sandbox_goes_on_from_it(pair: Cluster, client: Client) -> None:
    await leased(client, pair)
    sandbox = await client.create("debian", replicated_answers=True)
    host = await where(client, sandbox)
    await sandbox.exec(HOLDER)
    before = await counted(client)
    for number in range(3):
        await sandbox.exec(f"echo {number} > /log")
    after = await counted(client)
    assert after["copies"] > before["copies"]
    hashes = (32 << 20) // 4096 * 32  # bytes of a list of its pages
    assert after["copied_bytes"] - before["copied_bytes"] < (after["copies"] - before["copies"]) * hashes
    lose(pair.daemons[host])
    await until(lambda: _elsewhere(client, sandbox, host), "it went on elsewhere")
    await asyncio.to_thread(pair.daemons[host].start)  # an answer needs another host that holds the state
    reported = await sandbox.exec(
        "touch /check; while [ ! -s /checked ]; do sleep 0.05; done; cat /checked /wrong /log"
    )
    assert reported.text == "True2\n"
    await sandbox.remove()


async def test_a_host_that_comes_back_keeps_what_copies_build_upon(pair: Cluster, client: Client) -> None:
    await leased(client, pair)
    sandbox = await client.create("debian", replicated_answers=True)
    host = await where(client, sandbox)
    await sandbox.exec("dd if=/dev/urandom of=/data bs=1M count=8 2> /dev/null")
    lose(pair.daemons[host])
    await until(lambda: _elsewhere(client, sandbox, host), "it went on elsewhere")
    before = await counted(client)
    await asyncio.to_thread(pair.daemons[host].start)
    async with pair.daemons[host].client() as own:
        await until(lambda: _without_sandboxes(own), "it is removed where it was")
        assert {row.sandbox for row in await own.call("GET", "/v1/checkpoints", list[CheckpointInfo])} == {sandbox.id}
    await until(lambda: _more_copies(client, before), "what it has is the newest state, and counts as a copy")
    retained = await counted(client)
    assert retained["copied_bytes"] - before["copied_bytes"] < 4 << 10
    await sandbox.exec("echo 1 > /log")  # answered when that host holds it
    after = await counted(client)
    assert after["copies"] > retained["copies"]
    assert after["copied_bytes"] - before["copied_bytes"] < 4 << 20  # whole, it would be the 8 MiB of the file
    await sandbox.remove()
    async with pair.daemons[host].client() as own:
        await until(lambda: _empty(own), "nothing of it stays")


async def test_a_sandbox_that_is_removed_while_a_host_is_lost_does_not_come_back_with_it(
    pair: Cluster, client: Client
) -> None:
    await leased(client, pair)
    sandbox = await client.create("debian", replicated_answers=True)
    host = await where(client, sandbox)
    await sandbox.exec("echo 1 > /log")
    lose(pair.daemons[host])
    await until(lambda: _elsewhere(client, sandbox, host), "it went on elsewhere")
    await sandbox.remove()
    await asyncio.to_thread(pair.daemons[host].start)
    await until(lambda: _alive(client), "the host is back")
    async with pair.daemons[host].client() as own:
        await until(lambda: _without_sandboxes(own), "it is removed there as well")
    assert await client.sandboxes() == []


class Observed(msgspec.Struct):
    """What a decision about balance was made from."""

    hosts: list[HostView]
    residents: list[MovableSandbox]
    under_way: list[Move]
    steady: dict[str, float]


class Decided(msgspec.Struct):
    """One as it is logged."""

    view: Observed
    action: list[Move]


async def test_a_conversation_goes_on_after_a_move_and_after_the_loss_of_a_host(pair: Cluster, client: Client) -> None:
    await leased(client, pair)
    async with Upstream() as upstream:
        await client.gateway.put("scripted", Address(url=upstream.url))
        upstream.holds = 3
        sandbox = await client.create("debian", gateway=Gateway(upstream="scripted"))
        host = await where(client, sandbox)
        other = next(name for name in pair.daemons if name != host)
        await start(sandbox, 5)
        await until(lambda: len(upstream.requested) == 3, "the third request")
        await client.call("POST", "/v1/cluster/moves", MoveResult, MoveRequest(sandbox=sandbox.id, host=other))
        exchanges = await sandbox.gateway.exchanges()
        assert [(item.state, item.main) for item in exchanges[:2]] == [("answered", True)] * 2
        reported = json.loads((await sandbox.gateway.exchange(exchanges[1])).request)
        assert [item["content"] for item in reported["messages"]] == ["begin", "answer 1", "go on 0"]

        await until(lambda: len(upstream.requested) == 4, "the third request comes again")
        upstream.holds = 5
        upstream.gate.set()
        await until(lambda: len(upstream.requested) == upstream.holds, "the next request")
        turn = (await sandbox.turns())[-1]
        await until(lambda: copied(client, sandbox, turn.checkpoint), "the state is copied")
        lose(pair.daemons[other])
        await until(lambda: _elsewhere(client, sandbox, other), "it went on elsewhere")
        upstream.holds = 0
        upstream.gate.set()
        entries = await done(sandbox)
        assert [entry["turn"] for entry in entries] == ["1", "2", "3", "4", "5"]
        exchanges = await sandbox.gateway.exchanges()
        assert [item.state for item in exchanges] == ["answered"] * 5
        assert [item.parent for item in exchanges] == [None, *(item.id for item in exchanges[:-1])]
        last_seen = [entry["text"] for entry in entries]
        last = json.loads((await sandbox.gateway.exchange(exchanges[4])).request)
        assert [item["content"] for item in last["messages"][1::2]] == last_seen[:4]
        await sandbox.remove()


async def test_a_move_that_is_cut_short_is_taken_back(pair: Cluster, client: Client) -> None:
    """The coordinator dies when the sandbox stands still and has not arrived."""
    sandbox = await client.create("debian")
    host = await where(client, sandbox)
    daemon, target = pair.daemons[host], next(name for name in pair.daemons if name != host)
    await sandbox.exec(f"sleep 1000 > /dev/null 2>&1 & {ASLEEP}")
    async with daemon.client() as own:
        await own.call("POST", f"/v1/sandboxes/{sandbox.id}/hold", HeldSandbox)
        assert frozen(daemon, sandbox.id)
        with pytest.raises(Conflict):
            await (await own.get(sandbox.id)).exec("true")
        with pytest.raises(Conflict):
            await own.call("POST", f"/v1/sandboxes/{sandbox.id}/hold", HeldSandbox)
        assert frozen(daemon, sandbox.id)  # and still held, for whom it was
        with pytest.raises(Conflict):
            await (await own.get(sandbox.id)).exec("true")
        row = (await own.call("POST", "/v1/host", HostReport, LeaseRequest())).sandboxes[0]
    pair.kill()
    state = CoordinatorState(pair.root / "state" / "cluster.sqlite")
    await state.put_move(sandbox.id, MoveRow(source=host, target=target, sandbox=row))
    await state.put_home(sandbox.id, target)
    await state.close()
    pair.start()
    assert (await sandbox.exec("pgrep -c sleep")).text == "1\n"
    assert await where(client, sandbox) == host
    await sandbox.remove()


async def counted(client: Client) -> dict[str, float]:
    """What the coordinator counts of copies."""
    text = (await client.raw("GET", "/metrics", None, "")).decode()
    lines = [line.split() for line in text.splitlines() if line.startswith("pagurus_cluster_")]
    return {line[0].removeprefix("pagurus_cluster_").removesuffix("_total"): float(line[1]) for line in lines}


async def _hosts_have(client: Client, target: dict[str, int]) -> bool:
    return Counter(place.host for place in await client.call("GET", "/v1/cluster/places", list[PlaceInfo])) == target


async def _more_copies(client: Client, before: dict[str, float]) -> bool:
    return (await counted(client))["copies"] > before["copies"]


async def _without_sandboxes(own: Client) -> bool:
    return not await own.sandboxes()


async def _empty(own: Client) -> bool:
    return await own.call("GET", "/v1/checkpoints", list[CheckpointInfo]) == []


async def _elsewhere(client: Client, sandbox: Sandbox, host: str) -> bool:
    return await where(client, sandbox) != host


async def _alive(client: Client) -> bool:
    return {host.state for host in await client.call("GET", "/v1/cluster/hosts", list[HostInfo])} == {"alive"}
