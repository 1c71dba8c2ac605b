"""Benches in short forms on this host: ``python -m tests.hosts.benches REPORT [--only WORD] [--done FILE]``.

They are those of the checkout in the working directory, with the parts that the installed package brought
(``PAGURUS_PREFIX``). Needs a C compiler.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GROUP = "benches"
TIMEOUT = 7200.0  # seconds; on an emulated machine
COPIED = ("sandbox", "daemon", "ebpf", "coordinator", "rollout", "trainer", "pagurus", "bench", "tests", "examples")
LIBRARIES = ("hypothesis", "sortedcontainers")  # which the package does not bring: pure Python


@dataclass(frozen=True)
class Bench:
    """`figures`: what is told of its JSON, by its keys; `failures`: those that must be empty there."""

    name: str
    options: tuple[str, ...]
    figures: str
    failures: tuple[str, ...]

    @property
    def full_name(self) -> str:
        return " ".join([self.name, *self.options])


BENCHES = (
    Bench(
        "inspector",
        ("--quick",),
        "{cases} cases and {random_programs} programs: missed {false_negatives}; {tiny_cases} with tiny maps: missed "
        "{tiny_false_negatives}; {exact_kinds} kinds of events counted exactly, miscounted: {miscounted}; "
        "{false_positives} of {no_effect_cases} without effect captured for nothing",
        ("missed", "miscounted"),
    ),
    Bench(
        "equality",
        ("--rounds", "4"),
        "{restores} restores: equal {equal}; {states} states: restored {restored}, refused {refused}, named {named}, "
        "impossible {impossible}, silent {silent}",
        ("differences", "failures", "silent_states"),
    ),
    Bench(
        "transparency",
        ("--row", "5", "--fresh", "1", "--rounds", "2"),
        "{calls} calls: returned early {returned_early}; programs: {ran}; not here: {missing}",
        ("failures",),
    ),
    Bench("isolation", (), "{acts} acts: contained {contained}", ("not_contained",)),
    Bench(
        "recovery",
        ("--trials", "20"),
        "{trials} trials: killed {killed}, equal {equal}, without a checkpoint {without_checkpoint}, lost {lost}; left "
        "behind: {leaks}",
        ("troubles", "leaks"),
    ),
)


def run(bench: Bench) -> dict[str, object]:
    """The result of one, as :func:`tests.hosts.act.run_acts` writes those of acts; the figures are its note."""
    began = time.monotonic()
    command = [sys.executable, "-m", "pagurus", "bench", bench.name, "--json", *bench.options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT, check=False)
    print(done.stdout, flush=True)
    lines = done.stdout.splitlines()
    passed, note = judged(bench, done.returncode, lines[-1] if lines else "")
    seconds = round(time.monotonic() - began, 1)
    result = "passed" if passed else "failed"
    return {"group": GROUP, "act": bench.full_name, "result": result, "note": note, "seconds": seconds}


def judged(bench: Bench, status: int, line: str) -> tuple[bool, str]:
    """Whether a bench passed that ended so and printed this last, and its figures with the first failures."""
    try:
        found: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:
        return False, f"exit status {status}, no result"
    failures = [failure for key in bench.failures for failure in _items(found[key])]
    figures = bench.figures.format_map({key: _text(value) for key, value in found.items()})
    return not failures and status == 0, "; ".join([figures, *(item[:300] for item in failures[:10])])


def _items(value: Any) -> list[str]:
    return [f"{key}: {item}" for key, item in value.items()] if isinstance(value, dict) else list(map(str, value))


def _text(value: Any) -> str:
    return ", ".join(_items(value)) or "none" if isinstance(value, list | dict) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("--only", default="", help="benches whose group and name hold this word")
    parser.add_argument("--done", type=Path, help="names, one a line, that are not run again")
    arguments = parser.parse_args()
    done = arguments.done.read_text().splitlines() if arguments.done else []
    failed = 0
    for bench in BENCHES:
        full = f"{GROUP}: {bench.full_name}"
        if arguments.only not in full or full in done:
            continue
        result = run(bench)
        failed += result["result"] == "failed"
        with arguments.report.open("a") as lines:
            lines.write(json.dumps(result) + "\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
