"""Reward functions for tests: right ones, and ones that hang, die, raise, lie."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from rollout.decide import anchor
from rollout.rewards import Final, Score, reward
from rollout.rewards.messages import TooSlow


@reward(forks=False)
def says(final: Final, *, word: str) -> bool:
    return word in final.turns[-1].action


@reward(forks=False)
async def item_turn(final: Final) -> Score:
    return Score(reward=0.5, turns=[0.25 for _ in final.turns])


@reward(forks=False)
def cause(final: Final, *, target: str) -> bool:
    return final.cause == target


@reward(forks=False)
def counts(final: Final, *, notes: str) -> float:
    with open(notes, "a") as file:
        file.write("x")
    return 1.0


@reward
async def lines(final: Final, *, target: int) -> bool:
    reported = await final.sandbox.exec("cat f", timeout=final.limit)
    return len(reported.text.split()) == target


@reward
async def share(final: Final, *, letter: str) -> Score:
    """Of the lines of a file: of the last one as the end's reward, of the others as their turns'."""
    lines = (await final.sandbox.exec("cat f", timeout=final.limit)).text.split()[1:]
    worth = [float(line == letter) / len(lines) for line in lines]
    return Score(reward=worth[-1], turns=worth[:-1])


@reward
def slow(final: Final, *, notes: str) -> Score:
    with open(notes, "a") as file:
        file.write(f"{final.limit} ")
    if not anchor.believed(final.request.attempt):
        raise TooSlow("cut off")
    return Score(reward=0.0, reason="too slow")


@reward(forks=False)
def misbehaves(final: Final, *, how: str, times: int, notes: str) -> Any:
    """Does so the first `times` times."""
    done = Path(notes).stat().st_size if Path(notes).exists() else 0
    if done >= times:
        return 1.0
    with open(notes, "a") as file:
        file.write("x")
    if how == "raise":
        raise RuntimeError("broken")
    if how == "die":
        os.abort()
    if how == "hang":
        child = subprocess.Popen(["sleep", "1000"])
        Path(f"{notes}.child").write_text(str(child.pid))
        time.sleep(1000)
    if how == "forge":  # an answer of its own, on every descriptor that it finds
        for descriptor in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(descriptor, b"\0\0\0\x05forge")
    return {"nan": float("nan"), "much": 2.0, "text": "1.0", "turns": Score(reward=1.0, turns=[0.0] * 9)}.get(how, 1.0)
