"""Dockerfiles: from text to stages of instructions. Pure: no files, no sandboxes.

Owns: the language (Dockerfile reference, "Format", "Environment replacement"): stages, arguments, variables, quoting.
Does not own: carrying it out (:mod:`sandbox.sdk.build`). Guarantee: what is not understood is refused by line, never
skipped.
"""

from __future__ import annotations

import io
import re
import shlex
from dataclasses import dataclass, field

import msgspec
from dockerfile_parse import DockerfileParser

from sandbox.errors import Invalid

SUBSTITUTED = {"ADD", "COPY", "ENV", "EXPOSE", "FROM", "LABEL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"}
IGNORED = {"MAINTAINER", "EXPOSE", "VOLUME", "STOPSIGNAL", "HEALTHCHECK"}  # they say nothing about the tree
KNOWN = SUBSTITUTED | IGNORED | {"ARG", "RUN", "CMD", "ENTRYPOINT", "SHELL"}
_VARIABLE = re.compile(r"\\\$|\$(?:(\w+)|\{(\w+)(?::([-+])([^}]*))?\})")
_FLAG = re.compile(r"--([a-z-]+)(?:=(\S*))?\s+")
_HEREDOC = re.compile(r"<<-?\s*[\"']?\w")


@dataclass(frozen=True)
class Instruction:
    """One line of work. `words` are arguments; a ``RUN`` in shell form has one word and `shell` set."""

    kind: str
    line: int  # counted from 1
    words: tuple[str, ...] = ()
    flags: dict[str, str] = field(default_factory=dict)
    shell: bool = False
    pairs: dict[str, str] = field(default_factory=dict)  # of ENV, LABEL and ARG


@dataclass
class Stage:
    """What follows one FROM."""

    base: str  # an image, the name or number of a former stage, or "scratch"
    name: str
    instructions: list[Instruction] = field(default_factory=list)


def parse(text: str, arguments: dict[str, str] | None = None) -> list[Stage]:
    """The stages of a Dockerfile; `arguments` are the build arguments. Raises Invalid with the line.

    Variables are replaced here, so instructions hold final words; a RUN gets its ENV and ARG as environment.
    """
    given = arguments or {}
    outside: dict[str, str] = {}  # arguments before the first FROM
    scope: dict[str, str] = {}
    stages: list[Stage] = []
    for entry in DockerfileParser(fileobj=io.BytesIO(text.encode())).structure:
        kind, line, value = entry["instruction"].upper(), entry["startline"] + 1, entry["value"].strip()
        if kind == "COMMENT":
            continue
        if kind not in KNOWN:
            raise Invalid(f"line {line}: {kind} is not supported")
        if kind in ("RUN", "COPY", "ADD") and _HEREDOC.search(value):
            raise Invalid(
                f"line {line}: here-documents are not supported", remedy="put the text into a file and COPY it"
            )
        if kind in SUBSTITUTED:
            value = substitute(value, scope if stages and kind != "FROM" else outside)
        if kind == "FROM":
            stages.append(_stage(value, line, len(stages)))
            scope = {}
            continue
        if kind == "ARG":
            pairs = _arguments(value, line, given, outside if stages else {}, scope if stages else outside)
            (scope if stages else outside).update(pairs)
            if stages:
                stages[-1].instructions.append(Instruction("ARG", line, pairs=pairs))
            continue
        if not stages:
            raise Invalid(f"line {line}: {kind} before FROM")
        instruction = _instruction(kind, value, line)
        if kind == "ENV":
            scope.update(instruction.pairs)
        if kind not in IGNORED:
            stages[-1].instructions.append(instruction)
    if not stages:
        raise Invalid("the Dockerfile has no FROM")
    return stages


def substitute(text: str, scope: dict[str, str]) -> str:
    """Replace ``$NAME``, ``${NAME}``, ``${NAME:-default}`` and ``${NAME:+other}``; ``\\$`` is a dollar."""

    def found(match: re.Match[str]) -> str:
        if match[0] == "\\$":
            return "$"
        value = scope.get(match[1] or match[2], "")
        if match[3] == "-":
            return value or substitute(match[4], scope)
        if match[3] == "+":
            return substitute(match[4], scope) if value else ""
        return value

    return _VARIABLE.sub(found, text)


def _stage(value: str, line: int, number: int) -> Stage:
    _, value = _flags(value)
    words = value.split()
    if len(words) == 3 and words[1].lower() == "as":
        return Stage(words[0], words[2].lower())
    if len(words) != 1 or not words[0]:
        raise Invalid(f"line {line}: FROM IMAGE [AS NAME]")
    return Stage(words[0], str(number))


def _arguments(
    value: str, line: int, given: dict[str, str], outside: dict[str, str], scope: dict[str, str]
) -> dict[str, str]:
    pairs = {}
    for word in _words(value, line):
        name, has_default, default = word.partition("=")
        chosen = given.get(name, substitute(default, scope) if has_default else outside.get(name))
        if chosen is not None:
            pairs[name] = chosen
    return pairs


def _instruction(kind: str, value: str, line: int) -> Instruction:
    flags, value = _flags(value) if kind in ("COPY", "ADD", "RUN", "HEALTHCHECK") else ({}, value)
    if kind in ("ENV", "LABEL"):
        return Instruction(kind, line, pairs=_pairs(value, line))
    listed = _json(value)
    if kind == "RUN" and flags:
        raise Invalid(f"line {line}: RUN --{next(iter(flags))} is not supported")
    if kind in ("RUN", "CMD", "ENTRYPOINT"):
        return Instruction(kind, line, tuple(listed) if listed is not None else (value,), shell=listed is None)
    if kind == "SHELL":
        if listed is None:
            raise Invalid(f'line {line}: SHELL ["program", "argument"]')
        return Instruction(kind, line, tuple(listed))
    if kind in ("WORKDIR", "USER"):
        return Instruction(kind, line, (value.strip("\"'"),))
    if kind in ("COPY", "ADD"):
        words = tuple(listed if listed is not None else value.split())
        if unknown := set(flags) - {"from", "chown", "chmod", "link"}:
            raise Invalid(f"line {line}: {kind} --{min(unknown)} is not supported")
        if len(words) < 2:
            raise Invalid(f"line {line}: {kind} needs a source and a target")
        if kind == "ADD" and any("://" in word for word in words[:-1]):
            raise Invalid(f"line {line}: ADD from an address is not supported", remedy="fetch it with RUN")
        return Instruction(kind, line, words, flags)
    return Instruction(kind, line, (value,))


def _flags(value: str) -> tuple[dict[str, str], str]:
    flags = {}
    while (match := _FLAG.match(value)) is not None:
        flags[match[1]] = match[2] or ""
        value = value[match.end() :]
    return flags, value


def _json(value: str) -> list[str] | None:
    if not value.startswith("["):
        return None
    try:
        return msgspec.json.decode(value, type=list[str])
    except msgspec.DecodeError:
        return None  # a shell command that begins with a bracket


def _words(value: str, line: int) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError as error:
        raise Invalid(f"line {line}: {error}") from None


def _pairs(value: str, line: int) -> dict[str, str]:
    words = _words(value, line)
    if words and "=" not in words[0]:  # the old form: ENV NAME the rest
        name, _, rest = value.partition(" ")
        return {name: rest.strip()}
    if not words or any("=" not in word for word in words):
        raise Invalid(f"line {line}: NAME=VALUE ...")
    return dict(word.split("=", 1) for word in words)
