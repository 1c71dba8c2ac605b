"""Variables in compose files, and the files that define them. Pure.

As in Compose: ``$X``, ``${X}``, ``${X:-default}``, ``${X-default}``, ``${X:?error}``, ``${X?error}``, ``${X:+other}``,
``${X+other}``, nested ones, and ``$$`` for a dollar.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

MAX_DEPTH = 20  # of variables in defaults of variables
MAX_TEXT = 1 << 20  # characters of one value
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPERATOR = re.compile(r":?[-?+]")
_KEY = re.compile(r"(?:export[ \t]+)?([A-Za-z_][A-Za-z0-9_.-]*)[ \t]*")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\\": "\\", '"': '"'}


class Variables:
    """The variables of a project; `missing` collects those that were used and are not set."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self.values = dict(values)
        self.missing: set[str] = set()

    def expand(self, text: str, depth: int = 0) -> str:
        """A text with its variables replaced. Raises ValueError.

        >>> Variables({"A": "1"}).expand("${A}, ${B:-${A}2}, $$A")
        '1, 12, $A'
        """
        if "$" not in text:
            return text
        if depth > MAX_DEPTH:
            raise ValueError(f"variables are nested more than {MAX_DEPTH} deep")
        parts, rest = [], 0
        while (start := text.find("$", rest)) >= 0:
            parts.append(text[rest:start])
            said, rest = self._one(text, start + 1, depth)
            parts.append(said)
        result = "".join([*parts, text[rest:]])
        if len(result) > MAX_TEXT:
            raise ValueError(f"it is longer than {MAX_TEXT:,} characters with its variables")
        return result

    def _one(self, text: str, start: int, depth: int) -> tuple[str, int]:
        """What stands for the variable behind a dollar, and where the text continues."""
        following = text[start : start + 1]
        if following == "$":
            return "$", start + 1
        if following == "{":
            end = _closing(text, start)
            return self._braced(text[start + 1 : end], depth), end + 1
        if (name := _NAME.match(text, start)) is None:
            raise ValueError(f"no name of a variable follows the dollar in {text!r:.80}; write $$ for a dollar")
        return self._value(name[0]), name.end()

    def _braced(self, inner: str, depth: int) -> str:
        name = _NAME.match(inner)
        operator = _OPERATOR.match(inner, name.end()) if name is not None else None
        if name is None or (operator is None and name.end() != len(inner)):
            raise ValueError(f"${{{inner:.80}}} is no variable; write $$ for a dollar")
        if operator is None:
            return self._value(name[0])
        word, value = inner[operator.end() :], self.values.get(name[0])
        given = value is not None and (value != "" or not operator[0].startswith(":"))
        if operator[0].endswith("+"):
            return self.expand(word, depth + 1) if given else ""
        if given and value is not None:
            return value
        if operator[0].endswith("?"):
            raise ValueError(f"the variable {name[0]} is required: {self.expand(word, depth + 1) or 'it is not set'}")
        return self.expand(word, depth + 1)

    def _value(self, name: str) -> str:
        if name not in self.values:
            self.missing.add(name)
        return self.values.get(name, "")


def _closing(text: str, start: int) -> int:
    """Where the brace ends that opens at `start`."""
    depth, index = 0, start
    while index < len(text):
        if text[index] == "}":
            depth -= 1
            if depth == 0:
                return index
        elif text[index] == "{" and text[index - 1] == "$":
            depth += 1
        index += 1
    raise ValueError(f"no brace ends ${text[start : start + 60]!r}")


def parse_env(text: str, outer: Mapping[str, str], *, raw: bool = False) -> dict[str, str]:
    """The variables of an env file. `outer`: what its own variables are replaced by, and names without a value are.

    Raises ValueError with the line. `raw`: neither quotes nor variables mean anything.

    >>> parse_env("A=1 # one\\nB='$A'\\nC=\\"${A}\\\\n\\"\\nD", {"D": "4"})
    {'A': '1', 'B': '$A', 'C': '1\\n', 'D': '4'}
    """
    result: dict[str, str] = {}
    position, text = 0, text.removeprefix("\ufeff").replace("\r\n", "\n")
    while position < len(text):
        end = text.find("\n", position)
        end = len(text) if end < 0 else end
        line = text[position:end]
        if not line.strip() or line.lstrip().startswith("#"):
            position = end + 1
            continue
        number = text.count("\n", 0, position) + 1
        try:
            name, position = _assignment(text, position, end, outer, result, raw)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        if name is not None and name in outer:
            result[name] = outer[name]
    return result


def _assignment(
    text: str, start: int, end: int, outer: Mapping[str, str], result: dict[str, str], raw: bool
) -> tuple[str | None, int]:
    """Take one assignment; a name without a value is returned. And where the next line begins."""
    indent = len(text[start:end]) - len(text[start:end].lstrip())
    key = _KEY.match(text, start + indent, end)
    if key is None:
        raise ValueError(f"{text[start:end].strip()!r:.80} is no NAME=VALUE")
    behind = text[key.end() : key.end() + 1] if key.end() < end else ""
    if behind not in ("=", ":"):
        if text[key.end() : end].strip() and not text[key.end() : end].lstrip().startswith("#"):
            raise ValueError(f"{text[start:end].strip()!r:.80} is no NAME=VALUE")
        return key[1], end + 1
    value = text[key.end() + 1 : end]
    if raw:
        result[key[1]] = value
        return None, end + 1
    opening = key.end() + 1 + len(value) - len(value.lstrip(" \t"))
    scope = Variables({**result, **outer})
    if text[opening : opening + 1] in ("'", '"') and opening < end:
        said, close = _quoted(text, opening, scope)
        end = text.find("\n", close)
        result[key[1]] = said
        return None, len(text) if end < 0 else end + 1
    result[key[1]] = scope.expand(re.split(r"(?:^|\s)#", value, maxsplit=1)[0].strip())
    return None, end + 1


def _quoted(text: str, opening: int, scope: Variables) -> tuple[str, int]:
    """The content of a quotation, and where it ends."""
    quote, index, parts = text[opening], opening + 1, list[str]()
    while index < len(text):
        char = text[index]
        if char == quote:
            said = "".join(parts)
            return (said if quote == "'" else scope.expand(said)), index
        if char == "\\" and quote == '"' and index + 1 < len(text):
            following = text[index + 1]
            parts.append("$$" if following == "$" else _ESCAPES.get(following, f"\\{following}"))
            index += 2
            continue
        parts.append(char)
        index += 1
    raise ValueError("a quotation does not end")
