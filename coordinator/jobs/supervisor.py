"""``python -m coordinator.jobs.supervisor RUN``: the supervisor of a run, tied to the actor that Ray placed.

Owns: how its roles reach the sandboxes, its exit status. Does not own: what it does (:mod:`coordinator.local`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from coordinator import local
from coordinator.jobs.tied import tie
from sandbox import private
from sandbox.errors import Conflict

ENVIRONMENT = "environment.json"  # in the run's folder of roles: where its sandboxes are made


def remember(run: Path, environment: Mapping[str, str]) -> None:
    """Variables that the run's processes get. May hold a token."""
    path = local.roles_of(run) / ENVIRONMENT
    path.parent.mkdir(exist_ok=True)
    private.file(path)
    path.write_text(json.dumps(environment))


def main(run: Path) -> int:
    tie()
    known = local.roles_of(run) / ENVIRONMENT
    if known.exists():
        os.environ.update(json.loads(known.read_bytes()))
    if (run / "summary.json").exists():
        return local.DONE
    try:
        return local.supervise(run, local.programs(run), spares=local.SPARES)
    except Conflict as error:  # of an actor that has not quite ended, or of `pagurus train`
        print(error, file=sys.stderr)
        return local.OWNED


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
