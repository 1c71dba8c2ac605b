"""What `pagurus train` finds in a directory or a file: an environment, and perhaps a policy to begin with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from rollout.environments.base import Environment
from rollout.environments.harbor import environment_of, tasks_of
from rollout.rewards.messages import Scoring
from rollout.rewards.weighted import RewardPlan, planned
from rollout.user_code import load as load_code
from rollout.user_code import name_of
from sandbox.errors import Invalid, NotFound

START = "start"  # the directory next to the environment with the policy that its runs begin with


@dataclass(frozen=True, slots=True)
class LoadedTask:
    """An environment, loaded: what ENVIRONMENT names, or the only one that is defined there."""

    name: str
    environment: type[Environment]
    start: Path | None  # a policy in the Hugging Face layout


def load(place: Path) -> LoadedTask:
    """The task of a directory or file. Example: ``load(Path("examples/fix_the_service")).name ==
    "fix_the_service"``."""
    place = place.resolve()
    if not place.exists():
        raise NotFound(f"no directory {place}", hint="name a directory such as examples/fix_the_service, or a .py file")
    if tasks := tasks_of(place):
        return LoadedTask(place.name, environment_of(tasks), _start(place))
    code = place if place.is_file() else place / "__init__.py"
    if not code.is_file():
        raise Invalid(
            f"{place} is no environment: it has no __init__.py",
            hint="name its .py file, or tasks with task.toml",
        )
    loaded = load_code(name_of("task", place), code, package=place.is_dir())
    return LoadedTask(place.stem, _environment(loaded, code), _start(code.parent))


def _start(directory: Path) -> Path | None:
    return directory / START if (directory / START / "config.json").is_file() else None


def _environment(module: ModuleType, code: Path) -> type[Environment]:
    named = getattr(module, "ENVIRONMENT", None)
    result = [named] if named is not None else _defined(module)
    if len(result) != 1 or not (isinstance(result[0], type) and issubclass(result[0], Environment)):
        raise Invalid(
            f"{code} defines {len(result)} environments",
            hint="derive one from rollout.Environment; name it ENVIRONMENT",
        )
    need_playable(result[0])
    return result[0]


def need_playable(kind: type[Environment]) -> None:
    """Refuses a class of which every episode would fail."""
    name = kind.__name__
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        raise Invalid(f"{name} has no {' and no '.join(missing)}", hint="define it: see README.md")
    reward = kind.reward
    if reward is not None and not isinstance(reward, Scoring):
        raise Invalid(
            f"{name}.reward is no scoring: {reward!r:.80}",
            hint="decorate a function with rollout.reward and call it with its options: reward = right()",
        )
    if not isinstance(kind.max_turns, int) or kind.max_turns < 1:
        raise Invalid(f"{name}.max_turns is {kind.max_turns!r}", hint="set 1 or more")


def need_scorable(kind: type[Environment], rewards: Sequence[RewardPlan], *, image: str | None = None) -> None:
    """Refuses rewards of a run that look into a sandbox where there is none. `image`: instead of the environment's."""
    reward = planned(rewards, kind.reward)
    chooses = kind.of is not Environment.of  # by the seed, perhaps an image
    if reward is None or not reward.forks or image or kind.images() or kind.compose is not None or chooses:
        return
    raise Invalid(
        f"{kind.__name__} has no sandbox, and its reward {reward.name} looks into one",
        hint="@reward(forks=False), or set an `image`",
    )


def _defined(module: ModuleType) -> list[type[Environment]]:
    own = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Environment)]
    return [kind for kind in own if kind.__module__.startswith(module.__name__)]
