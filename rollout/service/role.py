"""The rollout as a process: engines, sandboxes, samples, and what a trainer may ask of them.

Guarantee: a version that was accepted is on disk before the trainer hears of it, and is adopted by this process or the
next one; no batch is handed out before the version that precedes it is served. Trainers that were replaced are refused.

::

    trainer ──publish──▶ accepted (on disk) ──▶ adopt: engines ──▶ controller.published ──▶ take may answer
       │ ▲                                                                                        │
       │ └────────────────────── batch, by reference ◀────────────────────────────────────────────┘
       └──ack──▶ store
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from rollout import tokenizer
from rollout.chaos import Faults
from rollout.config import RolloutConfig
from rollout.control.batch_request import NoMorePrompts
from rollout.controller import RolloutController
from rollout.engine.client import PublishResult
from rollout.environments.images import build_missing
from rollout.environments.mixture import RECENT, Draw, load_curriculum
from rollout.episode.pace import PacedEngine
from rollout.episode.prepared import PreparedStates
from rollout.episode.renderer import ChatRenderer, has_template
from rollout.labels import LabellingClient
from rollout.messages import Batch, Trajectory, TurnRecord
from rollout.plan import RolloutPlan
from rollout.pool.fleet import Fleet
from rollout.rewards import score_cache
from rollout.rewards.service import RewardService
from rollout.service import accepted
from rollout.service import protocol as wire
from rollout.service.engines import Engines, Serve, serving
from rollout.service.phases import PhaseClient
from rollout.store import stages
from rollout.store.samples import Fence, SampleStore
from rollout.weights.store import VersionStore
from sandbox.errors import EngineFailed, ImageNotFound, NoDaemon, NotFound, PagurusError

log = logging.getLogger("pagurus.rollout.role")

SEEDS = 1_000_000  # of a run's seed
TRAINER = "trainer"  # owner of fences
ROLLOUT = "rollout"
FAULT_TURNS = (1, 5)  # the service of an episode usually runs from turn 3 on
PREPARED = ".prepared"  # next to the runs, which share it
HOST_AGAIN = 0.2  # seconds between two looks
PHASES = ("seconds", "bytes", "fetch_s", "write_s", "check_s", "paused_s")


class RolloutRole:
    """``async with RolloutRole(run, plan, host) as role, Door(role, run / "roles"): await role.ended()``"""

    def __init__(self, run: Path, plan: RolloutPlan, host: LabellingClient, *, serve: Serve | None = None):
        self.run, self.plan, self.host = run, plan, host
        self.directory = run / "rollout"
        self.store = SampleStore(self.directory)
        self.environments = plan.environments(run)
        self.rewards = RewardService(
            host, workers=plan.scorers, ledger=self.directory / score_cache.NAME, log=run / "scorers.log"
        )
        self.controller: RolloutController | None = None
        self.born = time.time()
        self._serve = serve or serving(plan, run)
        self.phases = None if plan.share is None else PhaseClient(plan.share, run)
        self._ref = accepted.read(self.directory)
        self._served: wire.PublishedVersion | None = None
        self._published: PublishResult | None = None  # the last change of weights
        self._changed = asyncio.Condition()
        self._failure: BaseException | None = None
        self._first_turn: float | None = None
        self._verdicts: Counter[str] = Counter()
        self._finished = False
        self._work: asyncio.Task[None] | None = None

    async def __aenter__(self) -> RolloutRole:
        await self._check_image()
        self._reached("host")
        self._work = asyncio.create_task(self._adopt(), name="adopt versions")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._work is not None
        self._work.cancel()
        await asyncio.wait([self._work])
        if self.phases is not None:
            await self.phases.close()
        await self.rewards.close()
        self.store.close()

    async def ended(self) -> None:
        """Raises when this process cannot continue. Never returns."""
        assert self._work is not None
        await asyncio.shield(self._work)

    # ----------------------------------------------------------------- requests of the trainer

    async def open_trainer(self, request: wire.OpenTrainer) -> Fence:
        fence = await asyncio.to_thread(self.store.acquire, TRAINER)
        await asyncio.to_thread(self.store.recover, request.step, fence)
        if self.controller is not None:
            self.controller.resumed(request.step)
        log.info("trainer %d begins after %d steps", fence.generation, request.step)
        return fence

    async def publish(self, request: wire.Publish) -> wire.Done:
        await self._need(request.fence)
        await asyncio.to_thread(accepted.write, self.directory, request.ref)
        async with self._changed:
            self._ref = request.ref
            self._changed.notify_all()
        return wire.Done()

    async def take(self, request: wire.Take) -> wire.BatchReference:
        controller = await self._serving(request.fence)
        before = controller.meter.seconds()
        if 2 * request.step >= self.plan.steps and self.plan.faults:
            attempts = controller.attempts  # those that start from now on
            attempts.faults = attempts.faults or self._faults()
        await controller.start()
        if controller.step != request.step:
            raise NotFound(f"step {controller.step} is next, not {request.step}", hint="open the trainer again")
        try:
            batch = await controller.next_batch()
        except NoMorePrompts as error:
            raise NotFound(str(error), hint="every prompt was trained or given up") from None
        spent = {name: value - before.get(name, 0.0) for name, value in controller.meter.seconds().items()}
        return by_reference(batch, spent=spent, published=self._published)

    async def complete(self, request: wire.Complete) -> wire.BatchReference:
        return by_reference(await (await self._serving(request.fence)).complete(request.without))

    async def group_reference(self, request: wire.GroupReference) -> wire.Payloads:
        store = self.store
        return wire.Payloads(
            await asyncio.to_thread(lambda: [store.payload(request.prompt, member) for member in request.members])
        )

    async def ack(self, request: wire.Ack) -> wire.Done:
        await asyncio.to_thread(self.store.ack, request.step, request.fence)
        if self.controller is not None:
            self.controller.step = max(self.controller.step, request.step + 1)
            self.controller.ahead.trained(request.ess)
        return wire.Done()

    async def evaluate(self, request: wire.Evaluate) -> wire.EvaluationResult:
        controller = await self._serving(request.fence)
        if request.last:
            await controller.stop()
        sampling = controller.config.sampling
        if request.sampling is not None:
            sampling = msgspec.structs.replace(request.sampling, stop_token_ids=sampling.stop_token_ids)
        return wire.EvaluationResult(
            await controller.evaluate(request.seeds, sampling=sampling, samples=request.samples)
        )

    async def finish_run(self, request: wire.FinishRun) -> wire.RolloutCounters:
        controller = await self._serving(request.fence)
        await controller.stop()
        counts = await self.counts()
        await self.host.sweep()  # what was being created when the rollouts were stopped
        if self.phases is not None:
            await self.phases.leave()
        return counts

    async def count(self, request: wire.Count) -> wire.RolloutCounters:
        return await self.counts()

    async def counts(self) -> wire.RolloutCounters:
        """Of this process. Where the host does not answer, its part is what it last was."""
        counts = wire.RolloutCounters(
            born=self.born, verdicts=dict(self._verdicts), first_turn=self._first_turn, version=self._version
        )
        with contextlib.suppress(PagurusError):  # the host is being replaced: its figures are not needed
            now = await self.host.statistics()
            counts.in_flight, counts.queued = now.in_flight, now.queued
        if self.controller is not None:
            ours = self.controller.statistics()
            for name in ("killed", "recovered_equal", "trajectories_lost", "trajectories_retried"):
                setattr(counts, name, ours[name])
            counts.waits = [f"{wait.who} waits: {wait.reason}" for wait in self.controller.waits]
        elif self._failure is None:
            counts.waits = ["rollout waits: its engine starts"]
        if self.phases is not None and self.phases.waits:
            counts.waits = [f"rollout waits: {self.phases.waits}"]
        return counts

    # ----------------------------------------------------------------- versions

    @property
    def _version(self) -> int:
        return -1 if self._served is None else self._served.version

    async def _adopt(self) -> None:
        """Consumes versions that were accepted. Produces engines that serve the newest, and notifies the controller."""
        try:
            await self._changed_to(lambda: self._ref is not None)
            assert self._ref is not None
            ref = self._ref
            await self._turn(ref)
            await asyncio.to_thread(_need_published, ref)
            async with self._serve(ref) as engines, self._playing(engines, ref) as controller:
                while True:
                    await self._set_served(ref)
                    await self._changed_to(lambda: self._ref != self._served)
                    ref = self._ref
                    await self._turn(ref)
                    await asyncio.to_thread(_need_published, ref)
                    self._published = await engines.publish(ref.directory, ref.version)
                    await controller.published(ref.version)
        except Exception as error:
            self._failure = error
            async with self._changed:
                self._changed.notify_all()
            raise

    async def _turn(self, ref: wire.PublishedVersion) -> None:
        """Where machines are shared: nothing of a version happens on them before it is this run's turn."""
        if self.phases is not None:
            await self.phases.begin("rollout", ref.version)

    async def _set_served(self, ref: wire.PublishedVersion) -> None:
        async with self._changed:
            self._served = ref
            self._changed.notify_all()

    async def _changed_to(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)

    @contextlib.asynccontextmanager
    async def _playing(self, engines: Engines, ref: wire.PublishedVersion) -> AsyncIterator[RolloutController]:
        """The controller, continuing where the one before it stopped; sandboxes that no trajectory continues are
        removed."""
        self._reached("engine")
        renderer = await asyncio.to_thread(_renderer, self.run / "policy", self.plan.template)
        controller = self._controller(engines, ref, renderer)
        sweep: asyncio.Task[None] | None = None
        try:
            existing = controller.existing_sandboxes()
            left = await self.host.left(keep=existing)  # before there are new ones
            left += sorted(set(await self.host.retained()) - existing)
            if self.store.issued():  # it has learned before: no request for a batch is needed first
                await controller.start()
            self.controller = controller
            self._reached(stages.READY)
            sweep = asyncio.create_task(self._sweep(left), name="remove sandboxes without a trajectory")
            yield controller
        finally:
            if sweep is not None:
                sweep.cancel()
                await asyncio.wait([sweep])
            await asyncio.shield(controller.stop(leave=True))

    async def _sweep(self, left: list[str]) -> None:
        """Concurrently with the trajectories that continue: they need not wait for it."""
        try:
            await self.host.remove(left)
            await self.host.collect_prepared()
        except PagurusError as error:
            log.warning("sandboxes of the process before this one are removed at the end of the run: %s", error)

    async def _serving(self, fence: Fence) -> RolloutController:
        """The controller, once the version that was accepted last is served."""
        await self._changed_to(
            lambda: self._failure is not None or (self._served is not None and self._served == self._ref)
        )
        if self._failure is not None:
            raise (
                self._failure
                if isinstance(self._failure, PagurusError)
                else EngineFailed(f"the rollout cannot continue: {self._failure!r}", hint=f"see {self.run}/rollout.log")
            )
        await self._need(fence)  # he may have been replaced while he waited
        assert self.controller is not None
        return self.controller

    async def _need(self, fence: Fence) -> None:
        await asyncio.to_thread(self.store.need, fence)

    # ----------------------------------------------------------------- parts

    async def _check_image(self) -> None:
        """Before minutes are spent: is there an image to start sandboxes from? Some are built here."""
        if builds := self.environments.builds():
            await build_missing(self.host.client, builds)
        there = await self._images()
        for target in sorted(self.environments.images() - set(there)):
            raise ImageNotFound(
                f"no image {target!r}; there are: {', '.join(sorted(there)) or 'none'}", hint="pagurus image ls"
            )

    async def _images(self) -> list[str]:
        """A run that has begun waits for a host that is being replaced; a new one gets the error at once."""
        deadline = time.monotonic() + self.plan.host_timeout
        while True:
            try:
                return await self.host.images()
            except NoDaemon:
                if not self.store.issued() or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(HOST_AGAIN)

    def _controller(
        self, engines: Engines, ref: wire.PublishedVersion, renderer: ChatRenderer | None
    ) -> RolloutController:
        controller = RolloutController(
            environment=self.environments.environment,
            draw=self._draw,
            host=self.host,
            engine=PacedEngine(engines, seconds=self.plan.pace),
            tokenizer=tokenizer.load(self.run / "policy"),
            renderer=renderer,
            config=_ended_by(self.plan.config, renderer),
            directory=self.directory,
            version=ref.version,
            on_turn=self._on_turn,
            fleet=cast(Fleet, engines) if self.plan.handover else None,  # a pool: see `trainer.config`
        )
        controller.episodes.prepared = PreparedStates(self.host, self.run.parent / PREPARED)
        controller.episodes.rewards, controller.episodes.scoring = self.rewards, self.plan.scoring
        return controller

    def _draw(self, store: SampleStore) -> Draw:
        """The prompts that follow those of the store."""
        curriculum, parts = self.plan.curriculum, len(self.environments.parts)
        return Draw(
            self.environments,
            self.plan.config.seed * SEEDS,
            store.issued_of(parts),
            curriculum=None if curriculum is None else load_curriculum(Path(curriculum)),
            outcomes=lambda: store.outcomes(2 * RECENT * parts),
        )

    def _faults(self) -> Faults:
        """Strikes that hit about `faults` trajectories of the second half, at random turns."""
        plan = self.plan
        half = (plan.steps + 1) // 2 * plan.config.groups * plan.config.size
        return Faults(seed=plan.config.seed, share=min(1.0, plan.faults / half), turns=FAULT_TURNS)

    def _reached(self, stage: str) -> None:
        stages.note(self.run / "roles", ROLLOUT, stage)

    def _on_turn(self, _: Trajectory, turn: TurnRecord) -> None:
        if self._first_turn is None:
            self._first_turn = time.time()
            self._reached(stages.WORKED)
        self._verdicts[turn.verdict] += 1


