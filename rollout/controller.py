"""`RolloutController`: groups of trajectories from prompts, at a bounded staleness, for a trainer that waits little.

Owns: which groups run, the limit on trajectories at once, retries, the sample buffer, the books (ledger, counts).
Does not own: one trajectory (`run_trajectory`), the engine's life (supervisor), gradients.
Guarantee: every prompt is accounted for exactly once (I7); a batch is complete groups within the staleness bound;
a trajectory that failed is in its group with a reason (I10).

::

    seeds ─▶ ledger ─▶ admission (may_start) ─▶ group: size x run_trajectory ─▶ buffer ─▶ next_batch ─▶ trainer
                ▲                                      │ over-stale: abort                            │
                └─────────── queued again ◀────────────┘        published(version) ◀── consumed ◀─────┘

A failed trajectory is tried again in a fresh sandbox when the failure was the platform's, not the environment's or
the policy's. A group of which no trajectory succeeded in running is given up after `attempts` tries of the prompt.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rollout.engine.client import Sampling
from rollout.environment import Environment, Tokenizer
from rollout.faults import Faults
from rollout.ledger import Ledger, Prompt
from rollout.messages import Batch, Group, Trajectory
from rollout.staleness import may_start, over_stale, staleness
from rollout.trajectory import Engine, OnTurn, run_trajectory
from sandbox.errors import PagurusError

log = logging.getLogger("pagurus.rollout")


class RolloutConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Example: ``RolloutConfig(groups=8, size=8, sampling=Sampling(max_tokens=24, stop_token_ids=[1]))``"""

    groups: int = 8  # of a batch
    size: int = 8  # trajectories of a group
    concurrency: int = 64  # trajectories at once
    staleness: int = 1  # trainer version minus oldest policy version, at most
    sampling: Sampling = Sampling()
    trajectory_timeout: float = 300.0  # seconds; one that takes longer is truncated, counted, and stays in its group
    attempts: int = 3  # of a trajectory after failures of the platform, and of a prompt
    max_length: int = 1024  # tokens of a trajectory
    seed: int = 0


@dataclass(eq=False)
class _Running:
    """A group on its way."""

    prompt: Prompt
    trajectories: list[Trajectory]
    task: asyncio.Task[None] | None = None
    over_stale: bool = False

    @property
    def oldest(self) -> int | None:
        return Group(prompt="", seed=0, trajectories=self.trajectories).oldest


@dataclass
class _Counts:
    turns: int = 0
    tokens: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    struck: int = 0
    killed: int = 0
    recovered_equal: int = 0
    lost: int = 0  # trajectories that no restore and no retry could save
    retried: int = 0
    over_stale_aborted: int = 0
    over_stale_dropped: int = 0


