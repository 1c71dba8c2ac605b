"""`RolloutController`: groups of trajectories from prompts, at a bounded staleness, for a trainer that waits little.

Guarantee: every prompt is accounted for exactly once (I7); a batch is whole groups in which no token older than the
bound bears gradient; a failure is booked with its blame (I10); when nothing can continue, an error says why.

::

    seeds ─▶ store.lease ─▶ group: size x Attempts.play ──────▶ store.put ─▶ store.buffer ─▶ store.take ─▶ trainer
                                │      ▲ failed by the platform: again                           │
                                │      └───────────────────────────┐                             │
                       view ─▶ RolloutPolicy.decide ─▶ actions ─▶ execute ◀── published(version) ◀┘
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from rollout import held_out
from rollout.chaos import Faults
from rollout.config import RolloutConfig
from rollout.control import groups
from rollout.control.ahead import Ahead
from rollout.control.attempts import Attempts
from rollout.control.batch_request import NoMorePrompts, PendingBatch
from rollout.control.groups import GroupCounts, OpenGroup
from rollout.control.refusals import Refusals
from rollout.control.trees import BranchTrees
from rollout.decide.policy import RolloutPolicy
from rollout.decide.staleness import staleness
from rollout.decide.view import (
    Abort,
    Action,
    At,
    BufferedGroup,
    Defer,
    FinishGroup,
    GiveUp,
    HandOut,
    LeasePrompts,
    NoMoreBatches,
    ReopenGroup,
    Rest,
    RolloutView,
    StartTrajectory,
    Stop,
    WaitReason,
)
from rollout.engine.client import Sampling
from rollout.environments.base import Environment, Tokenizer
from rollout.episode.manager import EpisodeManager
from rollout.episode.parts import Generator, OnTurn
from rollout.episode.renderer import Renderer
from rollout.episode_clock import PhaseMeter
from rollout.messages import Batch, Trajectory, TurnRecord
from rollout.pool.fleet import Fleet
from rollout.store import samples as store
from rollout.store.decisions import DecisionLog
from rollout.store.disk import DiskThread, JournalThread
from rollout.store.journal import Key, TurnJournal
from rollout.store.status import Status, TrajectoryStatus, write_status
from sandbox.errors import Conflict, EngineFailed

log = logging.getLogger("pagurus.rollout")

NEVER = 3600.0  # seconds between two looks when nothing says when
STATUS, STATUS_INTERVAL = "rollout status", 1.0  # seconds


class RolloutController:
    """See the module. ``async with RolloutController(...) as rollout: batch = await rollout.next_batch()``"""

    def __init__(
        self,
        *,
        environment: Callable[[], Environment],
        host: Any,
        engine: Generator,
        tokenizer: Tokenizer,
        config: RolloutConfig,
        directory: Path | str,
        renderer: Renderer | None = None,  # of a chat model
        version: int = 0,
        step: int | None = None,
        seeds: Iterable[int] | None = None,
        draw: Callable[[store.SampleStore], Iterator[int]] | None = None,
        faults: Faults | None = None,
        on_turn: OnTurn = lambda *_: None,
        fleet: Fleet | None = None,
    ):
        """`version`: of the weights that the engine serves now. `step`: steps that the trainer has saved; None: those
        acknowledged. `seeds`: of the prompts, the same at every start; None: all from ``config.seed`` million on.
        `draw`: the seeds that come after those that the store has, instead. `fleet`: engines that go over to the
        trainer's gradients before the last answers are there; None: none do."""
        self.config, self.host, self.directory, self.fleet = config, host, Path(directory), fleet
        self._disk = DiskThread()
        self.store, self.journal = store.SampleStore(self.directory), TurnJournal(self.directory)
        self.fence = self.store.acquire("rollout")
        if step is not None:
            self.store.recover(step, self.fence)
        self.policy, self.meter = RolloutPolicy(config.rules), PhaseMeter()
        self._changed = asyncio.Event()
        self._refusals = Refusals(self._changed)
        self.trees = BranchTrees(host, self.store, self._disk, self.directory, config)
        self.log = DecisionLog(self.directory, self.fence.generation, config.rules)
        self.episodes = self._manager(environment, engine, tokenizer, renderer)
        self.step, self.version, self._reported = self.store.next_step() if step is None else step, version, on_turn
        issued = itertools.count(config.seed * 1_000_000) if seeds is None else seeds
        self._seeds = itertools.islice(issued, self.store.issued(), None) if draw is None else draw(self.store)
        self._seeds_left, self._draining, self._stopped = True, False, False
        self._queued, self._deferred = self.store.queued(), self.store.queued(deferred=True)
        self._groups: dict[str, OpenGroup] = {}
        self._buffer: dict[str, BufferedGroup] = {}
        self._requested = PendingBatch()
        self._training = self.store.unpublished(version)
        self._counts, self.ahead = GroupCounts(), Ahead(config)
        self.attempts = self._attempts(faults)
        self._waits: list[WaitReason] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._pump: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._load()

    async def __aenter__(self) -> RolloutController:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _manager(
        self, environment: Callable[[], Environment], engine: Generator, tokenizer: Tokenizer, renderer: Renderer | None
    ) -> EpisodeManager:
        config = self.config
        return EpisodeManager(
            environment=environment,
            host=self.host,
            engine=engine,
            tokenizer=tokenizer,
            renderer=renderer,
            limits=config.limits,
            failed_reward=config.failed_reward,
            notes=JournalThread(self.journal, self._disk),
            meter=self.meter,
            on_turn=self._on_turn,
            on_created=lambda: self._refusals.over("create"),
            retained=self.trees.retained if self.trees.retained.target else None,
            visitable=config.visit.trajectories > 0,
            effects=config.effects,
        )

    def _attempts(self, faults: Faults | None) -> Attempts:
        return Attempts(
            episodes=self.episodes,
            store=self.store,
            journal=self.journal,
            fence=self.fence,
            disk=self._disk,
            trees=self.trees,
            refusals=self._refusals,
            counts=self._counts,
            config=self.config,
            faults=faults,
            changed=self._changed,
        )

    def _load(self) -> None:
        """What processes before this one left: whole groups, groups on their way, turns on their way."""
        for lease in self.store.buffered():
            self._buffer[lease.prompt] = groups.complete(lease, self.config.size, self.store)
        for group in groups.left(self.config.rules, self.store, self.journal, self.trees.ledger):
            self._add(group)

    def _add(self, group: OpenGroup) -> None:
        self._groups[group.lease.prompt] = group
        self.trees.retained.need(group.lease.prompt)

    def existing_sandboxes(self) -> set[str]:
        """Sandboxes that another process left and this one continues or keeps. All others may be removed."""
        members = [member for group in self._groups.values() for member in group.members]
        parked = set(self.journal.open().values()) if self.config.tail_resumes else set()
        return {member.since[-1].sandbox for member in members if member.since} | self.trees.sandboxes() | parked

    async def start(self) -> None:
        """Begin to fill the buffer."""
        if self._pump is None:
            self._pump = self._spawn(self._run(), "rollout decisions")
        self._begin_report()

    def _begin_report(self) -> None:
        if not self._stopped and STATUS not in {task.get_name() for task in self._tasks}:
            self._spawn(self._report(), STATUS)

    async def stop(self, *, leave: bool = False) -> None:
        """End all trajectories. The next controller of this directory continues them if they `leave` their sandboxes,
        else it plays them from the beginning. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        self.episodes.leaving = leave
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if not leave:
            for key in await self._disk.do(self.journal.open):
                await self._disk.do(self.journal.forget, key)
        self._requested.cancel()
        self._disk.close()
        self.log.close()
        self.trees.close()
        self.journal.close()
        self.store.close()

    # ----------------------------------------------------------------- for the trainer

    def resumed(self, step: int) -> None:
        """A trainer begins that has saved so many steps, as the store knows by now. Who waited for a batch before it
        was replaced, and gets an error."""
        self._requested.refuse(Conflict("another trainer has begun", hint="let it work; `pagurus roles` shows it"))
        self.step = step

    async def next_batch(self) -> Batch:
        """Whole groups for the next step, oldest policy first. Waits until there are enough.

        Raises NoMorePrompts when there will be none, EngineFailed with the reason when the platform refuses too long.
        """
        if self._failure is not None:
            raise self._failure
        if (again := await self._disk.do(self.store.batch, self.step)) is not None:  # a step that was not saved
            self._training = True
            return again
        answer = self._requested.request()
        self._changed.set()
        return await answer

    async def complete(self, without: Collection[str] = ()) -> Batch:
        """Groups that wait for the next batch, but `without`, where a trainer may look before it is complete: on
        machines of its own, or once engines rest."""
        may = self.fleet is None or self.fleet.fleet().rested
        prompts, size = [item for item in self._buffer if may and item not in without], self.config.size
        result = await self._disk.do(lambda: self.store.complete(prompts, size))
        return Batch(version=self.version, groups=result, step=self.step, oldest=self.version - self.config.staleness)

    async def consumed(self, batch: Batch, *, ess: float | None = None) -> None:
        """The step on this batch is saved: its prompts are consumed for good. `ess`: see `Ahead.trained`."""
        await self._disk.do(self.store.ack, batch.step, self.fence)
        self.ahead.trained(ess)
        self.step = batch.step + 1

    async def published(self, version: int) -> None:
        """The trainer moved on, and the engine serves `version`."""
        training = await self._disk.do(self.store.unpublished, version)
        for group in self._groups.values():
            for member in group.members:
                member.published(self.version)
        self.version, self._training = version, training
        self._changed.set()

    async def evaluate(
        self, seeds: Iterable[int], *, sampling: Sampling | None = None, samples: int = 1
    ) -> list[Trajectory]:
        """Play held-out episodes under the same limit of concurrency; the store does not know of them."""
        self._begin_report()
        episodes = dataclasses.replace(self.episodes, notes=None, retained=None, visitable=False, effects=None)
        sampling = sampling or self.config.sampling
        trajectories = await held_out.play_all(
            episodes, seeds, sampling, self.config, refused=self._refusals.note, samples=samples
        )
        for trajectory in trajectories:
            self._counts.ledger(trajectory)
        return trajectories

    @property
    def waits(self) -> list[WaitReason]:
        """Who waits for what: as of the last decision, and which part refuses now."""
        reasons = {(wait.who, wait.reason): wait for wait in (*self._waits, *self._refusals.waits)}
        return list(reasons.values())

    def statistics(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "step": self.step,
            "active": len(self._running),
            "groups_running": len(self._groups),
            "groups_buffered": len(self._buffer),
            "bound": self.config.staleness if self.ahead.bound is None else self.ahead.bound,
            "prompts": msgspec.to_builtins(self.store.account()) if not self._stopped else {},
            **self._counts.metrics(),
            "staleness": [staleness(self.version, member.trajectory.oldest) for member in self._running],
        }

    @property
    def _running(self) -> list[groups.Slot]:
        return [m for group in self._groups.values() for m in group.members if m.task is not None]

    # ----------------------------------------------------------------- the loop of decisions

    async def _run(self) -> None:
        """Looks, decides, writes down, executes; sleeps until something changed or a pause is over."""
        while True:
            self._changed.clear()
            now, view = time.time(), self._view()
            actions = self.policy.decide(view, now)
            self.log.append(now, view, actions)
            self._waits = [action for action in actions if isinstance(action, WaitReason)]
            if len(self._waits) < len(actions):
                for action in actions:
                    await self._execute(action)
                if self._failure is not None:
                    return
                continue
            until = min((wait.until for wait in self._waits if wait.until is not None), default=now + NEVER)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.001, until - now)):
                    await self._changed.wait()

    def _view(self) -> RolloutView:
        return RolloutView(
            version=self.version, requested=self._requested.open, training=self._training,
            running=[group.view for group in self._groups.values()], buffered=list(self._buffer.values()),
            queued=self._queued, deferred=self._deferred, more=self._seeds_left, draining=self._draining,
            parts=self._refusals.views, bound=self.ahead.bound, fleet=None if self.fleet is None else
            self.fleet.fleet(),
        )  # fmt: skip

    async def _execute(self, action: Action) -> None:
        match action:
            case LeasePrompts(count, deferred):
                await self._lease(count, deferred=deferred)
            case Defer(prompt):
                await self._defer(prompt)
            case StartTrajectory(prompt, index, at):
                self._begin(self._groups[prompt], index, at)
            case Abort(prompt, index, why, again):
                await self._abort(self._groups[prompt], index, why, again=again)
            case ReopenGroup(prompt, members, why):
                await self._reopen(prompt, members, why)
            case FinishGroup(prompt):
                await self._finish(prompt)
            case GiveUp(prompt, reason):
                await self._give_up(prompt, reason)
            case HandOut(prompts, oldest):
                await self._hand_out(prompts, oldest)
            case Rest(stay):
                assert self.fleet is not None
                self.fleet.rest(stay)
            case NoMoreBatches():
                self._requested.refuse(NoMorePrompts("every prompt was trained or given up"))
            case Stop(reason):
                self._fail(EngineFailed(f"the rollout is stuck: {reason}", hint="see `pagurus rollouts why RUN`"))
            case WaitReason():
                pass

    async def _lease(self, count: int, *, deferred: bool) -> None:
        if not deferred and self._queued < count and self._seeds_left:
            seeds = list(itertools.islice(self._seeds, count - self._queued))
            self._seeds_left = len(seeds) == count - self._queued
            await self._disk.do(self.store.issue, seeds, self.fence)
        for lease in await self._disk.do(lambda: self.store.lease(count, self.fence, deferred=deferred)):
            self._add(
                await self._disk.do(
                    groups.leased, lease, self.config.rules, self.store, self.journal, self.trees.ledger
                )
            )
        await self._count_queued()

    async def _count_queued(self) -> None:
        self._queued = await self._disk.do(self.store.queued)
        self._deferred = await self._disk.do(lambda: self.store.queued(deferred=True))

    async def _defer(self, prompt: str) -> None:
        group, keep, parked = self._groups[prompt], self.config.tail_resumes, self.episodes.parked
        for member in group.members:
            if member.task is not None:
                key = Key(prompt, member.index, member.start)
                parked |= {key} if keep and not member.scoring else set()
                await self._abort(group, member.index, "put off", again=False)
                parked.discard(key)
        if not keep:
            await self.attempts.forget(group)
        await self._disk.do(lambda: self.store.defer(prompt, self.fence, keep=keep))
        del self._groups[prompt]
        await self.trees.retained.release(prompt)
        await self._count_queued()

    def _begin(self, group: OpenGroup, index: int, at: At | None) -> None:
        member = group.members[index]
        member.trajectory, member.why, member.overtaken = Trajectory(), "", None
        member.at = member.at if member.since else at
        member.task = self._spawn(self.attempts.play(group, member), f"episode {group.lease.prompt}/{index}")

    def _on_turn(self, trajectory: Trajectory, turn: TurnRecord) -> None:
        self._refusals.over("engine", "host")
        self._reported(trajectory, turn)

    async def _abort(self, group: OpenGroup, index: int, why: str, *, again: bool) -> None:
        member = group.members[index]
        self._counts.over_stale += why == "over-stale"
        if member.task is not None:
            member.why = why
            member.task.cancel()
            await asyncio.wait([member.task])
        elif member.ended:
            await self._disk.do(self.store.discard, group.lease.prompt, [index], self.fence)
        member.task, member.ended, member.scoring, member.played = None, False, False, None
        member.starts += again
        group.reason = why

    async def _reopen(self, prompt: str, members: list[int], why: str) -> None:
        self._counts.over_stale += len(members)
        done = self._buffer.pop(prompt)
        chosen = [item.member for item in await self._disk.do(self.store.finished, prompt)]
        await self._disk.do(self.store.discard, prompt, [chosen[n] for n in members], self.fence)
        (lease,) = [item for item in await self._disk.do(self.store.in_flight) if item.prompt == prompt]
        group = await self._disk.do(groups.restored, lease, self.config.rules, self.store, self.trees.ledger)
        self._add(group)
        group.reason = why
        for n in members:
            again = group.members[chosen[n]]
            again.starts = again.start = done.starts[n] + 1

    async def _finish(self, prompt: str) -> None:
        await self._disk.do(self.store.buffer, prompt, self.fence)
        group, self._counts.given_up_in_row = self._groups.pop(prompt), 0
        await self.attempts.forget(group)
        self._buffer[prompt] = await self._disk.do(groups.complete, group.lease, self.config.size, self.store)
        await self.trees.retained.release(prompt)

    async def _give_up(self, prompt: str, reason: str) -> None:
        group = self._groups[prompt]
        for member in group.members:
            if member.task is not None:
                await self._abort(group, member.index, "given up", again=False)
        await self.attempts.forget(group)
        self._counts.lost += group.failures < self.config.attempts
        self._counts.given_up(reason, self._fail)
        log.error("prompt %s given up: %s", prompt, reason)
        await self._disk.do(self.store.give_up, prompt, reason, self.fence)
        del self._groups[prompt]
        await self.trees.retained.release(prompt)

    async def _hand_out(self, prompts: list[str], oldest: int) -> None:
        take, size = self.store.take, self.config.size
        batch = await self._disk.do(
            lambda: take(self.step, prompts, self.fence, version=self.version, oldest=oldest, members=size)
        )
        taken = [self._buffer.pop(prompt) for prompt in prompts]
        lags = [staleness(self.version, oldest) for item in taken for oldest in item.oldest]
        self.ahead.handed(lags, self._requested.since)
        self._training = True
        self._requested.give(batch)

    # ----------------------------------------------------------------- books

    async def _report(self) -> None:
        """Keeps `status.json` fresh: what `pagurus rollouts why` reads."""
        while True:
            status = Status(
                at=time.time(),
                version=self.version,
                step=self.step,
                trainer="training" if self._training else "waiting" if self._requested.open else "elsewhere",
                requested_at=self._requested.since,
                waits=self.waits,
                running=[TrajectoryStatus.of(member.trajectory) for member in self._running],
                account=await self._disk.do(self.store.account),
                seconds=self.meter.seconds(),
            )
            await asyncio.to_thread(write_status, self.directory, status)
            await asyncio.sleep(STATUS_INTERVAL)

    # ----------------------------------------------------------------- tasks

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """A bug in our own loops must reach the trainer, not the log."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._requested.refuse(error)
