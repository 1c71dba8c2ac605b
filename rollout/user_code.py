"""Python files of the user's, loaded under names of our own, in this process and again in another."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from sandbox.errors import Invalid

_places: dict[str, str] = {}  # name of a module or package that was loaded -> its file or directory


def load(name: str, code: Path, *, package: bool = False) -> ModuleType:
    """A Python file, executed under this name."""
    directories = [str(code.parent)] if package else None
    spec = importlib.util.spec_from_file_location(name, code, submodule_search_locations=directories)
    if spec is None or spec.loader is None:
        raise Invalid(f"{code} is no Python file", hint="name a .py file or a directory with __init__.py")
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    _places[name] = str(code.parent if package else code)
    spec.loader.exec_module(made)
    return made


def place_of(module: str) -> str:
    """The file or directory that this module, or the package that it is in, was loaded from; "" for installed ones."""
    return _places.get(module.partition(".")[0], "")


def load_place(place: str, module: str) -> None:
    """Load again what another process named by `place_of`, under the same name."""
    path = Path(place)
    load(module.partition(".")[0], path / "__init__.py" if path.is_dir() else path, package=path.is_dir())
