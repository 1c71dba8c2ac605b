"""The page of what a run did when: spans, lanes, shares."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pagurus.training.rollouts import application
from rollout import RolloutController
from rollout.decide.view import Decision, View, Wait
from rollout.gantt import Bar, lanes, of_trainer, of_trajectory, page, shares
from rollout.messages import Trajectory, TurnRecord
from tests.rollout.test_controller import configured, train
from tests.support.rollout_fakes import SCRIPT, FakeHost, Letters, Notebook, ScriptedEngine


def seen(now: float, *, training: bool = False, asked: bool = False, why: str = "") -> Decision:
    view = View(version=3, asked=asked, training=training, running=[], buffered=[], queued=0, more=True)
    return Decision(now=now, view=view, actions=[Wait("trainer", why)] if why else [])


def test_the_trainer_trains_or_waits_for_a_reason() -> None:
    log = [
        seen(10, training=True), seen(12, training=True), seen(15, asked=True, why="stragglers"),
        seen(16, asked=True, why="groups"), seen(18), seen(20, training=True), seen(21),
    ]  # fmt: skip
    assert of_trainer(log) == [
        Bar("trains", 10, 15, "version 3"),
        Bar("waits for a batch", 15, 16, "stragglers"),
        Bar("waits for a batch", 16, 18, "groups"),
        Bar("trains", 20, 21, "version 3"),
    ]


def test_a_trajectory_is_what_its_turns_were() -> None:
    turns = [
        TurnRecord(index=0, gen_start=2, gen_end=5, exec_start=6, exec_end=7, waited_s=1, tokens=9, version=4),
        TurnRecord(index=1, gen_start=8, gen_end=9),  # it was cut
    ]
    bars = of_trajectory(Trajectory(prompt="p1", index=2, started_at=1, finished_at=9, scored_at=11, turns=turns))
    assert [(bar.kind, bar.begin, bar.end) for bar in bars] == [
        ("prepared", 1, 2), ("samples", 2, 5), ("held for a checkpoint", 5, 6), ("command", 6, 7), ("samples", 8, 9),
        ("scored", 9, 11),
    ]  # fmt: skip
    assert bars[1].who == "p1/2, turn 0, 9 tokens, version 4"


def test_a_lane_holds_one_at_a_time() -> None:
    rows = [
        [Bar("samples", begin, end, "")] for begin, end in ((0.0, 4.0), (1.0, 2.0), (2.0, 3.0), (4.0, 5.0), (4.5, 6.0))
    ]
    assert [[(bar.begin, bar.end) for bar in lane] for lane in lanes(rows)] == [
        [(0, 4), (4, 5)],
        [(1, 2), (2, 3), (4.5, 6)],
    ]


def test_shares_are_of_the_time_that_is_shown() -> None:
    bars = [Bar("samples", 0, 4, ""), Bar("command", 4, 6, "")]
    assert shares(bars, 2, 6, 2) == pytest.approx({"samples": 0.25, "command": 0.25, "nothing": 0.5})


def test_names_cannot_leave_their_place_on_the_page() -> None:
    said = page("<script>", [Bar("trains", 1, 2, "</title><script>x</script>")], [], 60)
    assert "<script>" not in said and "&lt;script&gt;" in said


@pytest.mark.asyncio
async def test_a_run_s_page_shows_what_it_played(tmp_path: Path) -> None:
    config = configured(groups=2, size=2)
    async with RolloutController(
        environment=Notebook, host=FakeHost(), engine=ScriptedEngine(SCRIPT), tokenizer=Letters(), config=config,
        folder=tmp_path / "rollout",
    ) as rollout:  # fmt: skip
        for _ in range(2):
            await train(rollout, await rollout.next_batch())
    ran = CliRunner().invoke(application, ["gantt", str(tmp_path)])
    assert ran.exit_code == 0, ran.output
    said = (tmp_path / "gantt.html").read_text()
    assert len(set(re.findall(r"p\d+/\d, turn 0, \d+ tokens", said))) >= 8 and "trainer<td>" in said
