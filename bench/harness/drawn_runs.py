"""A live rollout of drawn lengths over an engine whose steps take as long as on a GPU, and the same simulated.

Guarantee: a run that does not train each prompt once fails.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from bench.harness.paced_engine import paced
from coordinator.simulate.engines import StepCosts
from coordinator.simulate.rollouts import Plan, RolloutSimulation, SimulatedTurn
from rollout.config import RolloutConfig
from rollout.control.batch_request import NoMorePrompts
from rollout.controller import RolloutController
from rollout.engine.client import Generation, Sampling, WeightSpan
from rollout.engine.launch import embedded
from rollout.engine.supervisor import EngineSupervisor
from rollout.environments.base import Environment, Observation
from sandbox.paths import CHECKOUT
from sandbox.testing import FakeHost

MODEL = CHECKOUT / "examples" / "fix_the_service" / "start"
GROUPS, SIZE = 8, 4
LIMIT = 900  # tokens of an answer
EVEN = 240  # tokens of each answer, of a control
FIRST = 10  # token of the digit 0 in prompts
DIGITS = 6  # of a prompt

Law = Callable[[int, int], int]  # tokens of a prompt's answer, by the number of the answer


def tailed(seed: int) -> Law:
    """As `pagurus simulate tail` has them, at most `LIMIT` tokens: 0.6 of the logarithm's variance is the prompt's."""

    def law(prompt: int, answer: int) -> int:
        common, own = np.random.default_rng((seed, prompt)), np.random.default_rng((seed, prompt, answer + 1))
        return int(np.clip(82 * np.exp(1.4 * (np.sqrt(0.6) * common.normal() + np.sqrt(0.4) * own.normal())), 4, LIMIT))

    return law


def equal(tokens: int) -> Law:
    return lambda prompt, answer: tokens


class Digits:
    """A tokenizer for prompts that are numbers."""

    def encode(self, text: str) -> list[int]:
        return [FIRST + int(digit) for digit in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(str(token - FIRST) if 0 <= token - FIRST < 10 else "." for token in ids)


class OneAnswer(Environment):
    """The prompt is the seed; the answer's end is the episode's. It needs no sandbox."""

    shares_reset = False
    image = ""

    async def reset(self, sandbox: Any, seed: int) -> Observation:
        return Observation(f"{seed:0{DIGITS}}")

    async def step(self, sandbox: Any, action: str) -> Observation:
        return Observation("", reward=1.0, done=True)

    async def cut(self, sandbox: Any, action: str) -> Observation:
        return Observation("", reward=float(len(action) % 2), done=True)


class Generates(Protocol):
    """An engine, or a pool of some."""

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "") -> Generation: ...


class Drawn:
    """An engine whose answers have the lengths that a law gives."""

    def __init__(self, engine: Generates, law: Law):
        self.engine, self.law = engine, law
        self.answers: Counter[tuple[int, ...]] = Counter()
        self.live = self.version = 0
        self.observed: list[tuple[int, float, float]] = []  # tokens, answers at once, seconds

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "") -> Generation:
        key = tuple(prompt_ids[:DIGITS])
        prompt, answer = int(Digits().decode(prompt_ids[:DIGITS])), self.answers[key]
        self.answers[key] += 1
        drawn = msgspec.structs.replace(sampling, max_tokens=self.law(prompt, answer), ignore_eos=True)
        self.live += 1
        began, alongside = time.monotonic(), self.live
        try:
            generation = await self.engine.generate(prompt_ids, drawn, request_id=request_id)
        finally:
            self.live -= 1
        generation.spans = [WeightSpan(self.version, 0, len(generation.token_ids))]  # its weights never change
        self.observed.append((len(generation.token_ids), (alongside + self.live + 1) / 2, time.monotonic() - began))
        return generation


@dataclass(frozen=True)
class Way:
    """How a run goes about its prompts: so many groups of so many trajectories are one batch; `tail` as in its plan."""

    groups: int
    tail: float = 0.0
    size: int = SIZE

    @property
    def config(self) -> RolloutConfig:
        return RolloutConfig(groups=self.groups, size=self.size, tail=self.tail, staleness=0, concurrency=1024)


async def play(engine: Drawn, environment: Callable[[], Environment], prompts: int, config: RolloutConfig) -> float:
    """Seconds per prompt of one run to its end, whose trainer takes no time."""
    with tempfile.TemporaryDirectory(prefix="pagurus-scheduling-") as directory:
        async with FakeHost() as fake, fake.client() as host:
            rollout = RolloutController(
                environment=environment, host=host, engine=engine, tokenizer=Digits(), config=config,
                directory=directory,
                seeds=range(prompts),
            )  # fmt: skip
            trained = list[int]()
            async with rollout:
                began = time.monotonic()
                while True:
                    try:
                        batch = await rollout.next_batch()
                    except NoMorePrompts:
                        break
                    trained += [group.seed for group in batch.groups]
                    await rollout.consumed(batch)
                    engine.version = rollout.version + 1
                    await rollout.published(engine.version)
                seconds = time.monotonic() - began
    if Counter(trained) != Counter(range(prompts)):
        raise RuntimeError(f"of {prompts} prompts {len(set(trained))} were trained, {len(trained)} times in all")
    return seconds / prompts


async def live(engine: Generates, law: Law, prompts: int, way: Way) -> dict[str, Any]:
    """One run of single answers: seconds per trained prompt, and what the engine was seen to take."""
    drawn = Drawn(engine, law)
    return {"seconds_per_prompt": await play(drawn, OneAnswer, prompts, way.config), "observed": drawn.observed}


def simulated(law: Law, prompts: int, way: Way, rates: StepCosts, overhead: float) -> float:
    """Seconds per trained prompt."""
    answers: Counter[int] = Counter()

    def workload(prompt: int, member: int) -> list[SimulatedTurn]:
        answers[prompt] += 1
        return [SimulatedTurn(0, law(prompt, answers[prompt] - 1), overhead)]

    plan = Plan(rules=way.config.rules, engines=[rates], workload=workload, prompts=prompts)
    return RolloutSimulation(plan).run().seconds / prompts


async def calibrate(engine: EngineSupervisor, slots: int) -> tuple[StepCosts, float]:
    """The engine's rates from answers of equal length, 4 to 40 at once; and seconds of a round beside its steps."""
    observed: list[tuple[int, float, float]] = []
    alongside = []
    for groups in (1, 2, 4, 10) if slots >= 40 else (1, 2, 4):
        for tokens in (60, 240):
            came = await live(engine, equal(tokens), groups * 4, Way(groups))
            observed += came["observed"]
            item = statistics.mean(seconds for _, _, seconds in came["observed"])
            alongside.append(came["seconds_per_prompt"] * groups - item)
    # Relative to what each took: most of a round's time passes with few answers, most answers are measured among many.
    took = np.array([seconds for *_, seconds in observed])
    requested = np.array([[1.0, tokens, tokens * count] for tokens, count, _ in observed]) / took[:, None]
    own, base, slope = np.linalg.lstsq(requested, np.ones(len(observed)))[0]
    rates = StepCosts(base=float(max(base, 1e-4)), per_sequence=float(max(slope, 0.0)), slots=slots)
    return rates, max(0.0, float(own) + statistics.median(alongside))


