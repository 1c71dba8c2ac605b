"""A whole run, small: real daemon, real sandboxes, real engine; interrupted between two steps and resumed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console

from rollout.ledger import Ledger
from sandbox.errors import ImageNotFound
from tests.support.daemon_host import Daemon, missing
from trainer import sft
from trainer.metrics import read_lines
from trainer.report import Totals
from trainer.run import Config, Run, main

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fix_the_service"
FIELDS = {
    *("reward_before", "reward_after", "wall_s", "verdicts", "checkpoints", "stored_bytes", "full_bytes"),
    *("hidden_share", "killed", "recovered_equal", "trajectories_lost", "engine"),
}
RECIPE = sft.Recipe(clean_steps=2, sloppy_steps=1, batch=2)


class Interrupted(Exception):
    """Stands for kill -9 between the publication of a step and what would have come next."""


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


@pytest.fixture
def short_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    fit = sft.fit
    monkeypatch.setattr(sft, "fit", lambda *a, **k: fit(*a, **{**k, "recipe": RECIPE}))


def small(out: Path, **changes: Any) -> Config:
    options: dict[str, Any] = {
        "task": EXAMPLE, "steps": 2, "groups": 2, "size": 2, "concurrency": 4, "held_out": 2, "faults": 2,
        "pace": 0.0, "out": out,
    }  # fmt: skip
    return Config(**{**options, **changes})


async def test_a_run_that_is_interrupted_goes_on_and_consumes_every_prompt_once(
    daemon: Daemon, tmp_path: Path, short_fit: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(small(tmp_path / "runs"), Console(quiet=True))

    async def interrupted(*_: Any) -> None:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(run, "_record", interrupted)
        with pytest.raises(Interrupted):
            await run.go()
    assert (tmp_path / "runs" / "latest").resolve() == run.folder

    resumed = Run(small(tmp_path / "runs", resume=run.folder), Console(quiet=True))
    await resumed.go()

    summary = json.loads((run.folder / "summary.json").read_text())
    assert set(summary) >= FIELDS
    assert summary["steps"] == summary["policy_version"] == 2
    assert summary["trajectories_lost"] == 0
    assert summary["killed"] == summary["recovered_equal"]
    assert sum(summary["verdicts"].values()) == summary["turns"] > 0
    assert 0 < summary["stored_bytes"] < summary["full_bytes"]
    for name in ("reward.png", "verdicts.png", "bytes.png"):
        assert (run.folder / name).read_bytes().startswith(b"\x89PNG")
    assert [line["step"] for line in read_lines(run.folder / "metrics.jsonl") if "reward_held_out" in line] == [0, 2]
    assert list((run.folder / "tensorboard").iterdir())
    ledger = Ledger(run.folder / "rollout" / "ledger.sqlite")
    counts = ledger.counts()
    ledger.close()
    assert counts["consumed"] == 4  # two steps of two groups, none of them twice
    assert counts["claimed"] == counts["in_flight"] == 0
    async with daemon.client() as host:
        assert await host.sandboxes() == []


async def test_no_such_image_is_said_before_anything_is_spent(daemon: Daemon, tmp_path: Path) -> None:
    with pytest.raises(ImageNotFound, match="debian"):
        await Run(small(tmp_path / "runs", image="nope"), Console(quiet=True)).go()


def test_a_full_disk_stops_the_run_cleanly_and_it_can_go_on(
    daemon: Daemon, tmp_path: Path, short_fit: None, capsys: pytest.CaptureFixture[str]
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
