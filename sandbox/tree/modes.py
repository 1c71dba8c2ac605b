"""Modes of files as chmod writes them. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable

_CLAUSE = re.compile(r"([ugoa]*)((?:[-+=][rwxXstugo]*)+)")
_ACTION = re.compile(r"([-+=])([rwxXstugo]*)")
_WHO = {"u": 0o4700, "g": 0o2070, "o": 0o1007, "a": 0o7777}
_SHIFT = {"u": 6, "g": 3, "o": 0}


def change(text: str) -> Callable[[int, bool], int]:
    """What a mode, octal or symbolic, makes of another one (and whether that is of a directory).

    >>> change("u+x,go-w")(0o666, False) == 0o744, change("a=rX")(0o700, True) == 0o555
    (True, True)
    """
    if re.fullmatch("[0-7]+", text):
        return lambda mode, directory: int(text, 8)
    clauses = [_CLAUSE.fullmatch(item) for item in text.split(",")]
    if not all(clauses):
        raise ValueError(f"{text!r} is no mode")

    def changed(mode: int, directory: bool) -> int:
        for clause in clauses:
            assert clause is not None
            for action in _ACTION.finditer(clause[2]):
                mode = _applied(mode, clause[1] or "a", action[1], action[2], directory)
        return mode

    return changed


def _applied(mode: int, who: str, operator: str, rights: str, directory: bool) -> int:
    mask = 0
    for item in who:
        mask |= _WHO[item]
    bits = 0
    for right in rights:
        if right in _SHIFT:
            copied = mode >> _SHIFT[right] & 7
            bits |= copied << 6 | copied << 3 | copied
        elif right == "X":
            bits |= 0o111 if directory or mode & 0o111 else 0
        else:
            bits |= {"r": 0o444, "w": 0o222, "x": 0o111, "s": 0o6000, "t": 0o1000}[right]
    bits &= mask
    if operator == "=":
        return mode & ~(mask & 0o777) & ~(mask & 0o6000 if not directory else 0) | bits
    return mode | bits if operator == "+" else mode & ~bits
