"""``python -m coordinator.jobs.head DIRECTORY``: takes jobs from the queue to Ray, and records their outcome.

A process of its own, because Ray ends a process that has lost its cluster. The coordinator starts it while there are
jobs, and again when it dies. :mod:`coordinator.decide.queue` decides which job begins.
Guarantee: jobs continue while it is dead, and the next one adopts them: their actors have their names.

::

    jobs.sqlite ─▶ cancel what shall be ▸ place what has begun ▸ decide what begins ▸ wait for ends ─▶ jobs.sqlite
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from coordinator import local
from coordinator.decide.queue import QueuedJob, QueueView, StartJob, WaitJob, decide
from coordinator.jobs import own_ray, tied
from coordinator.jobs.shape import Needs, parts_of
from coordinator.jobs.store import JobRow, JobStore
from daemon import logs
from rollout.store.lock import own
from sandbox import structs
from sandbox.errors import Conflict, PagurusError

POLL_INTERVAL = 0.5  # seconds between two looks at the queue
CONNECT = 120.0  # seconds for Ray to answer
log = logging.getLogger("pagurus.jobs")


class JobExit(Protocol):
    """See :class:`coordinator.jobs.on_ray.RayJobExit`."""

    @property
    def job(self) -> str: ...
    @property
    def status(self) -> int: ...
    @property
    def reason(self) -> str: ...


class JobCluster(Protocol):
    """See :class:`coordinator.jobs.on_ray.OnRay`."""

    def machines(self) -> Sequence[Mapping[str, float]]: ...
    def place(self, job: str, run: str, parts: Mapping[str, Needs]) -> bool: ...
    def ended(self, timeout: float) -> Sequence[JobExit]: ...
    def remove(self, job: str) -> None: ...


class JobHead:
    """See the module."""

    def __init__(self, store: JobStore, cluster: JobCluster, quotas: Mapping[str, Mapping[str, float]]) -> None:
        self.store, self.cluster, self.quotas = store, cluster, quotas

    def run(self) -> None:
        """Until no job is left."""
        while jobs := self.store.unfinished():
            begun = [item for item in jobs if item.state != "queued"]
            for item in begun:
                if item.cancelling:
                    self._end(item.id, "cancelled")
                elif self.cluster.place(item.id, item.run, parts_of(item)) and item.state == "starting":
                    self.store.change(item.id, state="running", reason="", started_at=item.started_at or time.time())
            self._begin([item for item in jobs if item.state == "queued"], begun)
            before = time.monotonic()
            for end in self.cluster.ended(POLL_INTERVAL):
                failed = end.status != local.DONE
                self._end(end.job, "failed" if failed else "done", end.reason or self._last_words(end.job, failed))
            time.sleep(max(0.0, POLL_INTERVAL - (time.monotonic() - before)))

    def _begin(self, waiting: Sequence[JobRow], begun: Sequence[JobRow]) -> None:
        view = QueueView(
            waiting=[_queued(item) for item in waiting],
            begun=[_queued(item) for item in begun],
            machines=self.cluster.machines(),
            quotas=self.quotas,
        )
        reasons = {item.id: item.reason for item in waiting}
        for action in decide(view):
            match action:
                case StartJob(job):
                    log.info("%s begins", job)
                    self.store.change(job, only=("queued",), state="starting", reason="Ray looks for room")
                case WaitJob(job, reason) if reasons[job] != reason:
                    self.store.change(job, only=("queued",), reason=reason)

    def _end(self, job: str, state: str, reason: str = "") -> None:
        """First what it holds, then its row: a head that dies between finds it again."""
        self.cluster.remove(job)
        self.store.change(job, state=state, reason=reason)
        log.info("%s: %s %s", job, state, reason)

    def _last_words(self, job: str, failed: bool) -> str:
        """The last line that the run said."""
        if not failed:
            return ""
        said = Path(self.store.job(job).run) / "run.log"
        lines = said.read_text(errors="replace").splitlines() if said.exists() else []
        return next((line for line in reversed(lines) if line.strip()), "it did not say why")[:500]


def _queued(row: JobRow) -> QueuedJob:
    parts = list(parts_of(row).values())
    return QueuedJob(row.id, parts, row.owner, row.priority, row.number, placed=row.state != "starting")


def _connected(address: str, directory: Path) -> JobCluster:
    """The one at the address, or that of this machine, which takes a while to answer and may give up before that."""
    from coordinator.jobs.on_ray import OnRay

    deadline = time.monotonic() + CONNECT
    while True:
        try:
            return OnRay(address or own_ray.start(directory))
        except (ConnectionError, RuntimeError, TimeoutError):  # what Ray says of a cluster that does not answer
            if time.monotonic() > deadline:
                raise
            time.sleep(1.0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m coordinator.jobs.head")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ray", default="", help="address of a cluster; else one of this machine")
    parser.add_argument("--quotas", type=json.loads, default={})
    options = parser.parse_args(arguments)
    tied.tie()
    logs.to_stderr("info")
    structs.learn()
    try:
        with own(options.directory, "head.lock"):
            store = JobStore(options.directory)
            cluster = _connected(options.ray, options.directory)
            JobHead(store, cluster, options.quotas).run()
            if not options.ray:
                own_ray.stop(options.directory)
    except Conflict:  # the former one has not quite ended
        return local.OWNED
    except (PagurusError, OSError, RuntimeError) as error:  # RuntimeError: Ray's word for a cluster that is gone
        print(f"jobs: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
