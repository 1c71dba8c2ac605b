"""Resets that are made once: each episode of a seed begins in a verified fork, or is reset itself, and blamed right."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollout import labels
from rollout.chaos import Inject, kill_sandbox
from rollout.decide.blame import Blame, Cause, EpisodePhase, blame
from rollout.engine.client import Sampling
from rollout.environments.base import Observation
from rollout.episode.manager import EpisodeManager
from rollout.episode.prepared import GONE, MAX_FORKS_FAILED, PreparedStates
from rollout.episode.spec import EpisodeLimits, EpisodeSpec
from rollout.labels import LEDGER, PREPARED, LabellingClient
from rollout.messages import Trajectory
from sandbox import Client
from sandbox.errors import NotEqual
from tests.support.daemon_host import missing
from tests.support.rollout_fakes import END, SCRIPT, Letters, Notebook, ScriptedEngine

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
SAMPLING = Sampling(max_tokens=64, stop_token_ids=[END])


class Counting(Notebook):
    """Counts its resets; a process that the reset starts must be there in every episode."""

    resets = 0

    async def reset(self, sandbox: Any, seed: int) -> Observation:
        type(self).resets += 1
        await sandbox.exec("sleep 1000 & echo $! > /pid")
        self.secret = seed * 7
        return await super().reset(sandbox, seed)

    async def step(self, sandbox: Any, action: str) -> Observation:
        assert self.secret % 7 == 0 and (await sandbox.exec("kill -0 $(cat /pid)", ends_turn=False)).exit_code == 0
        return await super().step(sandbox, action)


@pytest.fixture
async def labelled(host: Client, tmp_path: Path) -> AsyncIterator[LabellingClient]:
    Counting.resets = 0
    labelled = LabellingClient(host, tmp_path / "run")
    yield labelled
    await labelled.sweep()
    for info in await host.sandboxes({PREPARED: None}):
        await (await host.get(info.id)).remove()


def manager(
    labelled: LabellingClient, states: PreparedStates | None, kind: Any = Counting, **limits: float
) -> EpisodeManager:
    return EpisodeManager(
        environment=kind,
        host=labelled,
        engine=ScriptedEngine(SCRIPT),
        tokenizer=Letters(),
        prepared=states,
        limits=EpisodeLimits(**limits),
    )


async def play(episodes: EpisodeManager, seed: int, count: int, **options: Any) -> list[Trajectory]:
    specs = [EpisodeSpec(prompt=f"p{seed}", seed=seed, index=index) for index in range(count)]
    return list(await asyncio.gather(*(episodes.run(spec, SAMPLING, **options) for spec in specs)))


async def test_one_reset_serves_the_group_the_next_epoch_and_the_next_run(
    labelled: LabellingClient, tmp_path: Path
) -> None:
    states = PreparedStates(labelled, tmp_path / "book")
    (alone,) = await play(manager(labelled, None), 3, 1)
    group = await play(manager(labelled, states), 3, 4)
    again = await play(manager(labelled, states), 3, 1)
    other_run = PreparedStates(LabellingClient(labelled.client, tmp_path / "other"), tmp_path / "book")
    later = await play(manager(labelled, other_run), 3, 1)
    assert [item.reward for item in [alone, *group, *again, *later]] == [1.0] * 7
    assert Counting.resets == 2  # of the one alone, and of all others
    assert {(tuple(item.tokens), item.opening) for item in [*group, *again, *later]} == {
        (tuple(alone.tokens), alone.opening)
    }
    assert (states.made, states.forked, other_run.made, other_run.forked) == (1, 5, 0, 1)
    left = await labelled.client.sandboxes()
    assert [(info.state, set(info.labels)) for info in left if PREPARED in info.labels] == [
        ("dead", {PREPARED, LEDGER})
    ]
    assert all(PREPARED in info.labels for info in left)  # the episodes' own are gone


@pytest.mark.parametrize("when", ["between", "command"])
async def test_a_member_that_dies_comes_back_to_the_prepared_state(
    labelled: LabellingClient, tmp_path: Path, when: Any
) -> None:
    episodes = manager(labelled, PreparedStates(labelled, tmp_path / "book"))
    inject = Inject(0, when, kill=kill_sandbox)
    (injected,) = await play(episodes, 3, 1, inject=inject)
    (calm,) = await play(episodes, 3, 1)
    assert injected.killed == injected.recovered_equal == 1 and Counting.resets == 1
    assert (injected.tokens, injected.reward) == (calm.tokens, 1.0)


async def test_a_state_that_somebody_removed_is_made_again(labelled: LabellingClient, tmp_path: Path) -> None:
    episodes = manager(labelled, PreparedStates(labelled, tmp_path / "book"))
    await play(episodes, 3, 1)
    for info in await labelled.client.sandboxes({PREPARED: None}):
        await (await labelled.client.get(info.id)).remove()
    group = await play(episodes, 3, 3)
    assert [item.reward for item in group] == [1.0] * 3 and Counting.resets == 2


async def test_a_state_that_comes_back_outlives_those_that_come_once(labelled: LabellingClient, tmp_path: Path) -> None:
    states = PreparedStates(labelled, tmp_path / "book", limit=2)
    episodes = manager(labelled, states)
    for seed in (1, 2, 3, 1, 4, 5, 1):
        assert [item.reward for item in await play(episodes, seed, 1)] == [1.0]
    assert Counting.resets == 6  # of 1 to 5, and of 1 once more
    retained = [path for path in (tmp_path / "book").iterdir() if not path.name.endswith(GONE)]
    assert len(await labelled.client.sandboxes({PREPARED: None})) == len(retained) == 2


async def test_states_whose_book_was_deleted_are_collected(
    labelled: LabellingClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    episodes = manager(labelled, PreparedStates(labelled, tmp_path / "book"))
    other = manager(labelled, PreparedStates(labelled, tmp_path / "other"))
    await play(episodes, 1, 1)
    await play(other, 2, 1)
    shutil.rmtree(tmp_path / "book")
    assert await labelled.collect_prepared() == 0  # too young to be told from one that is being made
    monkeypatch.setattr(labels, "YOUNG", -1.0)
    assert await labelled.collect_prepared() == 1
    assert len(await labelled.client.sandboxes({PREPARED: None})) == 1


async def test_what_a_reset_depends_on_has_a_state_of_its_own(labelled: LabellingClient, tmp_path: Path) -> None:
    class Harder(Counting):
        level = 0

        def __init__(self) -> None:
            self.hard = type(self).level

    states = PreparedStates(labelled, tmp_path / "book")
    for level in (0, 1, 1):
        Harder.level = level
        await play(manager(labelled, states, Harder), 3, 1)
    assert (states.made, states.forked) == (2, 3)


class Alone(Counting):
    shares_reset = False


class Opaque(Counting):
    """Keeps what nobody can write down."""

    async def reset(self, sandbox: Any, seed: int) -> Observation:
        self.lock = asyncio.Lock()
        return await super().reset(sandbox, seed)


@pytest.mark.parametrize("kind", [Alone, Opaque])
async def test_an_environment_may_keep_its_resets_to_itself(
    labelled: LabellingClient, tmp_path: Path, kind: type[Counting]
) -> None:
    kind.resets = 0
    states = PreparedStates(labelled, tmp_path / "book")
    group = await play(manager(labelled, states, kind), 3, 3)
    assert [item.reward for item in group] == [1.0] * 3 and states.made == 0
    assert kind.resets == 3 + (kind is Opaque)  # one was made before that was known
    assert not await labelled.client.sandboxes({PREPARED: None})


class Hanging(Counting):
    hang = 1  # resets that hang

    async def reset(self, sandbox: Any, seed: int) -> Observation:
        type(self).hang -= 1
        if type(self).hang >= 0:
            await asyncio.sleep(1000)
        return await super().reset(sandbox, seed)


async def test_a_reset_that_hangs_costs_one_member(labelled: LabellingClient, tmp_path: Path) -> None:
    Hanging.hang = 1
    states = PreparedStates(labelled, tmp_path / "book")
    group = await play(manager(labelled, states, Hanging, reset=8.0), 3, 4)
    failed = [item.failure for item in group if item.failure is not None]
    assert [(item.phase, item.cause, blame(item)) for item in failed] == [
        (EpisodePhase.RESET, Cause.LATE, Blame.ENVIRONMENT)
    ]
    assert sorted(item.reward for item in group) == [0.0, 1.0, 1.0, 1.0]


async def test_forks_that_do_not_come_back_equal_end_the_sharing(
    labelled: LabellingClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fork(checkpoint: str) -> Any:
        raise NotEqual("the restored state differs in 1 point")

    monkeypatch.setattr(labelled, "fork", fork)
    episodes = manager(labelled, PreparedStates(labelled, tmp_path / "book"))
    failures = [(await play(episodes, 3, 1))[0].failure for _ in range(MAX_FORKS_FAILED)]
    assert all(item is not None and blame(item) is Blame.PLATFORM for item in failures)
    assert [item.reward for item in await play(episodes, 3, 2)] == [1.0, 1.0]
    assert Counting.resets == 3  # the shared one, and one for each of the last two
