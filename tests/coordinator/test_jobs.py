"""Jobs on a real cluster of Ray: a whole run goes on whoever is killed; the queue and the head's order of acts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ray.cluster_utils import Cluster as Machines

from coordinator import local
from coordinator.jobs import own_ray
from coordinator.jobs.head import JobHead
from coordinator.jobs.keeper import Jobs as Keeper
from coordinator.jobs.keeper import parse_quotas
from coordinator.jobs.parts import make_key
from coordinator.jobs.shape import parts_of
from coordinator.jobs.store import JobStore
from coordinator.jobs.supervisor import remember
from pagurus.training.jobs import _trainer
from rollout.engine import adopted
from rollout.plan import PoolPlan
from rollout.store.samples import SampleStore
from sandbox.errors import Conflict, Invalid, NotFound
from sandbox.messages.cluster import JobInfo, JobRequest
from sandbox.paths import CHECKOUT
from tests.support.cluster import Cluster
from tests.support.daemon_host import Daemon
from tests.support.programs import Program
from tests.support.small_run import rows, small
from trainer.config import open_run
from trainer.settings import HostSettings

LONG = 400.0  # seconds; other tests run beside this one
ITEM = {"slot": 1}  # what a machine has: room for a run
APART = {"trainer_needs": {"train": 1}, "engine_needs": {"pool": 1}, "engines": 2}
PARTS: dict[str, tuple[str, ...]] = {  # of a job, and their processes
    "run": ("supervisor", "rollout", "trainer", "engine"),
    "trainer": ("trainer.supervisor", "trainer"),
    **{name: (f"{name}.supervisor", f"{name}.keeper", name) for name in ("engine-0", "engine-1")},
}


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


class Jobs:
    """The jobs of a coordinator as its callers see them."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def submit(self, run: Path, host: Path, apart: Mapping[str, Any] | None = None, **needs: float) -> JobInfo:
        remember(run, {"PAGURUS_HOST": str(host)})
        make_key(run)
        return self._call("POST", "", JobInfo, JobRequest(run=str(run), needs=needs, **apart or {}))

    def all(self) -> dict[str, JobInfo]:
        return {item.id: item for item in self._call("GET", "", list[JobInfo])}

    def cancel(self, job: str) -> JobInfo:
        return self._call("DELETE", f"/{job}", JobInfo)

    def said(self, job: str) -> bytes:
        async def work() -> bytes:
            async with self.cluster.client() as client:
                return await client.raw("GET", f"/v1/cluster/jobs/{job}/log", None, "")

        return asyncio.run(work())

    def _call(self, method: str, path: str, kind: type, body: object = None):  # type: ignore[no-untyped-def]
        async def work():  # type: ignore[no-untyped-def]
            async with self.cluster.client() as client:
                return await client.call(method, f"/v1/cluster/jobs{path}", kind, body)

        return asyncio.run(work())


@pytest.fixture
def machines() -> Iterator[Machines]:
    """A cluster of Ray: one node that has nothing, two with room for a run each."""
    made = Machines()
    try:
        for has in ({}, ITEM, ITEM):
            add_machine(made, has)
        yield made
    finally:
        made.shutdown()


def add_machine(machines: Machines, has: Mapping[str, float]) -> None:
    """To Ray a node is an error that takes 30 s to start: it is tried again."""
    for last in (False, False, True):
        try:
            machines.add_node(num_cpus=0, resources=dict(has), include_dashboard=False)
            break
        except Exception as error:  # Ray has no class for it
            if last or "timed out during startup" not in str(error):
                raise


