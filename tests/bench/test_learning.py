"""The task of the bench of learning, and how a run is compared with TRL's."""

from __future__ import annotations

from typing import Any

import pytest

from bench.harness.comparison import Comparison, number, question
from bench.learning import compared
from tests.support.daemon_host import Daemon


def test_a_row_has_both_sides_of_a_seed() -> None:
    ours: dict[str, Any] = {
        "seed": 3, "before": 0.125, "after": 0.5, "batch": {1: 0.0, 2: 0.5}, "step_tokens_per_s": 150.0,
        "wall_s": {0: 0.0, 2: 9.0},
    }  # fmt: skip
    row = compared(ours, {"batch": [0.25, 0.25], "step_tokens_per_s": 100.0})
    assert (row["batch_last"], row["trl_batch_last"], row["step_against_trl"], row["wall_s"]) == (0.25, 0.25, 1.5, 9.0)
    assert "step_against_trl" not in compared(ours, None)


@pytest.mark.parametrize(("text", "said"), [("The answer is 12.", "12"), ("34 or 71", ""), ("seven", "")])
def test_only_the_number_of_an_answer_counts(text: str, said: str) -> None:
    assert number(text) == said


async def test_the_sandbox_decides_which_number_is_larger(daemon: Daemon) -> None:
    async with daemon.client() as host, host.create("debian") as sandbox:
        for seed in range(2):
            text, left, right = question(seed)
            for answer, reward in (
                (f"It is {max(left, right)}", 1.0),
                (f"{min(left, right)}", 0.0),
                ("$(reboot)", 0.0),
            ):
                environment = Comparison()
                assert (await environment.reset(sandbox, seed)).text == text
                ended = await environment.step(sandbox, answer)
                assert (ended.reward, ended.done) == (reward, True)
