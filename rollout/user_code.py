"""Python files of the user's, loaded under names of our own, in this process and again in another.

Guarantee: two files never have one name, so that what one of them defines is not taken for the other's; a file that
does not load is an error that names its line.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
import traceback
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from sandbox.errors import Invalid, PagurusError

_places: dict[str, str] = {}  # name of a module or package that was loaded -> its file or directory


class _CurrentSource(SourceFileLoader):
    """Without compiled code, which stands for a corrected file of the same size and second."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def load(name: str, code: Path, *, package: bool = False) -> ModuleType:
    """A Python file, executed under this name."""
    directories = [str(code.parent)] if package else None
    loader = _CurrentSource(name, str(code))
    spec = importlib.util.spec_from_file_location(name, code, loader=loader, submodule_search_locations=directories)
    if code.suffix != ".py" or spec is None or spec.loader is None:
        raise Invalid(f"{code} is no Python file", hint="name a .py file or a directory with __init__.py")
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    _places[name] = str(code.parent if package else code)
    try:
        spec.loader.exec_module(made)
    except Exception as error:
        del sys.modules[name], _places[name]
        if isinstance(error, PagurusError):
            raise
        raise Invalid(
            f"{code} does not load: {type(error).__name__}: {error}{_line(error, code)}", hint=_hint(error, code)
        ) from error
    return made


def name_of(kind: str, place: Path) -> str:
    """A name for the file or directory `place`: the same whenever it is loaded, and of no other one that is."""
    name = f"pagurus_{kind}_{re.sub(r'[^0-9A-Za-z_]', '_', place.stem)}"
    if _places.get(name, str(place)) == str(place):
        return name
    return f"{name}_{hashlib.blake2b(str(place).encode(), digest_size=4).hexdigest()}"


def _line(error: Exception, code: Path) -> str:
    """Where it was raised. Example: " (line 3 of env.py)"."""
    if isinstance(error, SyntaxError):
        return ""  # which names it
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    own = [frame for frame in frames if frame.filename == str(code)]
    chosen = [*own[-1:], *(frames[-1:] if frames[-1:] != own[-1:] else [])]
    said = ", ".join(f"line {frame.lineno} of {Path(frame.filename).name}" for frame in chosen)
    return f" ({said})" if said else ""


def _hint(error: Exception, code: Path) -> str:
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if not missing:
        return "correct the file"
    if (code.parent / f"{missing}.py").is_file() or (code.parent / missing).is_dir():
        return (
            f"files next to it are found in a package: name a directory with __init__.py, and `from . import {missing}`"
        )
    return f"install the package that has {missing}, or correct the file"


def place_of(module: str) -> str:
    """The file or directory that this module, or the package that it is in, was loaded from; "" for installed ones."""
    return _places.get(module.partition(".")[0], "")


def load_place(place: str, module: str) -> None:
    """Load again what another process named by `place_of`, under the same name."""
    path = Path(place)
    load(module.partition(".")[0], path / "__init__.py" if path.is_dir() else path, package=path.is_dir())
