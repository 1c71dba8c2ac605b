"""Trajectories in real sandboxes that are killed through the operating system; a fake held to the same contract."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from rollout import Trajectory, run_trajectory
from rollout.chaos import Inject, When, kill_sandbox
from rollout.engine.client import Sampling
from sandbox.errors import SandboxDead
from tests.support.daemon_host import IMAGE, Daemon, missing
from tests.support.rollout_fakes import END, SCRIPT, FakeHost, Letters, Notebook, ScriptedEngine

NO_DAEMON = pytest.mark.skipif(bool(missing()), reason=missing())
SAMPLING = Sampling(max_tokens=64, stop_token_ids=[END])


@pytest_asyncio.fixture(params=["fake", pytest.param("real", marks=NO_DAEMON)])
async def host(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    if request.param == "fake":
        yield FakeHost()
    else:
        async with request.getfixturevalue("daemon").client() as client:
            yield client


def killer(host: Any) -> Any:
    return host.kill if isinstance(host, FakeHost) else kill_sandbox


async def play(host: Any, env: Any, script: list[str], inject: Inject | None = None) -> Trajectory:
    sandbox = await host.create(IMAGE)
    try:
        engine = ScriptedEngine(script)
        return await run_trajectory(env, sandbox, engine, Letters(), seed=1, sampling=SAMPLING, inject=inject)
    finally:
        await sandbox.remove()


async def test_the_contract_that_the_guard_relies_on(host: Any) -> None:
    sandbox = await host.create(IMAGE)
    try:
        result = await sandbox.exec("echo a >> f")
        assert result.verdict == "files" and (await sandbox.captured(result)).id == result.checkpoint
        poll = await sandbox.exec("cat f")
        assert (poll.verdict, poll.checkpoint, poll.text) == ("none", result.checkpoint, "a\n")
        assert (await sandbox.exec("true", ends_turn=False)).checkpoint is None
        assert await killer(host)(sandbox.id, 0.0) == 1
        with pytest.raises(SandboxDead):
            await sandbox.exec("cat f")
        restored = await sandbox.restore(verify=True)
        assert (restored.checkpoint, restored.verified, restored.differences) == (result.checkpoint, True, [])
        assert (await sandbox.exec("cat f")).text == "a\n"
        assert [info.id for info in await sandbox.tree()][-1] == result.checkpoint
    finally:
        await sandbox.remove()


@pytest.mark.parametrize("when", ["between", "command", "checkpoint"])
@pytest.mark.parametrize("turn", [1, 3])
async def test_a_kill_changes_nothing_in_a_trajectory(host: Any, turn: int, when: When) -> None:
    undisturbed = await play(host, Notebook(), SCRIPT)
    injected = await play(host, Notebook(), SCRIPT, Inject(turn, when, kill=killer(host)))
    assert (injected.status, injected.reason, injected.reward) == ("completed", "", 1.0)
    assert injected.tokens == undisturbed.tokens
    assert injected.injected == injected.killed == injected.recovered_equal == 1


class Counting(Notebook):
    """Its service counts in memory alone: only a restored process can go on counting."""

    async def step(self, sandbox: Any, action: str) -> Any:
        observation = await super().step(sandbox, action)
        return observation.__class__(
            observation.text, float(self.turns == 4 and "3" in observation.text), self.turns == 4
        )


SERVICE = [
    "mkfifo ask answer; (n=0; while read x < ask; do n=$((n+1)); echo $n > answer; done) > /dev/null 2>&1 &",
    "echo x > ask; cat answer",
    "echo x > ask; cat answer",
    "echo x > ask; cat answer",
]


@NO_DAEMON
@pytest.mark.parametrize("when", ["between", "checkpoint"])
async def test_a_running_service_survives_the_death_of_its_sandbox(daemon: Daemon, when: When) -> None:
    async with daemon.client() as host:
        trajectory = await play(host, Counting(), SERVICE, Inject(3, when))
    assert (trajectory.status, trajectory.reason, trajectory.reward) == ("completed", "", 1.0)
    assert trajectory.killed == trajectory.recovered_equal == 1
    assert trajectory.turns[0].verdict in ("processes", "both")
