"""A run whose two engines and trainer share two processors: in every other step an engine rests while gradients begin.

This file is also the environment that the run plays.

A decoding step takes the same time for many answers as for one (bench.harness.paced_engine). The second engine's
processor is the trainer's: what it computes there while that engine decodes would cost the engine nothing, unlike on a
GPU, so that in steps without handover it computes nothing before the batch is complete.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.harness import aftermath
from coordinator.simulate import handover
from coordinator.simulate.engines import StepCosts
from rollout import tokenizer
from rollout.decide.view import FleetView
from rollout.engine.client import Generation, PublishResult, Sampling
from rollout.engine.embedded.model import ModelConfig, Qwen3, save_model
from rollout.engine.launch import Launch, LaunchCommand, embedded
from rollout.engine.supervisor import EngineSupervisor
from rollout.environments.base import Environment, Observation
from rollout.labels import LabellingClient
from rollout.plan import PoolPlan, read_plan
from rollout.pool.pool import EnginePool
from rollout.service.protocol import PublishedVersion
from rollout.service.role import RolloutRole
from rollout.service.server import RolloutServer
from rollout.store import decisions
from rollout.store.samples import SampleStore
from sandbox.paths import CHECKOUT
from sandbox.testing import FakeHost
from trainer.config import TrainConfig, open_run
from trainer.reports.metrics import read_lines
from trainer.settings import OptimiserSettings

TOKENS = CHECKOUT / "examples" / "fix_the_service" / "start"  # whose tokenizer is used
ENGINES, TRAINER = ("0", "1"), "1"  # processors
GROUPS, SIZE = 16, 4
PROMPT = 150  # tokens: most of the gradients' time
LONGEST, EVEN = 200, 75  # tokens of an answer at most, of each answer of a control
CONTROL_INTERVAL = 3  # pairs of steps

Lengths = Callable[[int, int], int]  # tokens of an answer of a prompt, by its number among the prompt's answers


class OneAnswer(Environment):
    """The prompt is the seed; the answer's end is the episode's. Rewards differ, so that all groups bear gradients."""

    image = ""
    shares_reset = False
    max_turns = 1

    async def reset(self, sandbox: Any, seed: int) -> Observation:
        return Observation(f"{seed:0{PROMPT}d}")

    async def step(self, sandbox: Any, action: str) -> Observation:
        return Observation("", reward=hashlib.blake2b(action.encode()).digest()[0] / 255, done=True)

    async def cut(self, sandbox: Any, action: str) -> Observation:
        return await self.step(sandbox, action)


def policy(directory: Path) -> Path:
    """One that knows nothing."""
    made = Qwen3(ModelConfig.load(TOKENS))
    made.initialise(0)
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENS / name, directory)
    save_model(made, directory)
    return directory


def begin(home: Path, *, steps: int, longest: int) -> Path:
    """A run folder."""
    config = TrainConfig(
        task=Path(__file__), model=policy(home / "model"), steps=steps, groups=GROUPS, size=SIZE, concurrency=256,
        held_out=1, optimiser=OptimiserSettings(rate=1e-6), staleness=0, handover=True, 
        pool=PoolPlan(engines=len(ENGINES)), sampling=Sampling(max_tokens=longest),
        max_length=PROMPT + longest + 8, pace=0.0, trackers=(), out=home / "runs",
    )  # fmt: skip
    return open_run(config)[0]


@dataclass
class Observed:
    """Seconds, by version."""

    served: dict[int, float] = field(default_factory=dict)  # when all engines had it
    rested: dict[int, float] = field(default_factory=dict)  # when one began to rest
    ended: dict[int, float] = field(default_factory=dict)  # when the last answer was there
    rates: dict[int, StepCosts] = field(default_factory=dict)  # as the pool had learned them when it had this version
    servers: list[EngineSupervisor] = field(default_factory=list)

    def took(self, version: int) -> float:
        """The step that follows on it, whole: rollout, gradients, the next version on all engines."""
        return self.served[version + 1] - self.served[version]


class Drawn:
    """The pool, but that answers have the lengths that are drawn, and that engines rest at some versions only."""

    def __init__(self, pool: EnginePool, run: Path, lengths: Lengths, rests: Callable[[int], bool], observed: Observed):
        self.pool, self.run, self.lengths, self.rests, self.observed = pool, run, lengths, rests, observed
        self.words = tokenizer.load(run / "policy")
        self.version = 0
        self._answers: Counter[int] = Counter()

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "") -> Generation:
        prompt = int("".join(item for item in self.words.decode(prompt_ids) if item.isdigit()))
        number, self._answers[prompt] = self._answers[prompt], self._answers[prompt] + 1
        sampling = msgspec.structs.replace(sampling, max_tokens=self.lengths(prompt, number), ignore_eos=True)
        generation = await self.pool.generate(prompt_ids, sampling, request_id=request_id)
        self.observed.ended[self.version] = time.monotonic()
        return generation

    async def publish(self, weights: Path | str, version: int) -> PublishResult:
        if version == 1:  # before newer saves replace it: see `gradient_difference`
            await asyncio.to_thread(shutil.copytree, self.run / "resume" / "step-000001", self.run / "first")
        published = await self.pool.publish(weights, version)
        self.version, self.observed.served[version] = version, time.monotonic()
        fleet = self.pool.fleet()
        self.observed.rates[version] = StepCosts(base=fleet.base, per_sequence=fleet.item, slots=fleet.slots)
        return published

    def fleet(self) -> FleetView:
        fleet = self.pool.fleet()
        return fleet if self.rests(self.version) else FleetView(engines=1, slots=fleet.slots)

    def rest(self, stay: int) -> None:
        self.observed.rested[self.version] = time.monotonic()
        self.pool.rest(stay)


def on(processor: str, kind: Launch) -> Launch:
    """That engine, on this processor."""

    def command(directory: Path, port: int) -> LaunchCommand:
        plain = kind.command(directory, port)
        return replace(plain, argv=["taskset", "-c", processor, *plain.argv])

    return replace(kind, command=command, standby=None)


@asynccontextmanager
async def engines(
    ref: PublishedVersion, run: Path, kind: Callable[[Launch], Launch], observed: Observed
) -> AsyncIterator[EnginePool]:
    plan = read_plan(run)
    plain = kind(embedded(slots=plan.pool.slots, length=plan.config.limits.max_length))
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(EnginePool())
        for number, processor in enumerate(ENGINES):
            server = EngineSupervisor(
                on(processor, plain), ref.directory, ref.version, log=run / f"engine-{number}.log"
            )
            await pool.join(f"engine-{number}", await stack.enter_async_context(server))
            observed.servers.append(server)
        observed.served[ref.version] = time.monotonic()
        yield pool


@asynccontextmanager
async def rollout(
    run: Path, kind: Callable[[Launch], Launch], lengths: Lengths, rests: Callable[[int], bool]
) -> AsyncIterator[tuple[RolloutRole, Observed]]:
    """This process is the rollout of the run."""
    observed = Observed()

    @asynccontextmanager
    async def serve(ref: PublishedVersion) -> AsyncIterator[Drawn]:
        async with engines(ref, run, kind, observed) as pool:
            yield Drawn(pool, run, lengths, rests, observed)

    async with (
        FakeHost() as fake,
        fake.client() as host,
        RolloutRole(run, read_plan(run), LabellingClient(host, run), serve=serve) as role,
        RolloutServer(role, run / "roles"),
    ):
        yield role, observed


async def play(run: Path, kind: Callable[[Launch], Launch], lengths: Lengths, rests: Callable[[int], bool]) -> Observed:
    """The run to its end."""
    async with rollout(run, kind, lengths, rests) as (role, observed):
        trainer = await start_trainer(run)
        ended = {asyncio.ensure_future(trainer.wait()), asyncio.ensure_future(role.ended())}
        try:
            await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
            if trainer.returncode != 0:
                raise RuntimeError((run / "trainer.log").read_text()[-3000:])
        finally:
            for item in ended:
                item.cancel()
            if trainer.returncode is None:
                trainer.kill()
                await trainer.wait()
    return observed


async def start_trainer(run: Path) -> asyncio.subprocess.Process:
    argv = ("taskset", "-c", TRAINER, sys.executable, "-m", "trainer", str(run))
    with (run / "trainer.log").open("ab") as log:
        return await asyncio.create_subprocess_exec(*argv, cwd=CHECKOUT, stdout=log, stderr=log)


def gradient_difference(run: Path) -> float:
    """Of the first step, which had a handover, against one that gets its batch complete: the norm of what differs over
    that of the gradient, at most, of all tensors. (After one step Adam's first moment is the gradient, scaled.)"""
    import torch

    from trainer.batches.groups import samples
    from trainer.distributed.ranks import ALONE
    from trainer.distributed.worker import make_learner
    from trainer.resume import Saves
    from trainer.steps import work_plan

    _, config = open_run(TrainConfig(task=Path(), resume=run))
    plan = work_plan(config, run)
    store = SampleStore(run / "rollout")
    batch = store.batch(0)
    store.close()
    assert batch is not None
    complete, streamed = make_learner(plan, ALONE), make_learner(plan, ALONE)
    complete.step(samples(batch))
    (run / "first-only").mkdir()
    os.rename(run / "first", run / "first-only" / "step-000001")
    Saves(run / "first-only").load(streamed)

    def moments(learner: Any) -> list[torch.Tensor]:
        return [learner.optimisers[0].state[item]["exp_avg"] for item in learner.trained]

    pairs = zip(moments(complete), moments(streamed), strict=True)
    return max(float((one - other).norm() / one.norm()) for one, other in pairs)


def tailed(seed: int, limit: int) -> Lengths:
    """Log-normal, a deviation of the logarithm of 1.4, of whose square 0.6 is the prompt's."""

    def law(prompt: int, answer: int) -> int:
        common, own = np.random.default_rng((seed, prompt)), np.random.default_rng((seed, prompt, answer + 1))
        drawn = np.exp(1.4 * (np.sqrt(0.6) * common.normal() + np.sqrt(0.4) * own.normal()))
        return int(np.clip(limit / 8 * drawn, 4, limit))

    return law


def compared(pairs: int, kind: Callable[[Launch], Launch]) -> dict[str, Any]:
    """One run: a step that warms up, then pairs of steps, every third pair of equal answers, the others of drawn ones.
    Of each pair one step has a handover. What the simulation says of the drawn ones follows from the equal ones."""
    steps = 1 + 2 * pairs
    controls = [v for v in range(1, steps) if (v - 1) // 2 % CONTROL_INTERVAL == 0]
    drawn = [v for v in range(1, steps) if v not in controls]

    def law(version: int) -> Lengths:
        return (lambda *_: EVEN) if version in controls else tailed((version + 1) // 2, LONGEST)

    def lengths(prompt: int, answer: int) -> int:
        version, number = divmod(prompt, GROUPS)
        return law(min(version, steps))(number, answer)  # held-out episodes have seeds of their own

    def rests(version: int) -> bool:
        pair, second = divmod(version - 1, 2)
        return version == 0 or second != pair % 2  # of 1 and 2 the second, of 3 and 4 the first one ...

    with aftermath.TemporaryDirectory("pagurus-handover-") as home:
        run = begin(Path(home), steps=steps, longest=LONGEST)
        observed = asyncio.run(play(run, kind, lengths, rests))
        result = account(run, steps) | {"gradient_difference": gradient_difference(run)}
        lines = {line["step"] - 1: line for line in read_lines(run / "metrics.jsonl") if "seconds" in line}
    trained = {version: line["train/seconds"] for version, line in lines.items()}
    with_it = {way: [v for v in drawn if rests(v) is way] for way in (False, True)}
    live = {way: [observed.took(v) for v in of] for way, of in with_it.items()}
    even = {way: [observed.took(v) for v in controls if rests(v) is way] for way in (False, True)}
    rates = observed.rates[controls[-1] + 1]
    said = predicted(observed, trained, [v for v in controls if not rests(v)], [law(v) for v in with_it[True]], rates)
    rollouts = [statistics.mean(observed.ended[v] - observed.served[v] for v in of) for of in with_it.values()]
    hidden = [lines[v]["train/hidden_s"] / trained[v] for v in with_it[True]]
    rested = [at - observed.served[version] for version, at in observed.rested.items()]
    return result | {
        "ratio": round(_ratio(live), 3),
        "control": round(_ratio(even), 3),
        "simulated_ratio": round(_ratio(said), 3),
        "simulated_over_live": [round(statistics.mean(said[w]) / statistics.mean(live[w]), 3) for w in (False, True)],
        "seconds_per_step": [round(statistics.mean(live[way]), 2) for way in (False, True)],
        "handed_over": [
            f"{sum(v in observed.rested for v in with_it[True])} of {len(with_it[True])}",
            len(observed.rested),
        ],
        "hidden": round(statistics.median(hidden), 3),
        "rollout_slower": round(rollouts[1] / rollouts[0], 3),
        "rested_after_s": round(statistics.median(rested), 2) if rested else None,
        "calibrated_ms": [round(1e3 * item, 4) for item in (rates.base, rates.per_sequence)],
    }


def predicted(
    observed: Observed, trained: dict[int, float], existing: list[int], drawn: list[Lengths], rates: StepCosts
) -> dict[bool, list[float]]:
    """Seconds of steps of these lengths without and with handover, from steps of equal answers without one."""
    machines = handover.SharedMachinePool(engines=len(ENGINES), trained_on=1, switch=0.0, prompt=PROMPT)

    def step(lengths: np.ndarray, *, moves: bool) -> float:
        train = per_token * (lengths + PROMPT).sum()
        return handover.Rollout(lengths, rates, train, moves=moves, machines=machines).run().complete

    even = np.full((GROUPS, SIZE), float(EVEN))
    per_token = statistics.median(trained[v] for v in existing) / (even + PROMPT).sum()
    alongside = statistics.median(observed.took(v) for v in existing) - step(even, moves=False)
    tokens = [np.array([[law(n, a) for a in range(SIZE)] for n in range(GROUPS)], dtype=float) for law in drawn]
    return {moves: [step(item, moves=moves) + alongside for item in tokens] for moves in (False, True)}


def account(run: Path, steps: int) -> dict[str, Any]:
    """Raises where a prompt was not trained exactly once."""
    store = SampleStore(run / "rollout")
    batches = [store.batch(step) for step in range(steps)]
    said = store.account()
    store.close()
    seeds = Counter(group.seed for batch in batches if batch is not None for group in batch.groups)
    if seeds != Counter(range(steps * GROUPS)) or said.consumed != len(seeds) or said.given_up:
        raise RuntimeError(f"of {steps * GROUPS} prompts {len(seeds)} were trained, {seeds.total()} times: {said}")
    replayed = decisions.replay(run / "rollout")
    lost = msgspec.json.decode((run / "summary.json").read_bytes())["trajectories_lost"]
    return {"prompts": len(seeds), "lost": lost, "decisions": replayed.decisions, "replayed": replayed.identical}


def _ratio(seconds: dict[bool, list[float]]) -> float:
    return statistics.median(a / b for a, b in zip(seconds[False], seconds[True], strict=True))
