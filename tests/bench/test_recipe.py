"""What the figures of runs at several stalenesses say when they are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.recipe import compared, plot, read


def run(seed: int, staleness: int, after: float, wall: float) -> dict[str, Any]:
    rewards, walls = {0: 0.3, 2: after}, {0: 0.0, 1: wall / 2, 2: wall}
    return {"seed": seed, "staleness": staleness, "reward": rewards, "wall_s": walls, "before": 0.3, "after": after}


RUNS = [run(0, 0, 0.8, 10.0), run(1, 0, 0.9, 12.0), run(0, 1, 0.8, 6.0), run(1, 1, 0.86, 5.0), run(7, 1, 0.1, 99.0)]


def test_runs_are_compared_with_the_synchronous_ones_of_their_seeds() -> None:
    found = compared(RUNS)
    assert found["0"] == {"after": 0.85, "minus_synchronous": 0.0, "wall_share": 1.0}
    assert found["1"] == {"after": 0.5867, "minus_synchronous": -0.02, "wall_share": 0.5}


def test_figures_that_were_printed_are_read_again_and_drawn(tmp_path: Path) -> None:
    printed = tmp_path / "runs.json"
    printed.write_text(json.dumps({"runs": RUNS}))
    assert read(printed) == RUNS
    plot(read(printed)[:4], tmp_path / "curves.svg")
    assert (tmp_path / "curves.svg").read_text().startswith("<?xml")


def test_runs_in_sandboxes_are_drawn_by_the_rewards_of_their_batches(tmp_path: Path) -> None:
    real = [each | {"batch": {1: 0.4, 2: 0.6}} for each in RUNS[:4]]
    printed = tmp_path / "runs.json"
    printed.write_text(json.dumps({"runs": real}))
    assert read(printed) == real
    plot(real, tmp_path / "batches.svg")
    plot(RUNS[:4], tmp_path / "held-out.svg")
    assert (tmp_path / "batches.svg").read_text() != (tmp_path / "held-out.svg").read_text()
