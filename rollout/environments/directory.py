"""What `pagurus train` finds in a directory or a file: an environment, and perhaps a policy to begin with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from rollout.environments.base import Environment
from rollout.environments.harbor import environment_of, tasks_of
from rollout.user_code import load as load_code
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
    name = place.stem
    loaded = load_code(f"pagurus_task_{name}", code, package=place.is_dir())
    return LoadedTask(name, _environment(loaded, code), _start(code.parent))


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
    return result[0]


def _defined(module: ModuleType) -> list[type[Environment]]:
    own = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Environment)]
    return [kind for kind in own if kind.__module__.startswith(module.__name__)]
