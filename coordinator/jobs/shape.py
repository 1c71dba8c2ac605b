"""The parts of a job, each on one machine: the run, and where it is so submitted, its trainer, further hosts of the
trainer's ranks, and each of its engines.

Loads nothing of training: the coordinator imports it.
"""

from __future__ import annotations

from collections.abc import Mapping

from sandbox.messages.cluster import JobInfo

RUN, TRAINER, HOST, ENGINE = "run", "trainer", "host-", "engine-"
Needs = Mapping[str, float]


def parts_of(job: JobInfo) -> dict[str, Needs]:
    """What each needs, by name.

    >>> list(parts_of(JobInfo(id="j-1", run="/r", needs={"CPU": 2}, engine_needs={"GPU": 1}, engines=2)))
    ['run', 'engine-0', 'engine-1']
    """
    result: dict[str, Needs] = {RUN: job.needs}
    if job.trainer_needs:
        result[TRAINER] = job.trainer_needs
        result |= {f"{HOST}{number}": job.trainer_needs for number in range(1, job.trainer_hosts)}
    if job.engine_needs:
        result |= {f"{ENGINE}{number}": job.engine_needs for number in range(job.engines)}
    return result
