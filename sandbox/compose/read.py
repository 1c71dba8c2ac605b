"""YAML with places: one compose file as values.

Guarantee: only the plain types of YAML; no object is made. Bounded in size, depth and in what aliases multiply.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path, PurePath

import yaml

from sandbox.compose.values import Kind, Place, Value
from sandbox.compose.variables import Variables
from sandbox.descriptors import closing
from sandbox.errors import Invalid, NotFound

MAX_FILE = 1 << 20  # bytes
MAX_DEPTH = 50
MAX_VALUES = 100_000  # aliases counted as often as they stand there
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_KINDS: tuple[tuple[re.Pattern[str], Kind], ...] = (
    (_NULL, "null"),
    (_BOOL, "bool"),
    (_INT, "int"),
    (_FLOAT, "float"),
)
_PLAIN = ("map", "seq", "str", "int", "float", "bool", "null", "timestamp", "value")
_TAGS = ("!reset", "!override")


def read_text(path: str | Path, what: str = "compose file") -> str:
    """The text of a small regular file. Raises Invalid, NotFound."""
    try:
        return read_file(path, MAX_FILE, what)[0].decode()
    except UnicodeDecodeError:
        raise Invalid(f"{path} is not UTF-8", hint=f"is it a {what}?") from None


def read_file(path: str | Path, limit: int, what: str) -> tuple[bytes, int]:
    """The content and the mode of a regular file; links are followed. Raises Invalid, NotFound."""
    try:
        with closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)) as file:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise Invalid(f"{path} is not a file", hint=f"name a {what}")
            with open(file, "rb", closefd=False) as stream:
                content = stream.read(limit + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"there is no {what} {path}", hint="give its path") from None
    except OSError as error:
        raise Invalid(f"{path}: {error.strerror}", hint=f"name a {what} that can be read") from None
    if len(content) > limit:
        raise Invalid(f"{path} is larger than {limit:,} bytes", hint=f"is it a {what}?")
    return content, stat.S_IMODE(status.st_mode) & 0o777


def parse(text: str, file: str, base: PurePath, variables: Variables) -> Value:
    """The values of a file, with variables replaced. `base`: which its relative paths begin at. Raises Invalid."""
    try:
        depth = 0
        for event in yaml.parse(text, Loader=_LOADER):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise Invalid(f"{file}:{event.start_mark.line + 1}: nested more than {MAX_DEPTH} deep")
        node = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark is not None else ""
        said = " ".join(filter(None, (error.context, error.problem)))
        raise Invalid(f"{file}{line}: no YAML: {said}", hint="correct the file") from None
    except yaml.YAMLError as error:
        raise Invalid(f"{file}: no YAML: {error}", hint="correct the file") from None
    if node is None:
        raise Invalid(f"{file} is empty", hint="it needs `services:`")
    return _Values(file, base, variables).of(node, "")


class _Values:
    """From the nodes of one file to values."""

    def __init__(self, file: str, base: PurePath, variables: Variables) -> None:
        self._file, self._base, self._variables = file, base, variables
        self._count = 0
        self._open: list[int] = []  # the nodes that contain this one

    def of(self, node: yaml.Node, key: str) -> Value:
        place = Place(self._file, node.start_mark.line + 1, self._base)
        self._count += 1
        if self._count > MAX_VALUES:
            raise Invalid(f"{place}: more than {MAX_VALUES:,} values", hint="use fewer aliases")
        if id(node) in self._open or len(self._open) > MAX_DEPTH:
            raise Invalid(f"{place}: {key}: an alias contains itself, or is nested too deep", hint="remove it")
        tag = node.tag if node.tag in _TAGS else ""
        if not tag and node.tag.removeprefix("tag:yaml.org,2002:") not in _PLAIN:
            raise Invalid(f"{place}: {key}: the tag {node.tag} is not supported", hint="remove it")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, place, key, tag)
        self._open.append(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                items = [self.of(item, f"{key}[{index}]") for index, item in enumerate(node.value)]
                return Value(items, "list", place, key, tag)
            return Value(self._mapping(node, key), "map", place, key, tag)
        finally:
            self._open.pop()

    def _scalar(self, node: yaml.ScalarNode, place: Place, key: str, tag: str) -> Value:
        kind: Kind = "str"
        if not node.style and not node.tag.endswith(":str"):  # by YAML 1.2: `no` and 22:22 are texts
            kind = next((kind for pattern, kind in _KINDS if pattern.fullmatch(node.value)), "str")
        try:
            text = self._variables.expand(node.value)
        except ValueError as error:
            raise Invalid(f"{place}: {key}: {error}", hint="set it in the environment or in .env") from None
        return Value(text, kind, place, key, tag)

    def _mapping(self, node: yaml.MappingNode, key: str) -> dict[str, Value]:
        own: dict[str, Value] = {}
        merged: dict[str, Value] = {}
        for name, item in node.value:
            line = f"{self._file}:{name.start_mark.line + 1}"
            if name.tag == "tag:yaml.org,2002:merge":
                sources = item.value if isinstance(item, yaml.SequenceNode) else [item]
                for source in sources:
                    if not isinstance(source, yaml.MappingNode):
                        raise Invalid(f"{line}: {key}: << merges mappings only", hint="name an anchor of a mapping")
                    merged = {**self.of(source, key).map(), **merged}
                continue
            if not isinstance(name, yaml.ScalarNode):
                raise Invalid(f"{line}: {key}: a key is a text", hint="correct the file")
            if name.value in own:
                raise Invalid(f"{line}: {key}: {name.value} stands there twice", hint="remove one")
            own[name.value] = self.of(item, f"{key}.{name.value}" if key else name.value)
        return {**merged, **own}
