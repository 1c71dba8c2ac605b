"""The embedded engine beside users: it learns what its steps cost, and rollouts get what users leave."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from bench.harness.rated_engines import RatedServer
from coordinator.simulate.engines import StepCosts
from rollout.decide.engines.colocation import Colocation
from rollout.decide.engines.headroom import Budget, EngineView
from rollout.engine.client import EngineClient, Sampling
from rollout.engine.embedded.colocation import share
from rollout.engine.embedded.core import Core, SamplingSequence
from rollout.engine.embedded.scheduler import Scheduler, Sequence
from rollout.engine.embedded.server import serve
from rollout.pool.member import ColocatedEngine
from rollout.pool.pool import EnginePool
from rollout.step_log import PATTERN, StepLog
from rollout.store.decisions import replay
from sandbox.errors import EngineFailed
from sandbox.paths import CHECKOUT
from tests.support.daemon_host import free_port

MODEL = CHECKOUT / "examples" / "frozen_lake" / "start"
BUDGET = Budget(ttft=1.0, tpot=0.05, margin=0.0)
NOTHING: dict[str, Any] = {"waiting": [], "rollout_prompt": 0, "free": 99, "target": 0, "held": 0}


def test_what_steps_cost_is_learned() -> None:
    colocation, draw = Colocation(BUDGET), random.Random(0)
    for _ in range(4000):
        answers, tokens = draw.randrange(64), draw.choice([0, 0, draw.randrange(500)])
        colocation.took(answers, tokens, 0.002 + 0.0001 * answers + 0.00003 * tokens)
    cost = colocation.cost
    assert cost.base == pytest.approx(0.002, rel=0.1)
    assert cost.per_answer == pytest.approx(0.0001, rel=0.1)
    assert cost.per_prompt_token == pytest.approx(0.00003, rel=0.1)


def test_what_was_not_seen_for_long_is_not_believed_to_cost_nothing() -> None:
    colocation = Colocation(BUDGET)
    for _ in range(60_000):
        colocation.took(200, 0, 0.02)
    assert colocation.cost.step(200, 0) == pytest.approx(0.02, rel=0.01)
    assert colocation.cost.per_prompt_token > 1e-5


def test_a_step_that_something_held_up_stops_rollouts_until_others_have_gone_well() -> None:
    colocation, users = Colocation(BUDGET), EngineView(last_tokens=[0.0], rollouts=64, **NOTHING)
    for answers in [*range(64)] * 10:
        colocation.took(answers, 0, 0.002 + 0.0001 * answers)
    cost, before = colocation.cost, colocation.step(users, 0.0)
    assert before.rollouts == 64
    colocation.took(32, 0, 5.0)
    assert colocation.step(users, 0.0).rollouts == 0
    steps = 0
    while colocation.step(users, 0.0) != before:
        colocation.took(32, 0, 0.0052)
        steps += 1
    assert 10 < steps < 300
    for _ in range(1000):
        colocation.took(32, 0, 0.0052)
    assert 0.005 <= colocation.cost.step(32, 0) <= cost.step(32, 0)


def test_steps_are_expected_to_take_as_long_as_the_long_ones_of_their_kind() -> None:
    colocation, draw = Colocation(BUDGET), random.Random(0)
    taken = [(tokens, 0.03 + tokens * draw.choice([0.0, 0.00005])) for tokens in [0, 100, 200, 400] * 1000]
    for tokens, seconds in taken:
        colocation.took(8, tokens, seconds)
    assert colocation.cost.step(8, 0) == pytest.approx(0.03, rel=0.01)
    assert 0.047 <= colocation.cost.step(8, 400) <= 0.05


def test_one_step_that_something_held_up_changes_little_of_what_is_expected_but_many_do() -> None:
    colocation = Colocation(BUDGET)
    for tokens in [0, 100, 200, 400] * 500:
        colocation.took(8, tokens, 0.045 + tokens * 0.00001)
    colocation.took(8, 100, 0.2)
    assert colocation.cost.step(8, 0) == pytest.approx(0.045, rel=0.01)
    for tokens in [0, 100, 200, 400] * 500:
        colocation.took(8, tokens, 0.055 + tokens * 0.00001)
    assert colocation.cost.step(8, 0) == pytest.approx(0.055, rel=0.02)


def test_between_two_users_no_step_is_longer_than_one_of_them_would_wait() -> None:
    colocation, nobody = Colocation(BUDGET), EngineView(last_tokens=[], rollouts=1000, **NOTHING)
    for answers in [*range(64)] * 10:
        colocation.took(answers, 0, 0.002 + 0.001 * answers)
    assert colocation.step(nobody, 0.0).rollouts == 1000  # none has come yet
    colocation.step(EngineView(last_tokens=[9.9], rollouts=0, **NOTHING), 10.0)
    assert 40 <= colocation.step(nobody, 10.5).rollouts <= 48
    assert colocation.step(nobody, 11.1).rollouts == 1000


def test_what_was_decided_is_decided_again(tmp_path: Path) -> None:
    log = StepLog(tmp_path, BUDGET)
    core = Core(MODEL, version="0", slots=4, length=96, colocation=Colocation(BUDGET, log=log.append), clock=Clock())
    for n in range(9):
        core.add(SamplingSequence(f"rollout {n}", [5 + n] * 9, 12, priority=1))
        core.add(SamplingSequence(f"user {n}", [15 + n] * 9, 8))
        for _ in range(20):
            core.step()
        core.label(str(n))
    log.close()
    (path,) = tmp_path.glob(PATTERN)
    result = replay(tmp_path)
    assert result.decisions == result.identical == 9 * 20
    path.write_bytes(path.read_bytes().replace(b'"users_prompt":9', b'"users_prompt":8', 1) + b'{"half a line')
    result = replay(tmp_path)
    assert (result.decisions, result.identical) == (9 * 20, 9 * 20 - 1)
    assert "users_prompt=9" in result.first_difference and path.name in result.first_difference


def test_users_take_a_cache_that_rollouts_have_filled() -> None:
    """Were they late, and only rollouts could make room by ending, neither would ever go on."""
    core = Core(MODEL, version="0", slots=4, length=96, colocation=Colocation(BUDGET), cache=60, clock=Clock())
    core.add(SamplingSequence("rollout", [5] * 50, 40, temperature=0, priority=1))
    core.step()
    core.add(SamplingSequence("user", [7] * 20, 4, temperature=0, since=-100.0))
    assert {item.id: item.finish for item in played(core)} == {"rollout": "abort", "user": "length"}


def test_rollouts_that_are_slower_than_every_promise_go_on_while_nobody_else_is_there() -> None:
    colocation, scheduler = (
        Colocation(Budget(ttft=1e-6, tpot=1e-6)),
        Scheduler(slots=4, retained=0, length=64, colocates=True),
    )
    scheduler.add(Sequence("rollout", [1, 2, 3], max_tokens=9, priority=1))
    scheduler.schedule(share(colocation, scheduler, 0.0))
    assert share(colocation, scheduler, 0.0).rollout_prompt > 0
    scheduler.add(Sequence("user", [1, 2, 3], max_tokens=9))
    step = share(colocation, scheduler, 0.0)
    assert (step.users_prompt, step.rollouts, step.rollout_prompt) == (3, 0, 0)


class Clock:
    """Each look at it takes a while."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 0.004
        return self.now


