"""`RunActor`, `HostActor`: what Ray places and starts again. Each keeps the processes of one part of a job alive on its
machine.

Guarantee: they end with the actor. A `HostActor` needs no run directory: it learns from the trainer's actor where the
trainer is, and follows it to another machine.

::

    trainer: RunActor ─▶ supervisor ─▶ trainer ◀──── batches, saves, weights ────┐
                ▲ where is it?                                                    │
    host-1:  HostActor ─▶ coordinator.jobs.trainer_host ─▶ trainer.distributed.agent ─▶ ranks
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import cast

from coordinator import local
from coordinator.jobs import tied

# Not our child but our child's: Ray kills the children of a worker that ends, and the supervisor ends its roles first.
BEGIN = ("setsid", "--fork", "--wait", sys.executable, "-m")
AGAIN = 1.0  # seconds before a process that did not end by its own will is started again
FOLLOW_INTERVAL = 2.0  # seconds between two questions where the trainer is
ANSWER_TIMEOUT = 30.0  # seconds for its actor to say so
HEAD = "hosts.json"  # in the run's directory of roles: trainer.distributed.host_fleet writes it


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

    def head(self) -> bytes | None:
        """Where hosts of the trainer find it, as it wrote that down; None before it did."""
        path = local.roles_of(self._run) / HEAD
        return path.read_bytes() if path.exists() else None

    def _keep(self) -> None:
        try:
            while True:
                with (self._run / "run.log").open("ab") as out:
                    self._process = tied.begin(
                        [*BEGIN, "coordinator.jobs.supervisor", str(self._run), *self._words], out
                    )
                status = self._process.wait()
                if status in (local.DONE, local.SAID):
                    self._status.set_result(status)
                    return
                time.sleep(AGAIN)
        except OSError as error:  # this machine does not have the directory, or cannot start a process
            self._status.set_exception(error)


class HostActor:
    """Made by Ray: ``HostActor.options(...).remote("j-12.trainer", "j-12.host-1")``: ranks of a trainer elsewhere."""

    def __init__(self, trainer: str, name: str) -> None:
        """`trainer`: name of its actor."""
        self._trainer, self._name = trainer, name
        self._head: bytes | None = None  # of the process that runs
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: Future[int] = Future()
        threading.Thread(target=self._keep, daemon=True, name="trainer host").start()

    def ended(self) -> int:
        """Never by itself. Raises what this machine cannot do."""
        return self._failure.result()

    def _keep(self) -> None:
        try:
            while True:
                head = self._newest()
                over = self._process is None or self._process.poll() is not None
                if head is not None and (over or head != self._head):
                    self._begin(head)
                time.sleep(FOLLOW_INTERVAL)
        except OSError as error:  # it cannot start a process
            self._failure.set_exception(error)

    def _begin(self, head: bytes) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
        words = ["coordinator.jobs.trainer_host", self._name, "--at", address()]
        self._process, self._head = tied.begin([*BEGIN, *words]), head
        assert self._process.stdin is not None
        self._process.stdin.write(head + b"\n")
        self._process.stdin.flush()

    def _newest(self) -> bytes | None:
        """Where the trainer is now; what was known before where nothing answers."""
        import ray
        from ray.exceptions import RayError

        try:
            actor = ray.get_actor(self._trainer)
            return cast(bytes | None, ray.get(actor.head.remote(), timeout=ANSWER_TIMEOUT))
        except (ValueError, RayError):  # it waits for a machine
            return self._head
