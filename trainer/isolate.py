"""A step that one sample would stop: find the sample, put it aside with its reason, take the step with the others.

Guarantee: a batch whose step fails twice is trained without the fewest samples that make it fail, each of which is
named with the reason; where no sample alone is at fault, or most are, the error stands. The weights are those of before
the step whenever another try begins. Of several ranks only what all of them see is caught here: one that raises while
the others wait in a collective cannot go on with them.

::

    step ─ fails ─▶ restore ─▶ step again ─ fails ─▶ restore ─▶ probe halves ─▶ put aside ─▶ step with the others
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import torch

from trainer.batches.aside import name_of
from trainer.batches.sample import Sample
from trainer.distributed.ranks import Ranks
from trainer.errors import TrainerFailed
from trainer.learner import Learner, StepStats

TRIES = 2
# What arithmetic on a broken sample raises; RuntimeError is what torch says of shapes, indices and memory.
FAILURES = (TrainerFailed, ArithmeticError, LookupError, ValueError, TypeError, RuntimeError, MemoryError)

_NO_MEMORY = re.compile("out of memory|not enough memory|cannot allocate memory", re.IGNORECASE)  # as torch says it

Probe = Callable[[Sequence[int]], str | None]


def careful_step(
    learner: Learner, samples: Sequence[Sample], *, rate: float | None, restore: Callable[[], object]
) -> StepStats:
    """The step of this batch, if need be without the samples that make it fail: they are in `stats.put_aside`."""
    caught = failures(learner.ranks)
    for attempt in range(TRIES):
        try:
            return learner.complete(samples, rate=rate) if attempt == 0 else learner.step(samples, rate=rate)
        except caught as error:
            failure = error
            restore()
    at_fault = find(len(samples), lambda chosen: probed(learner, [samples[number] for number in chosen]))
    learner.begin()
    if not few(at_fault, samples):
        raise explained(failure)
    stats = learner.step([item for number, item in enumerate(samples) if number not in at_fault], rate=rate)
    stats.put_aside |= {name_of(samples[number]): reason for number, reason in at_fault.items()}
    return stats


def failures(ranks: Ranks) -> tuple[type[Exception], ...]:
    """What a step may raise on a bad sample, on every rank alike."""
    return FAILURES if ranks.alone else (TrainerFailed,)


def few(at_fault: Mapping[int, str], samples: Sequence[Sample]) -> bool:
    """Else it is no sample alone, or most of them: it is the weights, not the data."""
    return 0 < 2 * len(at_fault) <= len(samples)


def explained(failure: Exception) -> Exception:
    """Where memory is what lacks, an error that says what takes less of it."""
    if not isinstance(failure, MemoryError | torch.OutOfMemoryError) and not _NO_MEMORY.search(str(failure)):
        return failure
    result = TrainerFailed(
        f"a step does not fit into memory: {str(failure).splitlines()[0] if str(failure) else type(failure).__name__}",
        hint="a smaller optimiser.budget (tokens of a micro-batch) or max_length, recompute = true, offload = true, or "
        "more ranks; `pagurus train --dry-run` estimates what each takes",
    )
    result.__cause__ = failure
    return result


def find(count: int, probe: Probe) -> dict[int, str]:
    """Which of `count` samples fail by themselves, by halves. Example: only 5 of 8 is bad: 7 probes."""
    result: dict[int, str] = {}

    def poll(chosen: list[int]) -> None:
        if not chosen or (reason := probe(chosen)) is None:
            return
        if len(chosen) == 1:
            result[chosen[0]] = reason
            return
        middle = len(chosen) // 2
        poll(chosen[:middle])
        poll(chosen[middle:])

    poll(list(range(count)))
    return result


def probed(learner: Learner, chosen: Sequence[Sample]) -> str | None:
    """Why no gradient can be made of these, or None."""
    try:
        return learner.probe(chosen)
    except failures(learner.ranks) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
