"""What a build is going to do, and the keys by which its steps are known again. Pure: no files, no sandboxes.

Owns: what instructions set (:class:`State`), which of them change the file tree, the key of each such step. Does not
own: carrying them out (:mod:`sandbox.sdk.build`), where results are kept (the daemon's
``daemon/store/build_cache.py``). Guarantee: a key is made of everything that the daemon is told for a step: what it
stands on, the instruction, the variables, directory, user and shell that it runs with, what it may reach and use, and
the content of what is copied. What a command fetches from elsewhere is not part of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

import msgspec
from blake3 import blake3

from sandbox.image.dockerfile import Instruction
from sandbox.messages import ImageConfig, Limits, Network

VERSION = 1  # of the keys: another one forgets all that is kept
CHANGING = frozenset({"RUN", "COPY", "ADD", "WORKDIR"})  # the instructions that change the file tree


@dataclass(frozen=True)
class State:
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
    def of(cls, config: ImageConfig) -> State:
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

    def after(self, instruction: Instruction) -> State:
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
class Step:
    """An instruction, the state behind it, and its key where it changes the tree."""

    instruction: Instruction
    state: State
    key: str | None

    @property
    def title(self) -> str:
        """Example: ``RUN make install``."""
        words = " ".join(self.instruction.words) or " ".join(f"{k}={v}" for k, v in self.instruction.pairs.items())
        return f"{self.instruction.kind} {words}"


def image_key(digest: str) -> str:
    """Of what a stage finds that begins with an image."""
    return _hashed("FROM", digest)


def step_key(
    parent: str, instruction: Instruction, state: State, *, content: str, network: Network, limits: Limits
) -> str:
    """Of the tree behind a step. `parent`: the key before it; `state`: behind it; `content`: of what is copied."""
    if instruction.kind == "WORKDIR":
        return _hashed(parent, "WORKDIR", str(state.workdir))
    if instruction.kind == "RUN":
        surroundings = [state.variables, str(state.workdir), state.user, network, limits]
        return _hashed(parent, "RUN", state.command(instruction), *surroundings)
    return _hashed(parent, instruction.kind, instruction.words, instruction.flags, str(state.workdir), content)


def _hashed(*parts: Any) -> str:
    return blake3(msgspec.json.encode([VERSION, *parts], order="sorted")).hexdigest()
