"""Groups, the staleness bound, retries, and the books."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest_asyncio

from rollout import Batch, Faults, Observation, RolloutConfig, RolloutController
from rollout.engine.client import Sampling
from sandbox.errors import NoSpace
from tests.support.rollout_fakes import END, SCRIPT, FakeHost, Letters, Notebook, ScriptedEngine

CONFIG = RolloutConfig(groups=2, size=3, concurrency=64, sampling=Sampling(max_tokens=32, stop_token_ids=[END]))
Make = Callable[..., RolloutController]


@pytest_asyncio.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[RolloutController] = []

    def build(**options: Any) -> RolloutController:
        options = {
            "environment": Notebook,
            "host": FakeHost(),
            "engine": ScriptedEngine(SCRIPT),
            "tokenizer": Letters(),
            "config": CONFIG,
            "folder": tmp_path,
            **options,
        }
        made.append(RolloutController(**options))
        return made[-1]

    yield build
    for controller in made:
        await controller.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - a turn of the loop, not a time
            await asyncio.sleep(0)


async def train(rollout: RolloutController, batch: Batch) -> None:
    await rollout.consumed(batch)
    rollout.engine.version = rollout.version + 1  # type: ignore[attr-defined]
    await rollout.published(rollout.version + 1)


async def test_batches_are_complete_groups_and_prompts_are_consumed_once(make: Make) -> None:
    rollout = make()
    await rollout.start()
    seen: list[str] = []
    for step in range(4):
        batch = await rollout.next_batch()
        assert batch.version == step and [len(group.trajectories) for group in batch.groups] == [3, 3]
        assert all(group.oldest is not None and step - group.oldest <= 1 for group in batch.groups)
        seen += [group.prompt for group in batch.groups]
        await train(rollout, batch)
    assert len(set(seen)) == 8
    counts = rollout.ledger.counts()
    assert counts["consumed"] == 8 and sum(counts.values()) == rollout.ledger.issued()
    assert rollout.statistics()["over_stale_aborted"] == 0


async def test_nothing_starts_beyond_the_bound(make: Make) -> None:
    engine = ScriptedEngine(SCRIPT)
    engine.gate = asyncio.Event()
    rollout = make(engine=engine)
    await rollout.start()
    await until(lambda: len(engine.prompts) == 12)  # two batches of two groups of three
    for _ in range(200):
        await asyncio.sleep(0)
    assert rollout.statistics()["groups_running"] == 4 and len(engine.prompts) == 12
    engine.gate.set()


async def test_over_stale_stragglers_are_aborted_and_played_anew(make: Make) -> None:
    """One group hangs while the trainer moves on twice."""
    hang = asyncio.Event()

    class Slow(Notebook):
        async def reset(self, sandbox: Any, seed: int) -> Observation:
            self.seed = seed
            return await super().reset(sandbox, seed)

        async def step(self, sandbox: Any, action: str) -> Observation:
            if self.seed == 1 and self.turns == 2:
                await hang.wait()
            return await super().step(sandbox, action)

    rollout = make(environment=Slow)
    await rollout.start()
    prompts: list[str] = []
    for _ in range(2):
        batch = await rollout.next_batch()
        prompts += [group.prompt for group in batch.groups]
        await train(rollout, batch)
    assert "p000001" not in prompts
    assert rollout.statistics()["over_stale_aborted"] == 1
    hang.set()
    while "p000001" not in prompts:
        batch = await rollout.next_batch()
        assert all(rollout.version - (group.oldest or 0) <= 1 for group in batch.groups)
        prompts += [group.prompt for group in batch.groups]
        await train(rollout, batch)
    assert len(prompts) == len(set(prompts))


async def test_failures_of_the_platform_are_retried_and_counted(make: Make) -> None:
    host = FakeHost()
    host.failures = [NoSpace("pool is full") for _ in range(2)]
    rollout = make(host=host)
    await rollout.start()
    batch = await rollout.next_batch()
    assert {t.status for t in batch.trajectories} == {"completed"}
    assert rollout.statistics()["trajectories_retried"] == 2
    assert rollout.statistics()["trajectories_lost"] == 0


async def test_a_bug_in_the_environment_is_data_and_its_prompt_is_given_up(make: Make) -> None:
    class Buggy(Notebook):
        async def reset(self, sandbox: Any, seed: int) -> Observation:
            if seed == 0:
                raise KeyError("oops")
            return await super().reset(sandbox, seed)

    rollout = make(environment=Buggy)
    await rollout.start()
    batch = await rollout.next_batch()
    assert "p000000" not in [group.prompt for group in batch.groups]
    await until(lambda: rollout.ledger.counts()["given_up"] == 1)
    assert rollout.ledger.reasons() == {"environment: KeyError: 'oops'": 1}


async def test_a_time_out_is_data_in_its_group(make: Make) -> None:
    class Hanging(Notebook):
        async def step(self, sandbox: Any, action: str) -> Observation:
            if self.turns == 3:
                await asyncio.Event().wait()
            return await super().step(sandbox, action)

    config = CONFIG.__class__(groups=1, size=2, sampling=CONFIG.sampling, trajectory_timeout=0.5)
    host = FakeHost()
    rollout = make(environment=Hanging, config=config, host=host)
    await rollout.start()
    (group,) = (await rollout.next_batch()).groups
    assert [(t.status, t.reason) for t in group.trajectories] == [("truncated", "timeout: 0.5 s")] * 2
    assert all(sum(t.mask) > 0 for t in group.trajectories)
    assert all(sandbox.removed for sandbox in host.sandboxes[:2])


async def test_a_stopped_rollout_resumes_with_every_prompt(make: Make) -> None:
    rollout = make()
    await rollout.start()
    batch = await rollout.next_batch()
    await train(rollout, batch)
    second = await rollout.next_batch()  # claimed for step 1, never saved
    await rollout.stop()
    again = make(step=1, version=1)
    counts = again.ledger.counts()
    assert counts["consumed"] == 2 and counts["claimed"] == counts["in_flight"] == 0
    assert sum(counts.values()) == again.ledger.issued()
    await again.start()
    third = await again.next_batch()
    assert [group.prompt for group in third.groups] == [group.prompt for group in second.groups]


async def test_evaluation_touches_no_books(make: Make) -> None:
    rollout = make(faults=Faults(share=1.0))
    trajectories = await rollout.evaluate([100, 101])
    assert [t.reward for t in trajectories] == [1.0, 1.0] and rollout.ledger.issued() == 0


async def test_faults_are_recovered_and_booked(make: Make) -> None:
    host = FakeHost()
    rollout = make(host=host, faults=Faults(share=0.5, turns=(0, 3), kill=host.kill))
    await rollout.start()
    batch = await rollout.next_batch()
    assert {t.reward for t in batch.trajectories} == {1.0}
    statistics = rollout.statistics()
    assert statistics["struck"] == statistics["killed"] == statistics["recovered_equal"] > 0
