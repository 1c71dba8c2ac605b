"""Every prompt is accounted for exactly once, every sample is kept, also across crashes at any instant."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollout.messages import Trajectory
from rollout.store import stages
from rollout.store.samples import Fence, PromptLease, SampleStore, StaleOwner
from sandbox.errors import Conflict, Invalid, NotFound
from sandbox.paths import CHECKOUT

SIZE = 2


def played(prompt: str, index: int = 0, **changes: Any) -> Trajectory:
    lists = {"tokens": [5, 6, 7], "mask": [0, 1, 1], "logprobs": [0.0, -0.5, -0.25], "versions": [-1, 3, 4]}
    return Trajectory(**{"prompt": prompt, "index": index, "reward": 0.5, **lists, **changes})


@pytest.fixture
def store(tmp_path: Path) -> Any:
    made = SampleStore(tmp_path)
    yield made
    made.close()


def test_the_life_of_a_prompt(store: SampleStore) -> None:
    fence = store.acquire("rollout")
    assert store.issue([7, 8, 9], fence) == 3
    first, second = store.lease(2, fence)
    assert (first.prompt, first.seed, second.seed) == ("p000000", 7, 8)
    assert store.put(played(first.prompt, 0), fence) and store.put(played(first.prompt, 1), fence)
    assert not store.put(played(first.prompt, 1, reward=9.0), fence)  # once is once
    store.buffer(first.prompt, fence)
    batch = store.take(0, [first.prompt], fence, version=4, oldest=3, members=2)
    assert [t.reward for t in batch.trajectories] == [0.5, 0.5] and batch.trajectories[0].tokens == [5, 6, 7]
    assert store.take(0, ["another"], fence, version=9, oldest=9, members=2) == batch  # it was handed out
    store.ack(0, fence)
    store.give_up(second.prompt, "reset/raised", fence)
    account = store.account()
    assert (account.issued, account.consumed, account.given_up, account.queued) == (3, 1, 1, 1)
    assert store.reasons() == {"reset/raised": 1} and store.issued() == 3
    assert store.sample(first.prompt, 1).reward == 0.5  # what was trained is kept, too


@pytest.mark.parametrize("move", ["buffer", "give_up", "discard", "take"])
def test_illegal_moves_name_the_state(store: SampleStore, move: str) -> None:
    fence = store.acquire("rollout")
    store.issue([1], fence)
    (lease,) = store.lease(1, fence)
    store.buffer(lease.prompt, fence)
    store.take(0, [lease.prompt], fence, version=0, oldest=0, members=1)
    act = {
        "buffer": lambda: store.buffer(lease.prompt, fence),
        "give_up": lambda: store.give_up(lease.prompt, "x", fence),
        "discard": lambda: store.discard(lease.prompt, [0], fence),
        "take": lambda: store.take(1, [lease.prompt], fence, version=0, oldest=0, members=1),
    }[move]
    with pytest.raises(Conflict, match="is handed"):
        act()
    assert store.account().handed == 1


def test_a_sample_that_is_no_number_or_no_prompts_is_refused(store: SampleStore) -> None:
    fence = store.acquire("rollout")
    store.issue([1], fence)
    (lease,) = store.lease(1, fence)
    for broken in (
        {"logprobs": [0.0, float("-inf"), -0.25]},
        {"logprobs": [0.0, float("nan"), -0.25]},
        {"reward": float("nan")},
        {"tokens": [5, 6]},
    ):
        with pytest.raises(ValueError, match=r"finite|lengths"):
            store.put(played(lease.prompt, 0, **broken), fence)
    with pytest.raises(NotFound, match="ever issued"):
        store.put(played("p999999"), fence)
    assert store.finished(lease.prompt) == []


def test_damage_on_disk_is_said(store: SampleStore) -> None:
    fence = store.acquire("rollout")
    store.issue([1], fence)
    store.lease(1, fence)
    store.put(played("p000000"), fence)
    store._db.execute("update samples set payload = substr(payload, 1, 9)")
    with pytest.raises(Invalid, match="damaged"):
        store.sample("p000000", 0)


class Machine(RuleBasedStateMachine):
    """A rollout and a trainer work on one store; either may be replaced at any instant, the trainer's save may lag."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.store = SampleStore(Path(self.directory.name))
        self.fence = self.store.acquire("rollout")
        self.old: list[Fence] = []
        self.leases: dict[str, PromptLease] = {}
        self.put: dict[str, set[int]] = {}
        self.complete: set[str] = set()
        self.handed: dict[int, list[str]] = {}
        self.given_up: set[str] = set()
        self.step = self.saved = 0

    @rule(count=st.integers(1, 3))
    def issue_and_lease(self, count: int) -> None:
        self.store.issue(range(count), self.fence)
        for lease in self.store.lease(count, self.fence):
            assert lease.prompt not in self.leases  # no prompt is leased twice
            self.leases[lease.prompt] = lease
            self.put[lease.prompt] = set()

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), member=st.integers(0, SIZE - 1), reward=st.floats(0, 1))
    def finish(self, data: st.DataObject, member: int, reward: float) -> None:
        prompt = data.draw(st.sampled_from(sorted(self.leases)))
        assert self.store.put(played(prompt, member, reward=reward), self.fence) is (member not in self.put[prompt])
        self.put[prompt].add(member)
        if len(self.put[prompt]) == SIZE:
            self.store.buffer(prompt, self.fence)
            self.complete.add(prompt)
            del self.leases[prompt]

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        prompt = data.draw(st.sampled_from(sorted(self.leases)))
        self.store.give_up(prompt, "bug", self.fence)
        self.given_up.add(prompt)
        del self.leases[prompt]

    @precondition(lambda self: self.complete or self.step in self.handed)
    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        """One step: taken, trained, and, as chance has it, saved and told."""
        if self.step in self.handed:
            chosen: list[str] = []
        else:
            chosen = data.draw(st.lists(st.sampled_from(sorted(self.complete)), min_size=1, max_size=2, unique=True))
        batch = self.store.take(self.step, chosen, self.fence, version=self.step, oldest=0, members=SIZE)
        taken = [group.prompt for group in batch.groups]
        assert taken == self.handed.setdefault(self.step, chosen)
        assert all(len(group.trajectories) == SIZE for group in batch.groups)
        self.complete -= set(taken)
        self.step += 1
        if data.draw(st.booleans(), "saved"):
            self.saved = self.step
        if self.saved == self.step and data.draw(st.booleans(), "told"):
            self.store.ack(self.step - 1, self.fence)

    @rule()
    def killed(self) -> None:
        """Both processes die; their successors know what is on disk."""
        self.store.close()
        self.old.append(self.fence)
        self.store = SampleStore(Path(self.directory.name))
        self.fence = self.store.acquire("rollout")
        self.store.recover(self.saved, self.fence)
        self.step = self.saved
        assert {lease.prompt for lease in self.store.in_flight()} == set(self.leases)
        assert {lease.prompt for lease in self.store.buffered()} == self.complete
        assert {p: {one.member for one in self.store.finished(p)} for p in self.put} == self.put
        for step, prompts in self.handed.items():
            batch = self.store.batch(step)
            assert batch is not None and [group.prompt for group in batch.groups] == prompts

    @precondition(lambda self: self.old and self.leases)
    @rule(data=st.data())
    def a_dead_process_writes(self, data: st.DataObject) -> None:
        before, prompt = self.store.account(), data.draw(st.sampled_from(sorted(self.leases)))
        for act in (
            lambda fence: self.store.put(played(prompt), fence),
            lambda fence: self.store.give_up(prompt, "late", fence),
            lambda fence: self.store.issue([1], fence),
            lambda fence: self.store.lease(1, fence),
            lambda fence: self.store.ack(0, fence),
        ):
            with pytest.raises(StaleOwner):
                act(self.old[-1])
        assert self.store.account() == before

    @invariant()
    def the_account_is_full(self) -> None:
        account = self.store.account()
        parts = account.consumed + account.in_flight + account.queued + account.buffered + account.given_up
        assert parts == account.issued
        assert account.in_flight == len(self.leases) and account.given_up == len(self.given_up)
        handed = sum(len(prompts) for prompts in self.handed.values())
        assert account.consumed + account.handed == handed and account.buffered == len(self.complete) + account.handed

    def teardown(self) -> None:
        self.store.close()
        self.directory.cleanup()


