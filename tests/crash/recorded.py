"""A rollout that plays back: the batches of a finished run's store, to a real trainer, over the real socket.

Guarantee: a trainer gets the batch of each step as it was handed out in the recorded run, and nothing that it publishes
is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

from rollout.service import protocol as wire
from rollout.service.role import TRAINER, by_reference
from rollout.service.server import RolloutServer
from rollout.store.samples import Fence, SampleStore
from sandbox.errors import NotFound
from sandbox.paths import CHECKOUT


class Recorded:
    """A desk that has samples and no engines."""

    def __init__(self, store: SampleStore, steps: int):
        self.store, self.steps = store, steps
        self.published: list[wire.PublishedVersion] = []
        self.done = 0  # steps that were acknowledged
        self.opened = False  # since somebody looked

    def reached(self, step: int) -> bool:
        """A trainer has begun, and so many steps are done."""
        return self.opened and self.done >= step

    async def open_trainer(self, request: wire.OpenTrainer) -> Fence:
        fence = self.store.acquire(TRAINER)
        self.store.recover(request.step, fence)
        self.opened = True
        return fence

    async def publish(self, request: wire.Publish) -> wire.Done:
        self.store.need(request.fence)
        self.published.append(request.ref)
        return wire.Done()

    async def take(self, request: wire.Take) -> wire.BatchReference:
        self.store.need(request.fence)
        if request.step >= self.steps:
            await asyncio.Event().wait()  # the trainer is ended while it waits
        batch = self.store.batch(request.step)
        if batch is None:
            raise NotFound(f"step {request.step} was not recorded", hint="this is where the record ends")
        return by_reference(batch)

    async def complete(self, request: wire.Complete) -> wire.BatchReference:
        return wire.BatchReference(step=0, version=0, oldest=0, groups=[])

    async def group_reference(self, request: wire.GroupReference) -> wire.Payloads:
        return wire.Payloads([self.store.payload(request.prompt, member) for member in request.members])

    async def ack(self, request: wire.Ack) -> wire.Done:
        self.store.ack(request.step, request.fence)
        self.done = max(self.done, request.step + 1)
        return wire.Done()

    async def evaluate(self, request: wire.Evaluate) -> wire.EvaluationResult:
        """No episode is played: one that was recorded stands for all, its reward is nobody's figure."""
        prompt, member, *_ = next(self.store.samples())
        return wire.EvaluationResult([self.store.sample(prompt, member)])

    async def finish_run(self, request: wire.FinishRun) -> wire.RolloutCounters:
        return await self.count(wire.Count())

    async def count(self, request: wire.Count) -> wire.RolloutCounters:
        return wire.RolloutCounters(born=1.0)


@contextlib.asynccontextmanager
async def served(run: Path, steps: int) -> AsyncIterator[Recorded]:
    """The first `steps` batches of the store of `run`, served to a trainer of `run`."""
    store = SampleStore(run / "rollout")
    try:
        handler = Recorded(store, steps)
        async with RolloutServer(handler, run / "roles"):
            yield handler
    finally:
        store.close()


async def train(run: Path, steps: int, *, kills: int, seed: int = 0, longest: float = 0.0) -> int:
    """Train on the record of `run` until version `steps` is published. The trainer is killed at random steps, each time
    at most `longest` seconds after that step was acknowledged; how often that was."""
    chance, killed = random.Random(seed), 0
    async with served(run, steps) as handler:
        for target in sorted(chance.randrange(steps) for _ in range(kills)):
            handler.opened = False
            process = await _begin(run)
            await _until(run, process, partial(handler.reached, target))
            await asyncio.sleep(chance.uniform(0.0, longest))
            killed += process.returncode is None
            await _kill(process)
        process = await _begin(run)
        await _until(run, process, lambda: any(ref.version >= steps for ref in handler.published))
        await _kill(process)
    return killed


async def _begin(run: Path) -> asyncio.subprocess.Process:
    with (run / "trainer.log").open("ab") as log:
        argv = (sys.executable, "-m", "trainer", str(run))
        return await asyncio.create_subprocess_exec(*argv, cwd=CHECKOUT, stdout=log, stderr=subprocess.STDOUT)


async def _until(run: Path, process: asyncio.subprocess.Process, condition: Callable[[], bool]) -> None:
    while not condition():
        if process.returncode is not None:
            said = (run / "trainer.log").read_text(errors="replace")[-3000:]
            raise RuntimeError(f"the trainer ended by itself with {process.returncode}:\n{said}")
        await asyncio.sleep(0.01)


async def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
