"""`pagurus bench gpu` in small: what fails is named as missed and ends nothing; its own task; figures of a run."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from bench import gpu
from bench.harness import timed_training
from bench.harness.products import Products
from rollout.episode.nowhere import Nowhere
from sandbox.errors import Invalid


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert gpu.main(["--json", *arguments]) == 0
    return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))


def test_a_part_that_fails_is_missed_and_the_others_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: argparse.Namespace) -> dict[str, Any]:
        raise Invalid("no such kernel", hint="another GPU")

    monkeypatch.setitem(gpu.ACTS, "engine", fails)
    made = run(capsys, "--parts", "engine,trainer")
    assert made["small"] is True and "CPU" in made["said"]
    assert made["missed"]["engine"].startswith("Invalid: no such kernel") and "engine" not in made
    assert made["missed"]["training"] == "not chosen" and made["trainer"]["mfu"] > 0


def test_collectives_in_small(capsys: pytest.CaptureFixture[str]) -> None:
    made = run(capsys, "--parts", "collectives")["collectives"]
    assert made["backend"] == "gloo"
    assert all(made[f"{name}_gb_s"] > 0 for name in ("all_gather", "reduce_scatter", "all_reduce", "broadcast"))


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--parts", "engines"])


def test_a_product_is_scored_by_its_last_number() -> None:
    async def play(action: str) -> float:
        environment = Products()
        await environment.reset(Nowhere(), 7)
        said = action.replace("RIGHT", f"{environment.product:,}")
        return (await environment.step(Nowhere(), said)).reward

    answers = ["2 times 3 is 6, so RIGHT", "RIGHT, or 5", "many"]
    assert [asyncio.run(play(answer)) for answer in answers] == [1.0, 0.0, 0.0]
    assert Products.image == ""  # no sandbox is made


def test_medians_leave_out_the_first_step(tmp_path: Path) -> None:
    shares = {"engine": 1.0, "environment": 0.5, "trainer": 0.25, "idle": 0.25}
    step = {
        "reward": 0.5, "seconds": 2.0, "wall": shares, "train/mismatch_kl": 0.1, "train/batch_tokens": 100,
        "train/seconds": 0.5, "weights": {"bytes": 10, "encode_s": 0.1},
    }  # fmt: skip
    lines = [
        {"reward_held_out": 0.1},
        {**step, "seconds": 50.0},
        step,
        {**step, "reward": 1.0},
        {"reward_held_out": 0.8},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = timed_training._summary(tmp_path)
    assert (made["steps"], made["step_s"], made["train_tokens_per_s"]) == (3, 2.0, 200.0)
    assert (made["held_out_before"], made["held_out_after"], made["batch_last"]) == (0.1, 0.8, 1.0)
    assert made["step_shares"] == {"engine": 0.5, "environment": 0.25, "trainer": 0.125, "idle": 0.125}
