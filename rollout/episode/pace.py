"""The speed at which a model of useful size answers, for a policy that is far smaller.

A policy of a million parameters writes a command in some 30 ms, on the cores that also run the sandboxes. A model
that is worth training thinks for 1.5 to 25 s before a command (recordings of coding agents: median 3 s), on a GPU
elsewhere, and takes no time from the sandbox host. A demonstration on one small machine keeps a part of that
proportion: each answer is held until `seconds` have passed since its request. Nothing else changes;
`seconds` = 0 switches it off, and the summary says which it was.
"""

from __future__ import annotations

import asyncio
import time

from rollout.engine.client import Generation, Sampling
from rollout.episode.parts import Generator


class PacedEngine:
    """``PacedEngine(engine, seconds=0.8)`` gives no answer before 0.8 s have passed."""

    def __init__(self, engine: Generator, *, seconds: float):
        self.engine, self.seconds = engine, seconds

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "") -> Generation:
        began = time.monotonic()
        generation = await self.engine.generate(prompt_ids, sampling, request_id=request_id)
        left = self.seconds - (time.monotonic() - began)
        if left > 0:
            await asyncio.sleep(left)
        return generation
