"""The table of states in docs/states.md, made from the rows and their promises.

::

    python -m tests.conformance.states.table            # print it
    python -m tests.conformance.states.table --write    # put it into the page

Owns: its text. Does not own: whether it is true: `pagurus bench equality` and a test look.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from sandbox import paths
from tests.conformance.states.classify import Row, compiled, rows

PAGE = paths.CHECKOUT / "docs" / "states.md"
BEGIN, END = "<!-- states: made by `python -m tests.conformance.states.table --write` -->", "<!-- end of states -->"
WORDS = {
    "restored": "comes back",
    "refused": "refused at the dump",
    "named": "not compared",
    "impossible": "cannot be made",
}


def table(listed: Sequence[Row]) -> str:
    """All rows by group, with what is promised of each."""
    counts = Counter(row.promise.kind for row in listed)
    lines = [
        f"{len(listed)} states: {counts['restored']} come back, {counts['refused']} are refused at the dump with a "
        f"hint, {counts['named']} are not compared, {counts['impossible']} cannot be made in a sandbox.",
    ]
    for group in dict.fromkeys(row.group for row in listed):
        lines += ["", f"**{group}**", "", "| state | made by | what becomes of it |", "|---|---|---|"]
        for row in listed:
            if row.group == group:
                reason = f": {row.promise.reason}" if row.promise.reason else ""
                how = row.how.replace("|", "\\|")
                lines.append(f"| {row.name} | {how} | {WORDS[row.promise.kind]}{reason} |")
    return "\n".join(lines)


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
