"""The trainer's process of a run: from the policy that it begins with to a summary.

::

    policy to begin with ──▶ weights, version 0 ──▶ publish ──▶ held-out reward before
                                                                     │
         ┌───────────────────────────────────────────────────────────┘
         ▼
    rollout (a process of its own): prompts ─▶ sandboxes ⇄ engines ─▶ trajectories ─▶ groups ─▶ store   (never stops)
         ▲                                                                                │ take(step): whole groups
         │ a version, by reference, and forgotten                                         ▼
      publish ◀── ack(step) ◀── resume state saved ◀── one optimiser step ◀── advantages ◀┘

    after the last step: held-out reward after ─▶ summary.json, plots, table

Guarantee: after `kill -9` at any instant the next trainer of the run continues: the resume state of a step is on disk
before its batch is acknowledged and its weights are published. A trajectory that it takes is at most `staleness`
versions old (the rollout sees to it). It holds no handle of an engine.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from rich.console import Console
from safetensors import SafetensorError

from rollout import Batch, Trajectory
from rollout.environments import directory as task
from rollout.plan import read_plan
from rollout.service.client import RolloutClient
from rollout.service.phases import PhaseClient
from rollout.service.protocol import PublishedVersion, RolloutCounters
from rollout.store import stages
from rollout.store.lock import OWNED, own
from rollout.weights.store import VersionStore
from sandbox import structs
from sandbox.errors import Conflict, PagurusError
from trainer import machine, resume
from trainer.batches import aside
from trainer.batches.groups import samples, staleness
from trainer.batches.sample import Sample
from trainer.config import TrainConfig, open_run
from trainer.distributed.host_fleet import HostPlan
from trainer.errors import TrainerFailed
from trainer.evaluation.evaluations import Evaluations
from trainer.models import verify
from trainer.models.load import take
from trainer.prepare import explain
from trainer.progress import Display
from trainer.reports import report
from trainer.reports.metrics import MetricsRecorder
from trainer.reports.split import split
from trainer.reports.trackers import open_tracker
from trainer.settings import flat
from trainer.steps import DistributedSteps, LocalSteps, Steps, newest_state, work_plan
from trainer.stream import BatchStream

LOCK = "trainer.lock"
MAX_UNLEARNED = 3  # batches in a row
POLL_INTERVAL = 1.0  # seconds between two looks at what the rollout does


class RunDirectoryBusy(Exception):
    """Another process is the trainer of this run directory."""


def main(config: TrainConfig, *, client: RolloutClient | None = None, address: str = "") -> int:
    """Runs to the end; the exit status. Errors are one line each, with the command that continues from there."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until the loop turns, which then takes it
    structs.learn()
    console = Console()
    run: TrainerRun | None = None
    try:
        run = TrainerRun(config, console, client=client, address=address)
        asyncio.run(run.go())
        return 0
    except RunDirectoryBusy as error:
        print(error, file=sys.stderr)
        return OWNED
    except (PagurusError, OSError, SafetensorError, sqlite3.OperationalError) as error:
        console.print(f"[red]stopped[/red]: {explain(error, config.out)}", highlight=False, soft_wrap=True)
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("[red]stopped[/red] by request")
    if run is not None and resume.saves_in(run.directory / "resume"):
        console.print(f"continue with: pagurus train --resume {run.directory}", highlight=False, soft_wrap=True)
    return 1


def warm() -> None:
    """Load what torch loads with the first optimiser only: half a second of a processor, in a process that waits."""
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])


