"""Dockerfiles: from text to stages of instructions, before anything is expanded. Pure: no files, no sandboxes.

Lines, continuations, here-documents and JSON are read by BuildKit's own parser (the package ``dockerfile``). Guarantee:
what is not understood is refused by line, never skipped.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from types import ModuleType
from typing import Protocol

from sandbox.errors import Invalid, hinted

STRING, BOOLEAN, MANY = "string", "boolean", "many"
FLAGS: dict[str, dict[str, str]] = {
    "FROM": {"platform": STRING},
    "RUN": {"mount": MANY, "network": STRING, "security": STRING},
    "COPY": {"from": STRING, "chown": STRING, "chmod": STRING, "link": BOOLEAN, "parents": BOOLEAN, "exclude": MANY},
    "ADD": {
        "chown": STRING,
        "chmod": STRING,
        "link": BOOLEAN,
        "exclude": MANY,
        "checksum": STRING,
        "keep-git-dir": BOOLEAN,
        "unpack": BOOLEAN,
    },
    "HEALTHCHECK": dict.fromkeys(("interval", "timeout", "start-period", "start-interval", "retries"), STRING),
}
SINGLE = {"WORKDIR", "USER", "STOPSIGNAL", "MAINTAINER"}  # exactly one argument
SEVERAL = {"ENV", "LABEL", "ARG", "EXPOSE", "VOLUME", "ONBUILD", "SHELL", "HEALTHCHECK"}  # at least one
EXISTING = SINGLE | SEVERAL | {"FROM", "RUN", "CMD", "ENTRYPOINT", "COPY", "ADD"}
DIRECTIVES = {"escape", "syntax", "check"}
NAME = re.compile(r"[a-z][a-z0-9-_.]*")  # of a stage
MAX_SIZE = 16 << 20  # characters of a Dockerfile
_DIRECTIVE = re.compile(r"#\s*([A-Za-z][A-Za-z0-9]*)\s*=\s*(.+?)\s*")
_DOCUMENT = re.compile(r"(\d*)<<(-?)\s*([^<]*)")
_LINE = re.compile(r"(?:dockerfile )?parse error (?:on|at) line (\d+): ")


class _Heredoc(Protocol):
    name: str
    content: str


class _Command(Protocol):
    """What the parser says of one instruction."""

    cmd: str
    sub_cmd: str | None
    json: bool
    original: str
    start_line: int
    end_line: int
    flags: tuple[str, ...]
    value: tuple[str, ...]
    heredocs: tuple[_Heredoc, ...]


@dataclass(frozen=True)
class Document:
    """A here-document: ``<<NAME``, lines, ``NAME``."""

    name: str
    text: str
    literal: bool  # the name was quoted: variables in the text stay as they are
    indented: bool  # ``<<-``: leading tabs are not part of it

    @property
    def content(self) -> str:
        return re.sub(r"^\t+", "", self.text, flags=re.MULTILINE) if self.indented else self.text


@dataclass(frozen=True)
class Instruction:
    """One instruction as it stands there. `words` are its arguments, here-documents of a COPY or an ADD left out."""

    kind: str
    line: int  # counted from 1
    words: tuple[str, ...] = ()
    json: bool = False  # the words were a JSON list
    flags: dict[str, str] = field(default_factory=dict)
    lists: dict[str, tuple[str, ...]] = field(default_factory=dict)  # flags that may be given several times
    documents: tuple[Document, ...] = ()
    text: str = ""  # as written, for titles and for ONBUILD

    def is_set(self, flag: str) -> bool:
        """Whether a flag that is there or not is there."""
        return self.flags.get(flag) == "true"


@dataclass
class BuildStage:
    """What follows one FROM."""

    base: str  # an image, a former stage, or "scratch"; not expanded yet
    name: str  # "": it has only its number
    line: int = 1
    platform: str = ""
    instructions: list[Instruction] = field(default_factory=list)


@dataclass
class Dockerfile:
    """A whole one. `arguments` are the ARG instructions before the first FROM."""

    stages: list[BuildStage]
    arguments: list[Instruction]
    escape: str = "\\"


@hinted("correct it; the page about images says what is supported and what differs from BuildKit")
def parse(text: str) -> Dockerfile:
    """The stages of a Dockerfile. Raises Invalid with the line."""
    text = text.removeprefix("\ufeff")
    result = Dockerfile([], [], _directives(text).get("escape", "\\"))
    for instruction in instructions(text):
        if instruction.kind == "FROM":
            result.stages.append(_stage(instruction))
        elif result.stages:
            result.stages[-1].instructions.append(instruction)
        elif instruction.kind == "ARG":
            result.arguments.append(instruction)
        else:
            raise Invalid(f"line {instruction.line}: {instruction.kind} before FROM")
    if not result.stages:
        raise Invalid("the Dockerfile has no FROM")
    return result


def instructions(text: str) -> list[Instruction]:
    """The instructions of a text, in order."""
    import dockerfile as buildkit  # a Go library, which only builds need

    if len(text) > MAX_SIZE or "\0" in text:
        raise Invalid(f"a Dockerfile is a text of at most {MAX_SIZE} characters, without NUL")
    try:
        commands = buildkit.parse_string(text)
    except (buildkit.GoParseError, UnicodeError) as error:
        if "no instructions" in str(error):
            return []
        said = _LINE.sub("", str(error)).strip()
        raise Invalid(f"line {_culprit(buildkit, text)}: {said}") from None
    lines = text.split("\n")
    return [_instruction(command, lines) for command in commands]


def _culprit(buildkit: ModuleType, text: str) -> int:
    """The line of the instruction that cannot be read: the one behind the longest beginning that can."""
    lines = text.split("\n")

    def fails(count: int) -> bool:
        try:
            buildkit.parse_string("FROM x\n" + "\n".join(lines[:count]))
        except (buildkit.GoParseError, UnicodeError):
            return True
        return False

    count = len(lines)
    while count > 1 and fails(count - 1):
        count -= 1
    return count


def _directives(text: str) -> dict[str, str]:
    result: dict[str, str] = {}
    for line in text.splitlines():
        match = _DIRECTIVE.fullmatch(line.strip())
        if match is None or match[1].lower() not in DIRECTIVES:
            break
        result.setdefault(match[1].lower(), match[2])
    return result


def _instruction(command: _Command, lines: list[str]) -> Instruction:
    kind, line = command.cmd.upper(), command.start_line
    words = tuple(command.value)
    if kind not in EXISTING:
        raise Invalid(f"line {line}: {kind} is no instruction of a Dockerfile")
    if kind == "ONBUILD":
        return _trigger(command, line, lines)
    if kind == "HEALTHCHECK" and words and words[0].upper() == "NONE" and len(words) > 1:
        raise Invalid(f"line {line}: HEALTHCHECK NONE takes no arguments")
    if kind in SINGLE and (len(words) != 1 or not words[0]):
        raise Invalid(f"line {line}: {kind} has exactly one argument")
    if kind in SEVERAL and not any(words):
        raise Invalid(f"line {line}: {kind} has at least one argument")
    if kind == "SHELL" and not command.json:
        raise Invalid(f'line {line}: SHELL ["program", "argument"]')
    flags, lists = _flags(kind, command.flags, line)
    documents = _documents(command)
    if kind in ("COPY", "ADD"):
        words = _paths(kind, words, line)
    return Instruction(kind, line, words, command.json, flags, lists, documents, command.original.strip())


def _trigger(command: _Command, line: int, lines: list[str]) -> Instruction:
    """An ONBUILD has one word: the instruction that it stands for, with its here-documents."""
    kind = (command.sub_cmd or "").strip().upper()
    if kind in ("ONBUILD", "FROM", "MAINTAINER") or not kind:
        raise Invalid(f"line {line}: ONBUILD {kind} is not allowed")
    complete = command.original
    if "<<" in complete:  # of which the parser has the first line only
        complete = "\n".join(lines[line - 1 : command.end_line])
    text = re.sub(r"^\s*ONBUILD\s*", "", complete, count=1, flags=re.IGNORECASE).rstrip("\n")
    return Instruction("ONBUILD", line, (text,), text=command.original.strip())


def _flags(kind: str, given: tuple[str, ...], line: int) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    existing = FLAGS.get(kind, {})
    flags: dict[str, str] = {}
    lists: dict[str, tuple[str, ...]] = {}
    for item in given:
        name, equals, value = item.removeprefix("--").partition("=")
        if item == "--":
            break
        if name not in existing:
            raise Invalid(f"line {line}: {kind} --{name} is not supported")
        if name in flags:
            raise Invalid(f"line {line}: {kind} --{name} is there twice")
        if existing[name] == BOOLEAN:
            if value.lower() not in ("true", "false", "") or (equals and not value):
                raise Invalid(f"line {line}: {kind} --{name} is true or false, not {value!r}")
            flags[name] = value.lower() or "true"
        elif not equals:
            raise Invalid(f"line {line}: {kind} --{name} needs a value")
        elif existing[name] == MANY:
            lists[name] = (*lists.get(name, ()), value)
        else:
            flags[name] = value
    return flags, lists


def document_of(word: str) -> tuple[str, bool, bool] | None:
    """Name, whether it is quoted and whether it is indented, of a word that announces a here-document."""
    match = _DOCUMENT.fullmatch(word)
    if match is None:
        return None
    try:
        names = shlex.split(match[3])
    except ValueError:
        return None
    if len(names) != 1 or not names[0]:
        return None
    return names[0], names[0] != match[3].strip(), match[2] == "-"


def _documents(command: _Command) -> tuple[Document, ...]:
    """Those of the parser, with what only their announcements say."""
    announced: dict[str, tuple[str, bool, bool]] = {}
    paths = command.cmd.upper() in ("COPY", "ADD")
    for word in command.value if paths else re.findall(r"\d*<<-?\s*[^\s<;|&>)]+", " ".join(command.value)):
        if (result := document_of(word)) is not None:
            announced.setdefault(result[0], result)
    documents = []
    for item in command.heredocs:
        _, literal, indented = announced.get(item.name, (item.name, False, False))
        documents.append(Document(item.name, item.content, literal, indented))
    return tuple(documents)


def _paths(kind: str, words: tuple[str, ...], line: int) -> tuple[str, ...]:
    if len(words) < 2:
        raise Invalid(f"line {line}: {kind} needs a source and a target")
    if document_of(words[-1]) is not None:
        raise Invalid(f"line {line}: the target of a {kind} is no here-document")
    return tuple(word for word in words[:-1] if document_of(word) is None) + words[-1:]


def _stage(instruction: Instruction) -> BuildStage:
    words, line = instruction.words, instruction.line
    name = ""
    if len(words) == 3 and words[1].lower() == "as":
        name = words[2].lower()
        if NAME.fullmatch(name) is None:
            raise Invalid(f"line {line}: {words[2]!r} is no name of a stage", hint="a letter, then a-z, 0-9, - _ .")
    elif len(words) != 1 or not words[0]:
        raise Invalid(f"line {line}: FROM IMAGE [AS NAME]")
    return BuildStage(words[0], name, line, instruction.flags.get("platform", ""))
