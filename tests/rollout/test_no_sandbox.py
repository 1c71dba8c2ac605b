"""Environments without a sandbox: no host is requested anything, and what looks for one is theirs to answer for."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from rollout.decide.blame import Blame, Cause, EpisodePhase, blame
from rollout.engine.client import Sampling
from rollout.environments.base import Environment, Observation
from rollout.episode.manager import EpisodeManager
from rollout.episode.prepared import PreparedStates
from rollout.episode.spec import EpisodeSpec
from rollout.messages import Trajectory
from rollout.rewards import reward
from rollout.rewards.service import RewardService
from sandbox.paths import CHECKOUT
from sandbox.testing import host
from tests.support.rollout_fakes import END, Letters, ScriptedEngine

SAMPLING = Sampling(max_tokens=64, stop_token_ids=[END])


@reward(forks=False)
def right(final: Any) -> float:
    return float(final.turns[-1].action == final.opening)


@reward
async def looks(final: Any) -> float:
    return float((await final.sandbox.exec("true")).exit_code == 0)


class Echo(Environment):
    """All defaults but the image."""

    image = ""
    reward = right()

    async def reset(self, sandbox: Any, seed: int) -> Observation:
        return Observation("four")

    async def step(self, sandbox: Any, action: str) -> Observation:
        return Observation("", done=True)


class Runs(Echo):
    async def step(self, sandbox: Any, action: str) -> Observation:
        return Observation((await sandbox.exec(action)).text, done=True)


class Writes(Echo):
    async def reset(self, sandbox: Any, seed: int) -> Observation:
        await sandbox.files.write("/a", "b")
        return Observation("four")


class Forked(Echo):
    reward = looks()


class NoHost:
    """Fails a test that requests anything of it, but what becomes of a sandbox."""

    async def get(self, sandbox: str) -> Any:
        from sandbox.errors import NotFound

        raise NotFound(f"no sandbox {sandbox}")


async def play(kind: type[Environment], directory: Path) -> Trajectory:
    async with RewardService(NoHost()) as rewards:  # type: ignore[arg-type]
        episodes = EpisodeManager(
            environment=kind,
            host=NoHost(),
            engine=ScriptedEngine(["four"]),
            tokenizer=Letters(),
            prepared=PreparedStates(NoHost(), directory),  # type: ignore[arg-type]
            rewards=rewards,
        )
        return await episodes.play(EpisodeSpec(prompt="p", seed=1), SAMPLING)


async def test_it_is_played_and_scored_without_a_host(tmp_path: Path) -> None:
    assert Echo.shares_reset
    played = await play(Echo, tmp_path)
    assert (played.status, played.failure, played.reward) == ("completed", None, 1.0)


@pytest.mark.parametrize(
    ("kind", "phase"), [(Runs, EpisodePhase.STEP), (Writes, EpisodePhase.RESET), (Forked, EpisodePhase.SCORE)]
)
async def test_what_looks_for_a_sandbox_is_to_blame_for_it(
    kind: type[Environment], phase: EpisodePhase, tmp_path: Path
) -> None:
    """Nobody repeats it until the host would have one."""
    failure = (await play(kind, tmp_path)).failure
    assert failure is not None and (failure.phase, failure.cause) == (phase, Cause.RAISED)
    assert blame(failure) is Blame.ENVIRONMENT and "has no sandbox" in failure.message


ROWED = """
from rollout import Environment, Observation

class Rowed(Environment):
    image = ""

    async def reset(self, sandbox, seed):
        self.worth = self.row["worth"]
        return Observation(text=self.row["text"])

    async def step(self, sandbox, action):
        return Observation(text="", reward=self.worth, done=True)
"""


async def test_rows_are_evaluated_from_the_command_line(tmp_path: Path) -> None:
    """Each once, without a run."""
    (tmp_path / "rowed.py").write_text(ROWED)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": "a", "worth": n / 4}) + "\n" for n in range(3)))
    argv = ["-m", "pagurus", "eval", "rowed.py", "--model", "null", "--rows", "rows.jsonl", "--json"]
    async with host.FakeHost() as fake:
        environment = {**os.environ, "PAGURUS_HOST": fake.address, "PYTHONPATH": str(CHECKOUT)}
        process = await asyncio.create_subprocess_exec(
            sys.executable, *argv, cwd=tmp_path, env=environment, stdout=asyncio.subprocess.PIPE
        )
        said, _ = await process.communicate()
    result = json.loads(said)
    assert (result["seeds"], result["reward"]) == (3, 0.25)
