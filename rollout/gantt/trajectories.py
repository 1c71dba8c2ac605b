"""What trajectories did when, by the records of their turns. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from rollout.gantt.drawing import Bar, Lane
from rollout.messages import Trajectory

PREPARED, SAMPLES, HELD, COMMAND, SCORED = "prepared", "samples", "held for a checkpoint", "command", "scored"
COLOURS = {PREPARED: "#b39bc8", SAMPLES: "#e0912f", COMMAND: "#4f9d69", HELD: "#c0504d", SCORED: "#8c6d46"}


def of_trajectory(played: Trajectory) -> list[Bar]:
    """What it did in its turns, its preparation before, its scoring after."""
    name, bars = f"{played.prompt}/{played.index}", list[Bar]()
    for turn in played.turns[played.inherited :]:
        who = f"{name}, turn {turn.index}"
        if not bars:
            bars.append(Bar(PREPARED, played.started_at, turn.gen_start, who))
        said = f"{who}, {turn.tokens} tokens, version {turn.version}"
        bars.append(Bar(SAMPLES, turn.gen_start, turn.gen_end, said))
        bars.append(Bar(HELD, turn.gen_end, turn.gen_end + turn.waited_s, who))
        bars.append(Bar(COMMAND, turn.exec_start, turn.exec_end, f"{who}, {turn.verdict}"))
    bars.append(Bar(SCORED, played.finished_at, played.scored_at, name))
    return [bar for bar in bars if 0 < bar.begin < bar.end]


def lanes(rows: Iterable[Sequence[Bar]]) -> list[Lane]:
    """Each row into the first lane that is free when it begins."""
    result: list[list[Bar]] = []
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    for row in sorted((row for row in rows if row), key=lambda row: row[0].begin):
        while busy and busy[0][0] <= row[0].begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            result.append([])
            free = [len(result) - 1]
        lane = heapq.heappop(free)
        result[lane] += row
        heapq.heappush(busy, (max(bar.end for bar in row), lane))
    return [Lane("", bars) for bars in result]