class TrainerRun:
    """One run directory and what its trainer does."""

    def __init__(
        self, config: TrainConfig, console: Console, *, client: RolloutClient | None = None, address: str = ""
    ):
        """`client`: of a rollout elsewhere; None: the one that works in the run directory, on this host. `address` of
        this host, for others with ranks."""
        torch.set_num_threads(1)  # two threads make small matrix products many times slower
        machine.return_freed_memory()
        self.console = console
        self.started, self.started_at = time.monotonic(), time.time()
        self.directory, self.config = open_run(config)
        self.plan = read_plan(self.directory)
        os.nice(self.plan.nice)  # sandboxes and their checkpoints come first
        machine.use(self.plan.devices.ranks)
        self.task = task.load(self.config.task)
        self.environments = self.plan.environments(self.directory)
        self.store = VersionStore(self.directory / "weights")
        self.base = self.directory / "policy"  # what the run begins with, and its tokenizer
        self.saves = resume.Saves(self.directory / "resume")
        self.totals = report.Totals()
        self.wall_before = 0.0
        self.client, self.address = client, address
        self.phases = None if self.config.share is None else PhaseClient(self.config.share, self.directory)
        self.steps: Steps
        self.stream: BatchStream | None = None
        self._stages: set[str] = set()
        self._unlearned = 0  # batches in a row of which nothing was trained on

    async def go(self) -> None:
        """The whole run, read from top to bottom."""
        try:
            lock = own(self.directory, LOCK)
        except Conflict as error:
            raise RunDirectoryBusy(str(error)) from None
        with lock:
            self._reached(stages.IMPORTED)
            this = asyncio.current_task()
            assert this is not None
            # Only once: a supervisor and a terminal may both say it, and what ends then has an evaluation to end.
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: this.cancelling() or this.cancel())
            await self._go()

    async def _go(self) -> None:
        keys = {name: str(value) for name, value in flat(self.config)}
        trackers = [await asyncio.to_thread(open_tracker, name, self.directory, keys) for name in self.config.trackers]
        with self._shown() as display, MetricsRecorder(self.directory, trackers) as self.recorder:
            display.say(f"run directory {self.directory}, seed {self.config.seed}, engine {self.config.engine}")
            for line in self.environments.evaluates_on():
                display.say(line)
            plan = self.plan
            display.say(
                f"{plan.sizing}: {plan.config.concurrency} sandboxes at once, {plan.pace:g} s for an answer at least, "
                f"nice {plan.nice} for trainer and engine ({machine.processor()})"
            )
            await self._load()
            self.evaluations = Evaluations(
                self.directory, self.config, self.environments, self.recorder, self.totals, display.say
            )
            self._reached("loaded")
            try:
                if self.step < self.config.steps:
                    (self.directory / "summary.json").unlink(missing_ok=True)  # of before this run was extended
                async with self.client or RolloutClient.of(
                    self.directory, timeout=self.config.timeouts.rollout
                ) as self.rollout:
                    await self._with_rollout()
                    content = await self._finish()
            finally:
                self.steps.close()
                if self.phases is not None:
                    await self.phases.close()
        self.console.print(report.table(content, self.directory))
        print(report.line(content), flush=True)

    def _shown(self) -> Display:
        self.display = Display(steps=self.config.steps, console=self.console)
        return self.display

    # ------------------------------------------------------------------ stages

    async def _load(self) -> None:
        """Consumes the policy to begin with, or the resume state of an interrupted run. Produces model, optimiser."""
        state = await asyncio.to_thread(newest_state, self.saves, work_plan(self.config, self.directory))
        if state is None:
            start = self.config.model or self.task.start
            assert start is not None, "open_run refuses a plan without"
            await asyncio.to_thread(take, start, self.base)
            way = await asyncio.to_thread(verify.begin, self.base, self.directory)
            if not way.packs:
                self.display.say(f"{way.model} {way.reason}; each trajectory is computed by itself")
            self.display.say(f"begin with the policy of {start}")
            self.step = self.version = 0
            self.unsettled: list[str] = []
        else:
            self.step, self.version = state.step, state.version
            self.unsettled = state.consumed
            self.totals = msgspec.convert(state.totals, report.Totals)
            self.wall_before = self.totals.wall_s
            await asyncio.to_thread(aside.recover, self.directory, state.step, state.put_aside)
            for note in self.saves.notes:
                self.display.say(note)
            self.display.say(f"resumed after step {self.step}, policy version {self.version}")
        self.steps = await asyncio.to_thread(self._steps)
        try:
            await asyncio.to_thread(self.steps.begin, state)
        except BaseException:
            self.steps.close()
            raise

    def _steps(self) -> Steps:
        """Who takes them."""
        plan, ranks = work_plan(self.config, self.directory), self.config.ranks
        if ranks == 1:
            return LocalSteps(plan)
        timeouts = self.config.timeouts
        chosen = self.config.hosts

        def say(text: str) -> None:
            self.display.say(text)

        hosts = None
        if chosen.count > 1:
            hosts = HostPlan(settings=chosen, roles=self.directory / "roles", address=self.address, report=say)
        return DistributedSteps(
            plan,
            ranks=ranks,
            report=say,
            hosts=hosts,
            silent=timeouts.rank_silent,
            stuck=timeouts.rank_stuck,
        )

    async def _with_rollout(self) -> None:
        """The part of a run that needs episodes: evaluate, learn, evaluate."""
        await self.rollout.open(self.step)
        await asyncio.to_thread(self.steps.encode, self.version)
        await self._publish()
        self._reached(stages.READY)
        self.display.stage(f"waiting for the rollout and its {self.config.engine} engine")
        watcher = asyncio.create_task(self._watch(), name="look at the rollout")
        try:
            if self.config.evaluation.background:
                await self._learn_and_evaluate()
                return
            if self.totals.reward_before is None:
                await self._evaluate("held-out reward before GRPO", 0)
                await asyncio.to_thread(self.steps.note, self._state(self.step, self.unsettled))
            if self.step < self.config.steps:
                await self._learn()
            await self._evaluate("held-out reward after GRPO", self.step, last=True)
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)

    async def _learn_and_evaluate(self) -> None:
        """The same with evaluations that nothing waits for but the end of the run."""
        async with self.evaluations.queue as queue:
            if await asyncio.to_thread(self.evaluations.missing, self.step):
                await queue.begin(self.evaluations.order(self.step, self.version))
            if self.step < self.config.steps:
                await self._learn()
            self.display.stage("evaluations of the last versions")
            await queue.finish()

    async def _learn(self) -> None:
        """Consumes batches of complete groups. Waits for: the rollout. Produces one policy version per batch."""
        self.display.stage("GRPO", self.config.steps)
        self.display.advance(self.step)
        if self.config.stream or self.config.handover:
            self.stream = BatchStream(self.rollout, self.steps, self._samples)
        while self.step < self.config.steps:
            began = time.monotonic()
            batch = await (self.stream or self.rollout).next_batch()
            taken = self.rollout.last
            assert taken is not None
            if self.phases is not None:
                await self.phases.begin("train", self.step)
            waited = time.monotonic() - began
            self.totals.add(batch.trajectories)
            state = self._state(self.step + 1, [group.prompt for group in batch.groups])
            stats = await asyncio.to_thread(self._train, batch, state)
            self.step, self.version = state.step, state.version
            await asyncio.to_thread(self.steps.encode, self.version)
            await asyncio.to_thread(self.recorder.turns, self.step, batch.trajectories)
            await self.rollout.consumed(batch, ess=stats.get("ess"))
            await self._publish()
            self._reached(stages.WORKED)
            took = time.monotonic() - began
            parts = split(waited=waited, worked=took - waited, spent=taken.spent)
            await self._record(batch, stats, parts, took, taken.paused_s)
            if self.config.evaluation.background:
                self.evaluations.queue.check()
                if self.evaluations.due(self.step):
                    await self.evaluations.queue.begin(self.evaluations.order(self.step, self.version))
            elif self.evaluations.due(self.step) and self.step < self.config.steps:
                await self._evaluate(f"held-out reward after step {self.step}", self.step)

    async def _evaluate(self, name: str, step: int, *, last: bool = False) -> None:
        """Mean reward over held-out seeds, in real sandboxes."""
        self.display.stage(name)
        began = time.monotonic()
        target = self.config.evaluation
        trajectories = await self.rollout.evaluate(
            self.environments.held_out(self.config.held_out),
            last=last,
            sampling=target.of(self.config.sampling),
            samples=target.samples,
        )
        self.totals.add_time({"evaluation": time.monotonic() - began})
        await self._measure()
        await self.evaluations.record(name, trajectories, step=step, version=self.version)

    async def _finish(self) -> dict[str, Any]:
        """Consumes the files of the run. Produces the summary and the plots."""
        from trainer.reports import plots  # matplotlib takes a second to import

        self.totals.count(await self.rollout.finish())
        self.totals.put_aside = len(await asyncio.to_thread(aside.read, self.directory))
        self.totals.wall_s = self._wall()
        content = report.summary(
            self.totals,
            engine=self.config.engine,
            seed=self.config.seed,
            steps=self.step,
            version=self.version,
            pace=self.plan.pace,
            concurrency=self.plan.config.concurrency,
            machine=f"{machine.processor()}, {self.plan.sizing}",
            evaluated_on=self.environments.evaluates_on(),
        )
        await asyncio.to_thread(report.write_summary, self.directory, content)
        await asyncio.to_thread(plots.draw, self.directory)
        return content

    # ------------------------------------------------------------------ parts

    def _train(self, batch: Batch, state: resume.ResumeState) -> dict[str, Any]:
        """Consumes a batch. Produces the next weights and their save."""
        made = self._samples(batch)
        stats = self.steps.step(made, state)
        put_aside: dict[str, str] = stats.get("put_aside", {})
        aside.note(self.directory, aside.described(state.step, made, put_aside))
        for name, reason in put_aside.items():
            self.display.say(f"{name} was put aside: {reason}")
        self._unlearned = self._unlearned + 1 if made and len(put_aside) >= len(made) else 0
        if self._unlearned >= MAX_UNLEARNED:
            raise TrainerFailed(
                f"nothing of {MAX_UNLEARNED} batches in a row could be trained on: {sorted(set(put_aside.values()))}",
                hint=f"see {self.directory / aside.FILE}, and the engine's log",
            )
        return stats

    def _samples(self, batch: Batch) -> list[Sample]:
        return samples(batch, turns=self.config.objective.advantage.credit == "turns")

    async def _measure(self) -> None:
        """Brings the counters up to date."""
        self.totals.count(await self._poll())

    async def _poll(self) -> RolloutCounters:
        """What the rollout has counted, shown."""
        counts = await self.rollout.counts()
        self.display.turns(counts.verdicts, counts.waits)
        if self.totals.first_rollout_s is None and counts.first_turn is not None:
            self.totals.first_rollout_s = self.wall_before + max(0.0, counts.first_turn - self.started_at)
            self.display.say(f"first turn in a live sandbox after {self.totals.first_rollout_s:.1f} s")
        return counts

    def _by_part(self, name: str, trajectories: Sequence[Trajectory]) -> dict[str, dict[str, float]]:
        """Mean rewards by part of a mixture, where the run has one."""
        return report.by_part(name, trajectories, self.environments.name) if self.config.mixture else {}

    def _state(self, step: int, consumed: list[str]) -> resume.ResumeState:
        """Of the run after this step."""
        self.totals.wall_s = self._wall()
        return resume.ResumeState(step=step, version=step, consumed=consumed, totals=msgspec.to_builtins(self.totals))

    async def _publish(self) -> None:
        """Lists the version that was encoded, has the rollout take it up, and forgets it."""
        ref = await asyncio.to_thread(self.steps.publish)
        store = str(self.store.directory)
        await self.rollout.publish(PublishedVersion(version=ref.version, directory=store, digest=ref.manifest.digest))

    def _reached(self, stage: str) -> None:
        if stage not in self._stages:
            self._stages.add(stage)
            stages.note(self.directory / "roles", "trainer", stage)

    def _wall(self) -> float:
        return self.wall_before + time.monotonic() - self.started

    async def _watch(self) -> None:
        """Keeps the display's figures fresh."""
        while True:
            await asyncio.to_thread(self.steps.poll)
            counts = await self._poll()
            self.display.metrics.update(
                {
                    "checkpoints": f"{counts.in_flight} in flight, {counts.queued} queued",
                    "policy version": self.version,
                    "waits": "; ".join(counts.waits) or "nobody",
                }
            )
            await asyncio.sleep(POLL_INTERVAL)

    def _metrics_of_weights(self) -> dict[str, float]:
        """Of the version that was just published: what it took, and how far its readers are behind."""
        spent, taken = self.steps.publication, self.rollout.last
        readers = self.store.readers()
        behind = {name: self.version - item.version for name, item in readers.items() if item.version >= 0}
        return {
            "bytes": spent.bytes,
            "total_bytes": spent.total_bytes,
            "changed_share": spent.changed / max(1, spent.words),
            "copy_s": spent.copy_s,
            "encode_s": spent.encode_s,
            "versions_behind": max(behind.values(), default=0),
            **{f"behind/{name}": lag for name, lag in behind.items()},
            **({} if taken is None else taken.sync),
        }

    async def _record(
        self, batch: Batch, stats: dict[str, Any], parts: dict[str, float], took: float, paused: float
    ) -> None:
        """Produces one line of metrics and one of display."""
        self.totals.add_time(parts)
        trajectories = batch.trajectories
        await self._measure()
        age = staleness(trajectories, self.version - 1)
        rewards = [trajectory.reward for trajectory in trajectories if math.isfinite(trajectory.reward)]
        await asyncio.to_thread(
            self.recorder.step,
            self.step,
            {
                "reward": (reward := sum(rewards) / max(1, len(rewards))),
                **self._by_part("reward_by_part", trajectories),
                **report.by_scorer("reward_by_scorer", trajectories),
                "cut_share": report.cut_share(trajectories),
                "policy_version": self.version,
                "staleness": {str(key): count for key, count in sorted(age.items())},
                "degenerate_groups": sum(len({t.reward for t in group.trajectories}) == 1 for group in batch.groups),
                **{f"train/{key}": value for key, value in stats.items()},
                "idle_ratio": 1 - parts["trainer"] / took,
                "seconds": took,
                "wall": parts,
                "paused_s": paused,
                "weights": self._metrics_of_weights(),
                "turns_per_s": report.turns(trajectories) / took,
                "verdicts": self.totals.verdicts,
                "checkpoints": self.totals.checkpoints,
                "stored_bytes": self.totals.stored_bytes,
                "full_bytes": self.totals.full_bytes,
                "hidden_share": self.totals.hidden_share,
                "killed": self.totals.killed,
                "recovered_equal": self.totals.recovered_equal,
                "trajectories_lost": self.totals.trajectories_lost,
            },
        )
        metrics = {
            "policy version": self.version,
            "staleness": ", ".join(f"{count} at {key}" for key, count in sorted(age.items())),
            "mismatch KL": "{mismatch_kl:.1e}, entropy {entropy:.2f}, grad norm {grad_norm:.2f}".format(**stats)
            if stats
            else "said by ranks that were lost",
            "killed": f"{self.totals.killed}, recovered equal {self.totals.recovered_equal}",
        }
        self.display.step(self.step, reward, metrics)
