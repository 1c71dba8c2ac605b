"""``python -m rollout.background_evaluation DIRECTORY``: an evaluation of one version during training.

Guarantee: the result is on disk whole or not at all. After a kill the next process plays all of it again, and first
removes the sandboxes of the one before.

::

    DIRECTORY/model, order.json ──▶ engine ⇄ sandboxes ──▶ DIRECTORY/result.msgpack
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rollout.engine import gpus
from rollout.engine.client import Sampling
from rollout.environments import directory as task
from rollout.environments.images import build_missing, needed
from rollout.episode.manager import EpisodeManager
from rollout.evaluate import play_all
from rollout.labels import run_client
from rollout.messages import Trajectory
from rollout.plan import RolloutPlan, SuitePlan, read_plan
from rollout.played import engine_of, with_stops
from rollout.service.engines import launch
from rollout.store.lock import own, status_of
from sandbox import durable, structs
from sandbox.termination import termination_signals

MODEL, ORDER, RESULT, LOCK = "model", "order.json", "result.msgpack", "evaluation.lock"
HELD_OUT = ""  # name of the suite of the run's own held-out episodes


class EvaluationOrder(msgspec.Struct, frozen=True, kw_only=True):
    """``order.json``. How episodes are played is in the plan of the run."""

    run: str
    step: int
    version: int
    held_out: list[int]  # seeds of the run's own environment
    samples: int  # of each of them
    sampling: Sampling
    suites: list[SuitePlan]
    concurrency: int  # sandboxes at once


async def evaluate(directory: Path, order: EvaluationOrder) -> dict[str, list[Trajectory]]:
    """The episodes by the name of their suite, samples of a seed one after another."""
    run = Path(order.run)
    plan = read_plan(run)
    os.nice(plan.nice)
    os.environ.update(gpus.environment(plan.devices.evaluation, gpus.visible()))
    environment = plan.environments(run).environment
    async with engine_of(
        str(directory / MODEL),
        environment,
        run_client,
        launch=launch(plan, gpu=bool(plan.devices.evaluation)),
        length=plan.config.limits.max_length,
        build=lambda host: build_missing(host, environment().builds()),
        label=str(directory),
    ) as episodes:
        episodes.limits, episodes.scoring = plan.config.limits, plan.scoring
        sampling = with_stops(order.sampling, episodes)
        result = {HELD_OUT: await _played(episodes, order, sampling, order.held_out, order.samples)}
        for suite in order.suites:
            await _enter(episodes, suite, plan)
            seeds = range(suite.episodes)
            result[suite.name] = await _played(episodes, order, sampling, seeds, suite.samples)
        return result


async def _played(
    episodes: EpisodeManager, order: EvaluationOrder, sampling: Sampling, seeds: Sequence[int], samples: int
) -> list[Trajectory]:
    return await play_all(episodes, seeds, sampling, samples=samples, concurrency=order.concurrency)


async def _enter(episodes: EpisodeManager, suite: SuitePlan, plan: RolloutPlan) -> None:
    """Have the suite's environment played, scored by its own reward."""
    loaded = await asyncio.to_thread(task.load, Path(suite.task))
    await build_missing(episodes.host.client, needed(loaded.environment, range(suite.episodes)))
    episodes.environment, episodes.scoring = loaded.environment, lambda reward: reward


async def _until_ended(directory: Path, order: EvaluationOrder) -> dict[str, list[Trajectory]]:
    """`evaluate`; a signal that ends the process cancels it, so that its engine and sandboxes go first.

    A second signal does not cut that short.
    """
    this = asyncio.current_task()
    assert this is not None
    for number in termination_signals():
        asyncio.get_running_loop().add_signal_handler(number, lambda: this.cancelling() or this.cancel())
    return await evaluate(directory, order)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rollout.background_evaluation", description="One evaluation.")
    parser.add_argument("directory", type=Path, help="with a model and an order")
    directory: Path = parser.parse_args(arguments).directory.resolve()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    structs.learn()

    def work() -> None:
        with own(directory, LOCK):
            order = msgspec.json.decode((directory / ORDER).read_bytes(), type=EvaluationOrder)
            result = asyncio.run(_until_ended(directory, order))
            durable.publish(directory / RESULT, msgspec.msgpack.encode(result))

    try:
        return status_of(work)
    except asyncio.CancelledError:
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
