"""The commands behind every number in the documentation.

Each module here is a bench: ``main(arguments) -> exit code``, which prints one JSON object last when it is given
``--json``. The folders hold what benches are made of.
"""

from __future__ import annotations

import ast
import pkgutil
from pathlib import Path


def names() -> list[str]:
    """Names for ``pagurus bench NAME``."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg)


def about(name: str) -> str:
    """What a bench asks, in a line; it is not loaded for that."""
    text = ast.get_docstring(ast.parse((Path(__file__).parent / f"{name}.py").read_text()))
    return (text or "").partition("\n")[0]
