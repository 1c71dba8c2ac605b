"""Gymnasium environments as ours: what they show as text, what the model says as their action. No sandbox is needed.

Guarantee: another process that loads the state has played the same actions in an environment of the same seed.
Gymnasium is no dependency: who uses this has it.

::

    ENVIRONMENT = gym_environment("FrozenLake-v1", is_slippery=False)      # in a .py file that `pagurus train` is given
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

from rollout.environments.base import AgentSandbox, Environment, Observation

UNKNOWN = "no such action\n"
COLOURED = re.compile("\x1b\\[[0-9;]+m(.*?)\x1b\\[0m")
BRACKETS = r"[\1]"


class GymEnvironment(Environment):
    """Discrete actions, named by their number or by `names`. Made by `gym_environment`."""

    image = ""
    shares_reset = False
    make: ClassVar[Callable[[], Any]]
    names: ClassVar[tuple[str, ...]] = ()
    show: ClassVar[Callable[[Any, Any], str]]

    def __init__(self) -> None:
        self._gym: Any = None
        self._seed, self._said = 0, list[str]()

    async def reset(self, sandbox: AgentSandbox, seed: int) -> Observation:
        return Observation(self._begin(seed))

    def _begin(self, seed: int) -> str:
        self._gym = self._gym or type(self).make()
        self._seed, self._said = seed, []
        observed, _ = self._gym.reset(seed=seed)
        return type(self).show(self._gym, observed)

    async def step(self, sandbox: AgentSandbox, action: str) -> Observation:
        return self._act(action.strip())

    def _act(self, action: str) -> Observation:
        self._said.append(action)
        number = self._number(action)
        if number is None:
            return Observation(UNKNOWN + f"say one of: {' '.join(self._names())}\n")
        observed, earned, ended, cut, _ = self._gym.step(number)
        return Observation(type(self).show(self._gym, observed), reward=float(earned), done=bool(ended or cut))

    def _names(self) -> tuple[str, ...]:
        return type(self).names or tuple(str(n) for n in range(int(self._gym.action_space.n)))

    def _number(self, action: str) -> int | None:
        names = self._names()
        return names.index(action) + int(self._gym.action_space.start) if action in names else None

    async def close(self) -> None:
        if self._gym is not None:
            self._gym.close()

    def snapshot(self) -> bytes:
        return msgspec.json.encode((self._seed, self._said))

    def load(self, state: bytes) -> None:
        seed, said = msgspec.json.decode(state, type=tuple[int, list[str]])
        self._begin(seed)
        for action in said:
            self._act(action)


def _as_text(gym: Any, observed: object) -> str:
    """What it draws as text, where it can, with what it colours in brackets; else the observation."""
    drawn = gym.render() if gym.render_mode == "ansi" else None
    return f"{COLOURED.sub(BRACKETS, drawn) if isinstance(drawn, str) else observed}\n"


def gym_environment(
    name: str,
    *,
    names: tuple[str, ...] = (),
    show: Callable[[Any, Any], str] = _as_text,
    turns: int = 50,
    **options: Any,
) -> type[Environment]:
    """The environment `name` of Gymnasium. `names`: of its actions, by number; `show`: its text, from the environment
    and its observation."""

    def make() -> Any:
        import gymnasium

        return gymnasium.make(name, **options)

    content = {"make": staticmethod(make), "names": names, "show": staticmethod(show), "max_turns": turns}
    return type("Gym", (GymEnvironment,), {**content, "__module__": __name__})
