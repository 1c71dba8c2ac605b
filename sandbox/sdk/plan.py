"""What a build is going to do, and the keys by which its steps are known again. Pure: no files, no sandboxes.

Guarantee: a key is made of everything that the daemon gets for a step: what it is based on, the action with its
variables, directory, user and shell, what it may reach and use, and the content of what is copied. What a command
fetches from elsewhere is not part of it, nor what its cache holds, nor the secrets that it is given.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
from blake3 import blake3

from sandbox.image.dockerfile import BuildStage, Instruction
from sandbox.image.stages import Action, RunAction, StageState
from sandbox.messages import Limits, Network

VERSION = 3  # of the keys: another one forgets all that is kept
MAX_TITLE = 120  # characters


@dataclass(frozen=True)
class BuildStep:
    """An instruction, the state behind it, what it does to the tree, and its key where it does anything."""

    instruction: Instruction
    state: StageState
    action: Action | None
    key: str | None

    @property
    def title(self) -> str:
        """One line. Example: ``RUN make install``."""
        line = " ".join(self.instruction.text.split())
        return line if len(line) <= MAX_TITLE else line[: MAX_TITLE - 1] + "…"


def image_key(digest: str) -> str:
    """Of what a stage finds that begins with an image."""
    return _hashed("FROM", digest)


def step_key(parent: str, action: Action, *, content: str = "", network: Network, limits: Limits) -> str:
    """Of the tree behind a step. `parent`: the key before it; `content`: of what is copied or mounted."""
    surroundings = (network, limits) if isinstance(action, RunAction) else ()
    return _hashed(parent, type(action).__name__, asdict(action), content, *surroundings)


def references(stage: BuildStage) -> list[str]:
    """The names from which a stage copies or mounts, as they stand there."""
    result = []
    for item in stage.instructions:
        result.append(item.flags.get("from", ""))
        for mount in item.lists.get("mount", ()):
            result += [part.partition("=")[2] for part in mount.split(",") if part.lower().startswith("from=")]
    return [name for name in result if name]


def needed(stages: list[BuildStage], bases: list[str], last: int, replaced: Container[str] = ()) -> set[int]:
    """The stages that `last` is made of. `bases`: what each begins with; `replaced`: names that mean another thing."""
    target: set[int] = set()
    pending = [last]
    while pending:
        number = pending.pop()
        if number in target:
            continue
        target.add(number)
        before = enumerate(stages[:number])
        names = {stage.name: index for index, stage in before if stage.name and stage.name not in replaced}
        numbers = {str(index): index for index in range(number)}
        pending += [names[bases[number].lower()]] if bases[number].lower() in names else []
        pending += [
            (numbers | names)[item.lower()] for item in references(stages[number]) if item.lower() in numbers | names
        ]
    return target


def _hashed(*parts: Any) -> str:
    return blake3(msgspec.json.encode([VERSION, *parts], order="sorted")).hexdigest()
