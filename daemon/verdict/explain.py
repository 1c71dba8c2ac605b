"""Why a file changed: the explanations of turns, by path.

No verdict depends on it: a turn explains its first changes only, and programs have a hand in what they are called and
which path they name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from sandbox.messages import TurnInfo

_LINE = re.compile(r"^(?P<call>.+?) (?P<path>/.*) by (?P<who>.+\[\d+\]|the API)$", re.DOTALL)
_COMPLETE = re.compile(
    r"rename\w* by |.+ by the API$|.+ by the API in turn \d+$"
)  # what holds for all below a directory


def by_api(call: str, path: str) -> str:
    """The explanation of a change that the host made.

    >>> by_api("write", "srv/page")
    'write /srv/page by the API'
    """
    return f"{call} /{path.lstrip('/')} by the API"


def last_reasons(turns: Iterable[TurnInfo], now: Iterable[str] = ()) -> dict[str, str]:
    """The last explanation of each path. `turns`: oldest first; `now`: after the last of them.

    >>> last_reasons([], ["openat /a by sh[5]"])
    {'/a': 'openat by sh[5]'}
    """
    result: dict[str, str] = {}
    for turn in turns:
        for line in turn.effects.reasons if turn.effects is not None else ():
            _note(result, line, f" in turn {turn.turn}")
    for line in now:
        _note(result, line, "")
    return result


def reason(result: Mapping[str, str], path: str) -> str:
    """The explanation of a path. Where it has none, that of a directory above it: renamed, or changed by the API.

    >>> reason({"/a": "rename by mv[5]"}, "/a/b")
    'rename by mv[5]'
    """
    if path in result:
        return result[path]
    while path := path.rpartition("/")[0]:
        if _COMPLETE.match(result.get(path, "")):
            return result[path]
    return ""


def _note(result: dict[str, str], line: str, when: str) -> None:
    match = _LINE.match(line)
    if match is not None:
        call = "written" if match["call"] == "content of" else match["call"]
        result[match["path"]] = f"{call} by {match['who']}{when}"
