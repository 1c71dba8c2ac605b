"""The table of docs/integrations.md: what `make test-clients` tried of each tool, and what came of it.

``python -m tests.conformance.clients.table`` prints it, ``--write`` brings it into the page.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.tools import LIST, RESULTS, ROOT

PAGE = ROOT / "docs/integrations.md"
BEGIN, END = "<!-- clients: begin -->\n", "<!-- clients: end -->\n"
OTHERS = (  # not of PyPI
    "js - e2b of npm",
    "cli - @e2b/cli==2.19.0",
    "agents - Claude Code, Codex, Gemini CLI, opencode, aider, qwen-code: see the gateway",
)


def row(tool: str, requirement: str, calls: Mapping[str, str] | None) -> str:
    """One tool. A call has passed, has failed, is refused by name as this page says, or is absent from this version.

    >>> row("a", "a==1", {"x": "passed", "y": "refused", "z": "absent: z"})
    '| a | a==1 | 3 | 1 | y | z |'
    """
    if calls is None:
        return f"| {tool} | {requirement} | not run | | | |"
    passed = [name for name, outcome in calls.items() if outcome == "passed"]
    refused = ", ".join(name for name, outcome in calls.items() if outcome.startswith("refused"))
    rest = {name for name, outcome in calls.items() if not outcome.startswith(("passed", "refused"))}
    return f"| {tool} | {requirement} | {len(calls)} | {len(passed)} | {refused} | {', '.join(sorted(rest))} |"


def table(results: Path = RESULTS) -> str:
    """Tools of which every call passed in one line; a row for each of the others."""
    lines = ["| tool | version | tried | passed | refused by name | absent or failed |", "|---|---|---|---|---|---|"]
    complete = []
    for line in [*LIST, *OTHERS]:
        tool, _, *requirements = line.split()
        requirement = " ".join(word for word in requirements if "==" in word) or " ".join(requirements)
        file = results / f"{tool}.json"
        calls = json.loads(file.read_text()) if file.exists() else None
        if calls and all(outcome == "passed" for outcome in calls.values()):
            complete.append(f"{tool} ({requirement}): {len(calls)}")
        else:
            lines.append(row(tool, requirement, calls))
    if complete:
        lines += ["", f"Every call passed: {'; '.join(complete)}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    if "--write" not in sys.argv:
        print(table(), end="")
        return
    if not any(RESULTS.glob("*.json")):
        sys.exit(f"{RESULTS} has no results: run `make test-clients`; {PAGE.name} is as it was")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
