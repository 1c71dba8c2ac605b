"""A real engine that serves users, with rollouts beside: within what users leave, or in one queue with them.

Each mode plays the same users, in slices of time that take turns, so that what else the machine does hits all alike::

    users 0..30 s: alone, slack, naive    users 30..60 s: slack, naive, alone    ...    nobody: slack, naive    ...
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.harness import aftermath
from coordinator.simulate.serving import Mode, Traffic
from rollout.engine.client import EngineClient, Sampling
from rollout.engine.launch import Launch, LaunchCommand
from rollout.engine.supervisor import EngineSupervisor
from sandbox.errors import EngineFailed

LIVE, READ = 48, 400  # requests of rollouts at once, tokens of their prompts
ANSWER = (50, 150)  # tokens of their answers, at least and at most
VERSION_INTERVAL = 10.0  # seconds
NOBODY_INTERVAL = 6  # slices of users, then one of nobody
VOCABULARY = range(20, 300)
MODES: tuple[Mode, ...] = ("alone", "headroom", "naive")

Clock = Callable[[], float]


class Token(NamedTuple):
    """When a user got it, and how long after the one before it, or after the request."""

    came: float
    wait: float


class StepObserved(NamedTuple):
    """A step in the engine's log."""

    began: float
    ended: float
    predicted: float  # seconds
    late: bool  # somebody had waited for longer than was promised when it ended
    answers: int = 0
    prompt_tokens: int = 0
    users: int = 0  # that were answered: all, where rollouts are users like others
    age: float = 0.0  # seconds since the last token of one of them when it began


@dataclass
class Observed:
    """What a mode has come to."""

    first: list[Token] = field(default_factory=list)  # of each user
    later: list[Token] = field(default_factory=list)
    seconds: float = 0.0
    rollout_tokens: int = 0
    empty_seconds: float = 0.0  # without users
    empty_tokens: int = 0
    slices: list[tuple[float, float]] = field(default_factory=list)  # when they began and ended
    empty_slices: list[tuple[float, float]] = field(default_factory=list)


@asynccontextmanager
async def started(server: Launch, model: Path) -> AsyncIterator[EngineClient]:
    with aftermath.TemporaryDirectory("pagurus-lent-") as home:
        async with EngineSupervisor(server, model, 0, log=Path(home) / "engine.log") as engine:
            yield await engine.wait_serving()


def unlent(server: Launch) -> Launch:
    """A vLLM server as it is, but that it answers token by token."""

    def command(directory: Path, port: int) -> LaunchCommand:
        plain = server.command(directory, port)
        return replace(plain, argv=[*plain.argv, "--stream-interval", "1"])

    return replace(server, command=command)


