"""Do trees of rollouts learn what independent ones learn, for less of the environment? A part of ``pagurus bench
branching``.

Both ways begin with the policy in the tree and take as many steps, on as many groups of as many leaves. `cost`: turns
that were executed to learn, and resets: they stand for seconds, which a twin does not take. With `--real` the sandboxes
are real ones and `cost` is the seconds of these turns; held-out episodes are played on the twin all the same.
`share`: of trees over independent ones. `share_to_reach`: the same until trees first reach the last held-out reward of
the independent ones; None where they do not. `equal_cost_reward`: of independent ones when they had cost what trees
cost in all, between the two evaluations around it. `difference`: of several seeds, what trees earn more in the mean,
with its 95 % interval.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from examples.fit import Example
from rollout.config import RolloutConfig
from rollout.controller import RolloutController
from rollout.decide.blame import TrajectoryFailure
from rollout.decide.view import Branching, PartView
from rollout.engine.client import Generation, Sampling, WeightSpan
from rollout.engine.embedded.core import Core, SamplingSequence
from rollout.engine.embedded.model import load_model
from rollout.engine.embedded.thread import EngineThread
from rollout.environments.shell import TwinShell
from rollout.environments.splits import HELD_OUT
from rollout.episode.manager import EpisodeManager
from rollout.episode.spec import EpisodeLimits
from rollout.held_out import play_all
from rollout.messages import Batch
from rollout.tokenizer import load as load_tokenizer
from sandbox.errors import NotFound, SandboxDead
from sandbox.messages import CheckpointInfo, CheckpointState, ExecResult, SandboxInfo, SandboxState, Verdict
from trainer.batches.groups import samples
from trainer.config import TrainConfig
from trainer.learner import Learner
from trainer.models.policy import END_ID
from trainer.models.scorer import Scorer
from trainer.objectives import build

LONGEST = 512  # tokens of an episode
SLOTS = 64


class TwinSandbox:
    """A twin with checkpoints: copies of its files."""

    numbers = itertools.count()

    def __init__(self, host: TwinHost, twin: TwinShell):
        self.id, self._host, self._twin, self._alive = f"s-twin{next(self.numbers)}", host, twin, True
        self._tree: list[CheckpointInfo] = []
        self._capture()

    async def exec(self, command: Any, *, ends_turn: bool = True, **_: Any) -> ExecResult:
        if not self._alive:
            raise SandboxDead("nothing runs in it", sandbox=self.id)
        result = await self._twin.exec(command)
        if ends_turn:
            result.verdict, result.checkpoint = Verdict.FILES, self._capture().id
        return result

    def _capture(self) -> CheckpointInfo:
        info = CheckpointInfo(
            id=f"c-{self.id}-{len(self._tree)}",
            sandbox=self.id,
            state=CheckpointState.DURABLE,
            verdict=Verdict.FILES,
            started_at=1.0,
            captured_at=1.0,
        )
        self._tree.append(info)
        self._host.states[info.id] = dict(self._twin.files)
        return info

    async def captured(self, of: ExecResult) -> CheckpointInfo:
        return next(info for info in self._tree if info.id == of.checkpoint)

    async def checkpoint(self, label: str | None = None) -> CheckpointInfo:
        return self._capture()

    async def tree(self) -> list[CheckpointInfo]:
        return self._tree

    async def kill(self) -> None:
        self._alive = False

    async def remove(self) -> None:
        for info in self._tree:
            self._host.states.pop(info.id, None)
        self._host.sandboxes.pop(self.id, None)

    @property
    def info(self) -> SandboxInfo:
        return SandboxInfo(id=self.id, image="twin", state=SandboxState.RUNNING, created_at=0.0)


class TwinHost:
    """What the rollout needs of a host, of an example's twins."""

    def __init__(self, twin: type[TwinShell]):
        self._twin = twin
        self.sandboxes: dict[str, TwinSandbox] = {}
        self.states: dict[str, dict[str, str]] = {}  # files by checkpoint

    async def create(self, image: str, **_: Any) -> TwinSandbox:
        return self._add(self._twin())

    def _add(self, twin: TwinShell) -> TwinSandbox:
        sandbox = TwinSandbox(self, twin)
        self.sandboxes[sandbox.id] = sandbox
        return sandbox

    async def fork(self, checkpoint: str) -> TwinSandbox:
        if checkpoint not in self.states:
            raise NotFound(f"no checkpoint {checkpoint}")
        twin = self._twin()
        twin.files = dict(self.states[checkpoint])
        return self._add(twin)

    async def get(self, sandbox: str) -> TwinSandbox:
        if sandbox not in self.sandboxes:
            raise NotFound(f"no sandbox {sandbox}")
        return self.sandboxes[sandbox]

    async def keep(self, sandbox: TwinSandbox) -> None:
        """All stay until they are removed."""

    async def remove(self, left: Collection[str]) -> int:
        for name in left:
            if name in self.sandboxes:
                await self.sandboxes[name].remove()
        return len(left)


class Engine:
    """The embedded engine, in a thread of this process."""

    def __init__(self, directory: Path):
        core = Core(directory, version="0", slots=SLOTS, length=LONGEST)
        self._thread = EngineThread(core, asyncio.get_running_loop(), _fatal)
        self._names = itertools.count()

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "") -> Generation:
        request = SamplingSequence(
            id=str(next(self._names)),
            tokens=list(prompt_ids),
            max_tokens=sampling.max_tokens,
            stops=frozenset(sampling.stop_token_ids),
            seed=sampling.seed,
        )
        done = await self._thread.run(request)
        spans = [WeightSpan(int(span.version), span.start, span.end) for span in done.spans]
        return Generation(
            token_ids=done.output,
            logprobs=done.logprobs,
            spans=spans,
            finish_reason="stop" if done.finish == "stop" else "length",
        )

    async def take(self, weights: dict[str, torch.Tensor], version: int) -> None:
        def change(core: Core) -> None:
            core.model.load_state_dict(weights)
            core.forget()
            core.label(str(version))

        await self._thread.call(change)

    def close(self) -> None:
        self._thread.close()


