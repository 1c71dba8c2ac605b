"""What a daemon that was killed left captured becomes durable when whole; what is not is said to be lost."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sqlite3
import threading
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from daemon.catalogue import Catalogue, CheckpointRow, put_checkpoint
from daemon.checkpoints.inflight import InFlight, Services
from daemon.checkpoints.persist import UNSTORED, nearest, store, store_alone
from daemon.store.gc import GarbageCollector
from sandbox import CheckpointFailed, Client, NoSpace, Sandbox, Verdict
from sandbox.messages import CheckpointInfo, CheckpointState, SandboxState
from tests.support.daemon_host import ASLEEP, IMAGE, Daemon, missing

SERVICE = f"setsid sleep 1000000 >/dev/null 2>&1 & {ASLEEP}"
COUNT = "grep -l sleep /proc/[0-9]*/comm | wc -l"


# ---------------------------------------------------------------------------- one row, two writers


def row(name: str, **fields) -> CheckpointRow:
    given = {"sandbox": "s-1", "number": 1, "state": CheckpointState.CAPTURED, "verdict": Verdict.BOTH, "dump": name}
    return CheckpointRow(id=name, **{**given, **fields})


class Capturer:
    """Stores nothing. `raw`: whether there are raw images; `wrong`: what is wrong with the packed ones."""

    def __init__(self, directory: Path, *, raw: bool = True, wrong: str = "") -> None:
        self.places = SimpleNamespace(dump=lambda name: directory if raw else directory / "absent")
        self.wrong = wrong
        self.done: list[str] = []
        self.read = False

    def is_read(self, dump: str) -> bool:
        return self.read

    async def hash(self, row: CheckpointRow, before: str | None) -> str:
        self.done.append("hash")
        return "hashed"

    async def pack(self, row: CheckpointRow, hashed: str) -> None:
        self.done.append("pack")

    async def unpacked(self, dump: str) -> str:
        self.done.append("read")
        return self.wrong

    async def sync_files(self, row: CheckpointRow, parent: CheckpointRow) -> None:
        self.done.append("sync")

    async def release(self, dump: str) -> None:
        self.done.append("release")


class Engine:
    def now(self) -> float:
        return 0.0

    def submit(self, stage, **_) -> contextlib.AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()


@contextlib.asynccontextmanager
async def services(tmp_path: Path, capturer: Capturer):
    catalogue = Catalogue(tmp_path / "c.sqlite")
    try:
        made = Services(catalogue, Engine(), capturer, None, None)  # type: ignore[arg-type]
        made.outcomes = SimpleNamespace(durable=lambda *_: None, lost=lambda _: None)  # type: ignore[assignment]
        yield made
    finally:
        await catalogue.close()


def stored(tmp_path: Path) -> dict[str, CheckpointRow]:
    with contextlib.closing(sqlite3.connect(tmp_path / "c.sqlite")) as database:
        blobs = [blob for (blob,) in database.execute("SELECT row FROM checkpoints")]
    return {item.id: item for item in (msgspec.msgpack.decode(blob, type=CheckpointRow) for blob in blobs)}


def flight(these: Services, name: str, **fields) -> InFlight:
    """A captured checkpoint of which all of the memory for captures is full, on its way to durable."""
    made = these.inflights[name] = InFlight(row(name, dump_bytes=1 << 60, **fields), row("c-1"))
    made.ticket = SimpleNamespace()  # type: ignore[assignment]
    made.captured.set_result(None)
    return made


async def test_captures_of_one_owner_wait_for_each_other_and_not_those_of_another(tmp_path: Path) -> None:
    capturer = Capturer(tmp_path)
    capturer.places.dumps = tmp_path
    async with services(tmp_path, capturer) as these:
        older = flight(these, "c-2", sandbox="s-2", owner="t-a"), flight(these, "c-3", sandbox="s-3", owner="t-a")
        await these.need_memory(InFlight(row("c-4", owner="t-b"), row("c-1")))
        waiting = asyncio.create_task(these.need_memory(coming := InFlight(row("c-5", owner="t-a"), row("c-1"))))
        coming.ticket = older[0].ticket  # itself is not waited for
        these.inflights["c-5"] = coming
        for item in older:
            await asyncio.sleep(0)
            assert not waiting.done()
            item.finish()
            del these.inflights[item.row.id]
        await waiting


async def test_what_moves_is_stored_when_somebody_asks_for_it(tmp_path: Path) -> None:
    capturer = Capturer(tmp_path)
    async with services(tmp_path, capturer) as these:
        parent, child = row("c-1"), row("c-2", parent="c-1")
        these.checkpoints.update({item.id: item for item in (parent, child)})
        inflight = these.inflights["c-2"] = InFlight(child, parent)
        inflight.moving = True
        storing = asyncio.create_task(store_alone(these, inflight))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not capturer.done
        await inflight.finalized(durable=True)
        assert capturer.done and child.state is CheckpointState.DURABLE
        await storing


async def test_who_writes_a_row_while_it_becomes_durable_does_not_take_that_back(tmp_path: Path) -> None:
    capturer = Capturer(tmp_path)
    async with services(tmp_path, capturer) as these:
        grand, parent, child = row("c-1"), row("c-2", parent="c-1"), row("c-3", parent="c-2")
        these.checkpoints.update({item.id: item for item in (grand, parent, child)})
        write, between = these.catalogue.write, []

        async def overtaken(statements, *, durable: bool = False) -> None:
            pending = asyncio.ensure_future(write(statements, durable=durable))
            if durable and not between:  # the row that says durable is on its way: its parent is removed just now
                between.append(True)
                child.parent = "c-1"
                await asyncio.sleep(0)
                await write([put_checkpoint(child)])
            await pending

        these.catalogue.write = overtaken  # type: ignore[method-assign]
        await store(these, InFlight(child, parent))
        assert capturer.done == ["hash", "pack", "sync", "release"]
        there = stored(tmp_path)["c-3"]
        assert (there.state, there.parent) == (CheckpointState.DURABLE, "c-1") == (child.state, child.parent)
        assert there.durable_at == child.durable_at


class Broken(Capturer):
    """Whose store fails with `error`."""

    def __init__(self, directory: Path, error: Exception) -> None:
        super().__init__(directory)
        self.error = error

    async def pack(self, row: CheckpointRow, hashed: str) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (NoSpace("3.0 MiB more are needed", hint="remove some"), NoSpace, r"3\.0 MiB more.*remove some"),
        (OSError(5, "Input/output error"), CheckpointFailed, "Input/output error"),
        (sqlite3.OperationalError("disk I/O error"), CheckpointFailed, "disk I/O error"),
        (KeyError("a bug"), CheckpointFailed, "a bug"),
    ],
)
async def test_whatever_keeps_it_from_being_durable_is_said_and_tried_again(
    tmp_path: Path, error: Exception, kind: type[Exception], says: str
) -> None:
    capturer = Broken(tmp_path, error)
    async with services(tmp_path, capturer) as these:
        root, one = row("c-1", dump=None), row("c-2", parent="c-1")
        these.checkpoints.update({item.id: item for item in (root, one)})
        inflight = InFlight(one, root)
        await store(these, inflight)
        assert (one.state, one.durable_at) == (CheckpointState.CAPTURED, None)
        assert one.error is not None and one.error.startswith("captured, but not durable: ")  # so it is tried again
        assert inflight.trouble(durable=False) is None  # it can be restored
        trouble = inflight.trouble(durable=True)
        assert isinstance(trouble, kind) and re.search(says, str(trouble)) and "c-2" in str(trouble)
        again = InFlight(one, root)
        these.capturer = Capturer(tmp_path)  # type: ignore[assignment]
        await store(these, again)
        assert (one.state, one.error, again.trouble(durable=True)) == (CheckpointState.DURABLE, None, None)


@pytest.mark.parametrize("waited", [False, True])
async def test_forks_of_a_fresh_checkpoint_go_before_its_storing_unless_that_is_waited_for(
    tmp_path: Path, waited: bool
) -> None:
    capturer = Capturer(tmp_path)
    capturer.read = True
    async with services(tmp_path, capturer) as these:
        one = row("c-2")
        these.checkpoints.update({item.id: item for item in (row("c-1"), one)})
        inflight = InFlight(one, row("c-1"))
        storing = asyncio.create_task(store(these, inflight))
        await asyncio.sleep(0.05)
        assert not capturer.done
        if waited:
            inflight.expedite()
        else:
            capturer.read = False
        await storing
        assert one.state is CheckpointState.DURABLE


async def test_who_waits_until_it_is_durable_hastens_all_that_come_before(tmp_path: Path) -> None:
    rows = [row(f"c-{number}") for number in range(4)]
    inflights = [InFlight(item, rows[0]) for item in rows]
    tickets = [SimpleNamespace(promoted=0) for _ in rows]
    for inflight, ticket in zip(inflights, tickets, strict=True):
        inflight.ticket = SimpleNamespace(
            promote=lambda ticket=ticket: setattr(ticket, "promoted", ticket.promoted + 1)
        )
    inflights[1].before, inflights[2].before = inflights[0], inflights[1]
    waiting = asyncio.ensure_future(inflights[2].finalized(durable=True))
    await asyncio.sleep(0)
    assert [ticket.promoted for ticket in tickets] == [1, 1, 1, 0]
    assert [inflight.durable_waited for inflight in inflights] == [True, True, True, False]
    inflights[2].finish()
    await waiting
    # One that begins to wait for its parent when somebody waits for it already hastens that one as well.
    async with services(tmp_path, Capturer(tmp_path)) as these:
        late = InFlight(rows[3], rows[2])
        late.expedite()
        these.inflights[rows[2].id] = before = InFlight(rows[2], rows[0])
        storing = asyncio.ensure_future(store(these, late))
        await asyncio.sleep(0)
        assert before.durable_waited
        before.finish()
        await storing


async def test_what_is_packed_is_read_and_becomes_durable_without_raw_images(tmp_path: Path) -> None:
    capturer = Capturer(tmp_path, raw=False)
    async with services(tmp_path, capturer) as these:
        mine = row("c-1", error="captured, but not durable: no space")
        these.checkpoints["c-1"] = mine
        await store(these, InFlight(mine, mine))
        assert capturer.done == ["read", "sync", "release"]
        assert (mine.state, mine.error) == (CheckpointState.DURABLE, None)
        assert stored(tmp_path)["c-1"] == mine


async def test_what_is_nowhere_is_lost_with_all_that_share_it(tmp_path: Path) -> None:
    reported: list[str] = []
    async with services(tmp_path, Capturer(tmp_path, raw=False, wrong="its process images c-1")) as these:
        these.outcomes.lost = lambda row: reported.append(row.id)
        mine, heir = row("c-1"), row("c-2", dump="c-1", parent="c-1")
        these.checkpoints.update({"c-1": mine, "c-2": heir})
        await store(these, InFlight(mine, mine))
        await store(these, InFlight(heir, mine))
        assert reported == ["c-1", "c-2"]
        assert mine.error == f"{UNSTORED}its process images c-1"
        await these.catalogue.write([])
        assert {item.state for item in stored(tmp_path).values()} == {CheckpointState.FAILED}


async def test_a_captured_checkpoint_stays_while_others_share_its_content(tmp_path: Path) -> None:
    async with services(tmp_path, Capturer(tmp_path)) as these:
        owner, heir = row("c-1"), row("c-2", dump="c-1", parent="c-1")
        these.checkpoints.update({"c-1": owner, "c-2": heir})
        collector = GarbageCollector(these, {})
        assert collector.held() == {"c-1"}
        owner.state = CheckpointState.DURABLE
        assert collector.held() == set()


async def test_an_id_is_free_when_the_content_is_gone_and_not_when_the_row_is(tmp_path: Path) -> None:
    capturer, gone, let_go = Capturer(tmp_path), threading.Event(), threading.Event()

    def discard(checkpoint: str, *, files: bool, images: bool) -> None:
        gone.set()
        assert let_go.wait(60)
        capturer.done.append(f"discard {checkpoint}")

    capturer.discard = discard  # type: ignore[attr-defined]
    async with services(tmp_path, capturer) as these:
        these.checkpoints["c-1"] = mine = row("c-1", state=CheckpointState.DURABLE)
        collector = GarbageCollector(these, {})
        removing = asyncio.ensure_future(collector.remove(mine))
        assert await asyncio.to_thread(gone.wait, 60)
        assert not these.checkpoints
        free = asyncio.ensure_future(collector.removed())  # an import of the same id waits for this
        await asyncio.sleep(0)
        assert not free.done()
        let_go.set()
        await free
        assert capturer.done == ["discard c-1"]
        await removing


def test_the_nearest_whole_ancestor() -> None:
    failed = {"state": CheckpointState.FAILED}
    rows = {
        item.id: item for item in (row("c-1"), row("c-2", parent="c-1", **failed), row("c-3", parent="c-2", **failed))
    }
    assert [nearest(rows, name) for name in ("c-1", "c-2", "c-3", "c-0")] == ["c-1", "c-1", "c-1", "c-0"]


# ---------------------------------------------------------------------------- a daemon that was killed


class Host:
    """A daemon whose catalogue is changed while it is dead."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon

    def captured(self, *checkpoints: CheckpointInfo) -> None:
        """As if it had been killed before the rows could say durable."""
        with contextlib.closing(sqlite3.connect(self.daemon.state / "catalogue.sqlite")) as database, database:
            for name in (item.id for item in checkpoints):
                (blob,) = database.execute("SELECT row FROM checkpoints WHERE id = ?", (name,)).fetchone()
                there = msgspec.msgpack.decode(blob, type=CheckpointRow)
                there.state, there.durable_at = CheckpointState.CAPTURED, None
                database.execute(*put_checkpoint(there))

    def packed(self, checkpoint: CheckpointInfo) -> Path:
        return self.daemon.state / "checkpoints" / f"{checkpoint.id}.dump"

    def raw(self, checkpoint: CheckpointInfo) -> Path:
        return self.daemon.run / "captures" / checkpoint.id