async def compared(options: argparse.Namespace, slots: int, ways: tuple[Way, Way], control: int) -> dict[str, Any]:
    """The first way's time per prompt over the second's, live and simulated; `control` prompts with equal answers."""
    result: dict[Way, list[float]] = {way: [] for way in ways}
    even: dict[Way, list[float]] = {way: [] for way in ways}
    server = paced(embedded(slots=slots), options.step_ms)
    with tempfile.TemporaryDirectory(prefix="pagurus-scheduling-engine-") as home:
        async with EngineSupervisor(server, MODEL, 0, log=Path(home) / "engine.log") as engine:
            await live(engine, equal(20), GROUPS, ways[0])  # warm
            rates, overhead = await calibrate(engine, slots)
            for seed in range(options.rounds):
                for way in ways if seed % 2 else reversed(ways):
                    came = await live(engine, tailed(seed), options.prompts, way)
                    result[way].append(came["seconds_per_prompt"])
                    came = await live(engine, equal(EVEN), control, way)
                    even[way].append(came["seconds_per_prompt"])
    said = {
        way: [simulated(tailed(seed), options.prompts, way, rates, overhead) for seed in range(options.rounds)]
        for way in ways
    }
    even_said = [simulated(equal(EVEN), control, way, rates, overhead) for way in ways]
    return {
        "ratio": round(_ratio(result), 2),
        "control": round(_ratio(even), 3),
        "simulated_ratio": round(_ratio(said), 2),
        "simulated_control": round(even_said[0] / even_said[1], 3),
        "simulated_over_live": [round(statistics.mean(said[way]) / statistics.mean(result[way]), 3) for way in ways],
        "seconds_per_prompt": [round(statistics.mean(result[way]), 3) for way in ways],
        "over_bound": round(
            max(
                seconds / bound(tailed(seed), options.prompts, way, rates)
                for way in ways
                if not way.tail
                for seed, seconds in enumerate(result[way])
            ),
            3,
        ),
        "calibrated": {"base_ms": round(rates.base * 1e3, 3), "per_answer_ms": round(rates.per_sequence * 1e3, 4)},
        "beside_a_round_s": round(overhead, 3),
    }


def bound(law: Law, prompts: int, way: Way, rates: StepCosts) -> float:
    """Seconds per prompt; no queue takes longer: Q·mean/K + longest, of each batch (arXiv:2510.11345)."""
    steps = 0.0
    for first in range(0, prompts, way.groups):
        tokens = [law(prompt, answer) for prompt in range(first, first + way.groups) for answer in range(SIZE)]
        steps += sum(tokens) / rates.slots + max(tokens)
    return steps * (rates.base + rates.per_sequence * rates.slots) / prompts


def _ratio(seconds: dict[Way, list[float]]) -> float:
    return statistics.median(a / b for a, b in zip(*seconds.values(), strict=True))
