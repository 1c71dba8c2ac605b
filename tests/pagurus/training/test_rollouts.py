"""What people and scripts are told of a run's rollouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import pytest_asyncio
import zstandard
from typer.testing import CliRunner

from pagurus.cli import application
from pagurus.training.rollouts import parse, rescored
from rollout import RolloutConfig, RolloutController
from rollout.engine.client import Sampling
from rollout.rewards.rescore import RescoredTrajectory
from sandbox.errors import Invalid
from tests.support.rollout_fakes import END, SCRIPT, FakeHost, Letters, Notebook, ScriptedEngine

SHELL = CliRunner()


class Rude(Notebook):
    """Its sandbox writes what a terminal would obey."""

    async def step(self, sandbox: object, action: str) -> object:  # type: ignore[override]
        observation = await super().step(sandbox, action)
        return observation.__class__(observation.text + "\x1b[2J", observation.reward, observation.done)


@pytest_asyncio.fixture
async def run(tmp_path: Path) -> Path:
    """A run of one step, ended by force of nobody."""
    async with RolloutController(
        environment=Rude,
        host=FakeHost(),
        engine=ScriptedEngine(SCRIPT),
        tokenizer=Letters(),
        config=RolloutConfig(groups=1, size=2, sampling=Sampling(max_tokens=32, stop_token_ids=[END])),
        directory=tmp_path / "rollout",
    ) as rollout:
        batch = await rollout.next_batch()
        await rollout.consumed(batch)
        await rollout.published(1)
    return tmp_path


def reported(*words: str, code: int = 0) -> str:
    done = SHELL.invoke(application, ["rollouts", *words])
    assert done.exit_code == code, done.output
    return done.output


async def test_a_trajectory_is_read_as_a_person_would(run: Path) -> None:
    text = reported("show", str(run), "p0/1")
    assert "p000000/1: completed, reward 1, policy versions 0 to 0; seed 0" in text
    assert "turn 1: version 0" in text and "> cat f" in text and "[none, checkpoint c-" in text
    assert "\x1b" not in text
    assert json.loads(reported("show", str(run), "p0/1", "--json"))["reward"] == 1.0
    assert "p000000/0" in reported("show", str(run))
    assert parse("p12/4") == parse("12/4") == ("p000012", 4)
    with pytest.raises(Invalid):
        parse("eval-3/0")


async def test_who_reads_a_run_makes_nothing_in_it(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (run / "rollout" / "kept.sqlite").unlink(missing_ok=True)  # a run that retains no state has none
    before = files(run)
    page = str(tmp_path_factory.mktemp("out") / "gantt.html")
    for words in (("show",), ("why",), ("account",), ("effects",), ("replay",), ("gantt", "--out", page)):
        reported(words[0], str(run), *words[1:])
    assert "are not kept" in reported("show", str(run), "p0/1")
    reported("shell", str(run), "p0/1", code=125)
    assert SHELL.invoke(application, ["rollouts", "show", str(run / "rollout")]).exit_code == 1  # no run directory
    assert files(run) == before


def files(run: Path) -> list[Path]:
    return sorted(run.rglob("*"))


def test_all_that_a_scorer_printed_is_one_line_of_the_table() -> None:
    failed = RescoredTrajectory(
        trajectory="p000000/1", before=1.0, after=None, reason="Traceback:\n\n  line 1\r\n\tNameError: x\n"
    )
    assert rescored(failed) == ("p000000/1", 1.0, "-", "Traceback: line 1 NameError: x")


async def test_a_log_is_replayed_and_a_changed_one_is_noticed(run: Path) -> None:
    result = json.loads(reported("replay", str(run), "--json"))
    assert result["decisions"] == result["identical"] > 0
    (path,) = (run / "rollout").glob("decisions-*")
    with path.open("rb") as file:
        lines = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True).read()
    path.write_bytes(zstandard.compress(lines.replace(b'"count":', b'"count":1', 1)))
    assert "instead of" in reported("replay", str(run), code=1)


async def test_where_everything_is(run: Path) -> None:
    account = json.loads(reported("account", str(run), "--json"))
    assert account["consumed"] == 1 and account["trajectories"] > 0 and account["put_aside"] == []
    parts = ("consumed", "in_flight", "queued", "buffered", "given_up")
    assert sum(account[name] for name in parts) == account["issued"]
    why = json.loads(reported("why", str(run), "--json"))
    assert why["trainer"] in ("waiting", "training", "elsewhere")
    assert "prompts: " in reported("why", str(run))
    (run / "summary.json").write_text("{}")
    assert "the run has ended; what the rollout wrote last" in reported("why", str(run))


async def test_a_trajectory_whose_states_are_gone_is_said_to_be(run: Path) -> None:
    assert "are not kept" in reported("shell", str(run), "p0/1", "--turn", "3", "--", "ls", "-la", code=125)
    assert "no turn can be visited" in reported("show", str(run), "p0/1")
