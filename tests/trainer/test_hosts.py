"""A trainer on several hosts that share no directory: agents on the loopback, each with one of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

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
from trainer.distributed.hosts import HostServer, Order, Signs
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
        assert client.put("/signs/h-1", Signs(start=0), Order).node == -1
        server.state.members = ["h-2", "h-1"]
        assert client.get("/order/h-1", Order).node == 2
        log.write(0, samples(0))
        log.write_part(1, 0, samples(1)[:3])
        listed = client.get("/log", list[LogEntry])
        assert [entry.name for entry in listed] == ["part-000001-0000.zst", "batch-000000.zst"]
        for entry in listed:
            client.fetch("log", entry, other / entry.name)
        assert SampleLog(other).read(0) == samples(0)
        log.write(0, samples(5))  # the batch of a step is replaced
        assert client.get("/log", list[LogEntry])[1].digest != listed[1].digest
        with pytest.raises(EngineFailed, match="arrived damaged"):
            client.fetch("log", LogEntry("batch-000000.zst", "0" * 64), other / "x")
        assert not (other / "x").exists()
        model = entries(Path(made.model))
        assert "model.safetensors" in {entry.name for entry in model}
        shard = other / "__1_0.distcp"
        shard.write_bytes(b"shard")
        for wrong in ("/log/..%2fplan.json", "/model/..", "/save/.metadata", "/elsewhere/config.json"):
            with pytest.raises(urllib.error.HTTPError):
                client.get(wrong, bytes)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            client.upload(shard)  # no save is under way
        (made.resume / ".new").mkdir(parents=True)
        client.upload(shard)
        assert (made.resume / ".new" / shard.name).read_bytes() == b"shard"
        metadata = other / ".metadata"
        metadata.write_bytes(b"")
        with pytest.raises(urllib.error.HTTPError, match="400"):
            client.upload(metadata)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            HeadClient(url, "another token").get("/log", list[LogEntry])
        assert own_address(url) == LOOPBACK


def test_hosts_that_do_not_make_up_a_mesh_are_said(tmp_path: Path) -> None:
    fleet = HostFleet(plan(tmp_path, "head"), ranks=1, hosts=2, address=LOOPBACK, token=SECRET, join_timeout=0.0)
    try:
        assert fleet._members() == []
        fleet.plan = plan(tmp_path, "head", mesh=MeshSettings(replicate=2))
        with pytest.raises(RankLost, match="0 of 1 other hosts are there, which do not make up the mesh"):
            fleet.start()
    finally:
        fleet.close()
