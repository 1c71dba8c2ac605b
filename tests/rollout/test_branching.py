"""Groups as trees in the live loop, states that outlive their episodes, and going back within one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollout import Batch, Observation, RolloutConfig, RolloutController, Trajectory
from rollout.decide.keeping import KeepPlan, RetainedRow
from rollout.decide.view import Branching
from rollout.engine.client import Generation, Sampling, WeightSpan
from rollout.episode.manager import EpisodeManager
from rollout.episode.spec import EpisodeLimits, EpisodeSpec
from rollout.labels import RETAINED, LabellingClient
from rollout.messages import Ancestor
from rollout.rewards.service import RewardService
from rollout.store import decisions
from rollout.store.retained import RetainedLedger
from rollout.timetravel import at_turn, fork, resample, visitable
from sandbox import Client
from sandbox.errors import NoSpace, NotFound
from tests.support import reward_functions as functions
from tests.support.daemon_host import missing
from tests.support.rollout_fakes import END, FakeHost, Letters, Notebook
from trainer.batches.groups import samples

SAMPLING = Sampling(max_tokens=32, stop_token_ids=[END], seed=5)
TURNS = 4
Make = Callable[..., RolloutController]


class Dice:
    """Writes a letter per answer, drawn from the sampling's seed: siblings differ."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "") -> Generation:
        self.prompts.append(prompt_ids)
        await asyncio.sleep(0)
        letter = "ab"[(sampling.seed or 0) % 2]
        ids = [*map(ord, f"echo {letter} >> f"), END]
        logprobs = [-0.1 * (1 + prompt_ids.count(END))] * len(ids)
        return Generation(token_ids=ids, logprobs=logprobs, spans=[WeightSpan(0, 0, len(ids))], finish_reason="stop")


class Letters4(Notebook):
    """Four letters; the reward is the share of `a`. What its sandbox and this object say must agree in every branch."""

    steps = 0

    async def reset(self, sandbox: Any, seed: int) -> Observation:
        self.written = ""
        await sandbox.exec("echo start >> f")
        return Observation("begin\n")

    async def step(self, sandbox: Any, action: str) -> Observation:
        type(self).steps += 1
        content = (await sandbox.exec("cat f", ends_turn=False)).text
        assert content == "start\n" + "".join(f"{letter}\n" for letter in self.written)
        await sandbox.exec(action)
        self.written += action[5]
        done = len(self.written) == TURNS
        return Observation("$ ", reward=self.written.count("a") / TURNS if done else 0.0, done=done)


@pytest_asyncio.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[RolloutController] = []
    Letters4.steps = 0

    def build(*, by: str = "turns", keep: int = 0, groups: int = 2, **options: Any) -> RolloutController:
        config = RolloutConfig(
            groups=groups,
            size=6,
            sampling=SAMPLING,
            branching=Branching(roots=2, by=by, every=1),  # type: ignore[arg-type]
            visit=KeepPlan(trajectories=keep),
        )
        options = {
            "environment": Letters4,
            "host": FakeHost(),
            "engine": Dice(),
            "tokenizer": Letters(),
            "config": config,
            "directory": tmp_path,
            "seeds": range(2),
            **options,
        }
        made.append(RolloutController(**options))
        return made[-1]

    yield build
    for controller in made:
        await controller.stop()
    replayed = decisions.replay(tmp_path)
    assert replayed.identical == replayed.decisions > 0, replayed.first_difference


async def play(rollout: RolloutController) -> Batch:
    await rollout.start()
    async with asyncio.timeout(240):
        return await rollout.next_batch()


def need_trees(batch: Batch, branches: int = 4) -> None:
    for group in batch.groups:
        by_name = {(t.index, t.start): t for t in group.trajectories}
        assert [len(t.turns) for t in group.trajectories] == [TURNS] * 6
        assert sum(bool(t.lineage) for t in group.trajectories) == branches
        for trajectory in group.trajectories:
            trajectory.check()
            for older in trajectory.lineage:
                parent = by_name[older.member, older.start]
                first = [turn.action for turn in parent.turns[: older.turn]]
                assert [turn.action for turn in trajectory.turns[: older.turn]] == first
                at = len("begin\n") + older.turn * len("echo a >> f\x01$ ")
                assert trajectory.tokens[:at] == parent.tokens[:at]
                assert trajectory.logprobs[:at] == parent.logprobs[:at]


