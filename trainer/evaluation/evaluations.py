"""Evaluations of a run: after which steps, their figures, the best version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rollout import Trajectory
from rollout.background_evaluation import HELD_OUT, EvaluationOrder
from rollout.environments.mixture import Mixture
from rollout.evaluate import scored
from rollout.plan import read_plan
from sandbox.errors import EngineFailed
from trainer.config import TrainConfig
from trainer.evaluation.best import BestKeeper
from trainer.evaluation.queue import EvaluationQueue
from trainer.reports import report
from trainer.reports.metrics import MetricsRecorder, read_lines

FIGURE = "reward_held_out"
NOTABLE = 0.25  # share of episodes that ended at a limit of tokens, from which on that is said


class Evaluations:
    """``await evaluations.record("after step 4", trajectories, step=4, version=4)``"""

    def __init__(
        self,
        run: Path,
        config: TrainConfig,
        environments: Mixture,
        recorder: MetricsRecorder,
        totals: report.Totals,
        say: Callable[[str], None],
    ):
        self._run, self._config, self._environments = run, config, environments
        self._recorder, self._totals, self._say = recorder, totals, say
        self._best = BestKeeper(run, config.evaluation.best)
        self.queue = EvaluationQueue(run, self._played)

    def due(self, step: int) -> bool:
        """Whether the policy after this step is evaluated."""
        every = self._config.evaluate_every
        return step in (0, self._config.steps) or bool(every and step % every == 0)

    def missing(self, step: int) -> bool:
        """Whether an evaluation in the background that is due was neither begun nor recorded; takes over what a trainer
        before us recorded. Blocks."""
        recorded = self._recorded()
        self._totals.reward_before = recorded.get(0, {}).get(FIGURE)
        self._totals.reward_after = recorded.get(self._config.steps, {}).get(FIGURE)
        return self.due(step) and step not in recorded and not self.queue.has(step)

    def order(self, step: int, version: int) -> EvaluationOrder:
        """What is played in the background of this version."""
        settings = self._config.evaluation
        return EvaluationOrder(
            run=str(self._run),
            step=step,
            version=version,
            held_out=self._environments.held_out(self._config.held_out),
            samples=settings.samples,
            sampling=settings.of(read_plan(self._run).config.sampling),
            suites=list(self._config.suites),
            concurrency=settings.concurrency,
        )

    async def record(
        self,
        name: str,
        trajectories: Sequence[Trajectory],
        *,
        step: int,
        version: int,
        model: Path | None = None,
        suites: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        """Figures of held-out episodes that were played with a version, and of `suites` by name. `model`: a directory
        that has it, else it is taken from the run's weights. Raises EngineFailed when none could be scored."""
        failed = [str(item.failure) for item in trajectories if not item.scored]
        why = f"; {len(failed)} failed, such as {failed[0]}" if failed else ""
        if len(failed) == len(trajectories):
            raise EngineFailed(f"no held-out episode could be completed{why}", hint=f"see {self._run}/rollout.log")
        self._totals.add(trajectories)
        await asyncio.to_thread(self._recorder.turns, step, trajectories)
        own = summary_of(trajectories, self._config.evaluation.samples)
        metrics: dict[str, Any] = {FIGURE: own.pop("reward"), "held_out_episodes": int(own.pop("episodes"))}
        metrics |= {f"held_out_{key}": value for key, value in own.items()}
        if self._config.mixture:
            metrics |= report.by_part("reward_held_out_by_part", trajectories, self._environments.name)
        metrics |= report.by_scorer("reward_held_out_by_scorer", trajectories)
        metrics |= {"suites": dict(suites)} if suites else {}
        metrics["held_out_cut_share"] = cut = report.cut_share(trajectories)
        if cut > NOTABLE:
            why += f"; {cut:.0%} ended at sampling.max_tokens or max_length"
        await asyncio.to_thread(self._recorder.step, step, metrics)
        if step == 0:
            self._totals.reward_before = metrics[FIGURE]
        if step == self._config.steps:
            self._totals.reward_after = metrics[FIGURE]
        await self._consider(metrics, step, version, model)
        self._say(f"{name}: {metrics[FIGURE]:.3f}, mean of {metrics['held_out_episodes']} episodes{why}")

    async def _consider(self, metrics: Mapping[str, object], step: int, version: int, model: Path | None) -> None:
        considered = partial(self._best.consider, metrics, step=step, version=version, model=model)
        if await asyncio.to_thread(considered):
            self._say(f"version {version} is the best by {self._best.figure}: {self._run / 'best'}")

    async def _played(self, order: EvaluationOrder, model: Path, episodes: Mapping[str, Sequence[Trajectory]]) -> None:
        """Record an evaluation of the background, unless a trainer has that was killed after that."""
        recorded = await asyncio.to_thread(self._recorded)
        if order.step in recorded:
            await self._consider(recorded[order.step], order.step, order.version, model)
            return
        suites = {suite.name: summary_of(episodes[suite.name], suite.samples) for suite in order.suites}
        name = f"held-out reward after step {order.step}"
        own = episodes[HELD_OUT]
        await self.record(name, own, step=order.step, version=order.version, model=model, suites=suites)

    def _recorded(self) -> dict[int, dict[str, Any]]:
        """What was recorded of evaluations, by the step."""
        return {line["step"]: line for line in read_lines(self._run / "metrics.jsonl") if FIGURE in line}


def summary_of(trajectories: Sequence[Trajectory], samples: int) -> dict[str, float]:
    """Mean reward of those that were scored, their number, and pass@k where each seed was played `samples` times.

    Trajectories of a seed follow one another. Pure.
    """
    rewards = [trajectory.reward for trajectory in trajectories if trajectory.scored]
    result = {"episodes": float(len(rewards))}
    if rewards:
        result["reward"] = sum(rewards) / len(rewards)
    if samples > 1:
        of_seed = [trajectories[at : at + samples] for at in range(0, len(trajectories), samples)]
        result[f"pass_at_{samples}"] = scored(of_seed).rates[-1].mean
    return result
