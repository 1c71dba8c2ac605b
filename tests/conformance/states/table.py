"""The table of states in docs/states.md, made from the rows and their promises.

::

    python -m tests.conformance.states.table            # print it
    python -m tests.conformance.states.table --write    # put it into the page

`pagurus bench equality` and tests/conformance/test_states.py check that the table is true.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from sandbox import paths
from tests.conformance.states.classify import Row, compiled, rows

PAGE = paths.CHECKOUT / "docs" / "states.md"
BEGIN, END = "<!-- states: made by `python -m tests.conformance.states.table --write` -->", "<!-- end of states -->"
SOCKET = re.compile(
    r"options_(?P<family>\w+?)_"
    r"(?P<state>new|bound|pair|client|server|listening|inherited|unread|(?:both_|peer_)?shut|peer_closed)"
)
JOINED = 3  # names that begin alike
OUTCOMES = {"impossible": "Impossible", "refused": "Refused", "named": "Not compared"}


def table(listed: Sequence[Row]) -> str:
    """By group: the states that are not restored, by outcome and reason, then the names of those that are."""
    counts = Counter(row.promise.kind for row in listed)
    lines = [
        f"{len(listed)} states: {counts['restored']} are restored, {counts['refused']} refused at the dump with a "
        f"hint, {counts['named']} not compared, {counts['impossible']} impossible in a sandbox.",
    ]
    for group in dict.fromkeys(row.group for row in listed):
        lines += ["", f"**{group}**", ""]
        rows_of_group = [row for row in listed if row.group == group]
        for kind, outcome in OUTCOMES.items():
            if reasons := list(_by_reason(row for row in rows_of_group if row.promise.kind == kind)):
                lines.append(f"- {outcome}: {'; '.join(reasons)}.")
        if restored := [row.name for row in rows_of_group if row.promise.kind == "restored"]:
            lines.append(f"- Restored: {', '.join(f'`{name}`' for name in _braced(restored))}.")
    return "\n".join(lines)


def _braced(names: Iterable[str]) -> list[str]:
    """Names joined as a shell would expand them: of sockets with every option by family and state, others by word.

    >>> _braced(["options_tcp_new", "options_tcp6_new", "options_tcp_bound", "options_tcp6_bound", "lease"])
    ['options_{tcp,tcp6}_{new,bound}', 'lease']
    >>> _braced(["limit_core", "limit_data", "limit_stack", "lock_posix", "lock_shared"])
    ['limit_{core,data,stack}', 'lock_posix', 'lock_shared']
    """
    states: dict[str, list[str]] = {}
    others: dict[str, list[str]] = {}
    for name in names:
        if socket := SOCKET.fullmatch(name):
            states.setdefault(socket["family"], []).append(socket["state"])
        else:
            others.setdefault(name.partition("_")[0], []).append(name)
    families: dict[tuple[str, ...], list[str]] = {}
    for family, found in states.items():
        families.setdefault(tuple(found), []).append(family)
    joined = [f"options_{_alternatives(item)}_{_alternatives(found)}" for found, item in families.items()]
    for word, same in others.items():
        if len(same) < JOINED or word in same:
            joined += same
        else:
            joined.append(f"{word}_{_alternatives([name.removeprefix(f'{word}_') for name in same])}")
    return joined


def _alternatives(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{{{','.join(names)}}}"


def _by_reason(listed: Iterable[Row]) -> Iterator[str]:
    """What makes the states with the same reason, before that reason."""
    reasons: dict[str, list[str]] = {}
    for row in listed:
        reasons.setdefault(row.promise.reason, []).append(row.how or f"`{row.name}`")
    yield from (f"{', '.join(states)}: *{reason}*" for reason, states in reasons.items())


def current() -> str:
    """The table as it should be now. Compiles the program that has the rows."""
    with tempfile.TemporaryDirectory() as directory:
        return table(rows(compiled(Path(directory))))


def in_page() -> str:
    """The table as the page has it."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"put it into {PAGE.name}")
    if not parser.parse_args().write:
        print(current())
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{current()}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
