"""The tables of docs/hosts.md, made from what the last run on each system found (tests/hosts/results).

::

    python -m tests.hosts.table            # print it
    python -m tests.hosts.table --write    # put it into the page
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from sandbox import paths
from tests.hosts import benches
from tests.hosts.systems import SYSTEMS, System

PAGE = paths.CHECKOUT / "docs" / "hosts.md"
RESULTS = Path(__file__).with_name("results")
BEGIN, END = "<!-- hosts: made by `python -m tests.hosts.table --write` -->", "<!-- end of hosts -->"


def record(system: System, job: Path, machine: str, *, resume: bool = False) -> None:
    """Keep what a run found; beside what earlier ones found, where it resumed them."""
    acts = [json.loads(line) for line in (job / "acts.jsonl").read_text().splitlines()]
    earlier = results().get(system.name, {}) if resume else {}
    merged = {_name(item): item for item in [*earlier.get("acts", []), *acts]}
    result = {
        "system": (job / "os").read_text().strip(),
        "kernel": (job / "kernel").read_text().strip(),
        "lsm": (job / "lsm").read_text().strip(),
        "machine": machine,
        "runs": earlier.get("runs", 0) + 1,
        "acts": list(merged.values()),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{system.name}.json").write_text(json.dumps(result, indent=1) + "\n")


def done(system: System) -> list[str]:
    """The acts that an earlier run there has answered: "GROUP: NAME"."""
    acts = results().get(system.name, {}).get("acts", [])
    return [_name(item) for item in acts if item["result"] != "failed"]


def _name(item: dict[str, Any]) -> str:
    return f"{item['group']}: {item['act']}"


def results() -> dict[str, dict[str, Any]]:
    """By system, in their order."""
    named = {name: RESULTS / f"{name}.json" for name in SYSTEMS}
    return {name: json.loads(path.read_text()) for name, path in named.items() if path.exists()}


def text() -> str:
    """Systems, how much passed on all of them, then what did not on each, with the host's reason."""
    result = results()
    if not result:
        return "No system was tried yet."
    lines = [
        "| system | kernel | passed | absent | failed | not run |",
        "|---|---|---|---|---|---|",
    ]
    every = {name for row in result.values() for name in _acts(row)}
    for name, row in result.items():
        counts = [sum(act["result"] == item for act in row["acts"]) for item in ("passed", "absent", "failed")]
        cells = [SYSTEMS[name].title, row["kernel"], *counts, len(every - _acts(row).keys())]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*lines, *_passed(result), *_benches(result), *_rest(result)])


def _acts(row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The acts of a system by "GROUP: NAME", benches left out."""
    return {_name(act): act for act in row["acts"] if act["group"] != benches.GROUP}


def _passed(result: dict[str, dict[str, Any]]) -> list[str]:
    """How many acts of each group passed on every system."""
    systems = [_acts(row) for row in result.values()]
    names = dict.fromkeys(name for acts in systems for name in acts)
    groups = Counter(
        name.partition(": ")[0]
        for name in names
        if all(acts.get(name, {}).get("result") == "passed" for acts in systems)
    )
    counts = ", ".join(f"{group} ({count})" for group, count in groups.items())
    return ["", f"Passed on every system, acts by group: {counts}."]


def _rest(result: dict[str, dict[str, Any]]) -> list[str]:
    """What failed or is absent, by reason; systems on which the same acts have it share a line."""
    lines: dict[tuple[str, str], list[str]] = {}
    for system, row in result.items():
        reasons: dict[str, list[str]] = {}
        for act in row["acts"]:
            if act["result"] != "passed":
                note = act["note"].strip().replace("|", "\\|") or "no reason given"
                reasons.setdefault(f"{act['result']}, {note}", []).append(_name(act))
        for reason, names in reasons.items():
            for name in names:
                lines.setdefault((name, reason), []).append(SYSTEMS[system].title)
    shared: dict[tuple[str, str], list[str]] = {}
    for (name, reason), systems in lines.items():
        shared.setdefault(("; ".join(systems), reason), []).append(name)
    rest = [f"- {'; '.join(names)}: {reason} ({systems})" for (systems, reason), names in shared.items()]
    return ["", "The other acts, with the host's reason:", "", *rest]


def _benches(result: dict[str, dict[str, Any]]) -> list[str]:
    """The figures of each bench by system, if any ran."""
    lines = []
    for name, row in result.items():
        for item in row["acts"]:
            if item["group"] == benches.GROUP:
                note = item["note"].replace("|", "\\|")
                lines.append(f"| `{item['act']}` | {name}: {row['kernel']} | {note} | {round(item['seconds'])} |")
    if not lines:
        return []
    head = ["", "The short forms of the benches:", "", "| bench | system | result | seconds |", "|---|---|---|---|"]
    return head + sorted(lines)


def in_page() -> str:
    """The tables as the page has them."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip()


def write() -> None:
    """Put them into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{text()}\n\n{END}{rest.partition(END)[2]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"put them into {PAGE.name}")
    if parser.parse_args().write:
        write()
    else:
        print(text())


if __name__ == "__main__":
    main()