def _fatal(error: BaseException) -> None:
    raise SystemExit(f"the engine has failed: {error}")


def _refused(failure: TrajectoryFailure) -> PartView:
    raise SystemExit(f"a twin has failed: {failure}")


async def learn(
    example: Example, directory: Path, seed: int, options: argparse.Namespace, branching: Branching | None, real: Any
) -> dict[str, Any]:
    """One run: held-out rewards and what they cost, by step. `real`: a host of sandboxes, or None."""
    torch.manual_seed(seed)
    steps, held_out = options.steps, options.held_out
    config = TrainConfig(task=Path(), seed=seed, steps=steps)
    assert issubclass(example.twin, TwinShell), "it has no sandbox to fork"
    model, engine = load_model(example.start), Engine(example.start)
    learner = Learner(Scorer(model), build(config.objective), config.optimiser)

    rollouts = RolloutConfig(
        groups=config.groups,
        size=config.size,
        staleness=0,
        sampling=Sampling(max_tokens=config.sampling.max_tokens, stop_token_ids=[END_ID], seed=seed),
        limits=EpisodeLimits(max_length=LONGEST),
        seed=seed,
        branching=branching,
    )
    parts: dict[str, Any] = {
        "environment": example.environment,
        "engine": engine,
        "tokenizer": load_tokenizer(example.start),
    }
    judge = EpisodeManager(**parts, host=TwinHost(example.twin), limits=rollouts.limits)

    async def evaluated() -> float:
        seeds = range(HELD_OUT, HELD_OUT + held_out)
        played = await play_all(judge, seeds, rollouts.sampling, rollouts, refused=_refused)
        return sum(item.reward for item in played) / held_out

    host = TwinHost(example.twin) if real is None else real
    rewards, cost, spent, tokens = {0: await evaluated()}, {0: 0.0}, 0.0, 0
    async with RolloutController(**parts, host=host, config=rollouts, directory=directory) as rollout:
        for step in range(1, steps + 1):
            batch: Batch = await rollout.next_batch()
            learned = samples(batch)
            tokens += sum(sum(sample.mask) for sample in learned)
            spent += _spent(batch, seconds=real is not None)
            await asyncio.to_thread(learner.step, learned, rate=config.optimiser.rate_at(step - 1, steps))
            await engine.take(model.state_dict(), step)
            await rollout.consumed(batch)
            if step % options.every == 0 or step == steps:  # before the next batch is begun
                rewards[step], cost[step] = await evaluated(), round(spent, 1)
                print(f"seed {seed}, {'trees' if branching else 'independent'}: {rewards}", file=sys.stderr, flush=True)
            await rollout.published(step)
    engine.close()
    return {"reward": rewards, "cost": cost, "tokens": tokens}


def _spent(batch: Batch, *, seconds: bool) -> float:
    """Of the turns that were played for it, those that trajectories share once."""
    own = [turn for item in batch.trajectories for turn in item.turns[item.inherited :]]
    if seconds:
        return sum(turn.exec_end - turn.exec_start for turn in own)
    return float(len(own) + sum(not item.lineage for item in batch.trajectories))


def compared(trees: dict[str, Any], independent: dict[str, Any]) -> dict[str, Any]:
    last = max(independent["reward"])
    target, spent, complete = independent["reward"][last], independent["cost"][last], trees["cost"][last]
    reached = [step for step in trees["reward"] if step and trees["reward"][step] >= target]
    return {
        "independent_reward": round(target, 4),
        "trees_reward": round(trees["reward"][last], 4),
        "equal_cost_reward": round(_at(complete, independent["cost"], independent["reward"]), 4),
        "share": round(complete / spent, 3),
        "token_share": round(trees["tokens"] / independent["tokens"], 3),
        "share_to_reach": round(trees["cost"][min(reached)] / spent, 3) if reached else None,
    }


def _at(spent: float, cost: Mapping[int, float], reward: Mapping[int, float]) -> float:
    """The reward when so much had been spent."""
    for before, after in pairwise(cost):
        if spent <= cost[after]:
            part = (spent - cost[before]) / (cost[after] - cost[before])
            return reward[before] + part * (reward[after] - reward[before])
    return reward[max(reward)]


async def measure(directory: Path, options: argparse.Namespace, real: Any = None) -> dict[str, Any]:
    """Both ways, for each seed."""
    torch.set_num_threads(1)
    example, runs = Example.of(options.example), []
    for seed in options.seeds:
        result = {}
        for way, branching in (("independent", None), ("trees", Branching(roots=2, by=options.by, every=1))):
            result[way] = await learn(example, directory / f"{way}-{seed}", seed, options, branching, real)
        runs.append({"seed": seed, **result, **compared(result["trees"], result["independent"])})
    if len(runs) == 1:
        return {"tree_learning": runs}
    pairs = [run["trees_reward"] - run["independent_reward"] for run in runs]
    return {"tree_learning": runs, "difference": difference(pairs)}


def difference(pairs: Sequence[float]) -> dict[str, float]:
    """The mean over seeds of what trees earn more, and the 95 % interval of Student's t (of scipy, the extra `dev`)."""
    from scipy import stats

    mean = fmean(pairs)
    low, high = stats.t.interval(0.95, len(pairs) - 1, loc=mean, scale=stats.sem(pairs))
    return {"mean": round(mean, 4), "low": round(float(low), 4), "high": round(float(high), 4)}
