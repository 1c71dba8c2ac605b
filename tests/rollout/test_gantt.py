"""The page of what a run did when: spans, lanes, shares."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pagurus.training.rollouts import application
from rollout import RolloutController
from rollout.decide.view import (
    Action,
    BufferedGroup,
    Decision,
    GroupView,
    PartView,
    RolloutView,
    SchedulingRules,
    TrajectoryView,
    WaitReason,
)
from rollout.gantt import roles, trainer
from rollout.gantt.drawing import Bar, Lane, LaneGroup, page, shares, spent
from rollout.gantt.trajectories import lanes, of_trajectory
from rollout.messages import Trajectory, TurnRecord
from rollout.store.stages import RoleStage
from tests.rollout.test_controller import configured, train
from tests.support.rollout_fakes import SCRIPT, FakeHost, Letters, Notebook, ScriptedEngine

RULES = SchedulingRules(groups=2)
REFUSES = [PartView("create", 1, 0, 0, "full")]


def group(*states: str) -> GroupView:
    return GroupView("p", 0, [TrajectoryView(n, state) for n, state in enumerate(states)])  # type: ignore[arg-type]


def view(**existing: object) -> RolloutView:
    plain = {
        "version": 3,
        "requested": False,
        "training": False,
        "running": [],
        "buffered": [],
        "queued": 0,
        "more": True,
    }
    return RolloutView(**{**plain, **existing})  # type: ignore[arg-type]


def observed(now: float, *, why: str = "", **existing: object) -> tuple[SchedulingRules, Decision]:
    actions: list[Action] = [WaitReason("rollout", "create refuses"), WaitReason("trainer", why)] if why else []
    return RULES, Decision(now=now, view=view(**existing), actions=actions)


def test_the_trainer_trains_or_waits_for_a_reason() -> None:
    played, complete = [group("running", "scoring")], [BufferedGroup("a", 0, [3]), BufferedGroup("b", 1, [3])]
    log = [
        observed(10, training=True), observed(12, training=True),
        observed(15, requested=True, running=played, why="0 of 2 groups"),
        observed(16, requested=True, buffered=complete, why="stragglers: p/1"), observed(18), observed(20,
        training=True), observed(21),
    ]  # fmt: skip
    assert trainer.of_trainer(log) == [
        Bar(trainer.TRAINS, 10, 15, "version 3"),
        Bar(trainer.PLAYED, 15, 16, "0 of 2 groups"),
        Bar(trainer.STRAGGLERS, 16, 18, "stragglers: p/1"),
        Bar(trainer.TRAINS, 20, 21, "version 3"),
    ]


@pytest.mark.parametrize(
    ("existing", "reported"),
    [
        ({"training": True, "requested": True}, trainer.TRAINS),
        ({}, ""),
        ({"requested": True}, trainer.NONE),
        ({"requested": True, "running": [group("waiting")]}, trainer.PLAYED),
        ({"requested": True, "running": [group("ended", "scoring")]}, trainer.SCORED),
        ({"requested": True, "running": [group("running")], "parts": REFUSES}, trainer.REFUSED),
        ({"requested": True, "buffered": [BufferedGroup("a", 0, [3]), BufferedGroup("b", 1, [3])]}, trainer.STRAGGLERS),
    ],
)  # fmt: skip
def test_why_the_trainer_waits(existing: dict[str, object], reported: str) -> None:
    assert trainer.doing(RULES, view(**existing)) == reported


def test_a_role_is_down_or_waits_for_its_turn() -> None:
    noted = [
        RoleStage(at, role, 7, stage)
        for at, role, stage in [
            (1, "trainer", "begun"), (2, "trainer", "imported"), (3, "trainer", "ready"), (4, "trainer", "asks"),
            (5, "rollout", "turn"), (6, "trainer", "asks"), (7, "trainer", "turn"), (8, "trainer", "noticed"),
            (9, "trainer", "begun"), (10, "rollout", "ready"), (11, "trainer", "ready"), (12, "trainer", "asks"),
        ]
    ]  # fmt: skip
    bars = [(bar.kind, bar.begin, bar.end) for bar in roles.of_role(noted, "trainer")]
    assert bars == [(roles.DOWN, 1, 3), (roles.TURN, 4, 7), (roles.DOWN, 8, 11)]


def test_bars_lie_above_others() -> None:
    under = [Bar("trains", 0, 10, "v"), Bar("waits", 10, 12, "v")]
    result = roles.above(under, [Bar("turn", 2, 4, ""), Bar("down", 9, 11, "")])
    assert [(bar.kind, bar.begin, bar.end) for bar in result] == [
        ("trains", 0, 2), ("trains", 4, 9), ("waits", 11, 12), ("turn", 2, 4), ("down", 9, 11)
    ]  # fmt: skip


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
    assert [[(bar.begin, bar.end) for bar in lane.bars] for lane in lanes(rows)] == [
        [(0, 4), (4, 5)],
        [(1, 2), (2, 3), (4.5, 6)],
    ]


def test_shares_are_of_the_time_that_is_shown() -> None:
    bars = [Bar("samples", 0, 4, ""), Bar("command", 4, 6, ""), Bar("scored", 0, 1, "")]
    part = LaneGroup(title="", lanes=[Lane("", bars), Lane("", [])], spent=spent(bars, 2, 6), rest="nothing")
    assert shares(part, 2, 6) == [("samples", 2, 0.25), ("command", 2, 0.25), ("nothing", 4, 0.5)]


def test_names_cannot_leave_their_place_on_the_page() -> None:
    evil = "</title></text><script>x</script>'\"&"
    part = LaneGroup(title=evil, lanes=[Lane(evil, [Bar(evil, 1, 2, evil)])], spent={evil: 1.0}, rest=evil, said=evil)
    said = page(evil, [part], 0, 2, {})
    assert "<script" not in said and said.count("&lt;script&gt;") == 9 and "default-src 'none'" in said
    assert re.findall(r"<rect [^>]*>", said) == ["<rect x='800.0' y='0.0' width='800.0' height='10.0' fill='#3b6fb6'>"]


@pytest.mark.asyncio
async def test_a_run_s_page_shows_what_it_played(tmp_path: Path) -> None:
    config = configured(groups=2, size=2)
    async with RolloutController(
        environment=Notebook, host=FakeHost(), engine=ScriptedEngine(SCRIPT), tokenizer=Letters(), config=config,
        directory=tmp_path / "rollout",
    ) as rollout:  # fmt: skip
        for _ in range(2):
            await train(rollout, await rollout.next_batch())
    ran = CliRunner().invoke(application, ["gantt", str(tmp_path)])
    assert ran.exit_code == 0, ran.output
    said = (tmp_path / "gantt.html").read_text()
    assert (
        len(set(re.findall(r"p\d+/\d, turn 0, \d+ tokens", said))) >= 8 and "Trainer" in said and trainer.PLAYED in said
    )
