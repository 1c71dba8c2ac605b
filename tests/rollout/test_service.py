"""The rollout as another process sees it: real sockets, real stores; the host and the engines are fakes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from aiohttp.test_utils import unused_port

from rollout import RolloutConfig
from rollout.engine.client import PublishResult, Sampling
from rollout.environments import directory as tasks
from rollout.environments import splits
from rollout.plan import RolloutPlan
from rollout.service.client import RolloutClient
from rollout.service.protocol import TOKEN, PublishedVersion
from rollout.service.role import RolloutRole
from rollout.service.server import RolloutServer
from rollout.weights.layout import Layout
from rollout.weights.store import VersionStore
from rollout.weights.versions import VersionManifest
from sandbox.errors import Conflict, EngineFailed, ImageNotFound, Invalid, NoDaemon
from sandbox.messages import Statistics
from tests.support.rollout_fakes import END, SCRIPT, FakeHost, Letters, Notebook, ScriptedEngine

PLAN = RolloutPlan(
    task="unused", config=RolloutConfig(groups=1, size=2, sampling=Sampling(max_tokens=32, stop_token_ids=[END]))
)


class Host(FakeHost):
    swept = 0
    orphans: tuple[str, ...] = ("sb-left",)
    away = False

    async def images(self) -> list[str]:
        return [Notebook.image]

    async def left(self, keep: Any = ()) -> list[str]:
        return [name for name in self.orphans if name not in keep]

    async def remove(self, left: list[str]) -> int:
        self.swept += 1
        if self.away:
            raise NoDaemon("the host is away", hint="wait")
        self.orphans = tuple(name for name in self.orphans if name not in left)
        return len(left)

    async def collect_prepared(self) -> int:
        return 0

    async def sweep(self) -> int:
        return await self.remove(await self.left())

    async def statistics(self) -> Statistics:
        return Statistics(checkpoints={"files": 7})


class Engines(ScriptedEngine):
    """Takes a version when the gate is open."""

    def __init__(self) -> None:
        super().__init__(SCRIPT)
        self.gate = asyncio.Event()
        self.gate.set()

    async def publish(self, directory: Path | str, version: int) -> PublishResult:
        await self.gate.wait()
        self.version = version
        return PublishResult(version=version, seconds=0.0, paused_s=0.25)


class Scene:
    """A run folder whose rollout is started and ended at will."""

    def __init__(self, run: Path):
        self.run, self.host, self.engines = run, Host(), Engines()
        self.limiter: RolloutServer | None = None
        self._stack, self.clients = contextlib.AsyncExitStack(), contextlib.AsyncExitStack()

    async def begin(self) -> None:
        @contextlib.asynccontextmanager
        async def serve(ref: PublishedVersion) -> AsyncIterator[Engines]:
            self.engines.version = ref.version
            yield self.engines

        role = RolloutRole(self.run, PLAN, self.host, serve=serve)  # type: ignore[arg-type]
        await self._stack.enter_async_context(role)
        self.role = role
        self.limiter = await self._stack.enter_async_context(RolloutServer(role, self.run / "roles"))

    async def end(self) -> None:
        await self._stack.aclose()

    def published(self, version: int) -> PublishedVersion:
        """A version without any tensor."""
        store = VersionStore(self.run / "weights")
        layout = store.put(msgspec.msgpack.encode(Layout([], [])))
        made = VersionManifest(version=version, layout=layout, base=None, steps=None, complete=[], digests=b"")
        return PublishedVersion(
            version=version, directory=str(store.directory), digest=store.publish(made).manifest.digest
        )

    async def trainer(self, step: int = 0) -> RolloutClient:
        client = RolloutClient.of(self.run, timeout=30.0)
        self.clients.push_async_callback(client.close)
        await client.open(step)
        return client


@pytest_asyncio.fixture
async def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    monkeypatch.setattr(tasks, "load", lambda _: tasks.LoadedTask("notebook", Notebook, None))
    monkeypatch.setattr("rollout.service.role.tokenizer.load", lambda _: Letters())
    run = tmp_path / ("a-long-name-" * 10)  # the socket's name is longer than a socket's name may be
    run.mkdir()
    splits.write(run, splits.make([splits.Items(part="notebook", kind="seeds")]))
    made = Scene(run)
    await made.begin()
    yield made
    await made.clients.aclose()
    await made.end()


async def test_a_trainer_takes_acknowledges_publishes_and_forgets(scene: Scene) -> None:
    trainer = await scene.trainer()
    await trainer.publish(scene.published(0))
    first = await trainer.next_batch()
    assert (first.step, first.version, [len(g.trajectories) for g in first.groups]) == (0, 0, [2])
    assert all(trajectory.reward == 1.0 for trajectory in first.trajectories)
    assert trainer.last is not None and sum(trainer.last.spent.values()) > 0
    again = await trainer.next_batch()  # it was not acknowledged: the same
    assert again == first
    await trainer.consumed(first)
    scene.engines.gate.clear()
    await trainer.publish(scene.published(1))  # returns though no engine serves it
    waiting = asyncio.create_task(trainer.next_batch())
    done, _ = await asyncio.wait([waiting], timeout=0.3)
    assert not done and (await trainer.counts()).version == 0
    scene.engines.gate.set()
    second = await waiting
    assert (second.step, second.version) == (1, 1) and second.groups[0].prompt != first.groups[0].prompt
    assert trainer.last.paused_s == 0.25 and (await trainer.counts()).version == 1


async def test_a_trainer_that_was_replaced_commits_nothing(scene: Scene) -> None:
    old = await scene.trainer()
    await old.publish(scene.published(0))
    batch = await old.next_batch()
    await old.consumed(batch)
    await old.publish(scene.published(1))
    scene.engines.gate.clear()
    waiting = asyncio.create_task(old.next_batch())
    new = await scene.trainer(step=0)  # the save of that step was damaged: it goes on before it
    scene.engines.gate.set()
    for attempt in (old.consumed(batch), old.publish(scene.published(2)), old.complete(), old.evaluate([1])):
        with pytest.raises(Conflict, match="another process is the trainer"):
            await attempt
    assert await new.next_batch() == batch
    with pytest.raises(Conflict):
        await waiting
    assert scene.role.store.account().consumed == 0


async def test_the_next_rollout_goes_on_with_the_version_and_the_batch(scene: Scene) -> None:
    trainer = await scene.trainer()
    await trainer.publish(scene.published(0))
    batch = await trainer.next_batch()
    await scene.end()
    requested = asyncio.create_task(trainer.next_batch())
    done, _ = await asyncio.wait([requested], timeout=0.3)
    assert not done  # it waits for a rollout
    await scene.begin()
    assert await requested == batch
    await trainer.consumed(batch)
    assert (await trainer.counts()).version == 0
    assert [t.reward for t in await trainer.evaluate([5], last=True)] == [1.0]
    assert (await trainer.finish()).born == scene.role.born and scene.host.swept == 3


async def test_weights_that_were_withdrawn_after_they_were_published_are_not_served(scene: Scene) -> None:
    trainer = await scene.trainer()
    ref = scene.published(0)
    VersionStore(ref.directory).withdraw(-1)
    await trainer.publish(ref)
    with pytest.raises(EngineFailed, match="does not have what was published as version 0"):
        await trainer.next_batch()
    with pytest.raises(EngineFailed):
        await scene.role.ended()


async def test_other_hosts_need_the_token_and_a_wire_that_nobody_reads(scene: Scene) -> None:
    assert scene.limiter is not None
    with pytest.raises(Invalid, match="in the clear"):
        await scene.limiter.listen("0.0.0.0:1")
    with pytest.raises(Invalid, match="no address"):
        await scene.limiter.listen("here")
    port = unused_port()
    await scene.limiter.listen(f"127.0.0.1:{port}")
    token = scene.run / "roles" / TOKEN
    assert token.stat().st_mode & 0o777 == 0o600
    async with RolloutClient(f"http://127.0.0.1:{port}", token=token.read_text()) as away:
        await away.open(0)
    for wrong in (None, "guess"):
        async with RolloutClient(f"http://127.0.0.1:{port}", token=wrong) as away:
            with pytest.raises(Invalid, match="token"):
                await away.open(0)


async def test_where_no_rollout_is_the_trainer_is_told_after_a_while(tmp_path: Path) -> None:
    async with RolloutClient.of(tmp_path, timeout=0.1) as trainer:
        with pytest.raises(NoDaemon, match="the rollout of this run does not answer"):
            await trainer.open(0)


async def test_an_image_that_is_not_there_ends_it_at_once(scene: Scene) -> None:
    plan = RolloutPlan(task="unused", config=RolloutConfig(), image="nope")
    with pytest.raises(ImageNotFound, match="no image 'nope'"):
        async with RolloutRole(scene.run, plan, scene.host):  # type: ignore[arg-type]
            pass