def played(core: Core, limit: int = 400) -> list[SamplingSequence]:
    done: list[SamplingSequence] = []
    for _ in range(limit):
        if core.scheduler.idle:
            return done
        done += core.step()
    raise AssertionError("it never ends")


def test_an_engine_answers_users_and_rollouts_alike_whatever_it_is_asked_first() -> None:
    """What is sampled does not depend on the rows and the steps in which it is."""

    def answers(colocation: Colocation | None) -> dict[str, list[int]]:
        core, draw = (
            Core(MODEL, version="0", slots=6, length=96, colocation=colocation, clock=Clock()),
            random.Random(1),
        )
        done = []
        for n in range(12):
            tokens = [draw.randrange(3, 300) for _ in range(draw.randrange(2, 40))]
            core.add(SamplingSequence(str(n), tokens, draw.randrange(2, 30), temperature=0, priority=n % 2))
            for _ in range(15):
                done += core.step()
        done += played(core)
        return {item.id: item.output for item in done if item.finish != "abort"}

    plain, colocated = answers(None), answers(Colocation(BUDGET))
    assert len(plain) == len(colocated) == 12 and colocated == plain


def test_users_who_need_all_rows_take_them_from_rollouts_until_the_next_version() -> None:
    core = Core(MODEL, version="0", slots=4, length=64, colocation=Colocation(BUDGET), clock=Clock())
    for n in range(2):
        core.add(SamplingSequence(f"rollout {n}", [5 + n] * 9, 40, priority=1))
    for _ in range(4):
        core.step()
    for n in range(4):
        core.add(SamplingSequence(f"user {n}", [15 + n] * 9, 8))
    ended = core.step()
    assert {item.id: item.finish for item in ended} == {"rollout 0": "abort", "rollout 1": "abort"}
    with pytest.raises(EngineFailed, match="next version"):
        core.add(SamplingSequence("rollout 2", [7] * 9, 40, priority=1))
    assert {item.id for item in played(core)} == {f"user {n}" for n in range(4)}
    core.label("1")
    core.add(SamplingSequence("rollout 2", [7] * 9, 4, priority=1))
    assert [item.id for item in played(core)] == ["rollout 2"]


async def test_a_pool_sends_rollouts_there_until_users_need_it_and_again_with_the_next_version() -> None:
    port = free_port()
    core, stop = Core(MODEL, version="0", slots=4, length=1024, colocation=Colocation(BUDGET)), asyncio.Event()
    serving = asyncio.create_task(serve(core, host="127.0.0.1", port=port, stop=stop))
    server, begun = ColocatedEngine(f"http://127.0.0.1:{port}"), dict[tuple[int, ...], tuple[float, str, str]]()
    async with EngineClient(f"http://127.0.0.1:{port}") as users, EnginePool() as pool:
        await pool.join("colocated", server, colocated=True)
        assert server.slots == 2
        rollouts = [
            asyncio.create_task(pool.generate([5 + n] * 9, Sampling(max_tokens=1000, ignore_eos=True)))
            for n in range(2)
        ]
        while core.statistics.generated_tokens < 20:  # noqa: ASYNC110 - the engine's thread tells nobody
            await asyncio.sleep(0.01)
        await pool.join("own", RatedServer(StepCosts(base=0.001), "", begun))
        request = Sampling(max_tokens=60, ignore_eos=True)
        answers = await asyncio.gather(*(users.generate([15 + n] * 9, request) for n in range(4)))
        assert [len(item.token_ids) for item in answers] == [60] * 4
        assert [len(item.token_ids) for item in await asyncio.gather(*rollouts)] == [1000] * 2
        assert pool.counts["moved"] == 2 and pool.counts["moved_tokens"] >= 20 and len(begun) == 2
        assert server.slots == 0
        await users.set_version(1)
        while server.slots == 0:  # noqa: ASYNC110 - it is looked at now and then
            await asyncio.sleep(0.05)
        before = core.statistics.finished
        await pool.generate([40] * 9, Sampling(max_tokens=4, ignore_eos=True))
        assert core.statistics.finished == before + 1
    await server.close()
    stop.set()
    await serving