async def with_service(client: Client) -> tuple[Sandbox, CheckpointInfo, CheckpointInfo]:
    """A sandbox, a checkpoint of its files, and one after it of files and a process."""
    sandbox = await client.create(IMAGE)
    first = await sandbox.durable(await sandbox.exec("echo 1 > /x"))
    second = await sandbox.durable(await sandbox.exec(f"echo 2 > /x; {SERVICE}"))
    return sandbox, first, second


@pytest.mark.skipif(bool(missing()), reason=missing())
async def test_after_a_kill_nothing_stays_captured(tmp_path_factory: pytest.TempPathFactory) -> None:
    daemon = Daemon(tmp_path_factory.mktemp("host"))
    host = Host(daemon)
    try:
        await asyncio.to_thread(daemon.start)
        async with daemon.client() as client:
            complete, unpacked, damaged, gone = [await with_service(client) for _ in range(4)]
            (fork,) = await client.fork(gone[2].id, 1)
            assert fork.sandbox is not None, fork.error
            await gone[0].remove()
            await unpacked[0].kill()
        daemon.kill()
        host.captured(complete[2], unpacked[2], damaged[2], gone[2])
        host.packed(unpacked[2]).unlink()
        content = bytearray(host.packed(damaged[2]).read_bytes())
        content[len(content) // 2] ^= 1
        host.packed(damaged[2]).write_bytes(content)
        host.raw(complete[1]).mkdir()  # let go of too late, by a daemon that was killed after its row said durable
        await asyncio.to_thread(daemon.start)
        async with daemon.client() as client:
            for _, _, checkpoint in (complete, gone):
                said = await client.checkpoint(checkpoint, wait="durable")
                assert (said.state, said.error) == (CheckpointState.DURABLE, None)
                assert [report.damage for report in await client.store.verify(said)] == [[]]
            back = await client.get(complete[0].id)
            await back.restore(complete[2])
            assert (await back.exec(f"cat /x; {COUNT}")).text == "2\n1\n"
            for _, _, checkpoint in (unpacked, damaged):
                said = await client.checkpoint(checkpoint)
                assert said.state is CheckpointState.FAILED
                assert (said.error or "").startswith(f"{UNSTORED}its process images {checkpoint.id}")
            dead = await client.get(unpacked[0].id)
            assert (dead.info.state, dead.info.head) == (SandboxState.DEAD, unpacked[1].id)
            await dead.restore()
            assert (await dead.exec(f"cat /x; {COUNT}")).text == "1\n0\n"
            alive = await client.get(damaged[0].id)
            assert (alive.info.state, alive.info.head) == (SandboxState.RUNNING, damaged[1].id)
            carried_over = await alive.exec(f"cat /x; {COUNT}")
            assert (carried_over.text, carried_over.verdict) == ("2\n1\n", Verdict.BOTH)
            again = await alive.durable(carried_over)
            assert again.state is CheckpointState.DURABLE
            await alive.restore(again)
            assert (await alive.exec(f"cat /x; {COUNT}")).text == "2\n1\n"
        assert not host.raw(complete[1]).exists()
    finally:
        daemon.clean()
