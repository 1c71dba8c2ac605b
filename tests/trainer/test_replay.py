"""Saves every few steps, and a log in between: a killed trainer ends with the weights and the books of one that was
not."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import msgspec
import pytest
import torch

from rollout.messages import Trajectory
from rollout.store.samples import SampleStore
from rollout.weights.store import VersionStore
from tests.trainer.test_distributed import plan
from tests.trainer.test_learner import samples
from trainer.batches import groups
from trainer.batches.sample import SampleLog
from trainer.distributed.worker import WorkPlan
from trainer.replay import SaveInterval, StateLog
from trainer.resume import ResumeState, Saves, saves_in, weights_of
from trainer.steps import LocalSteps, newest_state

GROUPS, EVERY = 3, 4  # prompts of a batch, steps between saves
TIMEOUT = 300.0


def issue(directory: Path, steps: int) -> None:
    """The prompts of all steps, played."""
    store = SampleStore(directory)
    fence = store.acquire("rollout")
    store.issue(range(steps * GROUPS), fence)
    for lease in store.lease(steps * GROUPS, fence):
        for index, sample in enumerate(samples(lease.seed, groups=1)):
            versions = [0 if bit else -1 for bit in sample.mask]
            store.put(
                Trajectory(
                    prompt=lease.prompt, group=lease.prompt, index=index, tokens=sample.tokens, mask=sample.mask,
                    logprobs=sample.logprobs, versions=versions, reward=float(index % 2),
                ),
                fence,
            )  # fmt: skip
        store.buffer(lease.prompt, fence)
    store.close()


def train(made: WorkPlan, books: Path) -> None:
    """As the trainer of a run does, from wherever an earlier one was killed."""
    store = SampleStore(books)
    fence = store.acquire("trainer")
    steps = LocalSteps(made)
    state = newest_state(Saves(made.resume), made)
    steps.begin(state)
    done = 0 if state is None else state.step
    store.recover(done, fence)
    steps.encode(done)
    steps.publish()
    while done < made.steps:
        prompts = [lease.prompt for lease in store.buffered()[:GROUPS]]
        batch = store.take(done, prompts, fence, version=done, oldest=0, members=GROUPS)
        steps.expect()
        for group in batch.groups[: done % GROUPS]:  # as a stream brings them
            steps.feed(groups.samples(msgspec.structs.replace(batch, groups=[group]), turns=False))
        consumed = [group.prompt for group in batch.groups]
        steps.step(groups.samples(batch, turns=False), ResumeState(step=done + 1, version=done + 1, consumed=consumed))
        done += 1
        steps.encode(done)
        store.ack(done - 1, fence)
        assert steps.publish().version == done
    steps.close()


def drive(encoded: str, books: str, kills: str) -> None:
    """In a process without threads, whose children are killed at random instants and begin with torch loaded."""
    torch.set_num_threads(1)
    made, rng, store, before = msgspec.json.decode(encoded, type=WorkPlan), random.Random(7), SampleStore(books), 0
    for kill in range(int(kills) + 1):
        child = os.fork()
        if not child:
            try:
                train(made, Path(books))
                os._exit(0)
            finally:
                traceback.print_exc()
                os._exit(1)
        if kill < int(kills):
            before = min(before + rng.randrange(1, 3), made.steps - 1)  # each gets on by a step or more
            deadline = time.monotonic() + TIMEOUT
            while store.next_step() < before and time.monotonic() < deadline:
                assert os.waitpid(child, os.WNOHANG) == (0, 0), "it ended by itself"
                time.sleep(0.001)
            time.sleep(rng.random() * 0.06)
            os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == (-signal.SIGKILL if kill < int(kills) else 0), status


def driven(*runs: tuple[WorkPlan, Path, int]) -> None:
    """Each with its books and its kills."""
    program = "import sys; from tests.trainer.test_replay import drive\nfor at in range(1, len(sys.argv), 3):"
    arguments = [part for made, books, kills in runs for part in (msgspec.json.encode(made), str(books), str(kills))]
    timeout = TIMEOUT + sum(10 * kills for _, _, kills in runs)
    subprocess.run(
        [sys.executable, "-c", f"{program} drive(*sys.argv[at : at + 3])", *arguments], check=True, timeout=timeout
    )


@pytest.mark.parametrize("kills", [6, pytest.param(100, marks=pytest.mark.long)])
def test_a_trainer_that_is_killed_between_saves_loses_and_doubles_nothing(kills: int, tmp_path: Path) -> None:
    steps = 2 * kills + 3
    expected = plan(tmp_path, "calm", steps=steps, save_every=0)
    made = plan(tmp_path, "killed", steps=steps, save_every=EVERY)
    books = [tmp_path / f"{name}-books" for name in ("calm", "killed")]
    for place in books:
        issue(place, steps)
    driven((expected, books[0], 0), (made, books[1], kills))
    one, other = (weights_of(item.resume / f"step-{steps:06d}") for item in (expected, made))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    account = SampleStore(books[1]).account()
    assert account.consumed == account.issued == steps * GROUPS
    calm, stormy = VersionStore(expected.published), VersionStore(made.published)
    for store in (calm, stormy):
        assert [ref.version for ref in store.versions()][-1] == steps
    assert calm.digests(steps) == stormy.digests(steps)
    assert len(SampleLog(Path(made.directory, "log")).steps()) <= 5 * EVERY


def test_the_log_ends_at_the_first_step_that_is_not_noted(tmp_path: Path) -> None:
    log, batches = StateLog(tmp_path / "log"), SampleLog(tmp_path / "log")
    saved = ResumeState(step=2, consumed=["a"])
    assert log.latest(saved) == saved
    for step in (2, 3, 4, 6):
        batches.write(step, samples(step))
    for step in (3, 4, 6, 7):
        log.note(ResumeState(step=step, consumed=[str(step)]))
    assert log.latest(saved).consumed == ["4"]  # batch 4 was given, and its step not taken
    log.note(ResumeState(step=2, totals={"turns": 9}))
    assert log.latest(ResumeState(step=2)).step == 4
    log.forget(4)
    assert batches.steps() == [4, 6]
    assert log.latest(ResumeState(step=4)).consumed == ["4"]  # the state changed after the save
    assert log.latest(saved) == saved


def test_a_damaged_save_costs_no_step(tmp_path: Path) -> None:
    """The log reaches back to the save before."""
    torch.set_num_threads(1)
    made = plan(tmp_path, "torn", steps=20, save_every=3)
    first = LocalSteps(made)
    first.begin(None)
    for step in range(8):
        first.step(samples(step), ResumeState(step=step + 1))
    first.saves.wait_saved()
    newest = saves_in(made.resume)[-1]
    assert newest.name == "step-000006"
    torn = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    torn.write_bytes(b"torn")
    again = LocalSteps(made)
    state = newest_state(again.saves, made)
    assert state is not None and state.step == 8
    again.begin(state)
    left, right = (dict(one.model.state_dict()) for one in (first, again))
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_saves_are_due_by_steps_by_time_or_both(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    by_steps, by_time = SaveInterval(3, 0), SaveInterval(0, 10)
    assert [step for step in range(1, 9) if by_steps.due(step, 8)] == [3, 6, 8]
    due = []
    for step in range(1, 9):
        now[0] += 4
        due += [step] if by_time.due(step, 8) else []
    assert due == [3, 6, 8]
    assert SaveInterval(1, 0).every and not by_time.every
