"""What trees of rollouts save against independent ones of as many leaves: a part of ``pagurus bench branching``.

Both ways play the same number of trajectories to their end, in real sandboxes. Ratios are trees over independent:
tokens that were sampled, seconds that commands ran in sandboxes (of turns and resets), wall time of the group. The
negative control is an environment of one turn, where nothing can be shared: its ratio must be 1.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

from rollout.config import RolloutConfig
from rollout.controller import RolloutController
from rollout.decide.view import Branching
from rollout.engine.chat import END, Characters
from rollout.engine.client import Generation, Sampling, WeightSpan
from rollout.environments.base import Environment, Observation
from rollout.labels import LabellingClient
from rollout.messages import Batch

WORK = "import hashlib\\nfor _ in range({loops}): hashlib.sha256(b'x' * 4096).digest()"
TOKEN_S = 0.01  # seconds of one sampled token


class Turns(Environment):
    """Each turn computes for a while and writes a file."""

    image = "debian"
    turns = 8
    loops = 20_000

    async def reset(self, sandbox: Any, seed: int) -> Observation:
        self.done = 0
        await sandbox.exec("mkdir /work")
        return Observation("begin ")

    async def step(self, sandbox: Any, action: str) -> Observation:
        self.done += 1
        await sandbox.exec(["python3", "-c", WORK.format(loops=self.loops) + f"\nopen('/work/{self.done}', 'w')"])
        return Observation("done ", reward=1.0, done=self.done == self.turns)


class Speaker:
    """Ten tokens an answer, at a steady speed."""

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "") -> Generation:
        ids = [*b"next step", END]
        await asyncio.sleep(TOKEN_S * len(ids))
        return Generation(
            token_ids=ids, logprobs=[-1.0] * len(ids), spans=[WeightSpan(0, 0, len(ids))], finish_reason="stop"
        )


async def play(
    host: LabellingClient, directory: Path, *, leaves: int, at_once: int, branching: Branching | None
) -> dict[str, float]:
    """One group; what it took."""
    config = RolloutConfig(
        groups=1,
        size=leaves,
        concurrency=at_once,
        sampling=Sampling(max_tokens=16, stop_token_ids=[END]),
        branching=branching,
    )
    began = time.monotonic()
    async with RolloutController(
        environment=Turns,
        host=host,
        engine=Speaker(),
        tokenizer=Characters(),
        config=config,
        directory=directory,
        seeds=range(1),
    ) as rollout:
        batch: Batch = await rollout.next_batch()
        wall = time.monotonic() - began
    own = [turn for item in batch.trajectories for turn in item.turns[item.inherited :]]
    return {
        "tokens": float(sum(turn.tokens for turn in own)),
        "environment_s": sum(turn.exec_end - turn.exec_start for turn in own),
        "wall_s": wall,
    }


async def measure(host: LabellingClient, directory: Path, *, image: str, leaves: int, rounds: int) -> dict[str, Any]:
    """Ratios of both ways in turns: medians over the rounds."""
    Turns.image = image
    ratios: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {"trees_wall_s": [], "independent_wall_s": []}
    for turns, name in ((8, "tree_saving"), (1, "control")):
        Turns.turns = turns
        for number in range(rounds):
            result = {}
            ways = [None, Branching(roots=2, by="turns", every=1)]
            for way in ways if number % 2 else reversed(ways):
                place = directory / f"{name}-{number}-{way is not None}"
                result[way is not None] = await play(host, place, leaves=leaves, at_once=2, branching=way)
            for figure in result[True]:
                ratios.setdefault(f"{name}/{figure}", []).append(result[True][figure] / result[False][figure])
            if name == "tree_saving":
                seconds["trees_wall_s"].append(result[True]["wall_s"])
                seconds["independent_wall_s"].append(result[False]["wall_s"])
    grouped: dict[str, Any] = {"tree_saving": {}, "control": {}}
    for key, values in ratios.items():
        name, figure = key.split("/")
        grouped[name][figure] = round(statistics.median(values), 3)
    return {**grouped, "leaves": leaves, **{name: round(statistics.median(item), 2) for name, item in seconds.items()}}
