"""Gymnasium environments through the loop of episodes: FrozenLake, with no sandbox."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from rollout.engine.chat import Characters
from rollout.engine.client import Sampling
from rollout.engine.script import Script
from rollout.environments.gym import gym_environment
from rollout.episode.manager import EpisodeManager
from rollout.episode.spec import EpisodeLimits
from rollout.evaluate import evaluate
from rollout.messages import Trajectory

NAMES = ("left", "down", "right", "up")
MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
SAMPLING = Sampling(max_tokens=64)
LIMITS = EpisodeLimits(max_length=1 << 16)


def lake(slippery: bool = False) -> Any:
    return gym_environment("FrozenLake-v1", names=NAMES, is_slippery=slippery, render_mode="ansi", turns=30)


def shortest(rows: list[str]) -> list[str]:
    """A way from the start to the goal that falls into no hole."""
    todo = deque([((0, 0), [])])
    observed = {(0, 0)}
    while todo:
        (row, column), way = todo.popleft()
        if rows[row][column] == "G":
            return way
        for name, (down, right) in zip(NAMES, MOVES, strict=True):
            at = row + down, column + right
            if at not in observed and 0 <= at[0] < len(rows) and 0 <= at[1] < len(rows) and rows[at[0]][at[1]] != "H":
                observed.add(at)
                todo.append((at, [*way, name]))
    raise AssertionError("no way")


def manager(kind: Any, actions: list[str]) -> EpisodeManager:
    return EpisodeManager(environment=kind, host=None, engine=Script(actions), tokenizer=Characters(), limits=LIMITS)


async def test_who_knows_the_way_gets_there_and_who_says_nonsense_does_not() -> None:
    way = shortest(["SFFF", "FHFH", "FFFH", "HFFG"])
    observed: list[Trajectory] = []
    result = await evaluate(manager(lake(), way), range(3), SAMPLING, on_end=observed.append)
    assert (result.reward, result.lost, result.turns) == (1.0, 0, 6.0)
    assert "[S]FFF\nFHFH" in observed[0].opening and "(Down)" in "".join(turn.observation for turn in observed[0].turns)
    lost = await evaluate(manager(lake(), ["fly"]), range(2), SAMPLING, on_end=observed.append)
    assert (lost.reward, lost.lost) == (0.0, 0)
    assert observed[-1].turns[0].observation == "no such action\nsay one of: left down right up\n"
    assert observed[-1].status == "truncated" and len(observed[-1].turns) == 30


@pytest.mark.parametrize("slippery", [False, True])
async def test_the_state_is_the_seed_and_what_was_done(slippery: bool) -> None:
    for seed in range(5):
        first, second = lake(slippery)(), lake(slippery)()
        await first.reset(None, seed)
        for action in ("down", "down", "sing", "right"):
            await first.step(None, action)
        second.load(first.snapshot())
        assert second.snapshot() == first.snapshot()
        for action in ("right", "down", "down", "right"):
            assert await first.step(None, action) == await second.step(None, action)
