"""`reward`: makes a function one that scores, and finds it again in another process."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, overload

import msgspec

from rollout import user_code as task_code
from rollout.decide.anchor import LONGEST
from rollout.rewards.messages import Final, Score, Scoring, as_number
from sandbox.errors import Invalid

Said = float | Score
Function = Callable[..., Said | Awaitable[Said]]


class RewardFunction:
    """A function that scores. Call it with its options to say by what an environment is scored."""

    def __init__(self, function: Function, *, forks: bool, low: float, high: float, longest: float):
        self.function = function
        self._scoring = Scoring(forks=forks, low=low, high=high, longest=longest)

    def __call__(self, **options: Any) -> Scoring:
        try:
            inspect.signature(self.function).bind(None, **options)
        except TypeError as error:
            raise Invalid(f"{self.function.__name__}: {error}", hint="give the options that it has") from None
        name = f"{self.function.__module__}:{self.function.__qualname__}"
        place = task_code.place_of(self.function.__module__)
        return msgspec.structs.replace(self._scoring, function=name, code=place, options=options)

    async def run(self, final: Final) -> Score:
        """What it says of this state. Raises what it raises."""
        said = self.function(final, **final.request.scoring.options)
        if inspect.isawaitable(said):
            said = await said
        return said if isinstance(said, Score) else Score(reward=as_number(said, "what it said"))


@overload
def reward(function: Function) -> RewardFunction: ...


@overload
def reward(
    *, forks: bool = True, low: float = 0.0, high: float = 1.0, longest: float = LONGEST
) -> Callable[[Function], RewardFunction]: ...


def reward(
    function: Function | None = None,
    *,
    forks: bool = True,
    low: float = 0.0,
    high: float = 1.0,
    longest: float = LONGEST,
) -> RewardFunction | Callable[[Function], RewardFunction]:
    """Make a function one that scores.

    It is handed a `Final` and its options by name, and says a number between `low` and `high`, or a `Score`. With
    ``forks=False`` it reads what was said and looks into no sandbox. `longest`: seconds of one try.

    ::

        @reward
        async def port_answers(final, *, port: int) -> float:
            done = await final.sandbox.exec(f"curl -sf localhost:{port}", timeout=final.limit)
            return float(done.exit_code == 0)

        class Task(Environment):
            reward = port_answers(port=8000)
    """

    def made(function: Function) -> RewardFunction:
        return RewardFunction(function, forks=forks, low=low, high=high, longest=longest)

    return made if function is None else made(function)


def find(scoring: Scoring) -> RewardFunction:
    """The function, in this process; its code is loaded where it is not yet."""
    module, _, name = scoring.function.partition(":")
    if scoring.code and module not in sys.modules:
        task_code.load_place(scoring.code, module)
    result: object = importlib.import_module(module)
    for part in name.split("."):
        result = getattr(result, part, None)
    if not isinstance(result, RewardFunction):
        raise Invalid(f"{scoring.function} is no reward function", hint="decorate it with rollout.reward")
    return result


def digest(scoring: Scoring) -> str:
    """Of all that its answer depends on, but for what is scored: code, options, bounds."""
    said = hashlib.blake2b(msgspec.json.encode(msgspec.structs.replace(scoring, longest=0.0), order="sorted"))
    if scoring.function:
        spec = importlib.util.find_spec(scoring.function.partition(":")[0]) if not scoring.code else None
        place = Path(scoring.code or (spec.origin if spec and spec.origin else ""))
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            said.update(str(path).encode() + b"\0" + path.read_bytes() if path.is_file() else b"")
    return said.hexdigest()[:32]
