"""Tail batching: long prompts are put off once, and every prompt is in exactly one batch."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout import Observation, RolloutController
from rollout.control.batch_request import NoMorePrompts
from rollout.control.groups import OpenGroup, Slot
from rollout.decide import tail
from rollout.decide.policy import RolloutPolicy
from rollout.decide.view import (
    Abort,
    BufferedGroup,
    Defer,
    FinishGroup,
    GroupView,
    HandOut,
    LeasePrompts,
    NoMoreBatches,
    RolloutView,
    SchedulingRules,
    StartTrajectory,
    TrajectoryView,
)
from rollout.messages import Trajectory
from rollout.store import decisions
from rollout.store.journal import Key, TurnEntry
from rollout.store.samples import PromptLease
from tests.rollout.test_controller import configured, train
from tests.support.rollout_fakes import SCRIPT, FakeHost, Letters, Notebook, ScriptedEngine

RULES = SchedulingRules(groups=8, size=8, tail=1.25, staleness=0)


def view(**changes: object) -> RolloutView:
    plain: dict[str, object] = {
        "version": 3, "requested": True, "training": False, "running": [], "buffered": [], "queued": 0, "more": True,
    }  # fmt: skip
    return RolloutView(**(plain | changes))  # type: ignore[arg-type]


def group(number: int, *, deferred: bool = False) -> GroupView:
    return GroupView(f"p{number}", number, [TrajectoryView(0, "running")], deferred=deferred)


def complete(count: int) -> list[BufferedGroup]:
    return [BufferedGroup(f"b{n}", n, [3]) for n in range(count)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [LeasePrompts(10)]),
        ({"queued": 4}, [LeasePrompts(10)]),
        ({"queued": 4, "more": False}, [LeasePrompts(4)]),
        ({"deferred": 7}, [LeasePrompts(10)]),  # not yet a batch of them
        ({"deferred": 8}, [LeasePrompts(8, deferred=True)]),
        ({"deferred": 11}, [LeasePrompts(8, deferred=True)]),
        ({"deferred": 3, "more": False}, [LeasePrompts(3, deferred=True)]),  # the last ones
        ({"deferred": 3, "more": False, "queued": 2}, [LeasePrompts(2)]),
        ({"buffered": complete(6)}, [LeasePrompts(3)]),  # some were given up: 1.25 times the two that are missing
        ({"buffered": complete(6), "deferred": 8}, [LeasePrompts(3)]),
        ({"buffered": complete(8)}, []),
        ({"running": [group(1)]}, []),
        ({"training": True}, []),
    ],
)
def test_the_next_round(changes: dict[str, object], expected: list[LeasePrompts]) -> None:
    assert tail.next_round(view(**changes), RULES, bound=0) == expected


def test_a_round_may_begin_while_the_trainer_works_if_staleness_allows_it() -> None:
    assert tail.next_round(view(training=True), RULES, bound=1) == [LeasePrompts(10)]


def test_what_is_late_is_put_off_once_a_batch_is_whole() -> None:
    running = [group(20), group(21, deferred=True)]
    assert tail.put_off(view(buffered=complete(7), running=running), RULES) == []
    assert tail.put_off(view(buffered=complete(8), running=running), RULES) == [Defer("p20")]


def test_short_rounds_play_more_of_a_group_than_long_ones() -> None:
    assert (tail.members(RULES, deferred=False), tail.members(RULES, deferred=True)) == (10, 8)
    plain = SchedulingRules(size=8, extra=1)
    assert (tail.members(plain, deferred=False), tail.members(plain, deferred=True)) == (9, 9)


class Played:
    """Executes actions on a virtual clock: trajectory `n` of prompt `p` takes `seconds(p, n)`."""

    def __init__(self, rules: SchedulingRules, prompts: int, seconds: Any):
        self.rules, self.prompts, self.seconds = rules, prompts, seconds
        self.now, self.issued = 0.0, 0
        self.running: dict[int, dict[int, float | None]] = {}
        self.long: set[int] = set()
        self.waiting: list[int] = []
        self.complete: list[int] = []
        self.batches: list[list[int]] = []
        self.put_off: Counter[int] = Counter()
        self.ended = False

    def view(self) -> RolloutView:
        running = [
            GroupView(
                str(number),
                number,
                [
                    TrajectoryView(n, "waiting" if at is None else "ended" if at <= self.now else "running")
                    for n, at in members.items()
                ],
                deferred=number in self.long,
            )
            for number, members in self.running.items()
        ]
        return view(
            running=running,
            buffered=[BufferedGroup(str(number), number, [0]) for number in self.complete],
            more=self.issued < self.prompts,
            deferred=len(self.waiting),
        )

    def act(self, action: object) -> None:
        match action:
            case LeasePrompts(count, deferred):
                for _ in range(count):
                    if deferred:
                        number = self.waiting.pop(0)
                        self.long.add(number)
                    elif self.issued < self.prompts:
                        number, self.issued = self.issued, self.issued + 1
                    else:
                        break
                    members = tail.members(self.rules, deferred=deferred)
                    self.running[number] = dict.fromkeys(range(members))
            case StartTrajectory(prompt, member):
                number = int(prompt)
                self.running[number][member] = self.now + self.seconds(number, member)
            case Abort(prompt, member):
                self.running[int(prompt)].pop(member)
            case FinishGroup(prompt):
                self.running.pop(int(prompt))
                self.complete.append(int(prompt))
            case Defer(prompt):
                self.running.pop(int(prompt))
                self.waiting.append(int(prompt))
                self.put_off[int(prompt)] += 1
            case HandOut(prompts):
                self.batches.append([int(prompt) for prompt in prompts])
                self.complete = [number for number in self.complete if str(number) not in prompts]
            case NoMoreBatches():
                self.ended = True

    def run(self) -> None:
        policy = RolloutPolicy(self.rules)
        for _ in range(20_000):
            actions = policy.decide(self.view(), self.now)
            before = repr(self.view())
            for action in actions:
                self.act(action)
            if self.ended:
                return
            if repr(self.view()) == before:
                later = [at for members in self.running.values() for at in members.values() if at and at > self.now]
                assert later, f"nothing runs and nothing begins: {actions}"
                self.now = min(later)
        raise AssertionError("it never ends")


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.integers(0, 40),
    groups=st.integers(1, 5),
    size=st.integers(1, 4),
    factor=st.sampled_from([1.1, 1.25, 1.5, 2.0]),
    concurrency=st.integers(1, 64),
    data=st.data(),
)
def test_every_prompt_is_in_one_batch_and_is_put_off_at_most_once(
    prompts: int, groups: int, size: int, factor: float, concurrency: int, data: st.DataObject
) -> None:
    rules = SchedulingRules(groups=groups, size=size, tail=factor, staleness=0, concurrency=concurrency)
    seconds = data.draw(st.lists(st.floats(0.1, 100), min_size=1, max_size=20))
    played = Played(rules, prompts, lambda number, member: seconds[(number * 7 + member) % len(seconds)])
    played.run()
    consumed = Counter(number for batch in played.batches for number in batch)
    assert consumed == Counter(range(prompts))
    assert max(played.put_off.values(), default=0) <= 1
    assert all(len(batch) == groups for batch in played.batches[:-1])


def test_rounds_are_shorter_with_a_long_tail_and_no_shorter_without() -> None:
    """One prompt in five takes ten times as long."""

    def per_prompt(seconds: Any, tail: float) -> float:
        played = Played(SchedulingRules(groups=8, size=4, tail=tail, staleness=0, concurrency=1000), 400, seconds)
        played.run()
        return played.now / 400

    def tailed(number: int, member: int) -> float:
        return 100.0 if number % 5 == 3 else 10.0

    def even(number: int, member: int) -> float:
        return 10.0

    assert per_prompt(tailed, 1.25) < per_prompt(tailed, 0.0) / 2
    assert per_prompt(even, 1.25) == pytest.approx(per_prompt(even, 0.0), rel=0.02)


class Fifth(Notebook):
    """Every fifth prompt is slow."""

    slow = False

    async def reset(self, sandbox: Any, seed: int) -> Observation:
        self.slow = seed % 5 == 0
        return await super().reset(sandbox, seed)

    async def step(self, sandbox: Any, action: str) -> Observation:
        if self.slow:
            await asyncio.sleep(0.3)
        return await super().step(sandbox, action)


async def test_a_live_rollout_puts_long_prompts_off_and_trains_each_once(tmp_path: Path) -> None:
    config = configured(groups=4, size=2, tail=1.25, staleness=0)

    def again(version: int = 0) -> RolloutController:
        return RolloutController(
            environment=Fifth, host=FakeHost(), engine=ScriptedEngine(SCRIPT), tokenizer=Letters(), config=config,
            directory=tmp_path, seeds=range(40), version=version,
        )  # fmt: skip

    rollout, batches = again(), list[list[int]]()
    await rollout.start()
    while True:
        if len(batches) == 3:  # what was put off is known to a successor
            version = rollout.version
            await rollout.stop()
            rollout = again(version)
            rollout.episodes.engine.version = version  # type: ignore[attr-defined]
            await rollout.start()
        try:
            batch = await rollout.next_batch()
        except NoMorePrompts:
            break
        batches.append([group.seed for group in batch.groups])
        assert all(len(group.trajectories) == 2 for group in batch.groups)
        await train(rollout, batch)
    account = rollout.store.account()
    await rollout.stop()
    assert Counter(seed for batch in batches for seed in batch) == Counter(range(40))
    assert account.consumed == account.issued == 40
    assert any(all(seed % 5 == 0 for seed in batch) for batch in batches), "slow prompts are together"
    replayed = decisions.replay(tmp_path)
    assert replayed.identical == replayed.decisions, replayed.first_difference


class Reported(Fifth):
    """Its state can be written down."""

    def snapshot(self) -> bytes:
        return bytes([self.turns, self.slow])

    def load(self, state: bytes) -> None:
        self.turns, self.slow = state[0], bool(state[1])


@pytest.mark.parametrize("handed_over", [False, True])
async def test_what_was_put_off_goes_on_from_its_checkpoint(tmp_path: Path, handed_over: bool) -> None:
    config = configured(groups=4, size=2, tail=1.25, staleness=0, tail_resumes=True, over_stale="mask")
    host = FakeHost()

    def again(version: int = 0) -> RolloutController:
        engine = ScriptedEngine(SCRIPT)
        engine.version = version
        return RolloutController(
            environment=Reported, host=host, engine=engine, tokenizer=Letters(), config=config, directory=tmp_path,
            seeds=range(40), version=version,
        )  # fmt: skip

    rollout, trained, continued = again(), Counter[int](), 0
    await rollout.start()
    for number in range(100):
        if number == 3 and handed_over:  # a successor knows where they stand, and their sandboxes
            version = rollout.version
            await rollout.stop(leave=True)
            rollout = again(version)
            parked = set(rollout.journal.open().values())
            assert parked and parked <= rollout.existing_sandboxes()
            await rollout.start()
        try:
            batch = await rollout.next_batch()
        except NoMorePrompts:
            break
        for group in batch.groups:
            trained[group.seed] += 1
            assert len(group.trajectories) == 2 and all(item.reward == 1.0 for item in group.trajectories)
            continued += sum(item.continued > 0 for item in group.trajectories)
            for item in group.trajectories:
                assert [turn.index for turn in item.turns] == [0, 1, 2, 3]
        await train(rollout, batch)
    assert trained == Counter(range(40)) and continued > 0
    assert not rollout.journal.open()
    await rollout.stop()
    assert all(item.removed for item in host.sandboxes)
    replayed = decisions.replay(tmp_path)
    assert replayed.identical == replayed.decisions, replayed.first_difference


async def test_a_group_that_ends_leaves_what_runs_alone(tmp_path: Path) -> None:
    """Who runs forgets itself, and may end at that moment; who was to continue and has not begun is forgotten."""
    rollout = RolloutController(
        environment=Reported, host=FakeHost(), engine=ScriptedEngine(SCRIPT), tokenizer=Letters(),
        config=configured(groups=4, size=2), directory=tmp_path, seeds=range(4),
    )  # fmt: skip
    entry = TurnEntry(
        turn=0, sandbox="s", epoch="", at=0, tokens=[], mask=[], logprobs=[], versions=[], action="", state=None,
        checkpoint=None, records=[],
    )  # fmt: skip
    running = asyncio.ensure_future(asyncio.sleep(0))
    members = [Slot(n, Trajectory(), since=[entry]) for n in (0, 1)]
    members[0].task = running
    for member in members:
        rollout.journal.append(Key("p000000", member.index, 0), entry)
    group = OpenGroup(PromptLease(prompt="p000000", number=0, seed=0), members)
    await rollout.attempts.forget(group)
    assert list(rollout.journal.open()) == [Key("p000000", 0, 0)]
    await running
    await rollout.stop()
