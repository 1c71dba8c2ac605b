"""A process that ends with the one that started it, however that ends: it holds the writing end of our stdin.

Also ``python -m coordinator.jobs.tied RUN``: the supervisor of a run, tied to the actor that Ray placed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from coordinator import local
from sandbox import private
from sandbox.errors import Conflict

ENVIRONMENT = "environment.json"  # in the run's folder of roles: where its sandboxes are made


def begin(argv: Sequence[str], out: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """Start a process that calls `tie`."""
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True)


def tie() -> None:
    """End by SIGTERM when who started us is gone."""

    def wait() -> None:
        while os.read(0, 1 << 12):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True, name="ends with its parent").start()


def remember(path: Path, environment: Mapping[str, str]) -> None:
    """Variables that the run's processes get. May hold a token."""
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
