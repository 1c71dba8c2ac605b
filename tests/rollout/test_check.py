"""`pagurus env check`: what is right is not complained of, and each wrong is named."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any

import pytest

from rollout import Environment, Observation
from rollout.env_check import NULL, ORACLE, RANDOM, CheckReport, check, needs_sandbox
from rollout.environments.gym import gym_environment
from rollout.environments.harbor import environment_of, tasks_of
from rollout.labels import LabellingClient
from sandbox import Client
from tests.rollout.test_harbor import write
from tests.support import reward_functions as functions
from tests.support.daemon_host import missing

real = pytest.mark.skipif(bool(missing()), reason=missing())


def wrong(result: CheckReport) -> dict[str, str]:
    assert result.right == (not any(item.wrong for item in result.findings))
    return {item.what: item.observed for item in result.findings if item.wrong}


async def test_gymnasium_needs_no_sandbox_and_nothing_is_wrong() -> None:
    kind = gym_environment("FrozenLake-v1", names=("left", "down", "right", "up"), render_mode="ansi", turns=10)
    assert not needs_sandbox(kind, range(2))
    reported: list[str] = []
    result = await check(kind, None, range(2), report=reported.append)
    assert reported[:2] == ["resets and forks of seed 0, 1 of 2", "resets and forks of seed 1, 2 of 2"]
    assert reported[-1] == "random agent plays seed 1, 2 of 2"
    assert wrong(result) == {} and 20 <= result.costs.turns <= 40


class Wrong(Environment):
    """Each reset is another one, nothing is as good as anything, and it cannot stand an empty action."""

    image = ""

    async def reset(self, sandbox: Any, seed: int) -> Observation:
        self.drawn = secrets.token_hex(4)
        return Observation(f"{self.drawn} {seed}")

    async def step(self, sandbox: Any, action: str) -> Observation:
        if not action.strip():
            raise ValueError("empty")
        return Observation("", reward=float(action == "exit"), done=action != "left")

    def oracle(self, seed: int) -> list[str]:
        return ["left", "right"]


async def test_each_wrong_is_named() -> None:
    left: list[asyncio.subprocess.Process] = []

    class Leaving(Wrong):
        async def step(self, sandbox: Any, action: str) -> Observation:
            if not left:
                left.append(await asyncio.create_subprocess_exec("sleep", "1000"))
            return await super().step(sandbox, action)

    try:
        result = wrong(await check(Leaving, None, range(8)))
    finally:
        left[0].kill()
        await left[0].wait()
    assert result["reset of seed 0"] == "two differ in: first observation, state of the object"
    assert "cannot be solved" in result[ORACLE] and "doing nothing" in result[NULL] and "empty" in result[RANDOM]
    assert result["left behind"] == f"process {left[0].pid} sleep"


class Served(Environment):
    """A file and a program; the last letter counts."""

    reward = functions.lines(target=1)
    noise = ""

    async def reset(self, sandbox: Any, seed: int) -> Observation:
        await sandbox.exec(f"sleep 1000 > /dev/null 2>&1 & {self.noise}")
        return Observation("write")

    async def step(self, sandbox: Any, action: str) -> Observation:
        await sandbox.exec(["sh", "-c", 'echo "$0" >> f', action.replace("\0", "") or "-"])
        return Observation("written", done=True)


class Drawn(Served):
    noise = "head -c 8 /dev/urandom | tee /drawn | md5sum >> /etc/hosts; true"
    shares_reset = False


@real
async def test_real_sandboxes_are_compared_and_none_is_left(host: Client, tmp_path: Path) -> None:
    labelled = LabellingClient(host, tmp_path / "run")
    result = await check(Served, labelled, range(1))
    assert list(wrong(result)) == [NULL]  # one line is all that it takes
    assert result.costs.turns == 2 and "files" in result.costs.verdicts and result.costs.frozen_ms > 0
    assert wrong(await check(Drawn, labelled, range(1)))["reset of seed 0"] == "two differ in: /drawn, /etc/hosts"
    assert not await host.sandboxes()


@real
async def test_a_folder_of_tasks_is_checked(host: Client, tmp_path: Path) -> None:
    write(tmp_path / "tasks/file", "write", "echo done > /root/work\n", "grep -x done /root/work\nearn 1.0\n")
    kind = environment_of(tasks_of(tmp_path / "tasks"))
    result = await check(kind, LabellingClient(host, tmp_path / "run"), range(1))
    assert wrong(result) == {} and {item.what: item.observed for item in result.findings}[ORACLE].startswith(
        "reward 1.000"
    )
