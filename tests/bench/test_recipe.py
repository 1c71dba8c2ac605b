"""What the figures of runs at several stalenesses say when they are compared."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.recipe import Rounds, compared, plot, read
from trainer.config import TrainConfig


def run(seed: int, staleness: int, after: float, wall: float) -> dict[str, Any]:
    rewards, walls = {0: 0.3, 2: after}, {0: 0.0, 1: wall / 2, 2: wall}
    return {"seed": seed, "staleness": staleness, "reward": rewards, "wall_s": walls, "before": 0.3, "after": after}


RUNS = [run(0, 0, 0.8, 10.0), run(1, 0, 0.9, 12.0), run(0, 1, 0.8, 6.0), run(1, 1, 0.86, 5.0), run(7, 1, 0.1, 99.0)]


def test_runs_are_compared_with_the_synchronous_ones_of_their_seeds() -> None:
    result = compared(RUNS)
    assert result["0"] == {"after": 0.85, "minus_synchronous": 0.0, "wall_share": 1.0}
    assert result["1"] == {"after": 0.5867, "minus_synchronous": -0.02, "wall_share": 0.5}


def test_figures_that_were_printed_are_read_again_and_drawn(tmp_path: Path) -> None:
    printed = tmp_path / "runs.json"
    printed.write_text(json.dumps({"runs": RUNS}))
    assert read(printed) == RUNS
    plot(read(printed)[:4], tmp_path / "curves.svg")
    assert (tmp_path / "curves.svg").read_text().startswith("<?xml")


def test_runs_in_sandboxes_are_drawn_by_the_rewards_of_their_batches(tmp_path: Path) -> None:
    real = [item | {"batch": {1: 0.4, 2: 0.6}} for item in RUNS[:4]]
    printed = tmp_path / "runs.json"
    printed.write_text(json.dumps({"runs": real}))
    assert read(printed) == real
    plot(real, tmp_path / "batches.svg")
    plot(RUNS[:4], tmp_path / "held-out.svg")
    assert (tmp_path / "batches.svg").read_text() != (tmp_path / "held-out.svg").read_text()


def test_a_round_is_made_of_the_first_that_end_and_each_prompt_is_used_once() -> None:
    config = TrainConfig(task=Path(), groups=4, size=4)
    rounds, played = Rounds(0, config, 1.25), list[list[int]]()

    def play(seeds: list[int]) -> list[Any]:
        played.append(seeds)
        return [SimpleNamespace(seed=seed, ended=10 if seed % 5 else 100) for seed in seeds]

    batches: list[list[Any]] = [[*rounds.batch(play)] for _ in range(10)]
    assert all(len(batch) == 16 for batch in batches)
    used = Counter(item.seed for batch in batches for item in batch)
    assert set(used.values()) == {4} and sorted(used) == [*range(40)]
    assert [len(seeds) for seeds in played] == [25, 25, 25, 25, 16] * 2  # four short rounds, then those put off
    assert {seed for seed in played[4]} == {0, 5, 10, 15} and rounds.steps == 2 * (4 * 10 + 100)
