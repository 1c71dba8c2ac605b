"""The values of a compose file, each with the place where it stands. Pure.

Guarantee: what raises :class:`Invalid` here names file, line and key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Literal

from sandbox.errors import Invalid
from sandbox.image.durations import nanoseconds

Kind = Literal["null", "bool", "int", "float", "str", "list", "map"]
_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True)
class Place:
    """Where a value stands."""

    file: str
    line: int
    base: PurePath  # which its relative paths begin at

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Value:
    """One value: the text of a scalar, or the values of a list or mapping."""

    data: str | list[Value] | dict[str, Value]
    kind: Kind
    place: Place
    key: str  # such as services.web.ports[0]
    tag: str = ""  # !reset or !override

    def refuse(self, why: str, hint: str = "") -> Invalid:
        return Invalid(f"{self.place}: {self.key}: {why}", hint=hint)

    # ----------------------------------------------------------------- reading

    @property
    def is_null(self) -> bool:
        return self.kind == "null"

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing: null, false, 0, or without content."""
        if self.kind in ("list", "map"):
            return not self.data
        return self.is_null or self.data in ("", "false", "False", "FALSE", "0")

    def text(self) -> str:
        """A scalar as it is written; "" for null."""
        if isinstance(self.data, str):
            return "" if self.is_null else self.data
        raise self.refuse(f"a {_NAMES[self.kind]} stands where a text belongs")

    def name(self) -> str:
        """A text that is not empty."""
        if not (text := self.text()):
            raise self.refuse("it is empty")
        return text

    def map(self) -> dict[str, Value]:
        """A mapping; {} for null."""
        if isinstance(self.data, dict):
            return self.data
        if self.is_null:
            return {}
        raise self.refuse(f"a {_NAMES[self.kind]} stands where a mapping belongs")

    def items(self) -> list[Value]:
        """A list; [] for null."""
        if isinstance(self.data, list):
            return self.data
        if self.is_null:
            return []
        raise self.refuse(f"a {_NAMES[self.kind]} stands where a list belongs")

    def several(self) -> list[Value]:
        """A list, or one scalar as a list of it."""
        return [self] if isinstance(self.data, str) and not self.is_null else self.items()

    def flag(self) -> bool:
        """A boolean, also as a text that a variable was put into."""
        if (text := self.text().lower()) in ("true", "yes", "on", "y", "1"):
            return True
        if text in ("false", "no", "off", "n", "0", ""):
            return False
        raise self.refuse(f"{text!r} is neither true nor false")

    def integer(self, low: int, high: int) -> int:
        try:
            number = int(self.text())
        except ValueError:
            raise self.refuse(f"{self.text()!r} is no whole number") from None
        if not low <= number <= high:
            raise self.refuse(f"{number} does not lie between {low} and {high}")
        return number

    def number(self) -> float:
        try:
            number = float(self.text())
        except ValueError:
            raise self.refuse(f"{self.text()!r} is no number") from None
        if not 0 <= number < 1e9:
            raise self.refuse(f"{self.text()} is out of range")
        return number

    def seconds(self) -> float:
        """A duration such as 1m30s."""
        try:
            value = nanoseconds(self.text()) / 1e9
        except ValueError:
            raise self.refuse(f"{self.text()!r} is no duration", "numbers with units: 30s, 1m30s") from None
        if not 0 <= value <= 1e6:
            raise self.refuse(f"{self.text()} does not lie between 0 and 1,000,000 s")
        return value

    def size(self) -> int:
        """Bytes, from a number with or without one of b, k, m, g (kb, mb, gb).

        >>> Value("1.5g", "str", Place("f", 1, PurePath()), "memory").size()
        1610612736
        """
        text = self.text().lower().strip()
        short = text.removesuffix("b").removesuffix("i") if text[-2:-1].isalpha() else text
        unit = short[-1:] if short[-1:].isalpha() else ""
        try:
            size = float(short.removesuffix(unit)) * _UNITS[unit]
        except (ValueError, KeyError):
            raise self.refuse(f"{self.text()!r} is no size", "a number with b, k, m or g: 512m") from None
        if not 0 <= size < 1 << 60:
            raise self.refuse(f"{self.text()} is out of range")
        return int(size)

    def pairs(self) -> dict[str, str | None]:
        """A mapping of texts, or a list of NAME=VALUE. None: only a name is given."""
        return {name: None if value.is_null else value.text() for name, value in self.entries("=").items()}

    def entries(self, separators: str) -> dict[str, Value]:
        """A mapping, or a list of texts as one: NAME, a separator, the value."""
        if not isinstance(self.data, list):
            return self.map()
        result: dict[str, Value] = {}
        for item in self.data:
            text = item.name()
            cut = next((index for index, char in enumerate(text) if char in separators), None)
            name = text if cut is None else text[:cut]
            kind: Kind = "null" if cut is None else "str"
            result[name] = replace(item, data="" if cut is None else text[cut + 1 :], kind=kind)
        return result

    def get(self, name: str) -> Value | None:
        """An entry of a mapping that is there and not null."""
        value = self.map().get(name)
        return None if value is None or value.is_null else value

    def only(self, *names: str) -> None:
        """Refuse a mapping that has other keys; those that begin with x- are extensions."""
        for name, value in self.map().items():
            if name not in names and not name.startswith("x-"):
                raise value.refuse("this key is not supported", f"there are: {', '.join(names)}")

    def with_map(self, entries: dict[str, Value]) -> Value:
        return replace(self, data=entries, kind="map")

    def with_list(self, items: list[Value]) -> Value:
        return replace(self, data=items, kind="list")


_NAMES = {
    "null": "null",
    "bool": "boolean",
    "int": "number",
    "float": "number",
    "str": "text",
    "list": "list",
    "map": "mapping",
}


def every(value: Value) -> Iterator[Value]:
    """A value and all that is in it."""
    yield value
    if isinstance(value.data, list):
        for item in value.data:
            yield from every(item)
    elif isinstance(value.data, dict):
        for item in value.data.values():
            yield from every(item)
