"""Engine servers that are their rates, behind the real pool; and trajectories that go through it, or are simulated."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.simulate.engines import SimulatedEngine, StepCosts
from coordinator.simulate.rollouts import Plan, RolloutSimulation, SimulatedTurn
from rollout.decide.engines.prefixes import BLOCK
from rollout.decide.view import SchedulingRules
from rollout.engine.asking import KIND
from rollout.engine.client import Delta, PublishResult, Sampling, WeightSpan
from rollout.pool.pool import EnginePool


class IdleTime(selectors.DefaultSelector):
    """A selector that never waits: its loop's time goes on by what it would have waited."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        result = super().select(0)
        if not result and timeout is None:
            raise RuntimeError("nothing is left to happen")
        if not result and timeout:
            self.now += timeout
        return result


class IdleLoop(asyncio.SelectorEventLoop):
    """Of nothing but timers and this process's own work: hours pass in seconds, alike on a machine that is busy."""

    def __init__(self) -> None:
        self._idle = IdleTime()
        super().__init__(self._idle)

    def time(self) -> float:
        return self._idle.now


class LoopClock:
    """The event loop's time, as an engine's rates need it."""

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def after(self, seconds: float, what: Callable[[], None]) -> object:
        return asyncio.get_running_loop().call_later(seconds, what)


class ModellessServer:
    """What the pool asks of a server whose weights never change."""

    async def fetch(self, version: int) -> None:
        return None

    async def publish(self, weights: Path | str, version: int) -> PublishResult:
        return PublishResult(version=version, seconds=0.0, paused_s=0.0)

    def kill(self) -> None:
        return None

    async def version(self) -> int:
        return 0

    async def healthy(self) -> bool:
        return True


class RatedServer(ModellessServer):
    """An engine server without a model: what it gives takes as long as its rates say. It keeps what it has read."""

    def __init__(self, rates: StepCosts, hardware: str, begun: dict[tuple[int, ...], tuple[float, str, str]]):
        """`begun` gets when a trajectory began, its kind, and the hardware."""
        self.slots, self._engine, self._hardware, self._begun = (
            rates.slots,
            SimulatedEngine(LoopClock(), rates),
            hardware,
            begun,
        )
        self._held: dict[tuple[int, ...], int] = {}  # tokens of each trajectory, by how it begins

    async def wait_serving(self) -> Any:
        return self

    async def stream(
        self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "", priority: int = 0
    ) -> AsyncGenerator[Delta, None]:
        name, count = tuple(prompt_ids[:BLOCK]), sampling.max_tokens
        self._begun.setdefault(name, (asyncio.get_running_loop().time(), KIND.get(), self._hardware))
        read, done = asyncio.Event(), asyncio.Event()
        new = len(prompt_ids) - self._held.get(name, 0)
        request = self._engine.request(prompt=new, tokens=count, done=done.set, read=read.set)
        try:
            await read.wait()
            yield Delta(token_ids=[1], logprobs=[0.0])
            await done.wait()
        finally:
            if not done.is_set():
                self._engine.cancel(request)
        self._held[name] = len(prompt_ids) + count
        rest = count - 1
        yield Delta(
            token_ids=[1] * rest, logprobs=[0.0] * rest, spans=[WeightSpan(0, 0, count)], finish_reason="length"
        )


@dataclass(frozen=True)
class Kind:
    """An environment: means of what a turn of it needs."""

    read: float  # tokens
    sampled: float  # tokens
    environment: float  # seconds


Kinds = Mapping[str, Kind]
Park = Mapping[str, tuple[int, StepCosts]]  # of each hardware: servers, and their rates


@dataclass
class Driven:
    """What came of some seconds."""

    per_second: float = 0.0  # trajectories that ended
    begun: dict[tuple[int, ...], tuple[float, str, str]] = field(default_factory=dict)  # when, kind, hardware
    shifted: float = 0.0  # when the environments changed


LIVE, TURNS, WARM = 48, 4, 40.0  # trajectories at once, turns of one, seconds until their ends count


