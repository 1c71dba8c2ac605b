"""A whole run, small: real daemon, real sandboxes, real engine; interrupted between two steps and resumed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from coordinator import local
from rollout.gantt import engines
from rollout.gantt.chart import chart
from rollout.labels import LEDGER, PREPARED, RETAINED
from rollout.service.protocol import RolloutCounters
from rollout.store import decisions, servers
from rollout.store.lock import own
from rollout.store.samples import SampleStore
from rollout.weights.export import export
from rollout.weights.store import VersionStore
from sandbox.errors import Conflict
from tests.support.daemon_host import Daemon
from tests.support.programs import END_TIMEOUT, Program
from tests.support.small_run import EXAMPLE, rows, small
from trainer.config import open_run
from trainer.distributed.watch import read
from trainer.reports.metrics import read_lines
from trainer.reports.report import Totals
from trainer.reports.split import PARTS
from trainer.resume import ResumeState, saves_in
from trainer.run import main
from trainer.settings import MeshSettings

FIELDS = {
    *("reward_before", "reward_after", "wall_s", "verdicts", "checkpoints", "stored_bytes", "full_bytes"),
    *("hidden_share", "killed", "recovered_equal", "trajectories_lost", "engine"),
}


def begin(run: Path) -> Program:
    """The supervisor of a run."""
    return Program([sys.executable, "-m", "coordinator.local", str(run)], cwd=EXAMPLE.parent.parent)


OWNED = ("supervisor", "rollout", "trainer")


def all_live(directory: Path) -> bool:
    """Whether each of these roles has a living process, whose number its lock has."""
    living = {state.name: str(state.pid) for state in local.states(directory) if state.alive}
    locks = [directory / f"{role}.lock" for role in OWNED]
    return [living.get(role) for role in OWNED] == [lock.read_text() if lock.exists() else "" for lock in locks]


def test_a_run_goes_on_whichever_of_its_processes_is_killed(daemon: Daemon, tmp_path: Path) -> None:
    """kill -9 of each role: while turns are under way, right after a batch was handed out, and after a step."""
    directory, _ = open_run(small(tmp_path / "runs", steps=3, pace=0.1, stream=True, versions=0))
    instants = {
        ("rollout", "engine"): ("journal.sqlite", "select count(*) >= 3 from turns"),
        ("trainer",): ("samples.sqlite", "select count(*) from prompts where state='handed'"),
        ("supervisor", "rollout", "trainer"): ("samples.sqlite", "select count(*) from prompts where state='consumed'"),
    }
    process = begin(directory)
    try:
        for roles, (file, query) in instants.items():
            while process.poll() is None and not (rows(directory, file, query) and all_live(directory)):
                time.sleep(0.02)  # who was killed at the last instant must be back to be killed again
            assert process.poll() is None, "it ended before it could be killed"
            for role in OWNED:
                with pytest.raises(Conflict):
                    own(directory, f"{role}.lock")  # a second owner is refused while it lives
            assert all(local.restart(directory, role) for role in roles)
            if "supervisor" in roles:
                process.wait(END_TIMEOUT)
                process = begin(directory)
        assert process.wait(500) == 0, (directory / "rollout.log").read_text()
    finally:
        process.end()
    assert not any(state.alive for state in local.states(directory))
    run = SimpleNamespace(directory=directory)

    summary = json.loads((run.directory / "summary.json").read_text())
    assert set(summary) >= FIELDS
    assert summary["steps"] == summary["policy_version"] == 3
    assert summary["trajectories_lost"] == 0
    assert summary["killed"] == summary["recovered_equal"]
    assert sum(summary["verdicts"].values()) == summary["turns"] > 0
    assert 0 < summary["stored_bytes"] < summary["full_bytes"]
    assert {*PARTS, "evaluation"} == set(summary["wall_split_s"]) and summary["wall_split_s"]["trainer"] > 0
    assert sum(summary["wall_split_s"].values()) <= summary["wall_s"] + 1.0
    for name in ("reward.png", "verdicts.png", "bytes.png"):
        assert (run.directory / name).read_bytes().startswith(b"\x89PNG")
    assert [line["step"] for line in read_lines(run.directory / "metrics.jsonl") if "reward_held_out" in line] == [0, 3]
    assert list((run.directory / "tensorboard").iterdir())
    published = VersionStore(run.directory / "weights")
    assert [ref.version for ref in published.versions()] == [0, 1, 2, 3]
    assert export(run.directory, tmp_path / "exported") == 3
    spent = [line["weights"] for line in read_lines(run.directory / "metrics.jsonl") if "weights" in line]
    assert spent and all(item["versions_behind"] <= 1 for item in spent)
    changes = [item["sync_bytes"] for item in spent if "sync_bytes" in item]  # a rollout begins with what it finds
    assert "sync_bytes" in spent[-1] and all(size > 0 for size in changes)
    store = SampleStore(run.directory / "rollout")
    account = store.account()
    batches = [store.batch(step) for step in range(3)]
    store.close()
    prompts = [group.prompt for batch in batches if batch is not None for group in batch.groups]
    assert account.consumed == len(prompts) == len(set(prompts)) == 6 and account.given_up == 0
    assert any(t.continued for batch in batches if batch is not None for t in batch.trajectories)
    replayed = decisions.replay(run.directory / "rollout")
    assert replayed.identical == replayed.decisions > 0, replayed.first_difference
    noted = list(servers.read(run.directory / "rollout"))
    assert {item.server for item in noted} == {"engine"} and max(item.load for item in noted) > 1
    page = chart(run.directory / "rollout", "a run", seconds=3600)
    for shown in (engines.ANSWERS, engines.STATES["updating"], engines.STATES[servers.LEFT], engines.IN["command"]):
        assert f"</i> {escape(shown)}<td>" in page, shown
    left = asyncio.run(_sandboxes(daemon))
    assert {(info.state, *info.labels) for info in left} == {
        ("dead", PREPARED, LEDGER),  # for the next run of these seeds
        ("dead", RETAINED),  # of the newest trajectories, to be visited
    }
    assert sum(RETAINED in info.labels for info in left) <= 16


def test_a_rank_of_a_live_run_is_killed_and_the_run_goes_on(
    daemon: Daemon, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mesh = MeshSettings(tensor=2)
    directory, _ = open_run(small(tmp_path / "runs", steps=2, held_out=1, faults=0, ranks=2, staleness=0, mesh=mesh))
    process = begin(directory)
    try:
        while process.poll() is None and not rows(
            directory, "samples.sqlite", "select count(*) from prompts where state='consumed'"
        ):
            time.sleep(0.02)  # the next batch is only begun now: ranks have nothing to end with for seconds
        victim = read(directory / "ranks" / "beats")[1].pid
        assert {"rank-0", "rank-1"} <= {state.name for state in local.states(directory)}
        assert local.restart(directory, "rank-1")
        assert process.wait(500) == 0, (directory / "rollout.log").read_text()
    finally:
        process.end()
    assert f"rank 1 (pid {victim}) was killed by signal 9: all 2 ranks are started again" in capfd.readouterr().out
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["policy_version"], summary["trajectories_lost"]) == (2, 0)
    saves = [decoded(path) for path in saves_in(directory / "resume")]
    assert [(state.step, state.ranks, state.totals["trajectories"] > 0) for state in saves] == [
        (1, 2, True), (2, 2, True),
    ]  # fmt: skip
    assert [line["step"] for line in read_lines(directory / "metrics.jsonl") if "train/entropy" in line] == [1, 2]


def decoded(save: Path) -> ResumeState:
    return msgspec.json.decode((save / "state.json").read_bytes(), type=ResumeState)


async def _sandboxes(daemon: Daemon) -> list[Any]:
    async with daemon.client() as host:
        return await host.sandboxes()


def test_no_such_image_is_said_before_anything_is_spent(
    daemon: Daemon, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory, _ = open_run(small(tmp_path / "runs", image="nope"))
    with begin(directory) as process:
        assert process.wait(300) == 1
    assert "the rollout stopped: no image 'nope'; there are: debian" in capfd.readouterr().err
    assert not (directory / "summary.json").exists()


def test_a_full_disk_stops_the_run_cleanly_and_it_can_go_on(
    daemon: Daemon, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "small"
    out.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=19m", "pagurus-test", str(out)], check=True)
    try:
        directory, _ = open_run(small(out, steps=1))
        with begin(directory) as process:
            assert process.wait(300) == 1
        said = capfd.readouterr().out
        assert "is full" in said
        assert f"pagurus train --resume {directory}" in said
        subprocess.run(["mount", "-o", "remount,size=256m", str(out)], check=True)
        with begin(directory) as process:
            assert process.wait(300) == 0
        assert json.loads((directory / "summary.json").read_text())["trajectories_lost"] == 0
    finally:
        subprocess.run(["umount", str(out)], check=True)


def test_bad_input_is_one_line_and_a_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(small(tmp_path / "runs", task=tmp_path / "nowhere")) == 1
    assert main(small(tmp_path / "runs", engine="abacus")) == 1
    assert main(small(tmp_path / "runs", resume=tmp_path / "nowhere")) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert [line.split(":")[0] for line in lines] == ["stopped"] * 3
    assert not (tmp_path / "runs").exists()


def test_counts_are_neither_lost_nor_doubled_whoever_is_started_again() -> None:
    totals = Totals()
    totals.count(RolloutCounters(born=1.0, killed=3, recovered_equal=1))
    again = msgspec.convert(msgspec.to_builtins(totals), Totals)  # a trainer that was killed after its save
    again.count(RolloutCounters(born=1.0, killed=5, recovered_equal=5))
    again.count(RolloutCounters(born=2.0, killed=1))  # of the next rollout
    assert (again.killed, again.recovered_equal) == (6, 5)


def test_totals_survive_the_resume_state() -> None:
    totals = Totals(reward_before=0.25, turns=3, checkpoint_s=2.0, exposed_s=0.5)
    again = msgspec.convert(msgspec.to_builtins(totals), Totals)
    assert again == totals
    assert again.hidden_share == 0.75