def _renderer(directory: Path, options: dict[str, Any]) -> ChatRenderer | None:
    """Of a chat model: its episodes are conversations, laid out by its own template."""
    return ChatRenderer.load(directory, options=options) if has_template(directory) else None


def _ended_by(config: RolloutConfig, renderer: ChatRenderer | None) -> RolloutConfig:
    """The same, with all that ends a message of this model."""
    if renderer is None:
        return config
    stops = sorted({*config.sampling.stop_token_ids, *renderer.stops})
    sampling = msgspec.structs.replace(config.sampling, stop_token_ids=stops)
    return msgspec.structs.replace(config, sampling=sampling)


def _need_published(ref: wire.PublishedVersion) -> None:
    try:
        result = VersionStore(ref.directory).version(ref.version)
    except NotFound:
        result = None
    if result is None or result.manifest.digest != ref.digest:
        raise EngineFailed(
            f"{ref.directory} does not have what was published as version {ref.version}", hint="publish it again"
        )


def by_reference(
    batch: Batch, *, spent: Mapping[str, float] | None = None, published: PublishResult | None = None
) -> wire.BatchReference:
    """A batch as it is handed out: its samples by their names."""
    groups = [
        wire.GroupReference(prompt=group.prompt, seed=group.seed, members=[item.index for item in group.trajectories])
        for group in batch.groups
    ]
    return wire.BatchReference(
        step=batch.step,
        version=batch.version,
        oldest=batch.oldest,
        groups=groups,
        spent=dict(spent or {}),
        paused_s=0.0 if published is None else published.paused_s,
        sync={} if published is None else {f"sync_{name}": getattr(published, name) for name in PHASES},
    )
