"""Several rewards of one episode: each is scored by itself, the sum of them weighted is what is learned from.

Guarantee: each part keeps its own tries, limits and cache; its unweighted mean is logged by its name.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from rollout import user_code
from rollout.rewards.messages import Score, Scoring, ScoringPart
from rollout.rewards.registry import RewardFunction
from rollout.rewards.web import at
from sandbox.errors import Invalid, NotFound

OWN = "environment"  # in a plan: the reward that the environment itself has


class RewardPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table ``[[rewards]]`` of a run. Example: ``RewardPlan(name="style", function="style.py:kind", weight=0.2)``"""

    name: str  # in metrics
    function: str = ""  # file.py:function or module:function, made by rollout.reward; else the environment's own
    url: str = ""  # or where it is called by HTTP
    model: str = ""  # or a reward model: a Hugging Face directory with a head of one number
    weight: float = 1.0
    options: dict[str, Any] = {}  # of the function

    def __post_init__(self) -> None:
        if len([item for item in (self.function, self.url, self.model) if item]) > 1:
            raise ValueError(f"reward {self.name!r}: name one of function, url and model")

    def scoring(self, own: Scoring | None) -> Scoring:
        """By what it is scored. `own`: the environment's reward."""
        if self.function:
            return _function(self.function)(**self.options)
        if self.url:
            return at(self.url, **self.options)
        if self.model:
            return model(self.model, **self.options)
        if own is None:
            raise Invalid(
                f"reward {self.name!r} is the environment's, which has none", hint="name a function, a url or a model"
            )
        return own


def weighted(**parts: tuple[Scoring, float] | Scoring) -> Scoring:
    """The sum of several rewards, each with its weight: ``weighted(right=suite(...), style=(judge(...), 0.2))``."""
    pairs = {name: part if isinstance(part, tuple) else (part, 1.0) for name, part in parts.items()}
    made = [ScoringPart(name=name, scoring=scoring, weight=weight) for name, (scoring, weight) in pairs.items()]
    return Scoring(parts=made, forks=any(part.scoring.forks for part in made))


def model(directory: str, *, turns: bool = False, low: float = -1e6, high: float = 1e6) -> Scoring:
    """What a reward model says of the transcript: a Hugging Face directory whose head has one number, which a server
    that the rollout starts has in memory. `turns`: each turn is rewarded by what it adds."""
    options = {"turns": turns}
    return Scoring(
        model=str(Path(directory).resolve()), forks=False, low=low, high=high, longest=600.0, options=options
    )


def planned(plans: Sequence[RewardPlan], own: Scoring | None) -> Scoring | None:
    """By what an episode of a run is scored, whose environment has `own`."""
    if not plans:
        return own
    return weighted(**{plan.name: (plan.scoring(own), plan.weight) for plan in plans})


def need_rewards(plans: Sequence[RewardPlan]) -> None:
    """Refuses what could not be scored by: before a run begins."""
    names = [plan.name for plan in plans]
    if len(set(names)) < len(names):
        raise Invalid(f"rewards of one name: {', '.join(names)}", hint="give each a `name` of its own")
    for plan in plans:
        if plan.model and not (Path(plan.model) / "config.json").is_file():
            raise NotFound(f"reward {plan.name!r}: {plan.model} is no model", hint="name a Hugging Face directory")
        if plan.function or plan.url or plan.model:
            plan.scoring(None)


def combined(parts: Sequence[ScoringPart], scores: Mapping[str, Score]) -> Score:
    """Example: parts a (weight 1) and b (0.5) that said 1 and 0.4 make 1.2."""
    reward, turns, reasons = 0.0, list[float](), []
    for part in parts:
        score = scores[part.name]
        reward += part.weight * score.reward
        turns += [0.0] * (len(score.turns) - len(turns))
        for number, value in enumerate(score.turns):
            turns[number] += part.weight * value
        reasons += [f"{part.name}: {score.reason}"] if score.reason else []
    totals = {part.name: scores[part.name].total for part in parts}
    return Score(reward=reward, turns=turns, reason="; ".join(reasons), parts=totals)


def _function(name: str) -> RewardFunction:
    place, _, attribute = name.rpartition(":")
    module = _file(Path(place)) if place.endswith(".py") else _module(place)
    result = getattr(module, attribute, None)
    if not isinstance(result, RewardFunction):
        raise Invalid(f"{name} is no reward function", hint="decorate it with rollout.reward")
    return result


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise NotFound(f"no reward function in {path}", hint="name file.py:function")
    name = f"pagurus_reward_{hashlib.blake2b(str(path.resolve()).encode(), digest_size=6).hexdigest()}"
    return sys.modules.get(name) or user_code.load(name, path.resolve())


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotFound(
            f"no reward function in {name!r}: {error}", hint="name file.py:function or module:function"
        ) from None