@pytest.mark.parametrize("by", ["turns", "entropy", "spread"])
async def test_a_group_is_a_forest_of_forks_and_shared_turns_are_played_and_learned_once(make: Make, by: str) -> None:
    host = FakeHost()
    batch = await play(make(by=by, host=host))
    need_trees(batch)
    played = sum(len(t.turns) - t.inherited for group in batch.groups for t in group.trajectories)
    assert Letters4.steps == played < 2 * 6 * TURNS
    learned = samples(batch)
    sampled = sum(sum(sample.mask) for sample in learned)
    assert sampled == played * len("echo a >> f\x01")
    for group in batch.groups:
        rewards = [t.reward for t in group.trajectories]
        if len(set(rewards)) > 1:
            mine = [sample for sample in learned if sample.group == group.prompt]
            assert any(value != 0 for sample in mine for value in sample.advantages)
    assert all(sandbox.removed for sandbox in host.sandboxes)  # nothing is kept without a plan


class Shared(Letters4):
    """The same, but that what the end is worth is said in a fork of it."""

    reward = functions.share(letter="a")

    async def step(self, sandbox: Any, action: str) -> Observation:
        observed = await super().step(sandbox, action)
        return Observation(observed.text, done=observed.done)


@pytest.mark.parametrize("by", ["turns", "spread"])
async def test_branches_of_what_is_scored_in_a_fork_are_scored_each_by_itself(make: Make, by: str) -> None:
    host = FakeHost()
    async with RewardService(host) as service:
        rollout = make(by=by, host=host, environment=Shared)
        rollout.episodes.rewards = service
        batch = await play(rollout)
    need_trees(batch)
    for group in batch.groups:
        for played in group.trajectories:
            worth = [float(turn.action[5] == "a") / TURNS for turn in played.turns]
            assert played.score is not None and played.reward == sum(worth)
            assert [turn.reward for turn in played.turns] == [*worth[:-1], 0.0]
    assert any(value != 0 for sample in samples(batch) for value in sample.advantages)
    assert all(sandbox.removed for sandbox in host.sandboxes)


async def test_the_newest_states_stay_and_can_be_played_on(make: Make, tmp_path: Path) -> None:
    host, engine = FakeHost(), Dice()
    rollout = make(keep=3, host=host, engine=engine)
    batch = await play(rollout)
    need_trees(batch)
    rows = rollout.trees._ledger.rows()
    living = {sandbox.id for sandbox in host.sandboxes if not sandbox.removed}
    assert len(rows) == 3 and {row.sandbox for row in rows} == living == rollout.existing_sandboxes()
    await rollout.stop()
    origins = visitable(tmp_path, rows[0].prompt, rows[0].member)
    assert origins[-1].visit.turn == TURNS
    origin = at_turn(origins, TURNS - 1)
    episodes = EpisodeManager(environment=Letters4, host=host, engine=engine, tokenizer=Letters())
    value = await resample(episodes, origin, SAMPLING, count=6, concurrency=2, pass_at=1.0)
    before = [turn.action for turn in origin.trajectory.turns[: TURNS - 1]]
    certain = sum(action[5] == "a" for action in before) / TURNS
    assert value.played == 6 and set(value.rewards) <= {certain, certain + 1 / TURNS}
    with pytest.raises(NotFound, match="cannot be visited"):
        at_turn(origins, 99)
    with pytest.raises(NotFound, match="nothing follows"):
        await resample(episodes, origins[-1], SAMPLING, count=1, concurrency=1, pass_at=1.0)
    others = {(t.prompt, t.index) for group in batch.groups for t in group.trajectories}
    gone = sorted(others - {(row.prompt, row.member) for row in rows})[0]
    with pytest.raises(NotFound, match="are not kept"):
        visitable(tmp_path, *gone)