def lineage(pid: int) -> list[int]:
    """A process, its parent, and so on."""
    result = []
    while pid > 1:
        result.append(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return result


@pytest.mark.alone  # Ray gives up where it has to wait
def test_a_job_goes_on_whoever_is_killed(machines: Machines, own: Daemon, tmp_path: Path) -> None:
    """kill -9 of the head, then of the coordinator, then of all that runs on the machine of the job."""
    directory, _ = open_run(small(tmp_path / "runs", steps=3, pace=0.2, held_out=1, faults=0))
    other, _ = open_run(small(tmp_path / "runs"))
    cluster = Cluster(tmp_path, "--ray", machines.address, "--quota", "slot=1").start()
    try:
        jobs = Jobs(cluster)
        job = jobs.submit(directory, own.socket, slot=1).id
        waits = jobs.submit(other, own.socket, slot=1).id
        until(lambda: handed(directory) > 0, "no batch")
        assert jobs.all()[job].state == "running"
        until(lambda: "may use slot=1" in jobs.all()[waits].reason, "the quota is not told")
        supervisor = local.written(directory)["supervisor"]

        os.kill(int((tmp_path / "state" / "head.lock").read_text()), signal.SIGKILL)
        cluster.kill()
        cluster.start()
        assert jobs.cancel(waits).state == "cancelled"
        with pytest.raises(Conflict, match=job):
            jobs.submit(directory, own.socket, slot=1)
        assert local.written(directory)["supervisor"] == supervisor  # nobody has ended it

        lose_machine(machines, directory)
        until(lambda: jobs.all()[job].ended_at is not None, "the job does not end")
        assert (jobs.all()[job].state, jobs.all()[job].reason) == ("done", "")
        assert local.written(directory)["supervisor"].generation > supervisor.generation
        assert b"held-out reward after GRPO" in jobs.said(job)
    finally:
        cluster.clean()
    complete(directory)


def complete(directory: Path, steps: int = 3) -> None:
    """A run of so many steps of two groups counted each prompt once."""
    store = SampleStore(directory / "rollout")
    account, batches = store.account(), [store.batch(step) for step in range(steps)]
    store.close()
    prompts = [group.prompt for batch in batches if batch is not None for group in batch.groups]
    assert account.consumed == len(prompts) == len(set(prompts)) == 2 * steps and account.given_up == 0
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["steps"], summary["trajectories_lost"]) == (steps, 0)


def handed(directory: Path) -> int:
    """Prompts of a batch that the trainer has."""
    return rows(directory, "samples.sqlite", "select count(*) from prompts where state='handed'")


def apart(directory: Path, steps: int = 3, **more: Any) -> Path:
    """A run for which two engines are to be placed."""
    return open_run(small(directory, steps=steps, pace=0.2, held_out=1, faults=0, pool=PoolPlan(engines=2), **more))[0]


@pytest.mark.alone
def test_a_job_has_parts_on_machines_of_their_own(machines: Machines, own: Daemon, tmp_path: Path) -> None:
    """kill -9 of all on the machine of an engine, for which there is no other one, then on that of the trainer."""
    for has in ({"train": 1}, {"train": 1}, {"pool": 1}, {"pool": 1}):
        add_machine(machines, has)
    directory = apart(tmp_path / "runs")
    cluster = Cluster(tmp_path, "--ray", machines.address).start()
    try:
        jobs = Jobs(cluster)
        job = jobs.submit(directory, own.socket, APART, slot=1).id
        until(lambda: handed(directory) > 0, "no batch")
        assert set(local.written(directory)) >= {name for names in PARTS.values() for name in names} - {"engine"}
        assert local.written(directory)["engine-0"].url.startswith("https://")
        before = local.written(directory)["trainer"].generation
        for part in ("engine-1", "trainer"):
            lose_machine(machines, directory, part)
        until(lambda: jobs.all()[job].ended_at is not None, "the job does not end")
        assert (jobs.all()[job].state, jobs.all()[job].reason) == ("done", "")
        assert local.written(directory)["trainer"].generation > before
    finally:
        cluster.clean()
    complete(directory)
    until(lambda: not any(item.alive for item in local.states(directory)), "something of it lives on")


