"""Ray as jobs need it: machines, and for each job a placement group with an actor in it.

Owns: the only imports of Ray. Does not own: which job begins (:mod:`coordinator.decide.queue`).
Guarantee: groups and actors have the job's name and belong to nobody, so that whoever is the head finds them, and a job
has one of each.
"""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coordinator import local
from coordinator.jobs.actor import RunActor
from sandbox.errors import Unsupported

try:
    import ray
    from ray.exceptions import RayActorError, RayTaskError
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ModuleNotFoundError as error:
    raise Unsupported("jobs need Ray, which is not installed", remedy='pip install "pagurus[cluster]"') from error

NAMESPACE = "pagurus"
PLACED, REMOVED = "CREATED", "REMOVED"  # states of a placement group; in any other it waits for room
log = logging.getLogger("pagurus.jobs")


@dataclass(frozen=True)
class Ended:
    """A job is over. `reason`: why it could not even begin."""

    job: str
    status: int
    reason: str = ""


class OnRay:
    """A connection to a cluster of Ray."""

    def __init__(self, address: str) -> None:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray's own handler writes a trace of calls
        self._ends: dict[str, Any] = {}  # the answer of each job's actor that is waited for

    def machines(self) -> list[dict[str, float]]:
        """What each living one has in all."""
        return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]

    def place(self, job: str, run: str, needs: Mapping[str, float]) -> bool:
        """Ask for room and an actor there; asked again, nothing new. Whether there was room."""
        group = self._group(job)
        if group is None:
            group = ray.util.placement_group([dict(needs)], strategy="STRICT_PACK", name=job, lifetime="detached")
        if job not in self._ends:
            others = {name: amount for name, amount in needs.items() if name not in ("CPU", "GPU", "memory")}
            options: dict[str, Any] = {
                "num_cpus": needs.get("CPU", 0),
                "num_gpus": needs.get("GPU", 0),
                "resources": others,
                "name": job,
                "lifetime": "detached",
                "get_if_exists": True,
                "max_restarts": -1,  # by Ray, on another machine too, whether a head is there or not
                "max_task_retries": -1,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, 0),
            }
            if "memory" in needs:
                options["memory"] = needs["memory"]
            actor: Any = ray.remote(RunActor).options(**options).remote(run)
            self._ends[job] = actor.ended.remote()
        return ray.util.placement_group_table(group)["state"] == PLACED

    def ended(self, patience: float) -> list[Ended]:
        """Jobs that are over, as soon as there is one; none after `patience` seconds."""
        jobs = {end: job for job, end in self._ends.items()}
        if not jobs:
            return []
        ready, _ = ray.wait(list(jobs), timeout=patience)
        return [found for end in ready if (found := self._outcome(jobs[end], end)) is not None]

    def _outcome(self, job: str, end: Any) -> Ended | None:
        del self._ends[job]
        try:
            return Ended(job, ray.get(end))
        except RayTaskError as error:
            return Ended(job, local.SAID, str(error.cause).splitlines()[0])
        except RayActorError as error:  # somebody killed it: it is placed again
            log.warning("%s lost its actor: %s", job, str(error).splitlines()[0])
            self.remove(job)
            return None

    def remove(self, job: str) -> None:
        """End its actor, with the run's processes, and give its room back. Idempotent."""
        self._ends.pop(job, None)
        with contextlib.suppress(ValueError):  # there is none
            ray.kill(ray.get_actor(job), no_restart=True)
        group = self._group(job)
        if group is not None:
            ray.util.remove_placement_group(group)

    def _group(self, job: str) -> Any:
        try:
            group = ray.util.get_placement_group(job)
        except ValueError:
            return None
        return None if ray.util.placement_group_table(group)["state"] == REMOVED else group
