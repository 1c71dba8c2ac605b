"""Ray as jobs need it: machines, and for each part of a job a placement group with an actor in it.

Guarantee: groups and actors have the names of job and part and are detached, so that the next head finds them, and
there is one of each. Parts have groups of their own: one that lost its machine does not wait for another's.
"""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coordinator import local
from coordinator.jobs.actor import HostActor, RunActor
from coordinator.jobs.shape import ENGINE, HOST, RUN, TRAINER, Needs
from sandbox.errors import Unsupported

try:
    import ray
    from ray.exceptions import RayActorError, RayTaskError
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ModuleNotFoundError as error:
    raise Unsupported("jobs need Ray, which is not installed", hint='pip install "pagurus-runtime[cluster]"') from error

NAMESPACE = "pagurus"
MAX_CALLS = 64  # of an actor at once: one waits for its end, hosts of a trainer ask its actor
PLACED, REMOVED = "CREATED", "REMOVED"  # states of a placement group; in any other it waits for room
log = logging.getLogger("pagurus.jobs")


@dataclass(frozen=True)
class RayJobExit:
    """A job is over. `reason`: why it could not even begin."""

    job: str
    status: int
    reason: str = ""


class OnRay:
    """A connection to a cluster of Ray."""

    def __init__(self, address: str) -> None:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray's own handler writes a trace of calls
        self._ends: dict[tuple[str, str], Any] = {}  # of each job's parts, the answer that is waited for
        self._failed: set[tuple[str, str]] = set()  # parts that have ended by themselves

    def machines(self) -> list[dict[str, float]]:
        """What each living one has in all."""
        return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]

    def place(self, job: str, run: str, parts: Mapping[str, Needs]) -> bool:
        """Ask for room and an actor for each part; repeated, nothing new. Whether there was room for all."""
        states = []
        for part, needs in parts.items():
            name = _name(job, part)
            group = self._group(name)
            if group is None:
                group = ray.util.placement_group([dict(needs)], strategy="STRICT_PACK", name=name, lifetime="detached")
            if (job, part) not in self._ends:
                host = part.startswith(HOST)
                actor: Any = ray.remote(HostActor if host else RunActor).options(
                    **_amounts(needs),
                    name=name,
                    lifetime="detached",
                    get_if_exists=True,
                    max_restarts=-1,  # by Ray, on another machine too, whether a head is there or not
                    max_task_retries=-1,
                    max_concurrency=MAX_CALLS,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
                )
                words = (_name(job, TRAINER), name) if host else (run, part, list(parts))
                self._ends[job, part] = actor.remote(*words).ended.remote()
            states.append(ray.util.placement_group_table(group)["state"])
        return all(state == PLACED for state in states)

    def ended(self, timeout: float) -> list[RayJobExit]:
        """Jobs that are over, as soon as there is one; none after `timeout` seconds."""
        waited = {end: key for key, end in self._ends.items() if key not in self._failed}
        if not waited:
            return []
        ready, _ = ray.wait(list(waited), num_returns=1, timeout=timeout)
        return [result for end in ready if (result := self._outcome(*waited[end], end)) is not None]

    def _outcome(self, job: str, part: str, end: ray.ObjectRef[Any]) -> RayJobExit | None:
        try:
            status, reason = ray.get(end), ""
        except RayTaskError as error:
            status, reason = local.SAID, str(error.cause).splitlines()[0]
        except RayActorError as error:  # it was killed: it is placed again
            log.warning("%s lost its actor: %s", _name(job, part), str(error).splitlines()[0])
            self.remove(job)
            return None
        if part.startswith(HOST):  # the trainer continues on those that are left
            self._failed.add((job, part))
            log.warning("%s has ended by itself: the job continues without it. %s", _name(job, part), reason)
            return None
        if part.startswith(ENGINE):  # the run continues with the others, while there is one
            self._failed.add((job, part))
            if any(key[0] == job and key[1].startswith(ENGINE) for key in self._ends.keys() - self._failed):
                log.warning("%s has ended by itself: the job continues without it. %s", _name(job, part), reason)
                return None
        return RayJobExit(job, status, reason)

    def remove(self, job: str) -> None:
        """End its actors, with the run's processes, and give its room back. Idempotent."""
        for key in [key for key in self._ends if key[0] == job]:
            del self._ends[key]
            self._failed.discard(key)
        for name in ray.util.list_named_actors():
            if _job(name) == job:
                with contextlib.suppress(ValueError):  # it has just ended
                    ray.kill(ray.get_actor(name), no_restart=True)
        for item in ray.util.placement_group_table().values():
            if _job(item["name"]) == job and (group := self._group(item["name"])) is not None:
                ray.util.remove_placement_group(group)

    def _group(self, name: str) -> Any:
        try:
            group = ray.util.get_placement_group(name)
        except ValueError:
            return None
        return None if ray.util.placement_group_table(group)["state"] == REMOVED else group


def _name(job: str, part: str) -> str:
    return job if part == RUN else f"{job}.{part}"


def _job(name: str) -> str:
    return name.partition(".")[0]


def _amounts(needs: Needs) -> dict[str, Any]:
    """As Ray's options of an actor have them."""
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    result: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0}
    result |= {named[name]: amount for name, amount in needs.items() if name in named}
    return result | {"resources": {name: amount for name, amount in needs.items() if name not in named}}
