"""Why a file changed: the explanations of turns, put beside the differences of the tree.

Owns: which explanation belongs to which path, a pure matter. Does not own: the differences (sandbox/tree/diff.py) or
where explanations come from (ebpf/). No verdict depends on it: a turn explains its first changes only, and programs
have a hand in what they are called and which path they name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from sandbox.messages import Change, TurnInfo

_LINE = re.compile(r"^(?P<call>.+?) (?P<path>/.*) by (?P<who>.+\[\d+\])$", re.DOTALL)


def explained(changes: Iterable[Change], turns: Iterable[TurnInfo], now: Iterable[str] = ()) -> list[Change]:
    """The changes, each with the last explanation of its path. `turns`: oldest first; `now`: after the last of them.

    >>> explained([Change(path="/a", kind="added")], [], ["openat /a by sh[5]"])[0].why
    'openat by sh[5]'
    """
    found: dict[str, str] = {}
    for turn in turns:
        for line in turn.effects.reasons if turn.effects is not None else ():
            _note(found, line, f" in turn {turn.turn}")
    for line in now:
        _note(found, line, "")
    return [msgspec.structs.replace(change, why=found.get(change.path, "")) for change in changes]


def _note(found: dict[str, str], line: str, when: str) -> None:
    match = _LINE.match(line)
    if match is not None:
        found[match["path"]] = f"{match['call']} by {match['who']}{when}"
