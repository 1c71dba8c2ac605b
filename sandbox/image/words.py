"""Words of a Dockerfile: quotes, escapes and variables. Pure.

Guarantee: what cannot be read raises ValueError that says why.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

MAX_LENGTH = 1 << 20  # characters of what an expansion may give
MAX_DEPTH = 64  # of operators within one another
_SPECIAL = "@*#?-$!0"


def expand(text: str, variables: Mapping[str, str], *, escape: str = "\\", quotes: bool = True) -> str:
    """One word: variables replaced, quotes and escapes removed. `quotes`: False leaves quotes as they are.

    >>> expand("'$A' \\"$A\\" ${B:-none} ${A%.*}", {"A": "x.y"})
    '$A x.y none x'
    """
    return _Lexer(text, variables, escape, quotes).until("")[0]


def split(text: str, variables: Mapping[str, str], *, escape: str = "\\") -> list[str]:
    """The words of a text; what a variable holds is split as well, unless it stands in quotes.

    >>> split("80 $PORTS '$A b'", {"PORTS": "90 91"})
    ['80', '90', '91', '$A b']
    """
    return _Lexer(text, variables, escape, True).until("")[1]


class _Words:
    """Words as they grow: blanks end one, unless they were quoted."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self._word: list[str] = []

    def add(self, text: str, *, quoted: bool) -> None:
        for char in text:
            if quoted or not char.isspace():
                self._word.append(char)
            else:
                self.end()

    def end(self) -> list[str]:
        if self._word:
            self.done.append("".join(self._word))
            self._word = []
        return self.done


class _Lexer:
    def __init__(self, text: str, variables: Mapping[str, str], escape: str, quotes: bool) -> None:
        self._text, self._at, self._depth = text, 0, 0
        self._variables = variables
        self._escape, self._quotes = escape, quotes
        self._raw = False  # escapes stay as they are: a pattern reads them later

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _next(self) -> str:
        char = self._peek()
        self._at += len(char)
        return char

    def until(self, stop: str, *, raw: bool = False) -> tuple[str, list[str]]:
        """Read up to the character `stop` ("": to the end): as one word, and as words."""
        before, self._raw = self._raw, raw
        result: list[str] = []
        words = _Words()
        size = 0
        while (char := self._peek()) and not (stop and char == stop):
            if char == "$":
                result.append(self._dollar())
                words.add(result[-1], quoted=False)
            elif self._quotes and char in "'\"":
                result.append(self._single() if char == "'" else self._double())
                words.add(result[-1], quoted=True)
            else:
                char = self._next()
                escaped = char == self._escape
                if escaped:
                    char = (char if self._raw else "") + self._next()
                result.append(char)
                words.add(char, quoted=escaped)
            size += len(result[-1])
            if size > MAX_LENGTH:
                raise ValueError(f"the expansion is longer than {MAX_LENGTH} characters")
        if stop and not self._next():
            raise ValueError(f"the word ends before {stop}")
        self._raw = before
        return "".join(result), words.end()

    def _single(self) -> str:
        self._next()
        end = self._text.find("'", self._at)
        if end < 0:
            raise ValueError("a single quote is not closed")
        result, self._at = self._text[self._at : end], end + 1
        return result

    def _double(self) -> str:
        self._next()
        result: list[str] = []
        while (char := self._peek()) != '"':
            if not char:
                raise ValueError("a double quote is not closed")
            if char == "$":
                result.append(self._dollar())
                continue
            self._next()
            if char == self._escape:
                following = self._peek()
                if self._raw:
                    result.append(char)
                if not following:
                    continue
                if following in ('"', "$", self._escape):
                    char = self._next()
            result.append(char)
        self._next()
        return "".join(result)

    def _name(self) -> str:
        match = re.compile(r"\d+").match(self._text, self._at)
        if match is None and self._peek() and self._peek() in _SPECIAL:
            return self._next()
        match = match or re.compile(r"\w*").match(self._text, self._at)
        assert match is not None  # the empty name is one
        self._at = match.end()
        return match[0]

    def _dollar(self) -> str:
        self._next()
        if self._peek() != "{":
            name = self._name()
            return self._variables.get(name, "") if name else "$"
        self._next()
        if not self._peek():
            raise ValueError("no } ends the substitution")
        if self._peek() in "{}:":
            raise ValueError("a substitution without a name")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ValueError(f"substitutions nested more than {MAX_DEPTH} deep")
        result = self._braces(self._name())
        self._depth -= 1
        return result

    def _braces(self, name: str) -> str:
        """What follows ``${NAME``."""
        value, operator = self._variables.get(name), self._next()
        if operator == "}":
            return value or ""
        if operator == "/":
            return self._replaced(value or "")
        null = operator == ":"  # an empty value counts as none
        operator = self._next() if null else operator
        if not operator:
            raise ValueError("no } ends the substitution")
        if operator not in ("-+?" if null else "-+?#%"):
            raise ValueError(f"the operator {':' if null else ''}{operator} of a substitution is not known")
        word = self._word("}", raw=operator in "#%")
        there = value is not None and not (null and not value)
        if operator == "-":
            return value or "" if there else word
        if operator == "+":
            return word if there else ""
        if operator == "?":
            if not there:
                raise ValueError(f"{name}: {word or 'is not allowed to be ' + ('unset' if value is None else 'empty')}")
            return value or ""
        return _trimmed(value or "", word, operator)

    def _word(self, stop: str, *, raw: bool) -> str:
        try:
            return self.until(stop, raw=raw)[0]
        except ValueError as error:
            if self._peek():
                raise
            raise ValueError(f"no {stop} ends the substitution") from error

    def _replaced(self, value: str) -> str:
        every = self._peek() == "/"
        if every:
            self._next()
        pattern = _pattern(self._word("/", raw=True), greedy=True)
        replacement = self._word("}", raw=True)
        return re.sub(pattern, lambda match: replacement, value[:MAX_LENGTH], count=0 if every else 1)


def _trimmed(value: str, word: str, operator: str) -> str:
    """``${V#word}`` and its kin: the shortest match removed, of a doubled operator the longest."""
    greedy = word.startswith(operator)
    pattern = _pattern(word[1:] if greedy else word, greedy=greedy)
    if operator == "#":
        match = re.match(pattern, value)
        return value[match.end() :] if match is not None else value
    starts = range(len(value) + 1) if greedy else range(len(value), -1, -1)
    complete = re.compile(pattern)
    return next((value[:start] for start in starts if complete.fullmatch(value, start)), value)


def _pattern(word: str, *, greedy: bool) -> str:
    """A shell pattern of ``*`` and ``?``, without brackets, as a regular expression."""
    result, at = "", 0
    while at < len(word):
        char = word[at]
        at += 1
        if char == "*":
            if not result.endswith(("*", "*?")):  # many stars are one: no pattern takes for ever
                result += ".*" if greedy else ".*?"
        elif char == "?":
            result += "."
        elif char != "\\":
            result += re.escape(char)
        elif word[at : at + 1] not in ("}", "/"):
            if word[at : at + 1] not in ("*", "?", "\\") or at >= len(word):
                raise ValueError(f"invalid pattern ({word}) in substitution: invalid escape '\\{word[at : at + 1]}'")
            result += re.escape(word[at])
            at += 1
    return result
