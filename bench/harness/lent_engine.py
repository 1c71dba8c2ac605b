"""A real engine that serves users, with rollouts beside: within what users leave, or in one queue with them.

Owns: the users' and the rollouts' requests, what each got. Does not own: the engine, its choice of steps
(rollout.decide.engines.lending).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.harness import aftermath
from coordinator.simulate.serving import Mode, Served, Traffic
from rollout.engine.client import EngineClient, Sampling
from rollout.engine.launch import Command, Launch
from rollout.engine.supervisor import EngineSupervisor
from sandbox.errors import EngineFailed

LIVE, READ, ANSWER = 48, 400, 40  # requests of rollouts at once, tokens of their prompts, of their answers
VERSION_EVERY = 10.0  # seconds
VOCABULARY = range(20, 300)


@asynccontextmanager
async def started(server: Launch, model: Path) -> AsyncIterator[EngineClient]:
    with aftermath.TemporaryFolder("pagurus-lent-") as home:
        async with EngineSupervisor(server, model, 0, log=Path(home) / "engine.log") as engine:
            yield await engine.wait_serving()


def unlent(server: Launch) -> Launch:
    """A vLLM server as it is, but that it answers token by token."""

    def command(folder: Path, port: int) -> Command:
        plain = server.command(folder, port)
        return replace(plain, argv=[*plain.argv, "--stream-interval", "1"])

    return replace(server, command=command)


async def serve(engine: EngineClient, traffic: Traffic, mode: Mode, *, least: float = 0.0) -> Served:
    """Until every user is answered, and for `least` seconds."""
    served, began = Served(), time.monotonic()
    draw = np.random.default_rng(time.monotonic_ns())  # no prompt is in the cache of an earlier call

    def prompt(tokens: int) -> list[int]:
        return [int(each) for each in draw.integers(VOCABULARY.start, VOCABULARY.stop, tokens)]

    async def rollouts() -> None:
        while True:
            sampling = Sampling(max_tokens=ANSWER, ignore_eos=True)
            name = f"rollout-{next(numbers)}"
            priority = int(mode == "slack")
            try:
                came = await engine.generate(prompt(READ), sampling, request_id=name, priority=priority)
                served.rollout_tokens += len(came.token_ids)
                refused = came.finish_reason == "abort"
            except EngineFailed:
                refused = True
            if refused:  # users need all of it until the next version
                await asyncio.sleep(0.5)

    async def versions() -> None:
        for version in itertools.count(1):
            await asyncio.sleep(VERSION_EVERY)
            await engine.set_version(version)

    async def user(number: int) -> None:
        await asyncio.sleep(traffic.arrivals[number] - (time.monotonic() - began))
        ids = prompt(traffic.prompts[number])
        sampling = Sampling(max_tokens=traffic.answers[number], ignore_eos=True)
        last, seen = time.monotonic(), served.ttft
        async for delta in engine.stream(ids, sampling, request_id=f"user-{mode}-{number}"):
            if delta.token_ids:
                now = time.monotonic()
                seen.append(now - last)
                last, seen = now, served.tpot

    numbers = itertools.count(time.monotonic_ns())
    tasks = [asyncio.create_task(versions())]
    tasks += [asyncio.create_task(rollouts()) for _ in range(LIVE if mode != "alone" else 0)]
    await asyncio.gather(asyncio.sleep(least), *map(user, range(len(traffic.arrivals))))
    served.seconds = time.monotonic() - began
    for task in tasks:
        if task.done():
            task.result()  # it ended by an error
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return served
