"""A trainer on several hosts that share no directory: agents on the loopback, each with one of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from rollout.weights.export import put_together
from rollout.weights.mirror import Mirror
from rollout.weights.puller import Puller
from rollout.weights.source import source_of
from rollout.weights.store import VersionStore
from sandbox.errors import EngineFailed
from tests.support.programs import Program
from tests.trainer.test_distributed import alone, ended, near, plan, record
from tests.trainer.test_learner import samples
from trainer.batches.sample import SampleLog
from trainer.distributed.agent import own_address
from trainer.distributed.head import TOKEN, HeadClient, LogEntry, entries
from trainer.distributed.host_fleet import HostFleet
from trainer.distributed.hosts import HostAnswer, HostServer, Order, Signs
from trainer.distributed.save_parts import PART, SavePartsReader
from trainer.errors import RankLost
from trainer.resume import ResumeState
from trainer.settings import MeshSettings

SECRET = "a token"
LOOPBACK = "127.0.0.1"


@contextmanager
def agent(fleet: HostFleet, directory: Path, name: str) -> Iterator[Program]:
    program = Program(
        [
            *(sys.executable, "-m", "trainer.distributed.agent", "--head", f"http://{LOOPBACK}:{fleet.server.port}"),
            *("--directory", str(directory), "--name", name),
        ],
        env={**os.environ, TOKEN: SECRET},
    )
    try:
        yield program
    finally:
        program.destroy()


async def pulled(sources: str, directory: Path) -> int:
    """The version that a reader gets, every piece checked."""
    puller = Puller(source_of(sources, token=SECRET), Mirror(directory), name="reader")
    try:
        return (await puller.pull()).version
    finally:
        await puller.close()


def test_a_trainer_on_two_hosts_goes_on_when_one_is_lost(tmp_path: Path) -> None:
    """Its steps are those of one rank; what it publishes is read from both hosts."""
    expected = alone(tmp_path)
    made = plan(tmp_path, "head")
    fleet = HostFleet(made, ranks=1, hosts=2, address=LOOPBACK, token=SECRET)
    with agent(fleet, tmp_path / "other", "other") as other, fleet:
        fleet.join_timeout = 300.0
        fleet.start()
        record(fleet, 2)
        assert fleet.wait(2).saved
        theirs = tmp_path / "other"
        assert not (theirs / "resume" / ".new" / ".metadata").exists()  # the save is complete on one host alone
        assert len(list((made.resume / "step-000002").glob("*.distcp"))) == 2
        stores = [made.published, theirs / "weights"]
        contents = [{path.name for path in (store / "chunks").glob("??/*")} for store in stores]
        assert contents[0] > contents[1]  # this host gathers what the other one published
        assert asyncio.run(pulled(fleet.sources, tmp_path / "mirror")) == 2
        rank = next(beat for beat in fleet.beats() if beat.rank == 1)
        other.destroy()
        os.kill(rank.pid, signal.SIGKILL) if not ended(rank.pid) else None
        with pytest.raises(RankLost, match="host other gave no sign"):
            fleet.wait(3)
        record(fleet, 3, since=2)
        fleet.join_timeout = 0.0
        fleet.start()
        assert fleet.wait(3).saved and fleet.total == 1
        with agent(fleet, tmp_path / "other", "other"):
            deadline = time.monotonic() + 300.0
            while "other" not in {host.name for host in fleet.server.state.living()}:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            for step in (3, 4):  # the host that is back takes part from the next batch on
                fleet.give(samples(step), ResumeState(step=step + 1, version=step + 1))
            assert fleet.total == 2
            assert fleet.wait(5).saved
        assert near(fleet.weights(5), expected)
    store = VersionStore(made.published)  # what other hosts' ranks published was gathered
    assert [ref.version for ref in store.versions()][-1] == 5
    put_together(store, tmp_path / "last", 5)


def test_a_host_gets_what_is_named_and_nothing_else(tmp_path: Path) -> None:
    made = plan(tmp_path, "head")
    log = SampleLog(Path(made.directory, "log"))
    with HostServer(made, LOOPBACK, token=SECRET) as server:
        url = f"http://{LOOPBACK}:{server.port}"
        client, other = HeadClient(url, SECRET), tmp_path / "other"
        other.mkdir()
        first = client.put("/signs/h-1", Signs(start=0), HostAnswer)
        assert first.order is not None and first.order.node == -1
        server.state.members = ["h-2", "h-1"]
        known = Signs(start=0, ordered=0, log=first.mark)
        assert client.put("/signs/h-1", known, HostAnswer) == HostAnswer()  # after a while
        log.write_part(1, 0, samples(1)[:3])
        log.write(0, samples(0))
        second = client.put("/signs/h-1", msgspec.structs.replace(known, ordered=-1), HostAnswer)
        assert second.order is not None and second.order.node == 2
        listed = second.log
        assert listed is not None
        assert [entry.name for entry in listed] == ["part-000001-0000.zst", "batch-000000.zst"]
        for entry in listed:
            client.fetch("log", entry, other / entry.name)
        assert SampleLog(other).read(0) == samples(0)
        log.write(0, samples(5))  # the batch of a step is replaced
        third = client.put("/signs/h-1", msgspec.structs.replace(known, log=second.mark), HostAnswer).log
        assert third is not None and third[1].digest != listed[1].digest
        with pytest.raises(EngineFailed, match="arrived damaged"):
            client.fetch("log", LogEntry("batch-000000.zst", "0" * 64), other / "x")
        assert not (other / "x").exists()
        model = entries(Path(made.model))
        assert "model.safetensors" in {entry.name for entry in model}
        shard = other / "__1_0.distcp"
        shard.write_bytes(b"shard")
        for wrong in ("/log/..%2fplan.json", "/model/..", "/save/.metadata", "/elsewhere/config.json"):
            with pytest.raises(OSError, match="answered 4"):
                client._exchange("GET", wrong, lambda response: response.read())
        with pytest.raises(OSError, match="answered 404"):
            client.upload(shard)  # no save is under way
        (made.resume / ".new").mkdir(parents=True)
        client.upload(shard)
        assert (made.resume / ".new" / shard.name).read_bytes() == b"shard"
        metadata = other / ".metadata"
        metadata.write_bytes(b"")
        with pytest.raises(OSError, match="answered 400"):
            client.upload(metadata)
        kept = made.resume / "step-000001"
        kept.mkdir()
        (kept / shard.name).write_bytes(b"0123456789")
        server.state.order = Order(start=2, plan=made, save=kept.name)
        assert client.part(shard.name, 2, 3) == b"234"
        with pytest.raises(OSError, match="answered 400"):
            client.part(shard.name, 0, PART + 1)
        with pytest.raises(OSError, match="answered 401"):
            HeadClient(url, "another token").put("/signs/h-1", known, HostAnswer)
        assert own_address(url) == LOOPBACK
        client.close()


def test_a_rank_fetches_what_it_reads_of_a_save(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    state = {name: torch.randn(1 << 16) for name in ("a", "b", "c")}
    dcp.save(state, checkpoint_id=there, no_dist=True)
    here.mkdir()
    (here / ".metadata").write_bytes((there / ".metadata").read_bytes())
    asked: list[tuple[str, int, int]] = []

    def part(name: str, offset: int, length: int) -> bytes:
        asked.append((name, offset, length))
        return (there / name).read_bytes()[offset : offset + length]

    loaded = {"b": torch.zeros(1 << 16)}
    dcp.load(loaded, storage_reader=SavePartsReader(here, part), no_dist=True)
    assert torch.equal(loaded["b"], state["b"])
    assert sum(length for _, _, length in asked) < 1.1 * 4 * (1 << 16)
    assert sum((there / name).stat().st_size for name in {name for name, _, _ in asked}) > 12 * (1 << 16)


def test_hosts_that_do_not_make_up_a_mesh_are_said(tmp_path: Path) -> None:
    fleet = HostFleet(plan(tmp_path, "head"), ranks=1, hosts=2, address=LOOPBACK, token=SECRET, join_timeout=0.0)
    try:
        assert fleet._members() == []
        fleet.plan = plan(tmp_path, "head", mesh=MeshSettings(replicate=2))
        with pytest.raises(RankLost, match="0 of 1 other hosts are there, which do not make up the mesh"):
            fleet.start()
    finally:
        fleet.close()


#: An agent whose signal comes right after the main thread has taken the lock of what it waits for, if it ever does.
ENDED = """
import os, signal, threading, types
from pathlib import Path
from trainer.distributed import agent
def refuse(*_): raise OSError("refused")
one = agent.HostAgent(types.SimpleNamespace(put=refuse), "a", Path("."), address="", serve=False)
enter, sent = threading.Condition.__enter__, []
def end():
    if not sent:
        sent.append(True)
        os.kill(os.getpid(), signal.SIGTERM)
def entered(self):
    result = enter(self)
    if self is one._stop._cond and threading.current_thread() is threading.main_thread():
        end()
    return result
threading.Condition.__enter__ = entered
signal.signal(signal.SIGTERM, agent.end)
threading.Timer(1, end).start()
one.run()
"""


def test_an_agent_can_be_ended_at_any_instant(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ENDED], cwd=tmp_path, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
