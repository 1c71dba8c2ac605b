"""What the SDK promises, held against a real daemon, against a cluster of two and against the public fake alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest

from bench.harness import own_internet as world
from sandbox import Client, Network
from sandbox.criu.tcp import POOL
from sandbox.errors import Conflict, ImageNotFound, Invalid, NotFound, SandboxDead, Unsupported
from sandbox.messages import (
    Composition,
    CreateRequest,
    ProgramKind,
    ProgramState,
    SandboxInfo,
    SandboxState,
    Service,
    Verdict,
)
from sandbox.sdk.brief import BriefClient
from sandbox.testing import FakeHost

WRONG_NETWORKS = (
    Network(mode="none", cidrs=("1.2.3.4",)),
    Network(mode="open", names=("example.org",)),
    Network.allow(cidrs=["1.2.3.4/33"]),
    Network.allow(cidrs=["::1"]),
    Network.allow(cidrs=["example.org"]),
    Network.allow(cidrs=["169.254.169.254"]),
    Network.allow(cidrs=["127.0.0.1"]),
    Network.allow(cidrs=[f"{POOL[7]}"]),
    Network.allow(cidrs=["1.2.3.4:0"]),
    Network.allow(cidrs=["1.2.3.4:icmp/1"]),
    Network.allow(cidrs=["1.2.3.4:20-10"]),
    Network.allow(names=["1.2.3.4"]),
    Network.allow(names=["-bad.example"]),
    Network.allow(names=["a..b"]),
    Network.allow(names=["a b"]),
    Network.allow(names=["example.org:http"]),
    Network.allow(names=["*x.example"]),
)


def _script(fake: FakeHost) -> None:
    """The commands that the tests below use, as a shell would carry them out."""
    fake.on(r"true")
    fake.on(r"exit (\d)", exit_code=3)
    fake.on(r"echo (\w+) > (\S+)", effect=lambda files, result: files.write(result[2], f"{result[1]}\n"))
    fake.on(r"echo (\w+)", effect=lambda files, result: f"{result[1]}\n")
    fake.on(r"cat (\S+)", effect=lambda files, result: files.read(result[1]))
    fake.on(r"rm (\S+)", effect=lambda files, result: files.path(result[1]).unlink())
    fake.on(r"echo no >&2", stderr="no\n")
    fake.on(r"sleep 60", delay=60)


REAL = pytest.mark.parametrize("host", ["real", "cluster"], indirect=True)  # what the fake does not have


@pytest.fixture(params=["real", "cluster", "fake", "brief"])
async def host(request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    if request.param in ("real", "cluster"):
        made = request.getfixturevalue("daemon" if request.param == "real" else "cluster")
        async with made.client() as client:
            yield client
        return
    async with FakeHost() as fake:
        _script(fake)
        async with BriefClient(fake.address) if request.param == "brief" else fake.client() as client:
            yield client


@pytest.fixture
async def sb(host: Client) -> AsyncIterator[Any]:
    async with host.create("debian") as sandbox:
        yield sandbox


async def test_commands_are_results(sb) -> None:
    assert (await sb.exec("echo hello")).text == "hello\n"
    assert (await sb.exec("exit 3")).exit_code == 3
    assert (await sb.exec("echo no >&2")).stderr == b"no\n"
    cut = await sb.exec("echo hello", output_limit=2)
    assert (cut.stdout, cut.stdout_dropped) == (b"he", 4)
    late = await sb.exec("sleep 60", timeout=0.2)
    assert late.timed_out and late.exit_code == 143


async def test_streams_end_with_the_result(sb) -> None:
    chunks = [chunk async for chunk in sb.stream("echo hello")]
    assert b"".join(chunk.data for chunk in chunks) == b"hello\n"
    assert chunks[-1].stream == "result" and chunks[-1].result.exit_code == 0


async def test_a_command_that_does_not_run_takes_no_signal(sb) -> None:
    running = sb.stream("echo hello")
    with pytest.raises(NotFound):
        await running.signal("INT")
    assert (await anext(running)).data == b"hello\n"
    assert [chunk.stream async for chunk in running] == ["result"]
    with pytest.raises(NotFound):
        await running.signal()


async def test_turns_have_verdicts_and_checkpoints(sb) -> None:
    first = await sb.exec("echo a > /a")
    assert first.verdict is Verdict.FILES and first.turn == 1
    second = await sb.exec("true")
    assert second.verdict is Verdict.NONE and second.checkpoint == first.checkpoint
    assert (await sb.exec("true", ends_turn=False)).turn is None
    assert [turn.command for turn in await sb.turns()] == ["echo a > /a", "true"]
    assert (await sb.captured(first)).id == first.checkpoint


async def test_services_have_states_and_trees_of_their_own(host: Client) -> None:
    sleeping = Service(image="debian", command=["sleep", "1000"])
    composition = Composition(services={"main": sleeping, "db": sleeping}, main="main")
    info = await host.call("POST", "/v1/sandboxes", SandboxInfo, CreateRequest(image="", composition=composition))
    async with await host.get(info.id) as sb:
        assert [one.state for one in await sb.services.list()] == ["created", "created"]
        await sb.services.up("db")
        assert {one.name: one.state for one in await sb.services.list()} == {"main": "created", "db": "running"}
        assert [one.state for one in await sb.services.up()] == ["running", "running"]
        await sb.files.write("/x", "of the db", service="db")
        assert not await sb.files.exists("/x") and not await sb.files.exists("/x", service="main")
        db = await sb.services.get("db")
        assert (await db.exec("cat /x")).text == "of the db"
        assert (await sb.exec("cat /x", service="db")).text == "of the db"
        stopped = await db.stop()
        assert (stopped.state, stopped.exit_code) == ("exited", 143)
        again = await db.restart()
        assert (again.state, again.exit_code) == ("running", None) and again.program != stopped.program
        with pytest.raises(NotFound, match="no service no"):
            await sb.exec("true", service="no")
        with pytest.raises(NotFound, match="no service no"):
            await sb.services.up("no")
    async with host.create("debian") as alone:
        for call in (alone.services.list(), alone.services.up(), alone.exec("true", service="main")):
            with pytest.raises(Invalid, match="no services"):
                await call


async def test_restores_and_forks_continue_from_a_state(sb, host: Client) -> None:
    first = await sb.exec("echo a > /a")
    await sb.exec("rm /a")
    with pytest.raises(NotFound):
        await sb.files.read("/a")
    assert (await sb.restore(first.checkpoint, verify=True)).verified
    assert await sb.files.read("/a") == b"a\n"
    forks = await sb.fork(2)
    for number, fork in enumerate(forks):
        await fork.sandbox.files.write("/a", str(number))
    assert [await fork.sandbox.files.read("/a") for fork in forks] == [b"0", b"1"]
    assert await sb.files.read("/a") == b"a\n"
    ids = {info.id for info in await sb.tree()}
    assert first.checkpoint in ids
    forks += await host.fork(first.checkpoint, verify=True, labels={"group": "g"})
    assert forks[-1].sandbox.info.labels == {"group": "g"}
    assert await forks[-1].sandbox.files.read("/a") == b"a\n"
    for fork in forks:
        await fork.sandbox.remove()


async def test_checkpoints_have_labels_and_share_what_is_the_same(sb, host: Client) -> None:
    await sb.files.write("/a", "a")
    one = await sb.checkpoint("one")
    two = await sb.checkpoint("two")
    assert (one.label, one.verdict, two.verdict, two.parent) == ("one", Verdict.FILES, Verdict.NONE, one.id)
    listed = [saved.id for saved in await host.store.checkpoints() if saved.sandbox == sb.id]
    assert listed == [saved.id for saved in await sb.tree()] and listed[-2:] == [one.id, two.id]
    await sb.files.write("/d/b", "b")
    await sb.files.write("/a", "other")
    assert [(change.path, change.kind) for change in await sb.diff(two)] == [
        ("/a", "modified"),
        ("/d", "added"),
        ("/d/b", "added"),
    ]
    await sb.files.remove("/a")
    assert ("/a", "removed") in [(change.path, change.kind) for change in await sb.diff(one)]


async def test_files(sb) -> None:
    await sb.files.write("/d/f", b"12", mode=0o600)
    await sb.files.append("/d/f", "345")
    assert await sb.files.read("/d/f", offset=1, limit=3) == b"234"
    status = await sb.files.stat("/d/f")
    assert (status.kind, status.size, status.mode) == ("file", 5, 0o600)
    await sb.files.mkdir("/d/e")
    await sb.files.move("/d/f", "/x/y")
    assert [entry.name for entry in await sb.files.list("/d")] == ["e"]
    assert not await sb.files.exists("/d/f")
    with pytest.raises(Conflict):
        await sb.files.remove("/d")
    await sb.files.remove("/d", recursive=True)
    for path in ("/d", "/none/x"):
        with pytest.raises(NotFound):
            await sb.files.read(path)
    with pytest.raises(Invalid):
        await sb.files.read("/x")


@REAL
async def test_networks(host: Client) -> None:
    if reason := world.missing():
        pytest.skip(reason)
    policy = Network.allow(names=["*.example.org:443", "*"], cidrs=["10.2.0.0/16:tcp/80,udp/53,8000-8100", "1.2.3.4"])
    async with host.create("debian") as sandbox:
        status = await sandbox.network.status()
        assert (status.network, status.address, status.refusals) == (Network.none(), None, [])
        status = await sandbox.network.set(policy)
        assert status.network == policy and IPv4Address(status.address) in POOL
        for wrong in WRONG_NETWORKS:
            with pytest.raises(Invalid):
                await sandbox.network.set(wrong)
            with pytest.raises(Invalid):
                await host.create("debian", network=wrong)
        assert (await sandbox.network.status()).network == policy
        before = await sandbox.checkpoint()
        await sandbox.network.set(Network.open(cidrs=["10.0.0.0/8"]))
        await sandbox.restore(before)  # files and processes go back, what it may reach does not
        retained = await sandbox.network.status()
        assert (retained.network, retained.address) == (Network.open(cidrs=["10.0.0.0/8"]), status.address)
        (fork,) = await sandbox.fork()
        async with fork.sandbox as child:
            inherited = await child.network.status()
            assert inherited.network == retained.network and inherited.address not in (None, retained.address)
        await sandbox.kill()
        assert (await sandbox.network.set(Network.none())).address is None


async def test_the_dead_are_restored(sb) -> None:
    done = await sb.exec("echo a > /a")
    await sb.captured(done)
    await sb.kill()
    assert (await sb.refresh()).state is SandboxState.DEAD
    for act in (sb.exec("true"), sb.files.read("/a"), sb.checkpoint()):
        with pytest.raises(SandboxDead):
            await act
    await sb.restore()
    assert (await sb.exec("cat /a")).text == "a\n"


@REAL
async def test_processes(sb, host: Client) -> None:
    before = (await sb.metrics()).processes
    server = await sb.processes.start("sleep 60")
    assert server.info.verdict in (Verdict.PROCESSES, Verdict.BOTH) and server.info.turn == 1
    began = server.info.checkpoint
    assert (server.info.state, server.info.kind) == (ProgramState.RUNNING, ProgramKind.PROCESS)
    assert (await sb.metrics()).processes > before >= 1
    assert await server.wait(0.01) is None
    short = await sb.processes.start("echo hello", ends_turn=False)
    assert await short.wait() == 0 and short.info.turn is None
    assert [(chunk.stream, chunk.data) async for chunk in short.stream()] == [("stdout", b"hello\n")]
    logs = await short.logs()
    assert (logs.stdout, logs.stderr, logs.ended) == (b"hello\n", b"", True)
    assert (await short.logs(since=logs)).stdout == b""
    assert [item.id for item in await sb.processes.list()] == [server.id, short.id]
    with pytest.raises(Conflict):
        await short.signal()
    await sb.captured(began)
    (fork,) = await host.fork(began)
    async with fork.sandbox as child:
        assert [item.id for item in await child.processes.list()] == [server.id]
        twin = await child.processes.get(server.id)
        await twin.kill()
        assert await twin.wait() == 137
    await server.signal()
    assert await server.wait() == 143
    await sb.restore(began)
    assert (await server.refresh()).state is ProgramState.RUNNING
    with pytest.raises(NotFound):
        await short.refresh()
    await server.remove()
    assert await sb.processes.list() == []


@REAL
async def test_programs_of_the_dead_are_lost(sb) -> None:
    server = await sb.processes.start("sleep 60")
    session = await sb.sessions.open()
    await sb.captured(await sb.checkpoint())
    await sb.kill()
    assert (await server.refresh()).state is ProgramState.LOST
    assert [item.info.state for item in await sb.processes.list()] == [ProgramState.LOST]
    for act in (server.wait(), server.logs(), server.kill(), session.exec("true"), sb.processes.start("true")):
        with pytest.raises(SandboxDead):
            await act
    await sb.restore()
    assert (await server.refresh()).state is ProgramState.RUNNING
    assert (await session.exec("echo hello")).text == "hello\n"


@REAL
async def test_who_waits_for_a_process_is_told_of_its_loss(sb) -> None:
    server = await sb.processes.start("sleep 60")
    waiting = asyncio.ensure_future(server.wait())
    assert await server.wait(0.1) is None
    await sb.kill()
    with pytest.raises(SandboxDead):
        await waiting


@REAL
async def test_sessions(sb) -> None:
    async with await sb.sessions.open() as session:
        assert (await session.exec("echo hello")).text == "hello\n"
        changed = await session.exec("echo a > /a", key="0" * 32)
        assert changed.verdict is Verdict.FILES or changed.verdict is Verdict.BOTH
        again = await session.exec("echo a > /a", key="0" * 32)
        assert (again.turn, again.checkpoint) == (changed.turn, changed.checkpoint)
        assert (await session.exec("true")).turn == changed.turn + 1
        with pytest.raises(Conflict):
            await session.exec("true", key="0" * 32)
        late = await session.exec("sleep 60", timeout=0.2)
        assert late.timed_out and late.exit_code == 130
        cut = await session.exec("echo hello", output_limit=2)
        assert (cut.stdout, cut.stdout_dropped) == (b"he", 4)
        chunks = [chunk async for chunk in session.stream("echo hello")]
        assert b"".join(chunk.data for chunk in chunks) == b"hello\n" and chunks[-1].result.exit_code == 0
        assert [item.id for item in await sb.sessions.list()] == [session.id]
        assert await sb.processes.list() == []
    assert await sb.sessions.list() == []
    with pytest.raises(NotFound):
        await session.exec("true")


@REAL
async def test_several_acts_are_one_turn(sb) -> None:
    async with sb.turn() as turn:
        assert (await sb.exec("echo a > /a")).turn is None
        await sb.files.write("/b", "b")
        with pytest.raises(Conflict):
            async with sb.turn():
                pass
    assert (turn.result.turn, turn.result.verdict) == (1, Verdict.FILES) and turn.result.checkpoint
    assert [item.command for item in await sb.turns()] == ["(several acts)"]
    assert (await sb.exec("true")).turn == 2


async def test_labels_change(sb, host: Client) -> None:
    assert (await sb.set_labels({"task": "8", "of": "me"})).labels == {"task": "8", "of": "me"}
    assert (await sb.set_labels({"of": None})).labels == {"task": "8"}
    assert [info.id for info in await host.sandboxes({"task": "8"})] == [sb.id]
    assert [info.id for info in await host.sandboxes({"task": None})] == [sb.id]
    assert await host.sandboxes({"task": "9"}) == []


async def test_the_end_moves(sb) -> None:
    """It is counted from now, not from the creation."""
    first = (await sb.extend(1000.0)).lifetime
    assert first is not None and first > 1000 and (await sb.extend(2000.0)).lifetime > first + 900
    assert (await sb.extend(None)).lifetime is None
    assert (await sb.refresh()).lifetime is None
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(Invalid):
            await sb.extend(wrong)


async def test_a_run_ends_with_its_sandboxes(host, sb) -> None:
    async with host.run(lease=600) as run:
        mine = await run.create("debian", labels={"task": "8"})
        (child,) = await mine.fork(1)
        assert {info.id for info in await run.sandboxes()} == {mine.id, child.sandbox.id}
    assert [info.id for info in await host.sandboxes()] == [sb.id]
    with pytest.raises(Conflict):
        await run.renew()


async def test_trees(sb, tmp_path: Path) -> None:
    (tmp_path / "in/sub").mkdir(parents=True)
    (tmp_path / "in/sub/f").write_bytes(b"carried")
    (tmp_path / "in/link").symlink_to("sub/f")
    (tmp_path / "in/sub/f").chmod(0o640)
    assert await sb.files.upload(tmp_path / "in", "/carried") == 7
    assert await sb.files.read("/carried/sub/f") == b"carried" and (await sb.files.stat("/carried/sub/f")).mode == 0o640
    assert (await sb.files.stat("/carried/link")).target == "sub/f"
    assert await sb.files.upload(tmp_path / "in/sub/f", "/one") == 7
    assert await sb.files.download("/carried", tmp_path / "out") == 7
    assert (tmp_path / "out/sub/f").read_bytes() == b"carried" and (tmp_path / "out/link").is_symlink()
    assert await sb.files.download("/one/f", tmp_path / "single") == 7
    assert (tmp_path / "single/f").read_bytes() == b"carried"
    with pytest.raises(NotFound):
        await sb.files.download("/none", tmp_path / "none")


async def test_names(host: Client) -> None:
    async with host.create("debian", name="mine", labels={"team": "a"}) as sandbox:
        assert (await host.get("mine")).id == sandbox.id
        assert sandbox.info.labels == {"team": "a"}
        with pytest.raises(Conflict):
            await host.create("debian", name="mine")
    for what in (host.get("mine"), host.get("s-none"), host.checkpoint("c-none"), host.fork("c-none")):
        with pytest.raises(NotFound):
            await what
    with pytest.raises(ImageNotFound, match="debian"):
        await host.create("none")


async def test_what_the_fake_cannot_do_it_says() -> None:
    async with FakeHost() as fake, fake.client() as host, host.create("debian") as sandbox:
        unknown = await sandbox.exec("make")
        assert unknown.exit_code == 127 and b"FakeHost.on" in unknown.stderr
        for missing in (
            host.images.remove("debian"),
            sandbox.terminals.open(),
            sandbox.ports.list(),
            sandbox.ports.connect(80),
            sandbox.processes.start("make"),
            sandbox.sessions.open(),
            sandbox.network.status(),
            sandbox.metrics(),
            sandbox.gateway.exchanges(),
            host.store.have(),
            anext(aiter(sandbox.files.watch())),
            anext(aiter(host.store.stream("c-1"))),
        ):
            with pytest.raises(Unsupported, match="fake host"):
                await missing
        assert fake.commands == ["make"]
