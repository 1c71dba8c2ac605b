"""Stream training: the gradients of groups that are whole are computed while the rest of their batch is still sampled.

Owns: the wait for a batch, and whether what was computed early belongs to it. Does not own: gradients (learner), which
groups make a batch (rollout). Guarantee: the step is that of the batch as it was handed out: if a group that was fed
early is not in it, or not with the same tokens, all is computed again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from rollout import Batch
from trainer.batches.sample import Sample
from trainer.learner import Learner, StepStats

LOOK = 0.2  # seconds between looks at what has become whole


class Source(Protocol):
    """The part of `RolloutController` that is needed here."""

    async def next_batch(self) -> Batch: ...

    async def whole(self, without: Collection[str]) -> Batch: ...


class Stream:
    """``batch = await stream.next_batch()``, then ``stream.step(batch, rate=...)`` in a thread."""

    def __init__(self, source: Source, learner: Learner, samples: Callable[[Batch], list[Sample]]):
        self.source, self.learner, self.samples = source, learner, samples
        self._fed: dict[str, list[Sample]] = {}  # by prompt

    async def next_batch(self) -> Batch:
        """Consumes whole groups. Waits for: the batch. Produces their gradients meanwhile, where that is exact."""
        self._fed = {}
        self.learner.begin()
        asked = asyncio.ensure_future(self.source.next_batch())
        try:
            while self.learner.streams and not asked.done():
                there = await self.source.whole(self._fed)
                for group in there.groups:
                    if asked.done():
                        break
                    one = self.samples(Batch(version=there.version, groups=[group], oldest=there.oldest))
                    await asyncio.to_thread(self.learner.feed, one)
                    self._fed[group.prompt] = one
                await asyncio.wait({asked}, timeout=LOOK)
            return await asked
        finally:
            asked.cancel()

    def step(self, batch: Batch, *, rate: float) -> StepStats:
        """The step of this batch, with what is left of its work."""
        samples = self.samples(batch)
        rest = self._rest(samples)
        if rest is None:
            return self.learner.step(samples, rate=rate)
        self.learner.feed(rest, last=True)
        return self.learner.finish(rate=rate)

    def _rest(self, samples: Sequence[Sample]) -> list[Sample] | None:
        """What was not fed yet; None if something was fed that is not in the batch."""
        early = [sample for group in self._fed.values() for sample in group]
        if any(sample not in samples for sample in early):
            return None
        return [sample for sample in samples if sample not in early]
