"""The ideas of ROLL Flash (arXiv:2510.11345) live, each with its ablation, its control and what the simulation says.

Two embedded engines behind a pool; environments are delays. The simulation has the rates that were measured on answers
of equal length, and a turn's overhead that was measured with equal delays.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.drawn_runs import DIGITS, LIMIT, MODEL, Drawn, Generates, Law, OneAnswer, Way, calibrate, equal, play
from bench.harness.paced_engine import paced
from coordinator.simulate.engines import StepCosts
from coordinator.simulate.rollouts import Barrier, Plan, RolloutSimulation, SimulatedTurn
from rollout.engine.client import Generation, Sampling
from rollout.engine.launch import embedded
from rollout.engine.supervisor import EngineSupervisor
from rollout.environments.base import Environment, Observation
from rollout.pool.pool import EnginePool

ENGINES, SLOTS = 2, 64
TOKENS = 4  # of an answer, where environments are what takes time

Delays = Callable[[int, int], list[float]]  # seconds after each turn, by a prompt and the number of its trajectory


def tailed(seed: int) -> Law:
    """Log-normal, mean 56, deviation of the logarithm 1.2, the longest 16 times the mean."""

    def law(prompt: int, answer: int) -> int:
        drawn = np.random.default_rng((seed, prompt, answer)).lognormal(np.log(56) - 1.2**2 / 2, 1.2)
        return int(np.clip(drawn, 2, LIMIT))

    return law


def stalling(seed: int) -> Delays:
    """Four turns of Pareto times (shape 1.2) from 0.2 to 20 s."""

    def delays(prompt: int, member: int) -> list[float]:
        draw = np.random.default_rng((seed, prompt, member))
        return [min(20.0, 0.2 * float(draw.pareto(1.2) + 1)) for _ in range(4)]

    return delays


def varied(seed: int) -> Delays:
    """Eight turns of log-normal times, mean 0.5 s, coefficient of variation 1."""
    width = np.sqrt(np.log(2))

    def delays(prompt: int, member: int) -> list[float]:
        draw = np.random.default_rng((seed, prompt, member))
        return [float(draw.lognormal(np.log(0.5) - width**2 / 2, width)) for _ in range(8)]

    return delays


def steady(turns: int, seconds: float) -> Delays:
    return lambda prompt, member: [seconds] * turns


class CompleteGroups:
    """Engines that take a prompt's group as one request, on one engine whose slots it keeps until all have ended."""

    def __init__(self, engines: list[EngineSupervisor], size: int):
        self._size, self._free = size, dict.fromkeys(engines, SLOTS // size)
        self._places = asyncio.Semaphore(sum(self._free.values()))
        self._homes: dict[tuple[int, ...], asyncio.Task[EngineSupervisor]] = {}
        self._ended: Counter[tuple[int, ...]] = Counter()

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "") -> Generation:
        key = tuple(prompt_ids)
        if key not in self._homes:
            self._homes[key] = asyncio.create_task(self._home())
        engine = await asyncio.shield(self._homes[key])
        try:
            return await engine.generate(prompt_ids, sampling, request_id=request_id)
        finally:
            self._ended[key] += 1
            if self._ended[key] == self._size:
                self._free[engine] += 1
                self._places.release()

    async def _home(self) -> EngineSupervisor:
        await self._places.acquire()
        engine = max(self._free, key=lambda item: self._free[item])
        self._free[engine] -= 1
        return engine


class Delayed(Environment):
    """Answers after drawn times. `together`: where all trajectories of a batch wait for each other before a turn."""

    shares_reset = False
    image = ""

    def __init__(self, drawn: Callable[[int], list[float]], together: asyncio.Barrier | None):
        self._drawn, self._together = drawn, together

    async def reset(self, sandbox: Any, seed: int) -> Observation:
        self._left = self._drawn(seed)
        return await self._next(f"{seed:0{DIGITS}}")

    async def step(self, sandbox: Any, action: str) -> Observation:
        await asyncio.sleep(self._left.pop(0))
        return await self._next("1") if self._left else Observation("", reward=1.0, done=True)

    async def cut(self, sandbox: Any, action: str) -> Observation:
        return await self.step(sandbox, action)  # every answer ends by its number of tokens

    async def _next(self, text: str) -> Observation:
        if self._together is not None:
            await self._together.wait()
        return Observation(text)


def counted(delays: Delays) -> Callable[[int], list[float]]:
    """By a prompt alone: each time for another one of its trajectories."""
    members: Counter[int] = Counter()

    def drawn(prompt: int) -> list[float]:
        members[prompt] += 1
        return list(delays(prompt, members[prompt] - 1))

    return drawn