Machine.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestTheAccountIsAlwaysFull = Machine.TestCase


@pytest.mark.parametrize("at", range(0, 60, 11))
def test_a_killed_process_loses_no_prompt_and_no_sample(tmp_path: Path, at: int) -> None:
    """SIGKILL after so many calls in a stream of them; the next start finds every prompt in one state."""
    code = f"""
import os, signal
from rollout.store import stages
from rollout.store.samples import SampleStore
from tests.rollout.test_store import played
store, calls = SampleStore({str(tmp_path)!r}), 0
fence = store.acquire("rollout")
def call(act, *arguments, **options):
    global calls
    calls += 1
    if calls > {at}:
        os.kill(os.getpid(), signal.SIGKILL)
    return act(*arguments, **options)
call(store.issue, range(20), fence)
for step in range(9):
    leases = call(store.lease, 2, fence)
    for lease in leases:
        call(store.put, played(lease.prompt, 0), fence)
        call(store.put, played(lease.prompt, 1), fence)
        call(store.buffer, lease.prompt, fence)
    call(store.take, step, [lease.prompt for lease in leases], fence, version=step, oldest=0, members=2)
    call(store.ack, step, fence)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, check=False)
    assert done.returncode == -9
    store = SampleStore(tmp_path)
    account = store.recover(0, store.acquire("rollout"))
    assert account.issued == (20 if at else 0) and account.consumed == 0
    steps = account.handed // 2
    assert all(len(store.batch(step).trajectories) == 4 for step in range(steps))  # type: ignore[union-attr]
    waiting = [lease.prompt for lease in store.in_flight() + store.buffered()]
    assert sum(len(store.finished(prompt)) for prompt in waiting) + 4 * steps == len(list(store.samples()))
    store.close()


def test_stages_are_read_back_by_process_and_a_cut_line_is_passed_over(tmp_path: Path) -> None:
    roles = tmp_path / "roles"
    assert stages.read(roles) == []
    stages.note(roles, "trainer", stages.BEGUN, 7)
    since = time.time()
    stages.note(roles, "trainer", stages.READY, 8)
    with (roles / stages.NAME).open("a") as file:
        file.write('{"at": 1.0, "ro\n')
    stages.note(roles, "rollout", stages.READY)
    assert [item.pid for item in stages.read(roles)] == [7, 8, os.getpid()]
    assert [item.pid for item in stages.read(roles, role="trainer", since=since)] == [8]
    assert [item.stage for item in stages.read(roles, role="trainer", pid=7)] == [stages.BEGUN]
    stages.note(Path("/dev/null/roles"), "trainer", stages.READY)  # no room for it: nobody fails
