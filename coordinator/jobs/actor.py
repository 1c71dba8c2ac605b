"""`RunActor`: what Ray places and starts again. It keeps the supervisor of one part of a job alive on its machine.

Guarantee: the supervisor ends with the actor.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from coordinator import local
from coordinator.jobs import tied

# Not our child but our child's: Ray kills the children of a worker that ends, and the supervisor ends its roles first.
BEGIN = ("setsid", "--fork", "--wait", sys.executable, "-m", "coordinator.jobs.supervisor")
AGAIN = 1.0  # seconds before a supervisor that did not end by its own will is started again


def address() -> str:
    """Of this machine, as Ray knows it: at it the parts on other machines ask."""
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())


class RunActor:
    """Made by Ray: ``RunActor.options(...).remote("/shared/runs/latest", "run", ["run", "engine-0"])``."""

    def __init__(self, run: str, part: str, parts: Sequence[str]) -> None:
        """`parts`: all of the job."""
        self._run, self._words = Path(run), [part, *parts, "--at", address()]
        self._process: subprocess.Popen[bytes] | None = None
        self._status: Future[int] = Future()
        threading.Thread(target=self._keep, daemon=True, name="supervisor").start()

    def ended(self) -> int:
        """When the part is over: with which status. May be called repeatedly."""
        return self._status.result()

    def _keep(self) -> None:
        try:
            while True:
                with (self._run / "run.log").open("ab") as out:
                    self._process = tied.begin([*BEGIN, str(self._run), *self._words], out)
                status = self._process.wait()
                if status in (local.DONE, local.SAID):
                    self._status.set_result(status)
                    return
                time.sleep(AGAIN)
        except OSError as error:  # this machine does not have the directory, or cannot start a process
            self._status.set_exception(error)
