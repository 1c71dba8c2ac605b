"""Dockerfiles: from text to stages of instructions. Pure: no files, no sandboxes.

Owns: the language (Dockerfile reference, "Format", "Environment replacement", "Here-Documents", "RUN --mount"): stages,
arguments, variables, quoting.
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
_DOCUMENT = re.compile(r"(?:(?<=\s)|^)<<(-?)([\"']?)([A-Za-z_][\w.-]*)\2(?=[\s;|&>)]|$)")
_ADDRESS = re.compile(r"https?://[^/\s]+/\S*")
_CHECKSUM = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")


@dataclass(frozen=True)
class Document:
    """A here-document: ``<<NAME``, lines, ``NAME``."""

    name: str
    text: str
    literal: bool  # the name was quoted: variables in the text stay as they are


@dataclass(frozen=True)
class BuildMount:
    """What a RUN finds at `target` and leaves out of the image: a directory kept from build to build, or a secret."""

    kind: str  # cache or secret
    id: str
    target: str = ""  # "": none, the secret is a variable only
    variable: str = ""  # of the environment, for a secret
    required: bool = False
    mode: int = 0o400
    owner: str = "0:0"


@dataclass(frozen=True)
class Instruction:
    """One line of work. `words` are arguments; a ``RUN`` in shell form has one word and `shell` set."""

    kind: str
    line: int  # counted from 1
    words: tuple[str, ...] = ()
    flags: dict[str, str] = field(default_factory=dict)
    shell: bool = False
    pairs: dict[str, str] = field(default_factory=dict)  # of ENV, LABEL and ARG
    documents: tuple[Document, ...] = ()  # of RUN that is nothing else, and of COPY and ADD
    mounts: tuple[BuildMount, ...] = ()


@dataclass
class BuildStage:
    """What follows one FROM."""

    base: str  # an image, the name or number of a former stage, or "scratch"
    name: str
    instructions: list[Instruction] = field(default_factory=list)


def parse(text: str, arguments: dict[str, str] | None = None) -> list[BuildStage]:
    """The stages of a Dockerfile; `arguments` are the build arguments. Raises Invalid with the line.

    Variables are replaced here, so instructions hold final words; a RUN gets its ENV and ARG as environment.
    """
    given = arguments or {}
    outside: dict[str, str] = {}  # arguments before the first FROM
    scope: dict[str, str] = {}
    stages: list[BuildStage] = []
    text, found = _documents(text)
    for entry in DockerfileParser(fileobj=io.BytesIO(text.encode())).structure:
        kind, line, value = entry["instruction"].upper(), entry["startline"] + 1, entry["value"].strip()
        if kind == "COMMENT":
            continue
        if kind not in KNOWN:
            raise Invalid(f"line {line}: {kind} is not supported")
        documents = found.get(line, ())
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
        if kind in ("COPY", "ADD"):
            documents = tuple(each if each.literal else _filled(each, scope) for each in documents)
        instruction = _instruction(kind, value, line, documents)
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


def _documents(text: str) -> tuple[str, dict[int, tuple[Document, ...]]]:
    """The text with empty lines for here-documents, and those by the line of their instruction."""
    lines, found, at = text.split("\n"), {}, 0
    while at < len(lines):
        first = at
        while lines[at].rstrip().endswith("\\") and at + 1 < len(lines):
            at += 1
        kind = lines[first].split(maxsplit=1)[:1]
        logical = "\n".join(lines[first : at + 1])
        at += 1
        if not kind or kind[0].upper() not in ("RUN", "COPY", "ADD"):
            continue
        documents = []
        for dash, quote, name in _DOCUMENT.findall(logical):
            body: list[str] = []
            while at < len(lines) and (lines[at].lstrip("\t") if dash else lines[at]) != name:
                body.append(lines[at].lstrip("\t") if dash else lines[at])
                lines[at] = ""
                at += 1
            if at == len(lines):
                raise Invalid(f"line {first + 1}: the here-document {name} has no end", remedy=f"a line {name} ends it")
            lines[at] = ""
            at += 1
            documents.append(Document(name, "".join(f"{each}\n" for each in body), bool(quote)))
        if documents:
            found[first + 1] = tuple(documents)
    return "\n".join(lines), found


def _filled(document: Document, scope: dict[str, str]) -> Document:
    return Document(document.name, substitute(document.text, scope), literal=True)


def _stage(value: str, line: int, number: int) -> BuildStage:
    _, value = _flags(value)
    words = value.split()
    if len(words) == 3 and words[1].lower() == "as":
        return BuildStage(words[0], words[2].lower())
    if len(words) != 1 or not words[0]:
        raise Invalid(f"line {line}: FROM IMAGE [AS NAME]")
    return BuildStage(words[0], str(number))


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


def _instruction(kind: str, value: str, line: int, documents: tuple[Document, ...] = ()) -> Instruction:
    if kind == "RUN":
        return _run(value, line, documents)
    flags, value = _flags(value) if kind in ("COPY", "ADD", "HEALTHCHECK") else ({}, value)
    if kind in ("ENV", "LABEL"):
        return Instruction(kind, line, pairs=_pairs(value, line))
    listed = _json(value)
    if kind in ("CMD", "ENTRYPOINT"):
        return Instruction(kind, line, tuple(listed) if listed is not None else (value,), shell=listed is None)
    if kind == "SHELL":
        if listed is None:
            raise Invalid(f'line {line}: SHELL ["program", "argument"]')
        return Instruction(kind, line, tuple(listed))
    if kind in ("WORKDIR", "USER"):
        return Instruction(kind, line, (value.strip("\"'"),))
    if kind in ("COPY", "ADD"):
        return _copy(kind, tuple(listed if listed is not None else value.split()), flags, line, documents)
    return Instruction(kind, line, (value,))


def _copy(
    kind: str, words: tuple[str, ...], flags: dict[str, str], line: int, documents: tuple[Document, ...]
) -> Instruction:
    known = {"from", "chown", "chmod", "link"} | ({"checksum"} if kind == "ADD" else set())
    if unknown := set(flags) - known:
        raise Invalid(f"line {line}: {kind} --{min(unknown)} is not supported")
    if len(words) < 2:
        raise Invalid(f"line {line}: {kind} needs a source and a target")
    words = tuple(word for word in words if _DOCUMENT.fullmatch(word) is None)
    addresses = [word for word in words[:-1] if "://" in word]
    if addresses and (kind == "COPY" or not all(_ADDRESS.fullmatch(word) for word in addresses)):
        raise Invalid(f"line {line}: {kind} cannot fetch {addresses[0]}", remedy="ADD takes http:// and https://")
    if "checksum" in flags and (len(addresses) != 1 or len(words) != 2 or not _CHECKSUM.fullmatch(flags["checksum"])):
        raise Invalid(f"line {line}: ADD --checksum=sha256:HEX goes with one address")
    return Instruction(kind, line, words, flags, documents=documents)


def _run(value: str, line: int, documents: tuple[Document, ...]) -> Instruction:
    """Of a RUN: nothing but a here-document is a script; beside a command it is the shell's business."""
    flags, value = _flag_list(value)
    mounts = []
    for name, given in flags:
        if name != "mount":
            raise Invalid(f"line {line}: RUN --{name} is not supported")
        mounts.append(_mount(given, line))
    if (listed := _json(value)) is not None and not documents:
        return Instruction("RUN", line, tuple(listed), mounts=tuple(mounts))
    if documents and _DOCUMENT.fullmatch(value):
        return Instruction("RUN", line, (documents[0].text,), shell=True, documents=documents, mounts=tuple(mounts))
    for document in documents:
        value += f"\n{document.text}{document.name}"
    return Instruction("RUN", line, (value,), shell=True, mounts=tuple(mounts))


