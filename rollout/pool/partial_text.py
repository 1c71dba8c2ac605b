"""What may be sent of an answer that is not whole yet, and where a stop string ends it. Pure.

Guarantee: what was sent of an answer is the beginning of what is sent in the end, but for blanks at its start; tokens
after the one that completes a stop string are no part of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sandbox.errors import Invalid

MAX_STRINGS = 16
MAX_LENGTH = 256  # characters of one stop string
MARGIN = 8  # tokens: a text that is decoded from the middle may begin otherwise
UNFINISHED = "\ufffd"  # what a decoder shows of a character of which tokens are still to come


class Stops:
    """``Stops(["\\n"], decode)(ids)``: of an answer's tokens so far, how many are all of it; None: more may come."""

    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str]):
        if len(strings) > MAX_STRINGS or not all(0 < len(item) <= MAX_LENGTH for item in strings):
            raise Invalid(f"there may be {MAX_STRINGS} stop strings, each of 1 to {MAX_LENGTH} characters")
        self.strings, self._decode = list(strings), decode
        self.result: str | None = None
        self._reach = MARGIN + max((len(item.encode()) for item in strings), default=0)  # tokens, at most one a byte
        self._observed = 0

    def __call__(self, ids: list[int]) -> int | None:
        start, observed, self._observed = max(0, self._observed - self._reach), self._observed, len(ids)
        if not self.strings or self._in(ids[start:]) is None:
            return None
        for count in range(observed + 1, len(ids) + 1):
            self.result = self._in(ids[start:count])
            if self.result is not None:
                return count
        return None

    def cut(self, text: str) -> str:
        """A text up to the string that ended the answer; all of it where the string lies elsewhere."""
        return text if self.result is None else text.partition(self.result)[0]

    def _in(self, ids: list[int]) -> str | None:
        """The string that comes first in the text of these tokens."""
        text = self._decode(ids)
        there = [item for item in self.strings if item in text]
        return min(there, key=text.index, default=None)


class SentText:
    """How much of an answer's reasoning and text was sent."""

    def __init__(self, marks: Sequence[str] = ()):
        """`marks`: texts that may turn what comes with and after them into something else."""
        self._marks = marks
        self._said: dict[str, str] = {}

    def more(self, kind: str, text: str) -> str:
        """What may be sent next, where `text` is all of this kind so far."""
        return self.rest(kind, finalized(text, self._marks))

    def rest(self, kind: str, text: str) -> str:
        """What is left to send, where `text` is all of this kind."""
        said = self._said.get(kind)
        if said is None:
            new = text
        else:
            new = text.lstrip()[len(said.lstrip()) :] if text.lstrip().startswith(said.lstrip()) else ""
        if new:
            self._said[kind] = (said or "") + new
        return new


def finalized(text: str, marks: Sequence[str]) -> str:
    """The beginning of a text that stays as it is, whatever comes after it.

    >>> finalized("I look. <tool", ["<tool_call>"])
    'I look.'
    """
    text = text.rstrip(UNFINISHED)
    ends = [len(text)]
    for mark in marks:
        at = text.find(mark)
        if at < 0:
            at = next((n for n in range(max(0, len(text) - len(mark) + 1), len(text)) if mark.startswith(text[n:])), -1)
        if at >= 0:
            ends.append(at)
    return text[: min(ends)].rstrip()
