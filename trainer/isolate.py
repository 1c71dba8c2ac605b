"""A step that one sample would stop: find the sample, put it aside with its reason, take the step with the others.

Owns: how often a batch is tried, the bisection, the record of what was put aside. Does not own: a step (learner),
saves (resume).
Guarantee: a batch whose step fails twice is trained without the fewest samples that make it fail, each of which is
named with the reason; where no sample alone is at fault, or most are, the error stands. The weights are those
of before the step whenever another try begins.

::

    step ─ fails ─▶ restore ─▶ step again ─ fails ─▶ restore ─▶ probe halves ─▶ put aside ─▶ step with the others
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch

from trainer.batches.sample import Sample
from trainer.errors import TrainerFailed
from trainer.learner import Learner, StepStats

TRIES = 2
FILE = "put_aside.jsonl"
# What arithmetic on a broken sample raises; RuntimeError is what torch says of shapes, indices and memory.
FAILURES = (TrainerFailed, ArithmeticError, LookupError, ValueError, TypeError, RuntimeError, MemoryError)

_NO_MEMORY = re.compile("out of memory|not enough memory|cannot allocate memory", re.IGNORECASE)  # as torch says it

Probe = Callable[[Sequence[int]], str | None]


class PutAside(msgspec.Struct, kw_only=True, frozen=True):
    """A sample that was not trained on. A line of `put_aside.jsonl`."""

    step: int
    name: str
    reason: str
    tokens: int = 0


def careful_step(
    learner: Learner, samples: Sequence[Sample], *, rate: float | None, restore: Callable[[], object]
) -> StepStats:
    """The step of this batch, if need be without the samples that make it fail: they are in `stats.put_aside`."""
    for attempt in range(TRIES):
        try:
            return learner.complete(samples, rate=rate) if attempt == 0 else learner.step(samples, rate=rate)
        except FAILURES as error:
            failure = error
            restore()
    at_fault = find(len(samples), lambda chosen: _probed(learner, samples, chosen))
    learner.begin()
    if not at_fault or 2 * len(at_fault) > len(samples):
        raise _explained(failure)  # of no sample alone, or of most: it is the weights, not the data
    stats = learner.step([item for number, item in enumerate(samples) if number not in at_fault], rate=rate)
    stats.put_aside |= {name_of(samples[number]): reason for number, reason in at_fault.items()}
    return stats


def _explained(failure: Exception) -> Exception:
    """Where memory is what lacks, an error that says what takes less of it."""
    if not isinstance(failure, MemoryError | torch.OutOfMemoryError) and not _NO_MEMORY.search(str(failure)):
        return failure
    explained = TrainerFailed(
        f"a step does not fit into memory: {str(failure).splitlines()[0] if str(failure) else type(failure).__name__}",
        hint="a smaller optimiser.budget (tokens of a micro-batch) or max_length, recompute = true, offload = true, or "
        "more ranks; `pagurus train --dry-run` estimates what each takes",
    )
    explained.__cause__ = failure
    return explained


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


def _probed(learner: Learner, samples: Sequence[Sample], chosen: Sequence[int]) -> str | None:
    try:
        return learner.probe([samples[number] for number in chosen])
    except FAILURES as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def name_of(sample: Sample) -> str:
    return sample.name or sample.group or "a sample without a name"


def note(run: Path, step: int, samples: Sequence[Sample], put_aside: dict[str, str]) -> None:
    """Appends to the run's record."""
    sizes = {name_of(item): len(item.tokens) for item in samples}
    lines = [PutAside(step=step, name=name, reason=why, tokens=sizes.get(name, 0)) for name, why in put_aside.items()]
    if lines:
        with (run / FILE).open("ab") as file:
            file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
