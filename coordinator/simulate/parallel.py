"""Engines on some GPUs each, whose cache fills: steps of a run with the planner, and with a fixed number of GPUs.

An answer that finds no room in the cache waits; when the answers on their way need more than there is, the newest is
put back, and read again when it has room. A step of the run lasts until its last answer ends.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from coordinator.simulate.plot import Plot
from rollout.decide.engines.parallel import Planner

PIECE = 32  # tokens by which all answers advance at once
GPUS, GROUPS, SIZE = 8, 64, 16


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One GPU, and a model on it."""

    memory: float = 50e9  # bytes for weights and cache
    weights: float = 28e9  # 14B in half precision
    token: float = 196e3  # bytes of cache
    bandwidth: float = 3.35e12  # bytes per second
    between: float = 0.004  # seconds of a decoding step, for exchanging: twice that among four GPUs
    prefill: float = 12_000.0  # tokens per second of one GPU

    def cache(self, gpus: int) -> float:
        """Tokens."""
        return (gpus * self.memory - self.weights) / self.token

    def step(self, gpus: int, tokens: float) -> float:
        """Seconds for one token of each answer."""
        return (self.weights + self.token * tokens) / self.bandwidth / gpus + self.between * math.log2(gpus)


def play(lengths: list[int], gpus: int, hardware: Hardware, prompt: int = 500) -> tuple[float, int]:
    """Seconds of one engine for all these answers, and preemptions."""
    waiting, running = deque((length, 0) for length in lengths), list[list[int]]()
    capacity, seconds, preempted = hardware.cache(gpus), 0.0, 0
    held = 0.0
    while waiting or running:
        while waiting and (not running or held + prompt + waiting[0][1] + PIECE <= capacity):
            length, sampled = waiting.popleft()
            running.append([length, sampled])
            held += prompt + sampled
            seconds += (prompt + sampled) / hardware.prefill / gpus
        while len(running) > 1 and held + PIECE * len(running) > capacity:
            length, sampled = running.pop()
            waiting.appendleft((length, sampled))
            held -= prompt + sampled
            preempted += 1
        seconds += PIECE * hardware.step(gpus, held)
        for item in running:
            item[1] += PIECE
        held += PIECE * len(running)
        held -= sum(prompt + sampled for length, sampled in running if sampled >= length)
        running = [item for item in running if item[1] < item[0]]
    return seconds, preempted


def run(means: list[float], seed: int, hardware: Hardware, gpus: int | None) -> tuple[float, list[int]]:
    """Seconds of rollouts of a run whose answers have these mean lengths, and the GPUs of an engine, step by step.
    `gpus`: None lets the planner choose."""
    planner, draw, total, chosen = Planner(GPUS), np.random.default_rng(seed), 0.0, list[int]()
    for mean in means:
        lengths = [int(item) for item in np.clip(mean * draw.lognormal(-0.32, 0.8, GROUPS * SIZE), 32, 16_384)]
        item = planner.degree if gpus is None else gpus
        chosen.append(item)
        engines = GPUS // item
        played = [play(lengths[number::engines], item, hardware) for number in range(engines)]
        total += max(seconds for seconds, _ in played)
        planner.ended(sum(preempted for _, preempted in played))
    return total, chosen


def metrics(seed: int, steps: int = 48) -> dict[str, Any]:
    """GPUs of each engine chosen while answers grow and shrink, against each fixed number of them."""
    hardware, third = Hardware(), steps // 3
    grows = [*np.linspace(700, 3000, third), *([3000.0] * third), *([700.0] * (steps - 2 * third))]
    fixed = {gpus: run(grows, seed, hardware, gpus)[0] for gpus in (1, 2, 4, 8)}
    (planned, chosen), short = run(grows, seed, hardware, None), [500.0] * third
    numbers = range(1, steps + 1)
    return {
        "seconds": {str(gpus): round(seconds) for gpus, seconds in fixed.items()} | {"planned": round(planned)},
        "over_one_gpu_each": round(fixed[1] / planned, 3),
        "over_best_fixed": round(min(fixed.values()) / planned, 3),
        "over_worst_fixed": round(max(fixed.values()) / planned, 3),
        "control": round(run(short, seed, hardware, 1)[0] / run(short, seed, hardware, None)[0], 3),
        "plot": Plot(
            title="More GPUs for an engine while answers are long and its cache fills, fewer when they are short again",
            x="step",
            y="",
            lines={
                "GPUs of an engine": (numbers, chosen),
                "mean answer, in 500 tokens": (numbers, [mean / 500 for mean in grows]),
            },
            drawn_as="steps",
        ),
        "inputs": "8 GPUs of 50 GB and 3.35 TB/s, a model of 28 GB with 196 kB of cache for each token, 4 ms more for "
        "each step on two GPUs, 8 on four; 64 prompts x 16 answers, log-normal, whose mean grows from 700 to 3,000 "
        "tokens, stays, and is 700 again",
    }
