"""What environments and rewards return: numbers of any library are taken, what is no answer is theirs to correct."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rollout.decide.blame import Blame, blame
from rollout.engine.client import Sampling
from rollout.environments.base import Environment, Observation
from rollout.episode.manager import EpisodeManager
from rollout.episode.spec import EpisodeSpec
from rollout.messages import Trajectory
from rollout.rewards.messages import Final, Score, Scoring, ScoringRequest
from rollout.rewards.registry import RewardFunction
from tests.support.rollout_fakes import END, Letters, ScriptedEngine

NUMBERS = [1, True, np.float32(1), np.float64(1), np.int64(1), np.bool_(True), torch.tensor([1.0]), Fraction(1)]


async def play(first: Callable[[], Any], then: Callable[[], Any], *, plain: bool = False) -> Trajectory:
    class Made(Environment):
        image = ""

        async def reset(self, sandbox: Any, seed: int) -> Observation:
            return first()  # type: ignore[no-any-return]

        async def step(self, sandbox: Any, action: str) -> Observation:
            return then()  # type: ignore[no-any-return]

    class Plain(Made):
        def reset(self, sandbox: Any, seed: int) -> Any:
            return first()

        def step(self, sandbox: Any, action: str) -> Any:
            return then()

    engine = ScriptedEngine(["four"])
    episodes = EpisodeManager(environment=Plain if plain else Made, host=None, engine=engine, tokenizer=Letters())
    return await episodes.run(EpisodeSpec(prompt="p", seed=1), Sampling(max_tokens=16, stop_token_ids=[END]))


def begun() -> Observation:
    return Observation("two and two")


@pytest.mark.parametrize("number", NUMBERS, ids=lambda value: type(value).__name__)
async def test_a_reward_may_be_any_kind_of_number(number: Any) -> None:
    """And is one that the run can write down."""
    played = await play(begun, lambda: Observation("", reward=number, done=np.bool_(True)))
    assert type(played.reward) is float and played.reward == 1.0
    msgspec.msgpack.encode(played)
    request = ScoringRequest(id="", scoring=Scoring(), seed=0)
    function = RewardFunction(lambda final: number, forks=False, low=0.0, high=1.0, longest=1.0)
    for score in (Score(reward=number, turns=[number]), await function.run(Final(request))):
        assert msgspec.json.decode(msgspec.json.encode(score), type=Score).reward == 1.0


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        (begun, lambda: Observation("", reward=None), "Observation.reward is None"),  # type: ignore[arg-type]
        (begun, lambda: Observation("", reward="1"), "Observation.reward is '1'"),  # type: ignore[arg-type]
        (begun, lambda: Observation("", reward=math.nan), "Observation.reward is nan"),
        (begun, lambda: Observation(None), "None where a text must be"),  # type: ignore[arg-type]
        (lambda: Observation([{"role": "user"}]), begun, "where a text must be"),  # type: ignore[arg-type]
        (begun, lambda: ("text", 1.0, True, {}), r"step returned \('text'.* which is no Observation"),
        (lambda: None, begun, "reset returned None, which is no Observation"),
    ],
)
async def test_what_is_no_answer_is_named(first: Any, then: Any, said: str) -> None:
    failure = (await play(first, then)).failure
    assert failure is not None and blame(failure) is Blame.ENVIRONMENT
    with pytest.raises(TypeError, match=said):
        raise TypeError(failure.message)


async def test_methods_may_be_plain_functions() -> None:
    played = await play(begun, lambda: Observation("", reward=1.0, done=True), plain=True)
    assert (played.failure, played.reward) == (None, 1.0)


def test_a_score_of_no_number_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Score.reward is None, which is no number"):
        Score(reward=None)  # type: ignore[arg-type]
