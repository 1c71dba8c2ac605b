"""``python -m coordinator.jobs.supervisor RUN PART``: the supervisor of a part of a job, tied to its actor."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from coordinator import local
from coordinator.jobs.parts import processes
from coordinator.jobs.tied import tie
from sandbox import private
from sandbox.errors import Conflict

ENVIRONMENT = "environment.json"  # in the run's directory of roles: where its sandboxes are made


def remember(run: Path, environment: Mapping[str, str]) -> None:
    """Variables that the run's processes get. May hold a token."""
    path = local.roles_of(run) / ENVIRONMENT
    path.parent.mkdir(exist_ok=True)
    private.file(path)
    path.write_text(json.dumps(environment))


def main(run: Path, part: str, parts: Sequence[str], address: str) -> int:
    tie()
    existing = local.roles_of(run) / ENVIRONMENT
    if existing.exists():
        os.environ.update(json.loads(existing.read_bytes()))
    if (run / "summary.json").exists():
        return local.DONE
    try:
        retained = processes(run, part, parts, address)
        return local.supervise(run, retained.programs, standbys=retained.standbys, at=retained.directory)
    except Conflict as error:  # of an actor that has not quite ended, or of `pagurus train`
        print(error, file=sys.stderr)
        return local.OWNED


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m coordinator.jobs.supervisor")
    parser.add_argument("run", type=Path)
    parser.add_argument("part")
    parser.add_argument("parts", nargs="*", help="all of the job")
    parser.add_argument("--at", required=True, help="address of this machine")
    options = parser.parse_args()
    raise SystemExit(main(options.run, options.part, options.parts, options.at))
