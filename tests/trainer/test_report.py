"""What a person reads at the end of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from rollout import Trajectory, TurnRecord
from trainer.reports.report import Totals, summary, table, turns


def shown(totals: Totals) -> str:
    facts: dict[str, Any] = {"engine": "embedded", "seed": 0, "steps": 1, "version": 1, "pace": 0.0, "concurrency": 2}
    console = Console(width=200)
    with console.capture() as said:
        console.print(table(summary(totals, machine="one", **facts), Path("runs/one")))
    return said.get()


def test_a_run_without_a_checkpoint_gives_no_mean_of_none() -> None:
    assert "none was taken" in shown(Totals()) and "None" not in shown(Totals())


def test_checkpoints_are_told_with_their_mean() -> None:
    totals, turn = Totals(), TurnRecord(index=0, action="", observation="")
    turn.checkpoint, turn.verdict, turn.frozen_ms = "c-1", "files", 4.0
    turn.checkpoint_started, turn.checkpoint_captured = 1.0, 1.5
    totals._add_turn(turn)
    assert "1 (1 files); mean 500.0 ms, frozen 4.0 ms" in shown(totals)


def test_a_mean_reward_is_no_share() -> None:
    """Rewards may be of any size."""
    assert "2.500 before training, -1.000 after 1 steps" in shown(Totals(reward_before=2.5, reward_after=-1.0))


def test_turns_without_a_command_are_turns() -> None:
    """Of environments without a sandbox there are no others."""
    played = [Trajectory(turns=[TurnRecord(index=n, action="", observation="") for n in range(3)])]
    totals = Totals()
    totals.add(played)
    assert turns(played) == 3 and totals.turns == 0 and "turns with commands" in shown(totals)
