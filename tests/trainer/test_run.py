"""A whole run, small: real daemon, real sandboxes, real engine; interrupted between two steps and resumed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from rollout.store import decisions
from rollout.store.lock import own
from rollout.store.samples import SampleStore
from sandbox.errors import Conflict, ImageNotFound
from tests.support.daemon_host import Daemon, missing
from trainer.metrics import read_lines
from trainer.report import Totals
from trainer.run import Config, Run, main

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fix_the_service"
FIELDS = {
    *("reward_before", "reward_after", "wall_s", "verdicts", "checkpoints", "stored_bytes", "full_bytes"),
    *("hidden_share", "killed", "recovered_equal", "trajectories_lost", "engine"),
}


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    if missing():
        pytest.skip(missing())
    host = Daemon(tmp_path / "host")
    try:
        host.start()
        monkeypatch.setenv("PAGURUS_RUN", str(host.run))
        monkeypatch.setattr("trainer.run.os.nice", lambda _: 0)  # this process is the tests' own
        yield host
    finally:
        host.clean()


def small(out: Path, **changes: Any) -> Config:
    options: dict[str, Any] = {
        "task": EXAMPLE, "steps": 2, "groups": 2, "size": 2, "concurrency": 4, "held_out": 2, "faults": 2,
        "pace": 0.0, "out": out,
    }  # fmt: skip
    return Config(**{**options, **changes})


RUN = """
import sys
from pathlib import Path
from rich.console import Console
from trainer import run
from tests.trainer.test_run import small
run.os.nice = lambda _: 0
out = Path(sys.argv[1])
sys.exit(run.main(small(out, steps=3, pace=0.1, stream=True, resume=Path(sys.argv[2]) if len(sys.argv) > 2 else None)))
"""


def rows(folder: Path, file: str, query: str) -> int:
    """A count in a database that another process writes."""
    path = folder / "rollout" / file
    if not path.exists():
        return 0
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)) as db:
        try:
            return int(db.execute(query).fetchone()[0])
        except sqlite3.OperationalError:  # its tables are being made
            return 0


def test_a_run_that_is_killed_goes_on_and_consumes_every_prompt_once(daemon: Daemon, tmp_path: Path) -> None:
    """kill -9 of the whole run while turns are under way, right after a batch was handed out, and after a step."""
    out = tmp_path / "runs"
    folder: Path | None = None
    instants = {
        "turns under way": ("journal.sqlite", "select count(*) >= 3 from turns"),
        "a batch handed out": ("samples.sqlite", "select count(*) from prompts where state='handed'"),
        "a step consumed": ("samples.sqlite", "select count(*) from prompts where state='consumed'"),
    }
    for file, query in instants.values():
        process = subprocess.Popen(
            [sys.executable, "-c", RUN, str(out), *([str(folder)] if folder else [])], cwd=EXAMPLE.parent.parent
        )
        while process.poll() is None and not rows(folder or (out / "latest").resolve(), file, query):
            time.sleep(0.02)
        folder = (out / "latest").resolve()
        if file == "journal.sqlite":
            with pytest.raises(Conflict, match=str(process.pid)):
                own(folder)  # a second owner is refused while it lives
        assert process.poll() is None, "it ended before it could be killed"
        process.kill()
        process.wait()
    done = subprocess.run([sys.executable, "-c", RUN, str(out), str(folder)], cwd=EXAMPLE.parent.parent, check=False)
    assert done.returncode == 0
    assert folder is not None
    run = SimpleNamespace(folder=folder)

    summary = json.loads((run.folder / "summary.json").read_text())
    assert set(summary) >= FIELDS
    assert summary["steps"] == summary["policy_version"] == 3
    assert summary["trajectories_lost"] == 0
    assert summary["killed"] == summary["recovered_equal"]
    assert sum(summary["verdicts"].values()) == summary["turns"] > 0
    assert 0 < summary["stored_bytes"] < summary["full_bytes"]
    for name in ("reward.png", "verdicts.png", "bytes.png"):
        assert (run.folder / name).read_bytes().startswith(b"\x89PNG")
    assert [line["step"] for line in read_lines(run.folder / "metrics.jsonl") if "reward_held_out" in line] == [0, 3]
    assert list((run.folder / "tensorboard").iterdir())
    store = SampleStore(run.folder / "rollout")
    account = store.account()
    batches = [store.batch(step) for step in range(3)]
    store.close()
    prompts = [group.prompt for batch in batches if batch is not None for group in batch.groups]
    assert account.consumed == len(prompts) == len(set(prompts)) == 6 and account.given_up == 0
    assert any(t.continued for batch in batches if batch is not None for t in batch.trajectories)
    replayed = decisions.replay(run.folder / "rollout")
    assert replayed.identical == replayed.decisions > 0, replayed.first_difference
    assert asyncio.run(_sandboxes(daemon)) == []


async def _sandboxes(daemon: Daemon) -> list[Any]:
    async with daemon.client() as host:
        return await host.sandboxes()


async def test_no_such_image_is_said_before_anything_is_spent(daemon: Daemon, tmp_path: Path) -> None:
    with pytest.raises(ImageNotFound, match="debian"):
        await Run(small(tmp_path / "runs", image="nope"), Console(quiet=True)).go()


def test_a_full_disk_stops_the_run_cleanly_and_it_can_go_on(
    daemon: Daemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "small"
    out.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=19m", "pagurus-test", str(out)], check=True)
    try:
        assert main(small(out, steps=1)) == 1
        said = capsys.readouterr().out
        assert "is full" in said
        folder = (out / "latest").resolve()
        assert f"pagurus train --resume {folder}" in said
        subprocess.run(["mount", "-o", "remount,size=256m", str(out)], check=True)
        assert main(small(out, resume=folder)) == 0
        assert json.loads((folder / "summary.json").read_text())["trajectories_lost"] == 0
    finally:
        subprocess.run(["umount", str(out)], check=True)


def test_bad_input_is_one_line_and_a_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(small(tmp_path / "runs", task=tmp_path / "nowhere")) == 1
    assert main(small(tmp_path / "runs", engine="abacus")) == 1
    assert main(small(tmp_path / "runs", resume=tmp_path / "nowhere")) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert [line.split(":")[0] for line in lines] == ["stopped"] * 3
    assert not (tmp_path / "runs").exists()


def test_totals_survive_the_resume_state() -> None:
    totals = Totals(reward_before=0.25, turns=3, checkpoint_s=2.0, exposed_s=0.5)
    again = msgspec.convert(msgspec.to_builtins(totals), Totals)
    assert again == totals
    assert again.hidden_share == 0.75