def slices(traffic: Traffic, every: float) -> list[Traffic]:
    """What arrives in each `every` seconds."""
    result: dict[int, list[int]] = {}
    for number, arrival in enumerate(traffic.arrivals):
        result.setdefault(int(arrival // every), []).append(number)
    return [
        Traffic(
            arrivals=[traffic.arrivals[number] - part * every for number in numbers],
            prompts=[traffic.prompts[number] for number in numbers],
            answers=[traffic.answers[number] for number in numbers],
        )
        for part, numbers in result.items()
    ]


async def play(
    engine: EngineClient, traffic: Traffic, modes: Sequence[Mode], every: float, clock: Clock
) -> dict[Mode, Observed]:
    """All of it in each mode. `clock`: that of the engine's log of steps."""
    gc.collect()
    gc.freeze()  # looking through all that was imported would keep users waiting
    result = {mode: Observed() for mode in modes}
    versions = asyncio.create_task(_versions(engine))
    await _nobody(engine, "naive", 10.0, Observed(), clock)  # it learns what its steps cost, and is warm
    for number, part in enumerate(slices(traffic, every)):
        first = number % len(modes)
        for mode in [*modes[first:], *modes[:first]]:
            await _slice(engine, part, mode, result[mode], clock)
            observed = result[mode]
            p99 = float(np.percentile([token.wait for token in observed.first], 99))
            rate = observed.rollout_tokens / observed.seconds
            reported = f"p99 to the first token {p99:.3f} s, rollouts {rate:.0f} tokens a second so far"
            print(f"slice {number}, {mode}: {reported}", file=sys.stderr)
        if number % NOBODY_INTERVAL == 0:
            for mode in modes:
                if mode != "alone":
                    await _nobody(engine, mode, every, result[mode], clock)
    if versions.done():
        versions.result()  # it ended by an error
    versions.cancel()
    return result


async def _versions(engine: EngineClient) -> None:
    for version in itertools.count(1):
        await asyncio.sleep(VERSION_INTERVAL)
        await engine.set_version(version)


async def _nobody(engine: EngineClient, mode: Mode, seconds: float, observed: Observed, clock: Clock) -> None:
    began, first = time.monotonic(), clock()
    async with _Rollouts(engine, mode) as rollouts:
        await asyncio.sleep(seconds)
        observed.empty_seconds += time.monotonic() - began
        observed.empty_slices.append((first, clock()))
    observed.empty_tokens += rollouts.tokens


async def _slice(engine: EngineClient, traffic: Traffic, mode: Mode, observed: Observed, clock: Clock) -> None:
    """Until every user is answered."""
    began, first = time.monotonic(), clock()

    async def user(number: int) -> None:
        await asyncio.sleep(traffic.arrivals[number] - (time.monotonic() - began))
        ids = prompt(traffic.prompts[number])
        sampling = Sampling(max_tokens=traffic.answers[number], ignore_eos=True)
        last, tokens = clock(), observed.first
        async for delta in engine.stream(ids, sampling, request_id=f"user-{next(NUMBERS)}"):
            if delta.token_ids:
                now = clock()
                tokens.append(Token(now, now - last))
                last, tokens = now, observed.later

    async with _Rollouts(engine, mode) as rollouts:
        await asyncio.gather(*map(user, range(len(traffic.arrivals))))
        observed.seconds += time.monotonic() - began
        observed.slices.append((first, clock()))
    observed.rollout_tokens += rollouts.tokens


NUMBERS = itertools.count(time.monotonic_ns())
DRAW = np.random.default_rng(time.monotonic_ns())  # no prompt is in the cache of an earlier call


def prompt(tokens: int) -> list[int]:
    return [int(item) for item in DRAW.integers(VOCABULARY.start, VOCABULARY.stop, tokens)]


class _Rollouts:
    """Rollouts as long as the block runs; the tokens that they got until then."""

    def __init__(self, engine: EngineClient, mode: Mode):
        self.engine, self.priority, self.live = engine, int(mode == "headroom"), 0 if mode == "alone" else LIVE
        self.tokens, self._ends, self._names = 0, False, set[str]()

    async def __aenter__(self) -> _Rollouts:
        self._tasks = [asyncio.create_task(self._rollout()) for _ in range(self.live)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ends = True
        while not all(task.done() for task in self._tasks):
            if self._names:
                await self.engine.abort(list(self._names))
            await asyncio.wait(self._tasks, timeout=0.2)
        for task in self._tasks:
            task.result()

    async def _rollout(self) -> None:
        while not self._ends:
            sampling = Sampling(max_tokens=int(DRAW.integers(*ANSWER)), ignore_eos=True)
            name = f"rollout-{next(NUMBERS)}"
            self._names.add(name)
            try:
                came = await self.engine.generate(prompt(READ), sampling, request_id=name, priority=self.priority)
                self.tokens += len(came.token_ids)
                refused = came.finish_reason == "abort"
            except EngineFailed:
                refused = True
            self._names.discard(name)
            if refused and not self._ends:  # users need all of it until the next version
                await asyncio.sleep(0.5)
