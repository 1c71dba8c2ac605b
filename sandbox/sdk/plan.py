"""What a build is going to do, and the keys by which its steps are known again. Pure: no files, no sandboxes.

Owns: what instructions set (:class:`StageState`), which of them change the file tree, the key of each such step. Does
not
own: carrying them out (:mod:`sandbox.sdk.build`), where results are kept (the daemon's
``daemon/store/build_cache.py``). Guarantee: a key is made of everything that the daemon is told for a step: what it
stands on, the instruction, the variables, directory, user and shell that it runs with, what it may reach and use, and
the content of what is copied. What a command fetches from elsewhere is not part of it, nor what its cache holds, nor
the secrets that it is given.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

import msgspec
from blake3 import blake3

from sandbox.image.dockerfile import BuildStage, Instruction
from sandbox.messages import ImageConfig, Limits, Network

VERSION = 2  # of the keys: another one forgets all that is kept
MAX_TITLE = 120  # characters
CHANGING = frozenset({"RUN", "COPY", "ADD", "WORKDIR"})  # the instructions that change the file tree


@dataclass(frozen=True)
class StageState:
    """What the instructions of a stage have set so far."""

    env: dict[str, str]
    arguments: dict[str, str] = field(default_factory=dict)
    workdir: PurePosixPath = field(default_factory=lambda: PurePosixPath("/"))
    user: str = ""
    shell: tuple[str, ...] = ("/bin/sh", "-c")
    entrypoint: list[str] = field(default_factory=list)
    cmd: list[str] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, config: ImageConfig) -> StageState:
        return cls(
            dict(config.env),
            workdir=PurePosixPath("/", config.workdir),
            user=config.user,
            entrypoint=list(config.entrypoint),
            cmd=list(config.cmd),
            labels=dict(config.labels),
        )

    def config(self) -> ImageConfig:
        return ImageConfig(
            env=self.env,
            workdir=str(self.workdir),
            user=self.user,
            entrypoint=self.entrypoint,
            cmd=self.cmd,
            labels=self.labels,
        )

    def after(self, instruction: Instruction) -> StageState:
        """The state behind an instruction."""
        words, pairs = instruction.words, instruction.pairs
        match instruction.kind:
            case "ARG":
                return replace(self, arguments={**self.arguments, **pairs})
            case "ENV":
                return replace(self, env={**self.env, **pairs})
            case "LABEL":
                return replace(self, labels={**self.labels, **pairs})
            case "WORKDIR":
                return replace(self, workdir=self.workdir / words[0])
            case "USER":
                return replace(self, user=words[0])
            case "SHELL":
                return replace(self, shell=words)
            case "CMD":
                return replace(self, cmd=self.command(instruction))
            case "ENTRYPOINT":
                return replace(self, entrypoint=self.command(instruction), cmd=[])
        return self

    def command(self, instruction: Instruction) -> list[str]:
        """The argument vector of an instruction in shell form or not."""
        return [*self.shell, *instruction.words] if instruction.shell else list(instruction.words)

    @property
    def variables(self) -> dict[str, str]:
        """What a RUN has in its environment."""
        return {**self.arguments, **self.env}


@dataclass(frozen=True)
class BuildStep:
    """An instruction, the state behind it, and its key where it changes the tree."""

    instruction: Instruction
    state: StageState
    key: str | None

    @property
    def title(self) -> str:
        """One line. Example: ``RUN make install``."""
        words = " ".join(self.instruction.words) or " ".join(f"{k}={v}" for k, v in self.instruction.pairs.items())
        line = " ".join(f"{self.instruction.kind} {words}".split())
        return line if len(line) <= MAX_TITLE else line[: MAX_TITLE - 1] + "…"


def image_key(digest: str) -> str:
    """Of what a stage finds that begins with an image."""
    return _hashed("FROM", digest)


def step_key(
    parent: str, instruction: Instruction, state: StageState, *, content: str, network: Network, limits: Limits
) -> str:
    """Of the tree behind a step. `parent`: the key before it; `state`: behind it; `content`: of what is copied."""
    if instruction.kind == "WORKDIR":
        return _hashed(parent, "WORKDIR", str(state.workdir))
    if instruction.kind == "RUN":
        surroundings = [state.variables, str(state.workdir), state.user, network, limits]
        mounts = [repr(mount) for mount in instruction.mounts]
        return _hashed(parent, "RUN", state.command(instruction), *surroundings, *mounts)
    documents = [[each.name, each.text] for each in instruction.documents]
    return _hashed(
        parent, instruction.kind, instruction.words, instruction.flags, str(state.workdir), content, documents
    )


def addresses(instruction: Instruction) -> list[str]:
    """What an ADD fetches from the web."""
    return [word for word in instruction.words[:-1] if "://" in word] if instruction.kind == "ADD" else []


def sources(instruction: Instruction) -> list[str]:
    """What an instruction copies of the context or of another stage."""
    return [word for word in instruction.words[:-1] if word not in addresses(instruction)]


def needed(stages: list[BuildStage], last: int) -> set[int]:
    """The stages that `last` is made of."""
    names = {stage.name: number for number, stage in enumerate(stages)}
    names |= {str(number): number for number in range(len(stages))}
    needed, pending = set(), [last]
    while pending:
        number = pending.pop()
        if number in needed:
            continue
        needed.add(number)
        stage = stages[number]
        wanted = [stage.base, *(step.flags.get("from", "") for step in stage.instructions)]
        pending += [names[name.lower()] for name in wanted if names.get(name.lower(), number) < number]
    return needed


def _hashed(*parts: Any) -> str:
    return blake3(msgspec.json.encode([VERSION, *parts], order="sorted")).hexdigest()
