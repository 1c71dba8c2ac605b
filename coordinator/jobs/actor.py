"""`RunActor`: what Ray places and starts again. It keeps the supervisor of one run alive on its machine.

Owns: that process. Does not own: what it does (:mod:`coordinator.local`); a run folder has one owner by a lock of the
kernel, and its roles have generations, so two actors of one run could not both act.
Guarantee: the supervisor ends with the actor.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

from coordinator import local
from coordinator.jobs import tied

# Not our child but our child's: Ray kills the children of a worker that ends, and the supervisor ends its roles first.
BEGIN = ("setsid", "--fork", "--wait", sys.executable, "-m", "coordinator.jobs.supervisor")
AGAIN = 1.0  # seconds before a supervisor that did not end by its own will is started again


class RunActor:
    """Made by Ray: ``RunActor.options(...).remote("/shared/runs/latest")``."""

    def __init__(self, run: str) -> None:
        self._run = Path(run)
        self._process: subprocess.Popen[bytes] | None = None
        self._status: Future[int] = Future()
        threading.Thread(target=self._keep, daemon=True, name="supervisor").start()

    def ended(self) -> int:
        """When the run is over: with which status. However often it is asked."""
        return self._status.result()

    def _keep(self) -> None:
        try:
            while True:
                with (self._run / "run.log").open("ab") as out:
                    self._process = tied.begin([*BEGIN, str(self._run)], out)
                status = self._process.wait()
                if status in (local.DONE, local.SAID):
                    self._status.set_result(status)
                    return
                time.sleep(AGAIN)
        except OSError as error:  # this machine does not have the folder, or cannot start a process
            self._status.set_exception(error)
