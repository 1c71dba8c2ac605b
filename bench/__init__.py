"""The commands behind every number in the documentation.

Each module here is a bench: ``main(arguments) -> exit code``, which prints one JSON object last when it is given
``--json``. What decides pass or fail lies in ``tests/`` (conformance, hostile, crash); its long forms have the same
shape, and ``pagurus bench NAME`` runs them as well.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROOFS = ("tests/conformance", "tests/hostile", "tests/crash")


def names() -> list[str]:
    """Names for ``pagurus bench NAME``."""
    return sorted(_sources())


def module(name: str) -> str:
    """The module of a bench. Example: ``module("equality") == "tests.conformance.equality"``."""
    return ".".join(_sources()[name].relative_to(ROOT).with_suffix("").parts)


def about(name: str) -> str:
    """What a bench asks, in a line; it is not loaded for that."""
    text = ast.get_docstring(ast.parse(_sources()[name].read_text()))
    return (text or "").partition("\n")[0]


def source(name: str) -> Path:
    """The file of a bench."""
    return _sources()[name]


def _sources() -> dict[str, Path]:
    benches = [path for path in Path(__file__).parent.glob("*.py") if path.stem != "__init__"]
    proofs = [
        path for directory in PROOFS for path in (ROOT / directory).glob("*.py") if "\ndef main(" in path.read_text()
    ]
    return {path.stem: path for path in (*benches, *proofs)}
