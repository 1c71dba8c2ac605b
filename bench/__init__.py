"""The commands behind every number in the documentation.

Each module here is a bench: ``main(arguments) -> exit code``, which prints one JSON object last when it is given
``--json``. The folders hold what benches are made of.
"""

from __future__ import annotations

import pkgutil


def names() -> list[str]:
    """Names for ``pagurus bench NAME``."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg)