@dataclass
class Bench:
    """Two engines, what they were seen to take, and runs over them."""

    engines: list[EngineSupervisor]
    pool: EnginePool
    rates: StepCosts
    overhead: float  # seconds of an answer beside its steps
    turn: float = 0.0  # the same, where environments answer

    async def answers(self, law: Law, way: Way, barrier: Barrier) -> float:
        engine: Generates = CompleteGroups(self.engines, way.size) if barrier == "group" else self.pool
        return await play(Drawn(engine, law), OneAnswer, way.groups, way.config)

    async def turns(self, delays: Delays, way: Way, barrier: Barrier, prompts: int) -> float:
        together = asyncio.Barrier(way.groups * way.size) if barrier == "turn" else None
        drawn = counted(delays)
        return await play(Drawn(self.pool, equal(TOKENS)), lambda: Delayed(drawn, together), prompts, way.config)

    def said(self, turns: Callable[[int], list[SimulatedTurn]], way: Way, barrier: Barrier, prompts: int) -> float:
        """Seconds per prompt of the simulated run."""
        plan = Plan(
            rules=way.config.rules, engines=[self.rates] * ENGINES, prompts=prompts, barrier=barrier,
            workload=lambda prompt, member: turns(prompt),
        )  # fmt: skip
        return RolloutSimulation(plan).run().seconds / prompts

    def said_answers(self, law: Law, way: Way, barrier: Barrier) -> float:
        answers: Counter[int] = Counter()

        def turns(prompt: int) -> list[SimulatedTurn]:
            answers[prompt] += 1
            return [SimulatedTurn(0, law(prompt, answers[prompt] - 1), self.overhead)]

        return self.said(turns, way, barrier, way.groups)

    def said_turns(self, delays: Delays, way: Way, barrier: Barrier, prompts: int) -> float:
        drawn = counted(delays)
        return self.said(
            lambda prompt: [SimulatedTurn(0, TOKENS, self.turn + item) for item in drawn(prompt)], way, barrier, prompts
        )

    async def measure_turn(self, way: Way) -> None:
        """What a turn takes beside its tokens and its delay."""
        delays = steady(8, 0.5)
        took = await self.turns(delays, way, "none", 2 * way.groups)
        self.turn = max(0.0, (took - self.said_turns(delays, way, "none", 2 * way.groups)) * way.groups / 8)


class Pairs:
    """Times per prompt without and with an idea, live and simulated."""

    def __init__(self) -> None:
        self.live: list[list[float]] = []
        self.simulated: list[list[float]] = []
        self.control: list[list[float]] = []

    def metrics(self) -> dict[str, Any]:
        def ratio(pairs: list[list[float]]) -> float:
            return statistics.median(without / having for without, having in pairs)

        over = zip(zip(*self.simulated, strict=True), zip(*self.live, strict=True), strict=True)
        return {
            "ratio": round(ratio(self.live), 2),
            "simulated_ratio": round(ratio(self.simulated), 2),
            "control": round(ratio(self.control), 3),
            "simulated_over_live": [round(sum(said) / sum(came), 3) for said, came in over],
            "seconds_per_prompt": [round(statistics.mean(item), 3) for item in zip(*self.live, strict=True)],
        }


async def replication(bench: Bench, seed: int, pairs: Pairs) -> None:
    """16 prompts of 32 answers: single requests against one request for a prompt's group; control: equal lengths."""
    way, law, even = Way(16, size=32), tailed(seed), equal(56)
    barriers: tuple[Barrier, Barrier] = ("group", "none")
    pairs.live.append([await bench.answers(law, way, item) for item in barriers])
    pairs.control.append([await bench.answers(even, way, item) for item in barriers])
    pairs.simulated.append([bench.said_answers(law, way, item) for item in barriers])


async def redundancy(bench: Bench, seed: int, pairs: Pairs) -> None:
    """9 groups of 9 are begun where 8 of 8 are used, against 8 of 8, nine batches; control: equal delays.

    Of equal groups it is chance which are used, and so whether one batch more than needed ends the run: there are 90.
    """
    plain, more, prompts = Way(8, size=8), Way(8, 1.125, size=8), 72
    drawn, even = stalling(seed), steady(1, 0.5)
    pairs.live.append([await bench.turns(drawn, way, "none", prompts) for way in (plain, more)])
    pairs.control.append([await bench.turns(even, way, "none", 10 * prompts) for way in (plain, more)])
    pairs.simulated.append([bench.said_turns(drawn, way, "none", prompts) for way in (plain, more)])


async def asynchrony(bench: Bench, seed: int, pairs: Pairs) -> None:
    """Each trajectory by itself against a batch of 8 groups of 8 that steps together; control: equal, long delays."""
    way, drawn, even = Way(8, size=8), varied(seed), steady(8, 2.0)
    barriers: tuple[Barrier, Barrier] = ("turn", "none")
    pairs.live.append([await bench.turns(drawn, way, item, 16) for item in barriers])
    pairs.control.append([await bench.turns(even, way, item, 16) for item in barriers])
    pairs.simulated.append([bench.said_turns(drawn, way, item, 16) for item in barriers])


IDEAS = {item.__name__: item for item in (replication, redundancy, asynchrony)}


async def compared(rounds: int, step_ms: float) -> dict[str, Any]:
    """Each idea's time per prompt without it over the time with it."""
    async with AsyncExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pagurus-scheduling-engines-")))
        server = paced(embedded(slots=SLOTS), step_ms)
        engines = [
            await stack.enter_async_context(EngineSupervisor(server, MODEL, 0, log=home / f"{n}.log"))
            for n in range(ENGINES)
        ]
        rates, overhead = await calibrate(engines[0], SLOTS)
        pool = await stack.enter_async_context(EnginePool())
        for n, engine in enumerate(engines):
            await pool.join(str(n), engine)
        bench = Bench(engines, pool, rates, overhead)
        await bench.measure_turn(Way(8, size=8))
        result = {name: Pairs() for name in IDEAS}
        for seed in range(rounds):
            for name, idea in IDEAS.items():
                await idea(bench, seed, result[name])
    return {name: pairs.metrics() for name, pairs in result.items()} | {
        "calibrated": {"base_ms": round(rates.base * 1e3, 3), "per_answer_ms": round(rates.per_sequence * 1e3, 4)},
        "beside_an_answer_s": round(overhead, 3),
        "beside_a_turn_s": round(bench.turn, 3),
    }
