"""An engine that serves users and is lent to rollouts, as its rates, behind the real pool; and what its users see."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.harness.rated_engines import ModellessServer, RatedServer
from coordinator.simulate.engines import StepCosts
from coordinator.simulate.serving import Mode, ServingResult, Traffic
from rollout.decide.engines.headroom import CHUNK, Budget, EngineView, HeadroomStep, StepCost, WaitingRequest, next_step
from rollout.decide.engines.prefixes import BLOCK
from rollout.decide.engines.routing import RoutingRules
from rollout.engine.client import Delta, Sampling, WeightSpan
from rollout.pool.pool import EnginePool

SOON = 64  # users that a decision looks at
PROMPT, OBSERVED, ANSWER, TURNS = 1500, 50, 100, 4  # tokens of a trajectory's prompt, between answers, of one; answers
READ = (PROMPT + (TURNS - 1) * OBSERVED) / TURNS  # tokens for an answer, where the cache is kept


@dataclass(eq=False)
class User:
    arrival: float
    left: int  # tokens of its prompt to read
    answer: int
    context: int
    last: float = 0.0


@dataclass(eq=False)
class Turn:
    """A request of the pool."""

    left: int
    answer: int
    context: int
    sampled: int = 0
    cut: bool = False
    reported: asyncio.Event = field(default_factory=asyncio.Event)


class ServingEngine(ModellessServer):
    """One server of a pool, with users beside. ``await pool.join("users", engine, lent=True); await engine.serve()``"""

    def __init__(self, traffic: Traffic, budget: Budget, cost: StepCost, mode: Mode, *, cache: int, slots: int):
        self.traffic, self.budget, self.cost, self.mode, self.cache, self._slots = (
            traffic, budget, cost, mode, cache, slots,
        )  # fmt: skip
        self.served = ServingResult()
        self._waiting: deque[User] = deque()
        self._running: list[User] = []
        self._turns: deque[Turn] = deque()
        self._came = asyncio.Event()
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._capacity = True
        self._held: dict[tuple[int, ...], int] = {}

    # ----------------------------------------------------------------- as the pool sees it

    @property
    def slots(self) -> int:
        """Turns at once: as many as there are already, while users leave no time."""
        return self._slots if self._capacity else len(self._turns)

    async def wait_serving(self) -> Any:
        await self._thawed.wait()
        return self

    async def stream(
        self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "", priority: int = 0
    ) -> AsyncGenerator[Delta, None]:
        name = tuple(prompt_ids[:BLOCK])
        turn = Turn(len(prompt_ids) - self._held.pop(name, 0), sampling.max_tokens, len(prompt_ids))
        self._turns.append(turn)
        self._came.set()
        try:
            await turn.reported.wait()
        finally:
            if turn in self._turns:
                self._turns.remove(turn)
        count = turn.sampled
        if turn.cut:
            if count:
                yield Delta(token_ids=[1] * count, logprobs=[0.0] * count)
            yield Delta(token_ids=[], logprobs=[], finish_reason="abort")
            return
        self._held[name] = len(prompt_ids) + count
        yield Delta(
            token_ids=[1] * count, logprobs=[0.0] * count, spans=[WeightSpan(0, 0, count)], finish_reason="length"
        )

    # ----------------------------------------------------------------- steps

    def thaw(self) -> None:
        """The next version of the weights: rollouts are taken again."""
        self._thawed.set()

    async def serve(self) -> None:
        """Until every user is answered."""
        loop, number, arrivals = asyncio.get_running_loop(), 0, self.traffic.arrivals
        while number < len(arrivals) or self._waiting or self._running:
            now = loop.time()
            while number < len(arrivals) and arrivals[number] <= now:
                prompt = self.traffic.prompts[number]
                self._waiting.append(User(arrivals[number], prompt, self.traffic.answers[number], prompt))
                number += 1
            if not self._waiting and not self._running and not self._turns:
                await self._idle(arrivals[number] - now)
                continue
            step = self._decide(now)
            if step.cut:
                self._cut()
            chosen = self._chosen(step)
            await asyncio.sleep(self.cost.step(len(self._running) + len(chosen), step.users_prompt + self._read(step)))
            self._answer(loop.time(), chosen)
            self._read_users(step.users_prompt, loop.time())
        self.served.seconds = loop.time()

    async def _idle(self, seconds: float) -> None:
        self._came.clear()
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._came.wait()
        except TimeoutError:
            return

    def _decide(self, now: float) -> HeadroomStep:
        held = sum(turn.context + turn.sampled for turn in self._turns) + sum(self._held.values())
        users = sum(user.context + user.answer for user in self._running)
        free = self.cache - users - held
        target = sum(user.context + user.answer for user in self._waiting)
        if target > free and self._held:  # what nobody uses goes first
            free += sum(self._held.values())
            held -= sum(self._held.values())
            self._held.clear()
        step = next_step(
            EngineView(
                waiting=[WaitingRequest(user.arrival, user.left) for user in list(self._waiting)[:SOON]],
                last_tokens=[user.last for user in self._running],
                rollouts=sum(turn.left == 0 for turn in self._turns),
                rollout_prompt=sum(turn.left for turn in self._turns),
                free=free,
                target=target,
                held=held,
                frozen=not self._thawed.is_set(),
            ),
            self.budget,
            self.cost,
            now,
        )
        self._capacity = self.mode == "naive" or step.rollouts > 0 or step.rollout_prompt > 0 or not self._turns
        if self.mode == "naive":
            read = sum(turn.left for turn in self._turns)
            return HeadroomStep(step.users_prompt, len(self._turns), min(CHUNK - step.users_prompt, read))
        return step

    def _cut(self) -> None:
        """Rollouts lose their cache, and come back with the next version."""
        self._thawed.clear()
        self._held.clear()
        self.served.cuts += 1
        for turn in list(self._turns):
            turn.cut = True
            turn.reported.set()
        self._turns.clear()

    def _chosen(self, step: HeadroomStep) -> list[Turn]:
        """Those that get a token, in turns."""
        able = [turn for turn in self._turns if turn.left == 0][: step.rollouts]
        for turn in able if len(able) == step.rollouts else ():
            self._turns.remove(turn)
            self._turns.append(turn)
        return able

    def _read(self, step: HeadroomStep) -> int:
        """Prompts of rollouts, in pieces; those that were read get a token from the next step on."""
        left = step.rollout_prompt
        for turn in self._turns:
            part = min(left, turn.left)
            turn.left, left = turn.left - part, left - part
        return step.rollout_prompt - left

    def _answer(self, now: float, chosen: list[Turn]) -> None:
        self.served.rollout_tokens += len(chosen)
        for turn in chosen:
            turn.sampled += 1
            if turn.sampled == turn.answer:
                turn.reported.set()
                self._turns.remove(turn)
        for user in self._running:
            self.served.tpot.append(now - user.last)
            user.last, user.answer = now, user.answer - 1
        self._running = [user for user in self._running if user.answer > 0]

    def _read_users(self, tokens: int, now: float) -> None:
        while tokens and self._waiting:
            user = self._waiting[0]
            part = min(tokens, user.left)
            user.left, tokens = user.left - part, tokens - part
            if user.left == 0:
                self._waiting.popleft()
                self.served.ttft.append(now - user.arrival)
                user.last, user.answer = now, user.answer - 1
                if user.answer > 0:
                    self._running.append(user)


@dataclass
class Harvest:
    """What one comparison gave."""

    served: ServingResult
    counts: dict[str, int]  # of the pool
    ended: int  # turns of trajectories


async def harvest(
    traffic: Traffic,
    budget: Budget,
    cost: StepCost,
    mode: Mode,
    *,
    live: int = 110,
    cache: int = 400_000,
    slots: int = 100,
    version_every: float = 120.0,
) -> Harvest:
    """A serving engine and one of the rollouts' own in a pool; `live` trajectories want a turn all the time."""
    engine, ended = ServingEngine(traffic, budget, cost, mode, cache=cache, slots=slots), 0
    own = RatedServer(StepCosts(base=cost.base, per_sequence=cost.per_answer, prefill=20_000, slots=16), "", {})

    async def play(pool: EnginePool, number: int) -> None:
        nonlocal ended
        draw = np.random.default_rng(number)
        while True:
            ids = [int(item) for item in draw.integers(3, 1 << 30, BLOCK)] + [2] * PROMPT
            for _ in range(TURNS):
                said = await pool.generate(ids, Sampling(max_tokens=max(2, int(draw.exponential(ANSWER)))))
                ids += [*said.token_ids, *([2] * OBSERVED)]
                ended += 1

    async def versions() -> None:
        while True:
            await asyncio.sleep(version_every)
            engine.thaw()

    never = RoutingRules(silence=float("inf"), stall=float("inf"))  # health is of the machine's time, not of the loop's
    async with EnginePool(rules=never) as pool:
        await pool.join("own", own)
        await pool.join("users", engine, colocated=True)
        tasks = [asyncio.create_task(versions())]
        tasks += [asyncio.create_task(play(pool, n)) for n in range(live if mode != "alone" else 0)]
        await engine.serve()
        for task in tasks:
            if task.done():
                task.result()  # it ended by an error
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return Harvest(engine.served, dict(pool.counts), ended)