class Refusing(FakeHost):
    """Refuses some forks as a full host does, and has lost the checkpoint of others."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[Exception] = []

    async def fork(self, checkpoint: str) -> Any:
        if self.errors:
            raise self.errors.pop(0)
        return await super().fork(checkpoint)


async def test_a_fork_that_a_full_host_refuses_is_the_platforms_and_the_group_stays_a_tree(make: Make) -> None:
    host = Refusing()
    host.errors = [NoSpace("full"), NoSpace("full")]
    rollout = make(host=host)
    need_trees(await play(rollout))
    metrics = rollout.statistics()
    assert metrics["blames"] == {"platform": 2} and metrics["trajectories_retried"] == 2


async def test_a_member_whose_state_is_gone_begins_at_the_beginning(make: Make) -> None:
    host = Refusing()
    host.errors = [NotFound("no checkpoint")]
    batch = await play(make(host=host))
    branches = [bool(t.lineage) for group in batch.groups for t in group.trajectories]
    assert len(branches) == 12 and 4 <= sum(branches) < 8  # the branches of one first trajectory began anew
    assert all(t.scored for group in batch.groups for t in group.trajectories)


async def test_a_branch_has_the_seconds_of_its_environment(make: Make) -> None:
    class Patient(Letters4):
        seconds = 60.0

    branching, limits = Branching(roots=2, every=1), EpisodeLimits(step=0.0)
    config = RolloutConfig(groups=2, size=6, sampling=SAMPLING, branching=branching, limits=limits)
    need_trees(await play(make(environment=Patient, config=config)))


async def test_a_branch_that_dies_is_restored_within_its_own_turns(make: Make) -> None:
    host = FakeHost()
    killed: list[str] = []

    def prepare(sandbox: Any) -> None:
        def die(command: str) -> None:
            if len(host.sandboxes) > 4 and command.startswith("echo") and sandbox.id not in killed:
                killed.append(sandbox.id)
                sandbox.die()

        sandbox.after_command = die

    host.prepare = prepare
    batch = await play(make(host=host))
    need_trees(batch)
    branches = [t for group in batch.groups for t in group.trajectories if t.lineage]
    assert sum(t.killed for t in branches) > 0
    assert all(t.killed == t.recovered_equal for t in branches)


async def test_another_process_goes_on_with_the_tree(make: Make) -> None:
    """The first one is stopped in the middle; its branches, and the states that others are to begin in, live on."""
    host = FakeHost()
    stop = asyncio.Event()
    count = itertools.count()

    class Stopping(Letters4):
        async def step(self, sandbox: Any, action: str) -> Observation:
            if next(count) == 18:  # after the first trajectories of the trees, in the middle of the branches
                stop.set()
            if stop.is_set() and self.halting:
                await asyncio.Event().wait()
            return await super().step(sandbox, action)

        halting = True

    first = make(host=host, environment=Stopping)
    await first.start()
    async with asyncio.timeout(240):
        await stop.wait()
    await first.stop(leave=True)
    Stopping.halting = False
    second = make(host=host, environment=Stopping)
    existing = second.existing_sandboxes()
    assert existing and existing <= {sandbox.id for sandbox in host.sandboxes if not sandbox.removed}
    batch = await play(second)
    need_trees(batch)
    assert any(t.continued and t.lineage for group in batch.groups for t in group.trajectories)


@pytest.mark.skipif(bool(missing()), reason=missing())
async def test_real_sandboxes_are_branched_kept_and_visited(make: Make, host: Client, tmp_path: Path) -> None:
    """A process that the first trajectory's reset started lives in every branch, and in a visit afterwards."""

    class Living(Letters4):
        async def reset(self, sandbox: Any, seed: int) -> Observation:
            await sandbox.exec("sleep 1000 & echo $! > /pid")
            return await super().reset(sandbox, seed)

        async def step(self, sandbox: Any, action: str) -> Observation:
            assert (await sandbox.exec("kill -0 $(cat /pid)", ends_turn=False)).exit_code == 0
            return await super().step(sandbox, action)

    labelled = LabellingClient(host, tmp_path / "run")
    rollout = make(keep=6, host=labelled, environment=Living, seeds=range(1), groups=1)
    batch = await play(rollout)
    need_trees(batch)
    for row in rollout_rows(tmp_path):
        await host.checkpoint((await (await host.get(row.sandbox)).tree())[-1], wait="durable")
    await rollout.trees.retained.trim()
    await rollout.stop()
    rows = rollout_rows(tmp_path)
    there = await host.sandboxes()
    assert {(info.id, info.state, *info.labels) for info in there} == {(row.sandbox, "dead", RETAINED) for row in rows}
    assert len(rows) == 6 and all(row.bytes > 0 for row in rows)
    origins = visitable(tmp_path, rows[-1].prompt, rows[-1].member)
    for origin in origins:
        written = [turn.action[5] for turn in origin.trajectory.turns[: origin.visit.turn]]
        async with await fork(labelled, origin) as sandbox:
            said = (await sandbox.exec("cat f; kill -0 $(cat /pid)")).text
        assert said == "start\n" + "".join(f"{letter}\n" for letter in written)
    episodes = EpisodeManager(environment=Living, host=labelled, engine=Dice(), tokenizer=Letters())
    value = await resample(episodes, origins[0], SAMPLING, count=3, concurrency=2, pass_at=1.0)
    assert value.played == 3 and value.lost == 0
    for row in rows:
        await (await host.get(row.sandbox)).remove()
    with pytest.raises(NotFound, match="is gone: its sandbox was removed by hand"):
        await fork(labelled, origins[0])