def _mount(given: str, line: int) -> BuildMount:
    """``type=cache,target=/root/.cache`` or ``type=secret,id=token``."""
    options = dict(word.partition("=")[::2] for word in given.split(","))
    kind, here = options.pop("type", "bind"), f"line {line}: RUN --mount"
    if kind not in ("cache", "secret"):
        raise Invalid(f"{here}=type={kind} is not supported", remedy="cache and secret are")
    target = next((options.pop(name) for name in ("target", "dst", "destination") if name in options), "")
    options.pop("sharing", None)  # builds at the same time each have a copy, and the last one is kept
    name, variable = options.pop("id", ""), options.pop("env", "") if kind == "secret" else ""
    required = kind == "secret" and options.pop("required", "false") in ("", "true", "1")
    try:
        mode = int(options.pop("mode", "0755" if kind == "cache" else "0400"), 8)
    except ValueError:
        raise Invalid(f"{here}: mode is an octal number") from None
    owner = f"{options.pop('uid', '0')}:{options.pop('gid', '0')}"
    if options:
        raise Invalid(f"{here}=type={kind}: {min(options)} is not supported")
    if (kind == "cache" and not target) or (kind == "secret" and not (name or target)):
        raise Invalid(f"{here}=type={kind} needs {'a target' if kind == 'cache' else 'an id'}")
    if kind == "secret" and not target and not variable:
        target = f"/run/secrets/{name}"
    name = name or (target if kind == "cache" else target.rpartition("/")[2])
    return BuildMount(kind, name, target, variable, required, mode, owner)


def _flag_list(value: str) -> tuple[list[tuple[str, str]], str]:
    flags = []
    while (match := _FLAG.match(value)) is not None:
        flags.append((match[1], match[2] or ""))
        value = value[match.end() :]
    return flags, value


def _flags(value: str) -> tuple[dict[str, str], str]:
    flags, value = _flag_list(value)
    return dict(flags), value


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
