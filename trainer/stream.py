"""Stream training: the gradients of complete groups are computed while the rest of their batch is still sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from rollout import Batch
from trainer.batches.sample import Sample

POLL_INTERVAL = 0.2  # seconds between looks at what has become whole


class BatchSource(Protocol):
    """The part of `RolloutController` that is needed here."""

    async def next_batch(self) -> Batch: ...

    async def complete(self, without: Collection[str]) -> Batch: ...


class Takes(Protocol):
    """The part of `Steps` that is needed here."""

    @property
    def streams(self) -> bool:
        """Whether groups may come before their batch is complete."""

    def expect(self) -> None:
        """A new batch begins."""

    def feed(self, samples: Sequence[Sample]) -> None:
        """Whole groups of it."""


class BatchStream:
    """``batch = await stream.next_batch()``, then the step of that batch by the learner that was fed."""

    def __init__(self, source: BatchSource, takes: Takes, samples: Callable[[Batch], list[Sample]]):
        self.source, self.takes, self.samples = source, takes, samples

    async def next_batch(self) -> Batch:
        """Consumes whole groups. Waits for: the batch. Produces their gradients at that time, where that is exact."""
        fed: set[str] = set()  # prompts
        self.takes.expect()
        requested = asyncio.ensure_future(self.source.next_batch())
        try:
            while self.takes.streams and not requested.done():
                there = await self.source.complete(fed)
                for group in there.groups:
                    if requested.done():
                        break
                    one = self.samples(Batch(version=there.version, groups=[group], oldest=there.oldest))
                    await asyncio.to_thread(self.takes.feed, one)
                    fed.add(group.prompt)
                await asyncio.wait({requested}, timeout=POLL_INTERVAL)
            return await requested
        finally:
            requested.cancel()