@pytest.mark.alone
@pytest.mark.timeout(1500)  # three starts of torch on two hosts
def test_a_trainer_has_ranks_on_machines_of_their_own(machines: Machines, own: Daemon, tmp_path: Path) -> None:
    """kill -9 of all on the machine of a rank, then on that of the trainer: other machines take their places."""
    for _ in range(4):
        add_machine(machines, {"train": 1})
    hosts = HostSettings(count=2, wait=LONG)
    directory = open_run(small(tmp_path / "runs", steps=3, held_out=1, faults=0, ranks=2, hosts=hosts))[0]
    cluster = Cluster(tmp_path, "--ray", machines.address).start()
    try:
        jobs = Jobs(cluster)
        job = jobs.submit(directory, own.socket, {"trainer_needs": {"train": 1}, "trainer_hosts": 2}, slot=1).id
        log, other = directory / "run.log", f"{job}.host-1"
        until(lambda: handed(directory) > 0, "no batch")
        before, first = local.written(directory)["trainer"].generation, host_of(other)
        assert f"2 of 2 hosts, 1 ranks each: {other} and this one" in log.read_text()
        lose_process(machines, first)
        until(lambda: f"host {other} gave no sign" in log.read_text(), "the host is not missed")
        until(lambda: log.read_text().count("2 of 2 hosts") == 2, "no other machine takes its place")
        lose_machine(machines, directory, "trainer")
        until(lambda: jobs.all()[job].ended_at is not None, "the job does not end")
        assert (jobs.all()[job].state, jobs.all()[job].reason) == ("done", "")
        assert local.written(directory)["trainer"].generation > before
    finally:
        cluster.clean()
    complete(directory)
    until(lambda: host_of(other) is None, "a host of the trainer lives on")
    until(lambda: not launched(directory), "what starts the ranks lives on")


@pytest.mark.parametrize(("standby", "needs"), [(1, {"GPU": 16.0}), (0, {"GPU": 16.0, "CPU": 0.5})])
def test_hosts_of_a_trainer_share_what_it_needs(standby: int, needs: dict[str, float], tmp_path: Path) -> None:
    hosts = HostSettings(count=2, standby=standby)
    directory = open_run(small(tmp_path, ranks=2, hosts=hosts))[0]
    made = _trainer(directory, needs)
    assert made == {"trainer_needs": {name: amount / 2 for name, amount in needs.items()}, "trainer_hosts": 2 + standby}
    parts = parts_of(JobInfo(id="j-1", run="/r", needs={"CPU": 1}, **made))
    assert list(parts) == ["run", "trainer", "host-1", "host-2"][: 3 + standby]
    with pytest.raises(Invalid, match="2 hosts cannot share GPU=15 evenly"):
        _trainer(directory, {"GPU": 15})
    with pytest.raises(Invalid, match="has 2 hosts"):
        _trainer(directory, {})


def launched(directory: Path) -> list[str]:
    """The processes that start ranks of a run, by their command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_text(errors="replace"))
    return [line for line in found if "torch.distributed.run" in line and str(directory) in line]


def host_of(name: str) -> int | None:
    """The process of a host of a job's trainer whose name begins so."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_text(errors="replace").split("\0")
            at = words.index("coordinator.jobs.trainer_host") if "coordinator.jobs.trainer_host" in words else -1
            if at >= 0 and words[0] != "setsid" and words[at + 1].startswith(name):
                return int(path.parent.name)
    return None


