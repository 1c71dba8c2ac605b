"""Trajectories of a plan: drawn turn by turn, and what they come to in the mean.

Pure. Guarantee: a plan and a seed give the same trajectories each time; none has more tokens than `length`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coordinator.simulate.rollouts import SimulatedTurn
from coordinator.simulate.scale.plan import ScalePlan, Spread, TrajectoryPlan


@dataclass(frozen=True, kw_only=True)
class TrajectoryMeans:
    """Of one trajectory."""

    turns: float
    read: float  # tokens
    written: float  # tokens
    past: float  # tokens that a token sees before it
    context: float  # tokens at the beginning of a turn
    tools_s: float
    longest: float  # tokens of the longest of a batch

    @property
    def tokens(self) -> float:
        return self.read + self.written


def drawn(spread: Spread, draw: np.random.Generator, count: int) -> np.ndarray:
    """`count` of them. The mean is that of the law before it is cut at `limit`."""
    values = spread.mean * draw.lognormal(-(spread.deviation**2) / 2, spread.deviation, count)
    return np.minimum(values, spread.limit) if spread.limit else values


def turns(work: TrajectoryPlan, seed: int, prompt: int, member: int) -> list[SimulatedTurn]:
    """Of this member of a prompt's group."""
    draw = np.random.default_rng((seed, prompt, member))
    count = max(1, round(float(drawn(work.turns, draw, 1)[0])))
    columns = (drawn(spread, draw, count) for spread in (work.read, work.written, work.tool_s))
    result, left, before = list[SimulatedTurn](), float(work.length), work.prompt
    for read, written, tool in zip(*columns, strict=True):
        read, written = before + float(read), max(1.0, float(written))
        if read + written > left:
            break
        result.append(SimulatedTurn(read, written, float(tool)))
        left, before = left - read - written, 0.0
    result = result or [SimulatedTurn(work.prompt, max(1.0, work.length - work.prompt), work.tool_s.mean)]
    last = result[-1]
    result[-1] = SimulatedTurn(last.prompt, last.tokens, last.environment + work.reward_s)
    return result


def means(plan: ScalePlan, seed: int) -> TrajectoryMeans:
    """Of a batch."""
    work = plan.workload
    played = [turns(work, seed, prompt, n) for prompt in range(work.groups) for n in range(work.size)]
    lengths = [sum(turn.prompt + turn.tokens for turn in item) for item in played]
    squares, tokens = sum(length**2 for length in lengths), sum(lengths)
    starts = [float(np.cumsum([0.0, *(turn.prompt + turn.tokens for turn in item[:-1])]).mean()) for item in played]
    count = len(played)
    return TrajectoryMeans(
        turns=sum(map(len, played)) / count,
        read=sum(turn.prompt for item in played for turn in item) / count,
        written=sum(turn.tokens for item in played for turn in item) / count,
        past=squares / tokens / 2,
        context=sum(starts) / count,
        tools_s=sum(turn.environment for item in played for turn in item) / count - work.reward_s,
        longest=max(lengths),
    )
