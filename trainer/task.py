"""What `pagurus train FOLDER` finds in a folder: an environment, words, demonstrations.

Owns: loading the folder as a package and the errors for what it lacks. Does not own: what is in it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout import Environment
from sandbox.errors import Invalid, NotFound
from trainer.sft import Demonstration


@dataclass(frozen=True, slots=True)
class Task:
    """An example folder, loaded. Its `__init__.py` names ENVIRONMENT, WORDS and demonstrate."""

    name: str
    environment: type[Environment]
    words: Sequence[str]  # texts that deserve a token of their own
    demonstrate: Demonstration


def load(folder: Path) -> Task:
    """The task of a folder. Example: ``load(Path("examples/fix_the_service")).name == "fix_the_service"``."""
    folder = folder.resolve()
    init = folder / "__init__.py"
    if not folder.is_dir():
        raise NotFound(f"no folder {folder}", remedy="name a folder such as examples/fix_the_service")
    if not init.is_file():
        raise Invalid(f"{folder} is no environment: it has no __init__.py", remedy="copy examples/fix_the_service")
    name = f"pagurus_task_{folder.name}"
    spec = importlib.util.spec_from_file_location(name, init, submodule_search_locations=[str(folder)])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    missing = [wanted for wanted in ("ENVIRONMENT", "WORDS", "demonstrate") if not hasattr(module, wanted)]
    if missing:
        raise Invalid(f"{init} does not define {', '.join(missing)}", remedy="copy examples/fix_the_service")
    return Task(folder.name, module.ENVIRONMENT, module.WORDS, module.demonstrate)
