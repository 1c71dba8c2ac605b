"""The pictures of a run, drawn from its files alone.

Can be run again on a run directory: ``python -m trainer.reports.plots runs/latest``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from trainer.reports.metrics import read_lines
from trainer.reports.report import VERDICTS

COLOURS = {"none": "#c7c7c7", "files": "#4c9f70", "processes": "#3b6fb6", "both": "#8e5ea2"}
TIMELINE_ROWS = 8


def draw(directory: Path) -> list[Path]:
    """Draws every picture that the files of `directory` have data for."""
    steps = [line for line in read_lines(directory / "metrics.jsonl") if "reward" in line or "reward_held_out" in line]
    turns = [turn for turn in read_lines(directory / "turns.jsonl") if turn.get("checkpoint")]  # those that were judged
    made = []
    pictures: tuple[tuple[str, list[Any], Callable[[Any], None]], ...] = (
        ("reward.png", steps, lambda axes: _reward(axes, steps)),
        ("verdicts.png", turns, lambda axes: _verdicts(axes, turns)),
        ("timeline.png", turns, lambda axes: _timeline(axes, turns)),
        ("bytes.png", steps, lambda axes: _bytes(axes, steps)),
    )
    for name, ready, painter in pictures:
        if not ready:
            continue
        figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
        painter(axes)
        figure.savefig(directory / name, dpi=110)
        plt.close(figure)
        made.append(directory / name)
    return made


def _reward(axes: Axes, steps: list[dict[str, Any]]) -> None:
    trained = [line for line in steps if "reward" in line]
    axes.plot([line["step"] for line in trained], [line["reward"] for line in trained], label="training, T = 1")
    for line in steps:
        held_out = line.get("reward_held_out")
        if held_out is not None:
            axes.plot(line["step"], held_out, "o", color="#d1495b", label="_")
            axes.annotate(f"{held_out:.2f}", (line["step"], held_out), textcoords="offset points", xytext=(6, -12))
    axes.plot([], [], "o", color="#d1495b", label="held-out seeds, T = 1")
    axes.set(xlabel="optimisation step", ylabel="mean reward", ylim=(0, 1.02), title="Reward")
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)


def _verdicts(axes: Axes, turns: list[dict[str, Any]]) -> None:
    last = max(turn["step"] for turn in turns)
    floor = [0] * (last + 1)
    for verdict in VERDICTS:
        counts = [0] * (last + 1)
        for turn in turns:
            counts[turn["step"]] += turn.get("verdict") == verdict
        axes.bar(range(last + 1), counts, bottom=floor, color=COLOURS[verdict], label=f"{verdict} ({sum(counts)})")
        floor = [a + b for a, b in zip(floor, counts, strict=True)]
    axes.set(
        xlabel="optimisation step (the first and the last include an evaluation)",
        ylabel="turns",
        title="Verdicts of turns",
    )
    axes.legend()


def _timeline(axes: Axes, turns: list[dict[str, Any]]) -> None:
    """Some trajectories side by side: the model's thinking, the command, the checkpoint beneath the thinking."""
    chosen = _choose(turns)
    if not chosen:
        return
    begin = min(turn["gen_start"] for rows in chosen.values() for turn in rows)
    for row, (name, records) in enumerate(chosen.items()):
        for turn in records:
            _span(axes, row, turn["gen_start"] - begin, turn["gen_end"] - begin, "#f2d492", 0.32)
            _span(axes, row, turn["exec_start"] - begin, turn["exec_end"] - begin, "#d1495b", 0.32)
            if turn.get("checkpoint_started") and turn.get("checkpoint_captured"):
                colour = COLOURS[turn.get("verdict") or "none"]
                _span(
                    axes,
                    row + 0.36,
                    turn["checkpoint_started"] - begin,
                    turn["checkpoint_captured"] - begin,
                    colour,
                    0.26,
                )
        axes.text(0, row - 0.24, name, fontsize=7, color="#666666")
    for label, colour in (("model thinks", "#f2d492"), ("command runs", "#d1495b")):
        axes.barh([-9], [0], color=colour, label=label)
    for verdict in VERDICTS[1:]:
        axes.barh([-9], [0], color=COLOURS[verdict], label=f"checkpoint: {verdict}")
    axes.set(
        xlabel="seconds",
        yticks=[],
        ylim=(len(chosen), -0.5),
        title="Turns of some trajectories, and what lies beneath them",
    )
    axes.legend(loc="upper right", fontsize=8)


def _choose(turns: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Trajectories of the last step, several checkpoints each, none of them killed, at about the same time."""
    last = max(turn["step"] for turn in turns)
    rows: dict[str, list[dict[str, Any]]] = {}
    for turn in turns:
        if turn["step"] == last:
            rows.setdefault(turn["trajectory"], []).append(turn)
    good = {
        name: records
        for name, records in rows.items()
        if sum(bool(turn.get("checkpoint_captured")) for turn in records) >= 2
        and not any(turn.get("restored") for turn in records)
    }
    ordered = sorted(good.items(), key=lambda item: item[1][0]["gen_start"])
    return dict(ordered[:TIMELINE_ROWS])


def _span(axes: Axes, row: float, start: float, end: float, colour: str, height: float) -> None:
    axes.barh([row], [max(end - start, 0.0)], left=[start], height=height, color=colour, linewidth=0)


def _bytes(axes: Axes, steps: list[dict[str, Any]]) -> None:
    lines = [line for line in steps if line.get("full_bytes")]
    if not lines:
        return
    numbers = [line["step"] for line in lines]
    axes.semilogy(numbers, [line["full_bytes"] / 1e6 for line in lines], label="full dump every turn", color="#d1495b")
    axes.semilogy(numbers, [max(line["stored_bytes"], 1) / 1e6 for line in lines], label="stored", color="#3b6fb6")
    saved = 1 - lines[-1]["stored_bytes"] / lines[-1]["full_bytes"]
    axes.set(xlabel="optimisation step", ylabel="MB so far", title=f"Checkpoint bytes: {saved:.1%} saved")
    axes.legend()
    axes.grid(alpha=0.3, which="both")


if __name__ == "__main__":
    for path in draw(Path(sys.argv[1])):
        print(path)
