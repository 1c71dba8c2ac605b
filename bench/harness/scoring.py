"""Scoring beside the rollout, a part of ``pagurus bench branching``: slots, old states, functions that misbehave.

Episodes are played, whose end a suite of tests scores in a fork, and scored anew; meanwhile trajectories are scored by
functions of which some hang, die or say nonsense at first.

`score_slot_seconds_saved`: seconds for which the sandboxes would have been occupied had they been scored in place, less
those until they were free; `slot_free_ms` is the median of the latter, beside their 95th and 99th percentile and the
longest. `rescore_without_rollout`: the kept states were scored again, with the same rewards, by a service that can play
nothing. `scorings_lost` and `scorings_wrong` count those without a score, and with another one than is right.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

from bench.harness.own_daemon import IMAGE, BenchHost
from bench.harness.reward_functions import tests_pass, unsure
from rollout.decide.keeping import KeepPlan
from rollout.engine.chat import Characters
from rollout.engine.client import Sampling
from rollout.engine.script import Script
from rollout.environments.base import Environment, Observation
from rollout.episode.manager import EpisodeManager
from rollout.episode.retained import RetainedStates
from rollout.episode.spec import EpisodeSpec
from rollout.labels import LabellingClient
from rollout.messages import FinalState, Trajectory
from rollout.rewards import Score
from rollout.rewards.rescore import rescore
from rollout.rewards.service import RewardService
from rollout.store.disk import DiskThread
from rollout.store.retained import RetainedLedger


class Suite(Environment):
    """Ends at once; what is left is scored in a fork."""

    image = IMAGE

    async def reset(self, sandbox: Any, seed: int) -> Observation:
        await sandbox.files.write("/serve.py", "work\n")
        return Observation("ready")

    async def step(self, sandbox: Any, action: str) -> Observation:
        await sandbox.exec(f"echo {action} >> /serve.py")
        return Observation("", done=True)


async def measure(bench: BenchHost, directory: Path, *, scored: int, suite: float, unruly: int) -> dict[str, Any]:
    """Both at once."""
    result = await asyncio.gather(_forks(bench, directory, scored, suite), _unruly(directory, unruly))
    return result[0] | result[1]


async def _forks(bench: BenchHost, directory: Path, scored: int, suite: float) -> dict[str, Any]:
    """Slots that are free while suites run, and old states that are scored anew."""
    Suite.reward = tests_pass(seconds=suite)
    engine, sampling = Script(), Sampling(max_tokens=8)
    async with bench.client() as client:
        host = LabellingClient(client, directory / "scored")
        disk, ledger = DiskThread(), RetainedLedger(directory / "kept")
        async with RewardService(host) as rewards:
            episodes = EpisodeManager(
                environment=Suite,
                host=host,
                engine=engine,
                tokenizer=Characters(),
                rewards=rewards,
                retained=RetainedStates(host, ledger, disk, KeepPlan(trajectories=scored)),
            )
            specs = [EpisodeSpec(prompt=f"s{seed}", seed=seed) for seed in range(scored)]
            played = [await episodes.run(spec, sampling) for spec in specs]
            freed = [trajectory.freed_s for trajectory in played]
            began = time.monotonic()
            for trajectory in played:
                await episodes.score(trajectory)
            scored_s = time.monotonic() - began
        async with RewardService(host) as rewards:
            redo = await rescore(rewards, played)
        await host.remove(await host.retained())
        disk.close()
        ledger.close()
    right = all(item.score is not None and item.score.reward == 1.0 for item in played)
    right = right and all(item.after == item.before for item in redo)
    shares = statistics.quantiles(freed, n=100, method="inclusive")
    return {
        "score_slot_seconds_saved": round(scored_s - sum(freed), 2),
        "slot_free_ms": round(1000 * statistics.median(freed), 1),
        "slot_free_ms_p95": round(1000 * shares[94], 1),
        "slot_free_ms_p99": round(1000 * shares[98], 1),
        "slot_free_ms_worst": round(1000 * max(freed), 1),
        "rescore_without_rollout": right,
    }


async def _unruly(directory: Path, number: int) -> dict[str, Any]:
    """Scorings by functions some of which hang, die or lie at first."""
    (directory / "notes").mkdir()
    by = unsure(notes=str(directory / "notes"))
    ended = [
        Trajectory(opening=str(n), final=FinalState(scoring=by, seed=n // 40, checkpoint="")) for n in range(number)
    ]
    began = time.monotonic()
    async with RewardService(None) as rewards:  # type: ignore[arg-type]  # these look into no sandbox
        reported = await asyncio.gather(*(rewards.score(item) for item in ended), return_exceptions=True)
    lost = sum(isinstance(item, BaseException) for item in reported)
    wrong = sum(isinstance(item, Score) and item.reward != float(n % 2 == 0) for n, item in enumerate(reported))
    return {
        "scorings": number,
        "scorings_lost": lost,
        "scorings_wrong": wrong,
        "scoring_tries": rewards.tries,
        "scorings_s": round(time.monotonic() - began, 1),
    }