class Trajectories:
    """By their number: of which kind each is, and what its turns need."""

    def __init__(self, kinds: Kinds, seed: int):
        self.names, self._seed, self._draw, self._kinds = sorted(kinds), seed, np.random.default_rng(seed), list[str]()

    def kind(self, number: int) -> str:
        while number >= len(self._kinds):
            self._kinds.append(str(self._draw.choice(self.names)))
        return self._kinds[number]

    def factors(self, number: int) -> list[tuple[float, float, float]]:
        """Of what its kind's turns need in the mean: tokens to read, tokens to sample, seconds."""
        own = np.random.default_rng((self._seed, number))
        return [(a, b, c) for a, b, c in own.lognormal(-0.125, 0.5, size=(TURNS, 3)).tolist()]


def foretold(
    park: Park,
    kinds: Kinds,
    *,
    place: Mapping[str, str] | None = None,
    blind: bool = False,
    seconds: float = 160.0,
    seed: int = 0,
) -> float:
    """Trajectories a second that `drive` will find of the same, by the simulation."""
    drawn = Trajectories(kinds, seed)

    def turns(number: int, member: int) -> list[SimulatedTurn]:
        kind = kinds[drawn.kind(number)]
        return [
            SimulatedTurn(
                int(kind.read * a) + (0 if turn else BLOCK), max(2, int(kind.sampled * b)), kind.environment * c
            )
            for turn, (a, b, c) in enumerate(drawn.factors(number))
        ]

    plan = Plan(
        rules=SchedulingRules(groups=1, size=1, concurrency=LIVE, staleness=2 * LIVE, over_stale="mask"),
        engines=[rates for count, rates in park.values() for _ in range(count)],
        hardware=["" if blind else name for name, (count, _) in park.items() for _ in range(count)],
        workload=turns,
        kind=drawn.kind,
        place=place or {},
        prompts=1 << 30,
        until=WARM + seconds,
    )
    return sum(end > WARM for end in RolloutSimulation(plan).run().ends) / seconds


async def drive(
    park: Park,
    kinds: Kinds,
    *,
    place: Mapping[str, str] | None = None,
    blind: bool = False,
    shift: Kinds | None = None,
    seconds: float = 160.0,
    seed: int = 0,
) -> Driven:
    """`LIVE` trajectories at once, each of a kind that is drawn, for `seconds` after `WARM`.

    `place`: kinds that go to one hardware each, whatever they cost there. `blind`: the pool is not told which hardware
    its servers are. `shift`: what the kinds become after `seconds`, which then pass once more.
    """
    came, drawn, numbers, ended = Driven(), Trajectories(kinds, seed), iter(range(1 << 30)), list[float]()

    async def play(pool_of: Mapping[str, EnginePool]) -> None:
        while True:
            number = next(numbers)
            name = drawn.kind(number)
            KIND.set(name)
            ids = [number] * BLOCK
            for a, b, c in drawn.factors(number):
                kind = (shift if came.shifted and shift else kinds)[name]
                ids += [2] * int(kind.read * a)
                answer = await pool_of[name].generate(ids, Sampling(max_tokens=max(2, int(kind.sampled * b))))
                ids += answer.token_ids
                await asyncio.sleep(kind.environment * c)
            ended.append(asyncio.get_running_loop().time())

    async with AsyncExitStack() as stack:
        apart = {hardware: await stack.enter_async_context(EnginePool()) for hardware in park} if place else {}
        pool = await stack.enter_async_context(EnginePool())
        for hardware, (count, rates) in park.items():
            for n in range(count):
                server = RatedServer(rates, hardware, came.begun)
                await (apart.get(hardware) or pool).join(f"{hardware}-{n}", server, hardware="" if blind else hardware)
        pool_of = {name: apart[place[name]] if place else pool for name in drawn.names}
        tasks = [asyncio.create_task(play(pool_of)) for _ in range(LIVE)]
        await asyncio.sleep(WARM)
        before = len(ended)
        await asyncio.sleep(seconds)
        came.per_second = (len(ended) - before) / seconds
        if shift is not None:
            came.shifted = asyncio.get_running_loop().time()
            await asyncio.sleep(seconds)
        for task in tasks:
            if task.done():
                task.result()  # it ended by an error
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return came