@pytest.mark.alone
@pytest.mark.long  # three runs on two slots, each machine lost in turn: minutes
def test_three_jobs_go_on_whoever_is_killed(machines: Machines, own: Daemon, tmp_path: Path) -> None:
    """They share two trainers' slots and two pools of two engines. kill -9 of every role, of the head that speaks to
    Ray, of the coordinator, and of all that runs on a machine of each kind, in turn; another machine comes for it.
    Each of these deaths comes while jobs hand out batches."""
    steps = 12  # fewer are over before all have died
    kinds: dict[str, dict[str, float]] = {"run": ITEM, "trainer": {"train": 1}, "engine-0": {"pool": 2}}
    for kind in ("trainer", "trainer", "engine-0", "engine-0"):
        add_machine(machines, kinds[kind])
    directories = [apart(tmp_path / "runs", steps, seed=seed) for seed in range(3)]
    cluster = Cluster(tmp_path, "--ray", machines.address).start()
    try:
        jobs = Jobs(cluster)
        runs = {jobs.submit(directory, own.socket, APART, slot=1).id: directory for directory in directories}

        def working() -> list[Path]:
            """Jobs that have handed out a batch and have not handed out the last."""
            going = [directory for job, directory in runs.items() if jobs.all()[job].state == "running"]
            return [directory for directory in going if 0 < handed(directory) < 2 * steps]

        def finalized() -> bool:
            """As many work as there is room for."""
            left = sum(info.ended_at is None for info in jobs.all().values())
            assert left, "all jobs ended before the last death"
            return len(working()) >= min(2, left)

        def lose_one(part: str) -> bool:
            """A machine of one that works."""
            for directory in reversed(working()):
                with contextlib.suppress(FileNotFoundError, ValueError):  # its supervisor has just ended
                    lose_machine(machines, directory, part)
                    return True
            return False

        for act in ("roles", "head", "coordinator", "engine-0", "trainer", "run"):
            until(finalized, f"not all go on before the death of: {act}")
            if act == "roles":
                for directory in working():
                    for role in {name for names in PARTS.values() for name in names}:
                        local.restart(directory, role)
            elif act == "head":
                os.kill(int((tmp_path / "state" / "head.lock").read_text()), signal.SIGKILL)
            elif act == "coordinator":
                cluster.kill()
                cluster.start()
            else:
                until(lambda part=act: lose_one(part), "no machine is lost")
                add_machine(machines, kinds[act])
        until(lambda: all(info.ended_at is not None for info in jobs.all().values()), "not all jobs end")
        assert {info.state for info in jobs.all().values()} == {"done"}
    finally:
        cluster.clean()
    for directory in directories:
        complete(directory, steps)


def lose_process(machines: Machines, pid: int | None) -> None:
    """kill -9 of the machine of this process, and of the actor that it is of."""
    assert pid is not None
    living = [node for node in machines.list_all_nodes() if "raylet" in node.all_processes]
    raylets = {node.all_processes["raylet"][0].process.pid: node for node in living}
    above = lineage(pid)
    (where,) = raylets.keys() & set(above)
    raylets[where].kill_raylet()
    with contextlib.suppress(ProcessLookupError):
        os.kill(above[1], signal.SIGKILL)  # the actor


def lose_machine(machines: Machines, directory: Path, part: str = "run") -> None:
    """kill -9 of all that runs on the machine of a part of a job."""
    lose_process(machines, local.written(directory)[PARTS[part][0]].pid)
    for role in PARTS[part]:
        local.restart(directory, role)


@pytest.mark.alone
def test_a_cluster_of_this_machine_lives_while_there_are_jobs(tmp_path: Path) -> None:
    """No cluster is named: one begins with the first job, and ends with the last. That one fails, and says why."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "plan.json").write_text("{}")
    cluster = Cluster(tmp_path).start()
    try:
        jobs = Jobs(cluster)
        job = jobs.submit(run, tmp_path, CPU=1).id
        until(lambda: jobs.all()[job].ended_at is not None, "the job does not end")
        ended = jobs.all()[job]
        assert ended.state == "failed" and ended.reason
        assert ended.reason.encode() in jobs.said(job)
        existing = adopted.read(tmp_path / "state", own_ray.NAME)
        assert existing is not None
        until(lambda: adopted.hold(existing) is None, "Ray is still there")
    finally:
        cluster.clean()


async def test_a_log_that_was_replaced_by_a_link_or_a_pipe_is_not_read(tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "run" / "run.log"
    run.mkdir()
    (run / "plan.json").write_text("{}")
    (tmp_path / "secret").write_text("secret")
    retained = Keeper(tmp_path)
    job = (await retained.submit(JobRequest(run=str(run), needs={"CPU": 1.0}), "")).id
    assert await retained.said(job, 0) == b""
    log.write_bytes(b"one line")
    assert await retained.said(job, 4) == b"line"
    for put in (lambda: log.symlink_to(tmp_path / "secret"), lambda: os.mkfifo(log)):
        log.unlink()
        put()
        with pytest.raises(Invalid, match=r"cannot be read|no file"):
            await retained.said(job, 0)
    await retained.close()


class OneMachine:
    """Ray's part, by hand: has room for `capacity` jobs, which end when they are told."""

    def __init__(self) -> None:
        self.placed: list[str] = []
        self.removed: list[str] = []
        self.capacity = 1
        self.ends: list[End] = []

    def machines(self) -> Sequence[Mapping[str, float]]:
        return [{"CPU": 2.0}]

    def place(self, job: str, run: str, parts: Mapping[str, Mapping[str, float]]) -> bool:
        if job not in self.placed:
            self.placed.append(job)
        return self.placed.index(job) < self.capacity

    def ended(self, timeout: float) -> Sequence[End]:
        result, self.ends = [item for item in self.ends if item.job in self.placed], []
        return result

    def remove(self, job: str) -> None:
        self.removed.append(job)