def rollout_rows(directory: Path) -> list[RetainedRow]:
    ledger = RetainedLedger(directory)
    try:
        return ledger.rows()
    finally:
        ledger.close()


class Undoing(Letters4):
    """``undo N`` takes the sandbox back to the state before turn N."""

    max_turns = 8

    async def step(self, sandbox: Any, action: str) -> Observation:
        if action.startswith("undo"):
            await sandbox.exec("echo undone >> g")
            return Observation("went back\n$ ", back_to=int(action.split()[1]))
        return await super().step(sandbox, action)


class Script:
    def __init__(self, *answers: str) -> None:
        self.answers = answers

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "") -> Generation:
        ids = [*map(ord, self.answers[prompt_ids.count(END)]), END]
        return Generation(
            token_ids=ids, logprobs=[-0.5] * len(ids), spans=[WeightSpan(0, 0, len(ids))], finish_reason="stop"
        )


async def undoing(host: FakeHost, *answers: str) -> Trajectory:
    episodes = EpisodeManager(environment=Undoing, host=host, engine=Script(*answers), tokenizer=Letters())
    return await episodes.run(EpisodeSpec(prompt="p", seed=0), SAMPLING)


async def test_an_agent_goes_back_and_its_tokens_stay() -> None:
    echo = ["echo a >> f", "echo b >> f", "undo 1", "echo a >> f", "echo a >> f", "echo a >> f"]
    played = await undoing(FakeHost(), *echo)
    assert (played.status, played.reward, played.killed, len(played.turns)) == ("completed", 1.0, 0, 6)
    assert [turn.back_to for turn in played.turns] == [None, None, 1, None, None, None]
    assert sum(played.mask) == sum(len(answer) + 1 for answer in echo)
    again = await undoing(FakeHost(), "echo b >> f", "undo 7", "undo 0", *["echo a >> f"] * 4)
    assert again.reward == 1.0
    assert "no checkpoint holds the state before turn 7; there are: 0, 1" in again.turns[1].observation


def test_a_lineage_names_whose_turns_are_whose() -> None:
    from rollout.episode.origin import lineage

    parent = Trajectory(index=3, start=1, lineage=[Ancestor(0, 0, 2), Ancestor(1, 0, 4)])
    assert lineage(parent, 6) == [Ancestor(0, 0, 2), Ancestor(1, 0, 4), Ancestor(3, 1, 6)]
    assert lineage(parent, 4) == [Ancestor(0, 0, 2), Ancestor(1, 0, 4)]
    assert lineage(parent, 3) == [Ancestor(0, 0, 2), Ancestor(1, 0, 3)]
    assert lineage(parent, 2) == [Ancestor(0, 0, 2)]
    assert lineage(Trajectory(index=5), 1) == [Ancestor(5, 0, 1)]
