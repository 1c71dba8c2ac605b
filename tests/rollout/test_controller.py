"""Groups, the staleness bound, retries, and the books."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from rollout import Batch, EpisodeLimits, Faults, Observation, RolloutConfig, RolloutController
from rollout.control.batch_request import NoMorePrompts
from rollout.decide import breaker
from rollout.decide.view import Stop, WaitReason
from rollout.engine.client import Generation, Sampling, WeightSpan
from rollout.store import decisions
from rollout.store.samples import SampleStore, StaleOwner
from rollout.store.status import read_status
from sandbox.errors import EngineFailed, NoSpace, RestoreFailed
from tests.support.rollout_fakes import END, SCRIPT, FakeHost, FakeSandbox, Letters, Notebook, ScriptedEngine

CONFIG = RolloutConfig(groups=2, size=3, concurrency=64, sampling=Sampling(max_tokens=32, stop_token_ids=[END]))
Make = Callable[..., RolloutController]


def configured(**changes: Any) -> RolloutConfig:
    return RolloutConfig(**{name: getattr(CONFIG, name) for name in CONFIG.__struct_fields__} | changes)


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
            "directory": tmp_path,
            **options,
        }
        made.append(RolloutController(**options))
        return made[-1]

    yield build
    for controller in made:
        await controller.stop()
    replayed = decisions.replay(tmp_path)  # of every test: what was decided is what would be decided again
    assert replayed.identical == replayed.decisions, replayed.first_difference


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - a turn of the loop, not a time
            await asyncio.sleep(0)


async def train(rollout: RolloutController, batch: Batch) -> None:
    await rollout.consumed(batch)
    rollout.episodes.engine.version = rollout.version + 1  # type: ignore[attr-defined]
    await rollout.published(rollout.version + 1)


class Slow(Notebook):
    """The episode of seed 1 waits in its third turn until it is let go."""

    gate: asyncio.Event

    async def reset(self, sandbox: Any, seed: int) -> Observation:
        self.seed = seed
        return await super().reset(sandbox, seed)

    async def step(self, sandbox: Any, action: str) -> Observation:
        if self.seed == 1 and self.turns == 2:
            await self.gate.wait()
        return await super().step(sandbox, action)


async def test_batches_are_whole_groups_and_prompts_are_consumed_once(make: Make) -> None:
    rollout = make()
    await rollout.start()
    observed: list[str] = []
    for step in range(4):
        batch = await rollout.next_batch()
        assert batch.version == batch.step == step and [len(group.trajectories) for group in batch.groups] == [3, 3]
        assert all(group.oldest is not None and step - group.oldest <= 1 for group in batch.groups)
        observed += [group.prompt for group in batch.groups]
        await train(rollout, batch)
    assert len(set(observed)) == 8
    account = rollout.store.account()
    assert account.consumed == 8
    parts = account.consumed + account.in_flight + account.queued + account.buffered + account.given_up
    assert parts == account.issued == rollout.store.issued()


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


async def test_the_trainer_waits_for_stragglers_and_no_prompt_starts_twice(make: Make) -> None:
    Slow.gate = asyncio.Event()
    rollout = make(environment=Slow)
    await rollout.start()
    await train(rollout, await rollout.next_batch())
    requested = asyncio.create_task(rollout.next_batch())
    await until(lambda: any("stragglers" in wait.reason for wait in rollout._waits))
    assert not requested.done()
    Slow.gate.set()
    batch = await requested
    assert "p000001" in [group.prompt for group in batch.groups]
    assert all(trajectory.start == 0 for trajectory in batch.trajectories)


class Held(ScriptedEngine):
    """Requests of seed 1 hang after their first token, which the weights of that time sampled, until they may go on."""

    def __init__(self) -> None:
        super().__init__(SCRIPT)
        self.let_go = asyncio.Event()

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "") -> Generation:
        version = self.version
        if Letters().decode(prompt_ids).startswith("seed 1\n"):
            await self.let_go.wait()
        generation = await super().generate(prompt_ids, sampling, request_id=request_id)
        return msgspec.structs.replace(generation, spans=[WeightSpan(version, 0, len(generation.token_ids))])


async def test_the_trainer_waits_for_an_answer_that_older_weights_have_begun(make: Make) -> None:
    engine = Held()
    rollout = make(engine=engine)
    await rollout.start()
    await train(rollout, await rollout.next_batch())
    requested = asyncio.create_task(rollout.next_batch())
    await until(lambda: any("stragglers" in wait.reason for wait in rollout._waits))
    engine.let_go.set()
    batch = await requested
    assert ("p000001", 0) in [(group.prompt, group.oldest) for group in batch.groups]


async def test_the_trainer_waits_for_stragglers_that_a_dead_process_left(make: Make) -> None:
    """Its successor cannot go on with them yet: the host does not answer."""

    class Away(FakeHost):
        back = asyncio.Event()

        async def get(self, sandbox: str) -> FakeSandbox:
            await self.back.wait()
            return await super().get(sandbox)

    Slow.gate = asyncio.Event()
    host = Away()
    first = make(environment=Slow, host=host)
    await first.start()
    await train(first, await first.next_batch())
    await until(lambda: first.statistics()["groups_buffered"] == 3)
    await first.stop(leave=True)

    second = make(environment=Slow, host=host, engine=ScriptedEngine(SCRIPT, version=1), version=1)
    await second.start()
    requested = asyncio.create_task(second.next_batch())
    await until(lambda: any("stragglers" in wait.reason for wait in second._waits))
    Slow.gate.set()
    host.back.set()
    batch = await requested
    assert ("p000001", 0) in [(group.prompt, group.oldest) for group in batch.groups]


async def test_a_successor_starts_nothing_early_for_a_step_that_is_saved_but_not_published(make: Make) -> None:
    first = make()
    await first.start()
    await first.consumed(await first.next_batch())
    await first.stop(leave=True)

    second = make()
    await second.start()
    await until(lambda: second.statistics()["groups_buffered"] == 2)
    await asyncio.sleep(0)  # the first decision,
    await second._disk.do(str)  # and after what it asked of the disk
    assert second.store.account().issued == 4  # two were trained on, two wait; more would be of weights too old
    await second.published(1)
    second.episodes.engine.version = 1  # type: ignore[attr-defined]
    for version in (1, 2, 3):
        batch = await second.next_batch()
        assert all(group.oldest is not None and version - group.oldest <= 1 for group in batch.groups)
        await train(second, batch)


async def test_masking_waits_for_nobody_and_takes_the_gradient_from_old_tokens(make: Make) -> None:
    Slow.gate = asyncio.Event()
    rollout = make(environment=Slow, config=configured(over_stale="mask"))
    await rollout.start()
    for _ in range(3):
        await train(rollout, await rollout.next_batch())
    Slow.gate.set()
    while True:
        batch = await rollout.next_batch()
        (group,) = [group for group in batch.groups if group.prompt == "p000001"] or [None]
        if group is not None:
            break
        await train(rollout, batch)
    assert batch.oldest == batch.version - 1 > 0
    for trajectory in group.trajectories:
        bearing = trajectory.bearing(batch.oldest)
        assert trajectory.start == 0 and 0 < sum(bearing) < sum(trajectory.mask)
        ages = [v for v, b in zip(trajectory.versions, bearing, strict=True) if b]
        assert min(ages) >= batch.oldest


class Tenth(Notebook):
    """Every tenth prompt is slow: several times as slow as the step of a trainer."""

    async def reset(self, sandbox: Any, seed: int) -> Observation:
        self.slow = seed % 10 == 0
        return await super().reset(sandbox, seed)

    async def step(self, sandbox: Any, action: str) -> Observation:
        if self.slow:
            await asyncio.sleep(0.1)
        return await super().step(sandbox, action)


@pytest.mark.parametrize("over_stale", ["wait", "mask"])
async def test_the_slowest_tenth_is_trained_as_often_as_the_others(make: Make, over_stale: str) -> None:
    """Of the prompts that were issued before the last ten steps, slow and fast ones are consumed at one rate."""
    rollout = make(environment=Tenth, config=configured(over_stale=over_stale))
    trained: Counter[int] = Counter()
    await rollout.start()
    for _ in range(50):
        batch = await rollout.next_batch()
        trained.update(group.seed for group in batch.groups)
        await train(rollout, batch)
    assert max(trained.values()) == 1
    slow, others = range(0, 80, 10), [seed for seed in range(80) if seed % 10]
    rate = [sum(trained[seed] for seed in some) / len(some) for some in (slow, others)]
    assert rate[0] >= 0.99 * rate[1] > 0.9
    assert rollout.store.account().given_up == 0


async def test_dropping_ends_what_is_over_stale_and_gives_up_after_its_starts(make: Make) -> None:
    Slow.gate = asyncio.Event()
    rollout = make(environment=Slow, config=configured(over_stale="drop", starts=2))
    await rollout.start()
    while not rollout.store.account().given_up:
        await train(rollout, await rollout.next_batch())
    (reason,) = rollout.store.reasons()
    assert reason == "2 starts of one trajectory: over-stale"
    assert rollout.statistics()["over_stale"] == 6


async def test_failures_of_the_platform_are_retried_and_cost_no_prompt(make: Make) -> None:
    host = FakeHost()
    host.failures = [NoSpace("pool is full") for _ in range(16)]
    rollout = make(host=host)
    await rollout.start()
    batch = await rollout.next_batch()
    assert {t.status for t in batch.trajectories} == {"completed"}
    account = rollout.store.account()
    assert account.given_up == 0 and account.issued == 4
    assert {lease.failures for lease in rollout.store.in_flight() + rollout.store.buffered()} <= {0}


async def test_a_host_that_refuses_is_asked_ever_more_rarely_and_the_run_says_why_and_stops(make: Make) -> None:
    class Refusing(FakeHost):
        requested = 0

        async def create(self, image: str, **_: Any) -> FakeSandbox:
            self.requested += 1
            raise NoSpace("pool is full")

    host = Refusing()
    rollout = make(host=host, config=configured(timeout=4.0))
    await rollout.start()
    with pytest.raises(EngineFailed, match=r"create has refused everything .*pool is full"):
        await rollout.next_batch()
    assert host.requested <= breaker.OPEN_AT * 12 + 8  # waves until the breaker opens, then one at a time
    account = rollout.store.account()
    assert (account.given_up, account.issued) == (0, 4)
    said = read_status(rollout.directory)
    assert any("create refuses" in wait.reason and wait.since for wait in said.waits)


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
    await until(lambda: rollout.store.account().given_up == 1)
    assert rollout.store.reasons() == {"reset/raised: KeyError: 'oops'": 1}


async def test_a_rollout_that_gives_up_every_prompt_stops_and_says_why(make: Make) -> None:
    class Buggy(Notebook):
        async def step(self, sandbox: Any, action: str) -> Observation:
            raise KeyError("oops")

    rollout = make(environment=Buggy)
    await rollout.start()
    with pytest.raises(EngineFailed, match=r"32 prompts in a row were given up, the last: step/raised: KeyError"):
        await rollout.next_batch()


async def test_who_waits_is_said_while_held_out_episodes_are_refused(make: Make, tmp_path: Path) -> None:
    """Before the first batch is requested, too."""
    host = FakeHost()
    host.failures = [NoSpace("the host is full") for _ in range(4)]
    rollout = make(host=host)
    evaluation = asyncio.create_task(rollout.evaluate([100]))
    await until(lambda: any("the host is full" in wait.reason for wait in rollout.waits))
    await until((tmp_path / "status.json").exists)
    assert [t.reward for t in await evaluation] == [1.0] and not rollout.waits


async def test_a_reset_that_hangs_is_the_environments_and_the_group_stays_whole(make: Make) -> None:
    hung: list[int] = []

    class Hanging(Notebook):
        async def reset(self, sandbox: Any, seed: int) -> Observation:
            if not hung:
                hung.append(seed)
                await asyncio.Event().wait()
            return await super().reset(sandbox, seed)

    config = configured(groups=1, limits=EpisodeLimits(reset=2.0))
    rollout = make(environment=Hanging, config=config, seeds=range(1))
    await rollout.start()
    (group,) = (await rollout.next_batch()).groups
    assert [t.reward for t in group.trajectories] == [1.0] * 3 and hung == [0]
    assert rollout.statistics()["blames"] == {"environment": 1} and rollout.statistics()["causes"] == {"late": 1}


async def test_what_the_host_loses_is_played_again_and_the_group_stays_whole(make: Make) -> None:
    """Restores fail in one sandbox of three: its siblings gain nothing by it."""
    host = FakeHost()

    class Stuck(FakeSandbox):
        async def restore(self, to: str | None = None, *, verify: bool = False) -> Any:
            raise RestoreFailed("criu: no", sandbox=self.id)

    created = host.create

    async def create(image: str, **options: Any) -> FakeSandbox:
        sandbox = await created(image, **options)
        if len(host.sandboxes) == 2:
            sandbox.__class__ = Stuck
            sandbox.after_command = lambda command: sandbox.die() if command == SCRIPT[2] else None
        return sandbox

    host.create = create  # type: ignore[method-assign]
    rollout = make(host=host)
    await rollout.start()
    batch = await rollout.next_batch()
    assert {t.reward for t in batch.trajectories} == {1.0} and len(batch.trajectories) == 6
    assert rollout.statistics()["causes"] == {"died": 1}


async def test_a_time_out_is_data_in_its_group(make: Make) -> None:
    class Hanging(Notebook):
        async def step(self, sandbox: Any, action: str) -> Observation:
            if self.turns == 3:
                await asyncio.Event().wait()
            return await super().step(sandbox, action)

    host = FakeHost()
    rollout = make(environment=Hanging, config=configured(groups=1, size=2, limits=EpisodeLimits(step=0.5)), host=host)
    await rollout.start()
    (group,) = (await rollout.next_batch()).groups
    assert [(t.status, t.reason) for t in group.trajectories] == [("truncated", "step/late: its 0.5 s are used up")] * 2
    assert all(sum(t.mask) > 0 for t in group.trajectories)
    assert all(sandbox.removed for sandbox in host.sandboxes[:2])


async def test_a_slow_create_costs_a_trajectory_nothing(make: Make) -> None:
    class Slowly(FakeHost):
        async def create(self, image: str, **options: Any) -> FakeSandbox:
            await asyncio.sleep(1.6)
            return await super().create(image, **options)

    rollout = make(host=Slowly(), config=configured(groups=1, limits=EpisodeLimits(step=1.5)))
    await rollout.start()
    batch = await rollout.next_batch()
    assert {(t.status, t.reward) for t in batch.trajectories} == {("completed", 1.0)}


async def test_a_finite_list_of_prompts_ends(make: Make) -> None:
    rollout = make(seeds=[5, 6, 7])
    await rollout.start()
    sizes = []
    with pytest.raises(NoMorePrompts):
        while True:
            batch = await rollout.next_batch()
            sizes.append(len(batch.groups))
            await train(rollout, batch)
    assert sizes == [2, 1] and rollout.store.account().consumed == 3


async def test_a_sample_that_is_no_number_is_played_again(make: Make) -> None:
    class Odd(ScriptedEngine):
        odd = 1

        async def generate(self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "") -> Any:
            generation = await super().generate(prompt_ids, sampling)
            if self.odd:
                self.odd = 0
                generation.logprobs[0] = float("-inf")
            return generation

    rollout = make(engine=Odd(SCRIPT))
    await rollout.start()
    batch = await rollout.next_batch()
    assert all(logprob > float("-inf") for t in batch.trajectories for logprob in t.logprobs)
    assert rollout.statistics()["trajectories_retried"] == 1


async def test_a_step_that_was_not_saved_gets_the_same_batch_again(make: Make) -> None:
    rollout = make()
    await rollout.start()
    await train(rollout, await rollout.next_batch())
    second = await rollout.next_batch()  # handed out for step 1, never saved
    await rollout.stop()
    again = make(step=1, version=1)
    account = again.store.account()
    assert (account.consumed, account.handed) == (2, 2)
    assert await again.next_batch() == second


async def test_evaluation_touches_no_books(make: Make) -> None:
    rollout = make(faults=Faults(share=1.0))
    trajectories = await rollout.evaluate([100, 101])
    assert [t.reward for t in trajectories] == [1.0, 1.0] and rollout.store.issued() == 0


async def test_faults_are_recovered_and_booked(make: Make) -> None:
    host = FakeHost()
    rollout = make(host=host, faults=Faults(share=0.5, turns=(0, 3), kill=host.kill))
    await rollout.start()
    batch = await rollout.next_batch()
    assert {t.reward for t in batch.trajectories} == {1.0}
    statistics = rollout.statistics()
    assert statistics["injected"] == statistics["killed"] == statistics["recovered_equal"] > 0


async def test_a_successor_goes_on_at_the_turn(make: Make) -> None:
    """One process ends while all trajectories generate their third answer; the next has the same host."""
    host, engine = FakeHost(), ScriptedEngine(SCRIPT)
    first = make(host=host, engine=engine)
    await first.start()
    await until(lambda: len(engine.prompts) >= 30)
    await first.stop(leave=True)
    left = [sandbox for sandbox in host.sandboxes if not sandbox.removed]
    assert left
    executed = {sandbox.id: list(sandbox.commands) for sandbox in left}

    second = make(host=host, engine=ScriptedEngine(SCRIPT))
    retained = second.existing_sandboxes()
    assert retained and retained <= {sandbox.id for sandbox in left}
    await second.start()
    batch = await second.next_batch()
    assert {t.reward for t in batch.trajectories} == {1.0}
    await train(second, batch)
    batches = [batch, await second.next_batch()]
    continued = [t for batch in batches for t in batch.trajectories if t.continued]
    assert {t.sandbox for t in continued} == retained and second.statistics()["trajectories_continued"] == len(retained)
    for sandbox in left:
        if sandbox.id in retained:  # every command exactly once, whoever sent it
            assert sandbox.commands == ["echo start >> f", *SCRIPT]
            assert sandbox.commands[: len(executed[sandbox.id])] == executed[sandbox.id]


async def test_a_prompt_that_is_given_up_leaves_nothing_of_those_that_were_to_go_on(make: Make) -> None:
    class Broken(Notebook):
        async def step(self, sandbox: Any, action: str) -> Observation:
            raise RuntimeError("no")

    host, engine, config = FakeHost(), ScriptedEngine(SCRIPT), configured(groups=1, attempts=1)
    first = make(host=host, engine=engine, config=config, seeds=[0])
    await first.start()
    await until(lambda: len(engine.prompts) >= 9)
    await first.stop(leave=True)

    second = make(host=host, environment=Broken, config=configured(groups=1, attempts=1, concurrency=1), seeds=[0])
    assert len(second.existing_sandboxes()) == 3
    with pytest.raises(NoMorePrompts):
        await second.start()
        await second.next_batch()
    assert not second.journal.open() and all(item.removed for item in host.sandboxes)


async def test_a_successor_brings_dead_sandboxes_back_first(make: Make) -> None:
    host, engine = FakeHost(), ScriptedEngine(SCRIPT)
    first = make(host=host, engine=engine)
    await first.start()
    await until(lambda: len(engine.prompts) >= 30)
    await first.stop(leave=True)
    second = make(host=host, engine=ScriptedEngine(SCRIPT))
    retained = second.existing_sandboxes()
    for sandbox in host.sandboxes:
        if sandbox.id in retained:
            sandbox.die()
    await second.start()
    batches = [await second.next_batch()]
    await train(second, batches[0])
    batches.append(await second.next_batch())
    continued = [t for batch in batches for t in batch.trajectories if t.continued]
    assert {t.reward for t in continued} == {1.0} and {t.sandbox for t in continued} == retained
    assert all([recovery.equal for recovery in t.recoveries] == [True] for t in continued)


async def test_who_was_replaced_can_write_no_more(make: Make) -> None:
    rollout = make()
    await rollout.start()
    SampleStore(rollout.directory).acquire("rollout")
    with pytest.raises(StaleOwner):
        for _ in range(4):
            await train(rollout, await rollout.next_batch())


def test_the_pause_doubles_and_a_wave_of_failures_counts_once() -> None:
    now = time.time()
    existing = breaker.note(None, "create", "full", now)
    for _ in range(100):
        existing = breaker.note(existing, "create", "full", now)
    assert existing.rounds == 1 and breaker.slots([existing], free=64, trying=0, now=now) == 0
    pauses = []
    for _ in range(10):
        at = breaker.retry_at(existing)
        pauses.append(at - existing.last)
        existing = breaker.note(existing, "create", "full", at)
    assert pauses[0] == breaker.PAUSE_FIRST and pauses[-1] == breaker.MAX_PAUSE and sorted(pauses) == pauses
    late = breaker.retry_at(existing)
    assert breaker.slots([existing], free=64, trying=0, now=late) == 1
    assert breaker.slots([existing], free=64, trying=1, now=late) == 0
    assert breaker.hopeless([existing], timeout=1e6, now=late) is None
    assert isinstance(Stop("x"), Stop) and isinstance(breaker.waits([existing], now)[0], WaitReason)