class End(msgspec.Struct):
    job: str
    status: int = local.DONE
    reason: str = ""


def test_a_head_adopts_what_began_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.jobs.head.POLL_INTERVAL", 0.0)
    store = JobStore(tmp_path)
    first, second, third = (
        store.submit(JobRequest(run=f"/runs/{n}", needs={"CPU": 1.0}), "").id for n in ("one", "two", "three")
    )
    store.change(first, state="running", started_at=5.0)
    store.change(second, state="starting")
    store.cancel(second)
    machine = OneMachine()
    machine.ends = [End(first), End(third, local.SAID, "no disk")]
    sight: list[dict[str, str]] = []

    def place(job: str, run: str, parts: Mapping[str, Mapping[str, float]]) -> bool:
        sight.append({item.id: item.state for item in store.all()})
        machine.ends = machine.ends or [End(third, local.SAID, "no disk")]
        return OneMachine.place(machine, job, run, parts)

    monkeypatch.setattr(machine, "place", place)
    machine.capacity = 2
    JobHead(store, machine, {}).run()
    reported = {item.id: item for item in store.all()}
    assert [reported[item].state for item in (first, second, third)] == ["done", "cancelled", "failed"]
    assert (reported[first].started_at, reported[third].reason) == (5.0, "no disk")
    assert machine.placed == [first, third] and machine.removed == [second, first, third]
    assert store.change(first, state="failed").state == "done"  # a job that has ended stays as it is
    with pytest.raises(NotFound):
        store.job("j-nothing")
    store.close()


def test_quotas_are_of_one_owner_or_of_each_of_the_others() -> None:
    assert parse_quotas(["CPU=8,GPU=1", "alice:GPU=4"]) == {"": {"CPU": 8, "GPU": 1}, "alice": {"GPU": 4}}
    with pytest.raises(Invalid, match="write them like"):
        parse_quotas(["alice:GPU"])


SUPERVISOR = """
import sys
from pathlib import Path
from coordinator import local
from coordinator.jobs.tied import tie
tie()
begun = "import sys, time; open(sys.argv[1], 'w'); time.sleep(600)"
local.supervise(Path(sys.argv[2]), {"trainer": [sys.executable, "-c", begun, sys.argv[2] + "/begun"]})
"""
ACTOR = """
import sys, time
from coordinator.jobs import actor
actor.BEGIN = (*actor.BEGIN[:-1], "-c", sys.argv[2])  # the module's name is its first word then
actor.address = lambda: "127.0.0.1"
made = actor.RunActor(sys.argv[1], "run", ["run"])
while made._process is None:
    time.sleep(0.01)
print(made._process.pid, flush=True)
time.sleep(600)
"""


def test_a_run_ends_with_its_actor_though_ray_kills_the_actors_children(tmp_path: Path) -> None:
    program = [sys.executable, "-c", ACTOR, str(tmp_path), SUPERVISOR]
    actor = Program(program, cwd=CHECKOUT, stdout=subprocess.PIPE)
    assert actor.stdout is not None
    child = int(actor.stdout.readline())
    until((tmp_path / "begun").exists, "the trainer does not begin")
    os.kill(child, signal.SIGKILL)
    actor.destroy()
    actor.end()
    until(lambda: not any(item.alive for item in local.states(tmp_path)), "its roles live on")
