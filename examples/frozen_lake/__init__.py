"""FrozenLake of Gymnasium, by our adapter: cross the ice, fall into no hole. It needs gymnasium, and no sandbox.

Owns: the text of the lake; the scripted walks that the policy in ``start/`` was fitted to
(`python -m examples.fit frozen_lake`). Does not own: the lake, its rules and its reward, which are Gymnasium's.
The lake is one map and not slippery, so every seed is the same episode: the reward of held-out seeds says how often the
policy arrives here, and nothing of other maps.
"""

from __future__ import annotations

import random
from typing import Any

from rollout.environments.base import Environment
from rollout.environments.gym import gym_environment
from rollout.environments.shell import immediate
from rollout.episode.nowhere import Nowhere as Twin

TURNS = 20
NAMES = ("left", "down", "right", "up")
WORDS = (*NAMES, "row ", ", column ", *"0123", "\n")
SHAPE = {"width": 96, "heads": 3, "inner": 288}  # of the policy: a tenth of the weights that the other examples need
AHEAD = ("drdl", "d.d.", "rdd.", ".rr.")  # of each place that is ice, a move on a shortest way to the goal
ASTRAY, SLOPPILY = 0.35, 0.75  # chances that a walk takes any move instead


def show(_: Any, place: int) -> str:
    """What the model reads. Example: ``show(None, 9) == "row 2, column 1\\n"``"""
    return f"row {place // 4}, column {place % 4}\n"


ENVIRONMENT = gym_environment(
    "FrozenLake-v1", names=NAMES, show=show, turns=TURNS, map_name="4x4", is_slippery=False, max_episode_steps=TURNS
)
LAKE = ENVIRONMENT()  # of the demonstrations


def demonstrate(seed: int, *, sloppy: bool) -> list[tuple[str, bool]]:
    """A walk: its texts in order, True beside each that is an action. One that is not sloppy arrives."""
    rng = random.Random(f"walk {seed} {sloppy}")
    while True:
        texts, arrived = _walk(LAKE, rng, SLOPPILY if sloppy else ASTRAY)
        if arrived or sloppy:
            return texts


def _walk(lake: Environment, rng: random.Random, astray: float) -> tuple[list[tuple[str, bool]], bool]:
    observed = immediate(lake.reset(Twin(), 0))
    texts = [(observed.text, False)]
    for _ in range(TURNS):
        row, column = (int(digit) for digit in observed.text if digit.isdigit())
        ahead = next(name for name in NAMES if name[0] == AHEAD[row][column])
        action = rng.choice(NAMES) if rng.random() < astray else ahead
        observed = immediate(lake.step(Twin(), action))
        texts += [(action, True), (observed.text, False)]
        if observed.done:
            break
    return texts, observed.reward > 0


__all__ = ["ENVIRONMENT", "WORDS", "Twin", "demonstrate"]
