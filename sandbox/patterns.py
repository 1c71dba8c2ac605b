"""Patterns of paths: ``.dockerignore``, ``--exclude`` and ``--parents``, and the wildcards of sources. Pure.

Guarantee: the last pattern that matches decides; ``!`` takes back; a pattern that matches a directory holds for what is
in it. A pattern that cannot be read raises ValueError.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass

MAX_LENGTH = 4096  # characters of one pattern


@dataclass(frozen=True)
class PathPattern:
    """One line of a list."""

    text: str
    exception: bool  # it began with "!"
    matches: re.Pattern[str]


class PatternList:
    """An ordered list of patterns. Example: ``PatternList(["*", "!src"]).matches("src/app.py")`` is False."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = [_pattern(item.strip()) for item in patterns if item.strip()]
        self.has_exceptions = any(item.exception for item in self._patterns)

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def decide(self, path: str, above: tuple[bool, ...] = ()) -> tuple[bool, tuple[bool, ...]]:
        """Whether a path matches, and by which patterns; `above` is that of its directory (of the root: empty)."""
        result, by = False, []
        for number, pattern in enumerate(self._patterns):
            match = bool(above) and above[number]
            if not match and pattern.exception == result:
                match = pattern.matches.fullmatch(path) is not None
            by.append(match)
            if match:
                result = not pattern.exception
        return result, tuple(by)

    def matches(self, path: str) -> bool:
        """Whether a path matches, by itself or by a directory above it."""
        result, by, parts = False, tuple[bool, ...](), path.split("/")
        for count in range(1, len(parts) + 1):
            result, by = self.decide("/".join(parts[:count]), by)
        return result


def ignore_lines(text: str) -> list[str]:
    """The patterns of a .dockerignore.

    >>> ignore_lines("# all but this\\n*\\n! /src/../app/\\n")
    ['*', '!app']
    """
    result = []
    for line in text.removeprefix("\ufeff").splitlines():
        pattern = line.strip()
        if line.startswith("#") or not pattern:
            continue
        exception = pattern.startswith("!")
        pattern = pattern[1:].strip() if exception else pattern
        if pattern:
            pattern = _clean(pattern)
            pattern = pattern[1:] if len(pattern) > 1 and pattern.startswith("/") else pattern
        result.append(("!" if exception else "") + pattern)
    return result


def has_wildcards(path: str) -> bool:
    """Whether a source of COPY is a pattern rather than a path."""
    return re.search(r"[*?\[]", re.sub(r"\\.", "", path)) is not None


def split_wildcards(path: str) -> tuple[str, str]:
    """The part of a source before its first wildcard, and the rest.

    >>> split_wildcards("a/b*/c"), split_wildcards("a/b")
    (('a', 'b*/c'), ('a/b', ''))
    """
    parts = _clean(path).split("/")
    first = next((number for number, part in enumerate(parts) if has_wildcards(part)), len(parts))
    fixed = "/".join(parts[:first])
    return (fixed or "/" if path.startswith("/") else fixed), "/".join(parts[first:])


def glob(pattern: str) -> re.Pattern[str]:
    """Go's ``filepath.Match``: a wildcard stops at a slash."""
    result, at = "", 0
    while at < len(pattern):
        char = pattern[at]
        if char == "[":
            part, at = _bracket(pattern, at)
            result += part
            continue
        at += 1
        if char == "*":
            result += "" if result.endswith("[^/]*") else "[^/]*"
        elif char == "?":
            result += "[^/]"
        elif char == "\\":
            if at >= len(pattern):
                raise ValueError(f"{pattern!r} ends with an escape")
            result += re.escape(pattern[at])
            at += 1
        else:
            result += re.escape(char)
    return re.compile(result, re.DOTALL)


def _clean(path: str) -> str:
    cleaned = posixpath.normpath(path)
    return cleaned[1:] if cleaned.startswith("//") else cleaned


def _pattern(text: str) -> PathPattern:
    if len(text) > MAX_LENGTH:
        raise ValueError(f"a pattern of more than {MAX_LENGTH} characters")
    text = _clean(text)
    exception = text.startswith("!")
    if text == "!":
        raise ValueError("'!' is no pattern")
    text = text[1:] if exception else text
    glob(text)  # for what is wrong with it
    return PathPattern(text, exception, re.compile(_regular(text), re.DOTALL | re.ASCII))


def _regular(text: str) -> str:
    result, at = "", 0
    while at < len(text):
        char = text[at]
        if text.startswith("**", at):
            at += 2
            while text.startswith("**", at):  # more stars say nothing new
                at += 2
            at += text.startswith("/", at)
            result += ".*" if at >= len(text) else "(?:.*/)?"
            continue
        if char == "[":
            part, at = _bracket(text, at)
            result += part
            continue
        at += 1
        if char == "*":
            result += "[^/]*"
        elif char == "?":
            result += "[^/]"
        elif char == "\\" and at < len(text):
            result += _escaped(text, at)
            at += 1
        else:
            result += re.escape(char)
    return result


def _escaped(text: str, at: int) -> str:
    """As moby has it, which hands an escaped letter to Go's regular expressions: ``\\n`` is a line's end."""
    char = text[at]
    if not (char.isascii() and char.isalnum()):
        return re.escape(char)
    if char not in "AabBdDfnrsStvwW":
        raise ValueError(f"{text!r}: an escape that means nothing: \\{char}")
    return f"\\{char}"


def _bracket(text: str, at: int) -> tuple[str, int]:
    """A class of characters, such as ``[a-z]`` or ``[^/]``, and where it ends."""
    begin = at
    at += 1
    negated = text.startswith("^", at)
    at += negated
    members: list[str] = []
    while not members or not text.startswith("]", at):
        low, at = _member(text, at)
        high = low
        if text.startswith("-", at):
            high, at = _member(text, at + 1)
        if high < low:
            raise ValueError(f"{text[begin:]!r}: the range {low}-{high} is empty")
        members.append(re.escape(low) + (f"-{re.escape(high)}" if high != low else ""))
    return f"[{'^' if negated else ''}{''.join(members)}]", at + 1


def _member(text: str, at: int) -> tuple[str, int]:
    if text.startswith("\\", at):
        at += 1
    elif text[at : at + 1] in ("-", "]"):
        raise ValueError(f"{text!r}: not a class of characters")
    if at >= len(text):
        raise ValueError(f"{text!r}: a class of characters has no end")
    return text[at], at + 1