class RolloutController:
    """See the module. ``async with RolloutController(...) as rollout: batch = await rollout.next_batch()``"""

    def __init__(
        self,
        *,
        environment: Callable[[], Environment],
        host: Any,
        engine: Engine,
        tokenizer: Tokenizer,
        config: RolloutConfig,
        folder: Path | str,
        version: int = 0,
        step: int = 0,
        seeds: Iterable[int] | None = None,
        faults: Faults | None = None,
        on_turn: OnTurn | None = None,
    ):
        """`version`: of the weights that the engine serves now. `step`: steps that the trainer has saved (a resume).
        `seeds`: of the prompts, in order, the same at every start; None: 0, 1, 2, … from ``config.seed`` million on."""
        self.environment, self.host, self.engine, self.tokenizer = environment, host, engine, tokenizer
        self.config, self.faults, self.on_turn = config, faults, on_turn
        self.ledger = Ledger(Path(folder) / "ledger.sqlite")
        self.requeued_at_start = self.ledger.recover(step)
        self.version, self.step = version, step
        base = itertools.count(config.seed * 1_000_000) if seeds is None else iter(seeds)
        self._seeds: Iterator[int] = itertools.islice(base, self.ledger.issued(), None)
        self._slots = asyncio.Semaphore(config.concurrency)
        self._running: set[_Running] = set()
        self._buffer: list[Group] = []
        self._training = False
        self._changed = asyncio.Condition()
        self._pump: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._active = 0
        self._counts = _Counts()
        self._stopping = False

    async def __aenter__(self) -> RolloutController:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # ----------------------------------------------------------------- life

    async def start(self) -> None:
        """Begin to fill the buffer."""
        if self._pump is None:
            self._pump = asyncio.get_running_loop().create_task(self._admit(), name="rollout admission")
            self._pump.add_done_callback(self._note_failure)

    async def stop(self) -> None:
        """End all trajectories; their prompts are queued again in the ledger. Idempotent."""
        self._stopping = True
        tasks = [running.task for running in self._running if running.task is not None]
        if self._pump is not None:
            tasks.append(self._pump)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._pump = None
        for group in self._buffer:
            self.ledger.requeue(group.prompt, "stopped")
        self._buffer.clear()
        self.ledger.close()

    # ----------------------------------------------------------------- for the trainer

    async def next_batch(self) -> Batch:
        """Complete groups for the next step, oldest policy first. Waits until there are enough."""
        async with self._changed:
            while True:
                self._drop_over_stale()
                if self._failure is not None:
                    raise self._failure
                if len(self._buffer) >= self.config.groups:
                    break
                await self._changed.wait()
            self._buffer.sort(key=lambda group: -staleness(self.version, group.oldest))
            groups, self._buffer = self._buffer[: self.config.groups], self._buffer[self.config.groups :]
            self.ledger.claim([group.prompt for group in groups], self.step)
            self._training = True
            return Batch(version=self.version, groups=groups)

    async def consumed(self, batch: Batch) -> None:
        """The step on this batch is saved: its prompts are consumed for good."""
        self.ledger.consume([group.prompt for group in batch.groups])
        self.step += 1

    async def published(self, version: int) -> None:
        """The trainer moved on, and the engine serves `version`. Ends what became over-stale, admits anew."""
        async with self._changed:
            self.version = version
            self._training = False
            for running in self._running:
                if over_stale(trainer=version, oldest=running.oldest, bound=self.config.staleness):
                    running.over_stale = True
                    self._counts.over_stale_aborted += 1
                    assert running.task is not None
                    running.task.cancel()
            self._drop_over_stale()
            self._changed.notify_all()

    async def evaluate(self, seeds: Iterable[int], *, sampling: Sampling | None = None) -> list[Trajectory]:
        """Play held-out episodes under the same limit of concurrency; neither ledger nor buffer knows of them."""
        runs = [self._play(f"eval-{seed}", seed, 0, Trajectory(), sampling, faults=False) for seed in seeds]
        return list(await asyncio.gather(*runs))

    def statistics(self) -> dict[str, Any]:
        counts = self._counts
        return {
            "version": self.version,
            "step": self.step,
            "active": self._active,
            "groups_running": len(self._running),
            "groups_buffered": len(self._buffer),
            "prompts": self.ledger.counts() if not self._stopping else {},
            "turns": counts.turns,
            "tokens": counts.tokens,
            "verdicts": dict(counts.verdicts),
            "trajectories": dict(counts.statuses),
            "reasons": dict(counts.reasons),
            "struck": counts.struck,
            "killed": counts.killed,
            "recovered_equal": counts.recovered_equal,
            "trajectories_lost": counts.lost,
            "trajectories_retried": counts.retried,
            "over_stale_aborted": counts.over_stale_aborted,
            "over_stale_dropped": counts.over_stale_dropped,
            "staleness": [staleness(self.version, running.oldest) for running in self._running],
        }

    # ----------------------------------------------------------------- groups

    async def _admit(self) -> None:
        """Consumes: prompts. Waits for: room within the staleness bound. Produces: running groups."""
        while True:
            async with self._changed:
                await self._changed.wait_for(self._may_start)
            prompt = self._next_prompt()
            if prompt is None:
                return
            size = self.config.size
            running = _Running(prompt, [Trajectory() for _ in range(size)])
            self._running.add(running)
            running.task = asyncio.get_running_loop().create_task(self._group(running), name=f"group {prompt.id}")
            running.task.add_done_callback(self._note_failure)

    def _may_start(self) -> bool:
        outstanding = len(self._running) + len(self._buffer)
        config = self.config
        return may_start(outstanding=outstanding, batch=config.groups, bound=config.staleness, training=self._training)

    def _next_prompt(self) -> Prompt | None:
        if (prompt := self.ledger.take()) is None:
            self.ledger.issue(itertools.islice(self._seeds, self.config.groups))
            prompt = self.ledger.take()
        return prompt

    async def _group(self, running: _Running) -> None:
        """Play all trajectories of a prompt, then decide what becomes of the group."""
        prompt = running.prompt
        try:
            runs = [
                asyncio.ensure_future(self._play(prompt.id, prompt.seed, index, trajectory))
                for index, trajectory in enumerate(running.trajectories)
            ]
            try:
                done = await asyncio.gather(*runs)
            finally:
                for run in runs:
                    run.cancel()
                await asyncio.wait(runs)
        except asyncio.CancelledError:
            self.ledger.requeue(prompt.id, "over-stale" if running.over_stale else "stopped")
            if not running.over_stale:
                raise
        else:
            self._settle(prompt, list(done))
        finally:
            self._running.discard(running)
            await self._notify()

    def _settle(self, prompt: Prompt, trajectories: list[Trajectory]) -> None:
        """A finished group: into the buffer, back to the queue, or given up."""
        if any(trajectory.status in ("completed", "truncated") for trajectory in trajectories):
            self._buffer.append(Group(prompt=prompt.id, seed=prompt.seed, trajectories=trajectories))
            return
        reason = trajectories[0].reason or trajectories[0].status
        if prompt.attempts < self.config.attempts:
            log.warning("prompt %s failed, queued again: %s", prompt.id, reason)
            self.ledger.requeue(prompt.id, reason)
        else:
            log.error("prompt %s given up after %d attempts: %s", prompt.id, prompt.attempts, reason)
            self.ledger.give_up(prompt.id, reason)

    def _drop_over_stale(self) -> None:
        kept = []
        for group in self._buffer:
            if over_stale(trainer=self.version, oldest=group.oldest, bound=self.config.staleness):
                self.ledger.requeue(group.prompt, "over-stale")
                self._counts.over_stale_dropped += 1
            else:
                kept.append(group)
        self._buffer = kept

    # ----------------------------------------------------------------- trajectories

    async def _play(
        self,
        prompt: str,
        seed: int,
        index: int,
        into: Trajectory,
        sampling: Sampling | None = None,
        *,
        faults: bool = True,
    ) -> Trajectory:
        """One trajectory, tried again in a fresh sandbox while it is the platform that fails."""
        for attempt in range(self.config.attempts):
            async with self._slots:
                self._active += 1
                try:
                    trajectory = await self._once(prompt, seed, index, attempt, into, sampling, faults)
                finally:
                    self._active -= 1
            platform = trajectory.status == "failed" and not trajectory.reason.startswith("environment:")
            if not platform:
                break
            log.warning("trajectory %s/%d failed: %s", prompt, index, trajectory.reason)
            if attempt + 1 < self.config.attempts:
                self._counts.retried += 1
                self._book(trajectory)
                _clear(into)
        else:
            self._counts.lost += 1
        self._counts.statuses[trajectory.status] += 1
        if trajectory.reason:
            self._counts.reasons[trajectory.reason.partition(":")[0]] += 1
        self._book(trajectory)
        return trajectory

    async def _once(
        self,
        prompt: str,
        seed: int,
        index: int,
        attempt: int,
        into: Trajectory,
        sampling: Sampling | None,
        faults: bool,
    ) -> Trajectory:
        env = self.environment()
        sandbox = None
        into.started_at = time.time()
        try:
            async with asyncio.timeout(self.config.trajectory_timeout):
                sandbox = await self.host.create(env.image, limits=env.limits, network=env.network)
                return await run_trajectory(
                    env,
                    sandbox,
                    self.engine,
                    self.tokenizer,
                    seed=seed,
                    sampling=sampling or self.config.sampling,
                    prompt=prompt,
                    group=prompt,
                    index=index,
                    max_length=self.config.max_length,
                    strike=self.faults.choose(prompt, index, attempt) if self.faults is not None and faults else None,
                    on_turn=self.on_turn,
                    into=into,
                )
        except TimeoutError:
            into.status, into.reason = "truncated", f"timeout: {self.config.trajectory_timeout:g} s"
            return into
        except PagurusError as error:  # no sandbox to play in
            into.status, into.reason = "failed", f"{error.code}: {error}"
            into.prompt, into.group, into.index, into.seed = prompt, prompt, index, seed
            return into
        finally:
            if sandbox is not None:
                await asyncio.shield(_remove(sandbox))

    def _book(self, trajectory: Trajectory) -> None:
        counts = self._counts
        counts.turns += len(trajectory.turns)
        counts.tokens += sum(trajectory.mask)
        counts.verdicts.update(turn.verdict for turn in trajectory.turns)
        counts.struck += trajectory.struck
        counts.killed += trajectory.killed
        counts.recovered_equal += trajectory.recovered_equal

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        """A bug in our own loops must reach the trainer, not the log."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self._wake = asyncio.ensure_future(self._notify())


def _clear(trajectory: Trajectory) -> None:
    """Make it a fresh one, in place: the group watches this object."""
    fresh = Trajectory()
    for name in Trajectory.__struct_fields__:
        setattr(trajectory, name, getattr(fresh, name))


async def _remove(sandbox: Any) -> None:
    try:
        await sandbox.remove()
    except PagurusError as error:  # it is the daemon's to clean up now; the trajectory itself is whole
        log.warning("sandbox %s could not be removed: %s", sandbox.id, error)
