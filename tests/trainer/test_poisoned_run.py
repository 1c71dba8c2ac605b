"""Broken trajectories in the batches of a live run: real daemon, sandboxes, engine, rollout and trainer. It ends, each
of them is named with its reason, and all others are trained on."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollout.messages import Batch, Group, Trajectory
from rollout.service.client import RolloutClient
from sandbox.paths import CHECKOUT
from tests.support.daemon_host import Daemon
from tests.support.programs import Program
from tests.support.small_run import small
from trainer.batches import aside
from trainer.config import open_run
from trainer.reports.metrics import read_lines
from trainer.run import main
from trainer.settings import ObjectiveSettings

INF, NAN = math.inf, math.nan
VOCABULARY = 1 << 20  # more than any policy of the examples has
STEPS = 3


def at_sampled(item: Trajectory, name: str, value: Any) -> dict[str, Any]:
    """The list `name`, with another value at the last sampled token."""
    values = list(getattr(item, name))
    values[max(t for t, bit in enumerate(item.mask) if bit)] = value
    return {name: values}


def of_length(count: int, **fields: Any) -> dict[str, Any]:
    lists = {"tokens": [5] * count, "mask": [0] + [1] * (count - 1), "logprobs": [0.0] + [-1.0] * (count - 1)}
    return {**lists, "versions": [-1] + [0] * (count - 1), "breaks": [], **fields}


POISON: dict[str, Any] = {
    "too long": lambda item: of_length(5000),
    "far too long": lambda item: of_length(200_016),
    "long prompt": lambda item: of_length(3000, mask=[0] * 2999 + [1]),
    "token past the vocabulary": lambda item: at_sampled(item, "tokens", VOCABULARY),
    "token far past it": lambda item: at_sampled(item, "tokens", 2**40),
    "prompt past it": lambda item: {"tokens": [VOCABULARY, *item.tokens[1:]]},
    "negative token": lambda item: at_sampled(item, "tokens", -1),
    "logprob -inf": lambda item: at_sampled(item, "logprobs", -INF),
    "logprob inf": lambda item: at_sampled(item, "logprobs", INF),
    "logprob nan": lambda item: at_sampled(item, "logprobs", NAN),
    "logprob above 0": lambda item: at_sampled(item, "logprobs", 0.5),
    "reward nan": lambda item: {"reward": NAN},
    "reward inf": lambda item: {"reward": INF},
    "reward -inf": lambda item: {"reward": -INF},
    "temperature nan": lambda item: {"temperature": NAN},
    "temperature inf": lambda item: {"temperature": INF},
    "temperature below 0": lambda item: {"temperature": -1.0},
    "nothing": lambda item: {"tokens": [], "mask": [], "logprobs": [], "versions": [], "breaks": []},
    "short mask": lambda item: {"mask": item.mask[:2]},
    "long mask": lambda item: {"mask": [*item.mask, 1]},
    "no mask": lambda item: {"mask": []},
    "mask of 2": lambda item: at_sampled(item, "mask", 2),
    "mask of -1": lambda item: at_sampled(item, "mask", -1),
    "short logprobs": lambda item: {"logprobs": item.logprobs[:1]},
    "long logprobs": lambda item: {"logprobs": [*item.logprobs, -1.0]},
    "no logprobs": lambda item: {"logprobs": []},
    "short versions": lambda item: {"versions": item.versions[:1]},
    "long versions": lambda item: {"versions": [*item.versions, 0]},
    "first token sampled": lambda item: {"mask": [1, *item.mask[1:]]},
    "top_p": lambda item: {"complete": False},
    "breaks past the end": lambda item: {"breaks": [len(item.tokens) + 7]},
    "breaks backwards": lambda item: {"breaks": [4, 2]},
}


class PoisoningClient(RolloutClient):
    """Puts broken copies beside the trajectories of each batch."""

    async def next_batch(self) -> Batch:
        batch = await super().next_batch()
        kinds = list(POISON)[batch.step :: STEPS]
        groups = []
        for number, group in enumerate(batch.groups):
            sound = group.trajectories[0]
            broken = [
                msgspec.structs.replace(sound, index=100 + list(POISON).index(kind), **POISON[kind](sound))
                for kind in kinds[number :: len(batch.groups)]
            ]
            both = [broken[0], *group.trajectories, *broken[1:]]
            groups.append(Group(prompt=group.prompt, seed=group.seed, trajectories=both))
        return msgspec.structs.replace(batch, groups=groups)


@pytest.mark.timeout(900)
def test_a_live_run_ends_with_all_others_trained_and_each_broken_one_named(daemon: Daemon, tmp_path: Path) -> None:
    settings = msgspec.convert({"preset": "dr_grpo", "advantage": {"credit": "turns"}}, ObjectiveSettings)
    run, config = open_run(small(tmp_path / "runs", steps=STEPS, faults=0, objective=settings))
    with (run / "rollout.log").open("wb") as log:
        rollout = Program(
            [sys.executable, "-m", "rollout", str(run)], cwd=CHECKOUT, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            assert main(msgspec.structs.replace(config, resume=run), client=PoisoningClient.of(run)) == 0
        finally:
            rollout.end()
    lines = aside.read(run)
    names = {int(line.name.rpartition("/")[2].partition("+")[0]) - 100: line for line in lines}
    unnamed = [kind for number, kind in enumerate(POISON) if number not in names]
    assert len(POISON) >= 30 and not unnamed and len(names) == len(POISON)
    assert all(line.reason for line in lines)
    trained = [line["train/trajectories"] for line in read_lines(run / "metrics.jsonl") if "train/trajectories" in line]
    assert trained == [config.groups * config.size] * STEPS
