"""One training run, from a policy to begin with to a summary.

Owns: the order of the stages and the run folder. Does not own: what the stages do (modules of their names).

::

    policy to begin with ──▶ weights/v000000 ──▶ engine serves ──▶ held-out reward before
                                                                         │
         ┌───────────────────────────────────────────────────────────────┘
         ▼
    controller: prompts ─▶ sandboxes ⇄ engine ─▶ trajectories ─▶ groups ─▶ buffer     (never stops)
         ▲                                                                    │ batch of complete groups
         │ admission opens                                                    ▼
      publish ◀── resume state saved ◀── one optimiser step ◀── advantages ◀── next_batch
         │
         └─▶ engine takes the version between two of its steps; running trajectories go on and span versions

    after the last step: held-out reward after ─▶ summary.json, plots, table

Guarantee: after `kill -9` at any instant `--resume RUN` goes on: the resume state of a step is on disk before its
weights are published, and names the prompts that it consumed. A trajectory that the trainer takes is at most
`staleness` versions old (the controller's admission and this loop's order see to it).
"""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError

from rollout import Batch, Environment, Faults, RolloutConfig, RolloutController, Trajectory, TurnRecord
from rollout.engine.client import Sampling
from rollout.engine.embedded.model import ModelConfig, Qwen3, load_model, save_model
from rollout.engine.supervisor import EngineSupervisor, embedded, vllm
from rollout.store.lock import own
from rollout.tokenizer import FolderTokenizer
from sandbox import Client
from sandbox.errors import EngineFailed, ImageNotFound, Invalid, NoSpace, PagurusError
from trainer import estimate, machine, report, resume, sizing, task
from trainer.batches.sample import Sample
from trainer.config import KEYS, Config, open_run, unfinished
from trainer.labels import Labelled
from trainer.learner import Learner, Settings, StepStats, learning_rate
from trainer.metrics import Recorder
from trainer.models import policy
from trainer.models.load import take
from trainer.models.scorer import Scorer
from trainer.objectives import named, with_corrections
from trainer.pace import Paced
from trainer.progress import Display
from trainer.publish import path_of, publish
from trainer.split import split
from trainer.stream import Stream

HELD_OUT = 1_000_000_000  # seeds from here on are for evaluation alone; demonstrations use negative ones
ACTION_TOKENS = 16  # longest action
FULL = (errno.ENOSPC, errno.EDQUOT)
FAULT_TURNS = (1, 5)  # the service of an episode usually runs from turn 3 on


def main(config: Config, *, steps: int | None = None) -> int:
    """Runs to the end; the exit status. Errors are one line each, with the command that goes on from there."""
    console = Console()
    run: Run | None = None
    try:
        run = Run(config, console, steps=steps)
        asyncio.run(run.go())
        return 0
    except (PagurusError, OSError, SafetensorError, sqlite3.OperationalError) as error:
        console.print(f"[red]stopped[/red]: {explain(error, config.out)}", highlight=False, soft_wrap=True)
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("[red]stopped[/red] by request")
    if run is not None and resume.saves_in(run.folder / "resume"):
        console.print(f"go on with: pagurus train --resume {run.folder}", highlight=False, soft_wrap=True)
    return 1


def prepare(config: Config, *, steps: int | None = None, fresh: bool = False) -> Path | None:
    """The run folder to work in, made if need be; None when there can be none, which has been said.

    A run of the same plan that has not ended is gone on with, unless `fresh`.
    """
    console = Console()
    try:
        left = None if fresh or config.resume is not None else unfinished(config)
        if left is not None:
            console.print(f"go on with {left} (--fresh begins anew)", highlight=False, soft_wrap=True)
            return left
        return open_run(config, steps=steps)[0]
    except (PagurusError, OSError) as error:
        console.print(f"[red]stopped[/red]: {explain(error, config.out)}", highlight=False, soft_wrap=True)
        return None


def explain(error: Exception, out: Path) -> Exception:
    """The error as a person should read it: a full disk has many names, and one remedy."""
    if isinstance(error, OSError) and error.errno not in FULL:
        return error
    if isinstance(error, OSError) or any(sign in str(error) for sign in ("os error 28", "disk is full", "No space")):
        return NoSpace(f"the disk of {out} is full", remedy="free some space, then go on")
    return error


class Run:
    """One run folder and what happens in it."""

    def __init__(self, config: Config, console: Console, *, steps: int | None = None):
        torch.set_num_threads(1)  # two threads make small matrix products many times slower
        self.console = console
        self.started = time.monotonic()
        self.folder, self.config = open_run(config, steps=steps)
        wanted = self.config
        self.sizing = sizing.choose(machine.cores(), machine.busy(), concurrency=wanted.concurrency, pace=wanted.pace)
        os.nice(self.sizing.nice)  # the engine inherits it: both give way to the sandboxes and to their checkpoints
        self.task = task.load(self.config.task)
        self.weights = self.folder / "weights"
        self.base = self.folder / "policy"  # what the run begins with, and its tokenizer
        self.saves = resume.Saves(self.folder / "resume")
        self.totals = report.Totals()
        self.wall_before = 0.0
        self.last_turns = 0

    async def go(self) -> None:
        """The whole run, read from top to bottom."""
        with own(self.folder):
            await self._go()

    async def _go(self) -> None:
        async with Client() as client:
            host = Labelled(client, self.folder)
            await self._check_image(client)
            with (
                Recorder(self.folder) as self.recorder,
                Display(steps=self.config.steps, console=self.console) as self.display,
            ):
                self.display.say(f"run folder {self.folder}, seed {self.config.seed}, engine {self.config.engine}")
                self.display.say(
                    f"{self.sizing.reason}: {self.sizing.concurrency} sandboxes at once, {self.sizing.pace:g} s for an "
                    f"answer at least, nice {self.sizing.nice} for trainer and engine ({machine.processor()})"
                )
                await self._load()
                self.meter = report.Meter(self.totals)
                await self._with_engine(host)
            content = await self._finish(host)
        self.console.print(report.table(content, self.folder))

    # ------------------------------------------------------------------ stages

    async def _check_image(self, host: Client) -> None:
        """Before minutes are spent: is there an image to start sandboxes from?"""
        wanted = self.config.image or self.task.environment.image
        there = [image.name for image in await host.images.list()]
        if wanted not in there:
            raise ImageNotFound(
                f"no image {wanted!r}; there are: {', '.join(sorted(there)) or 'none'}", remedy="pagurus image ls"
            )

    async def _load(self) -> None:
        """Consumes the policy to begin with, or the resume state of an interrupted run. Produces model, optimiser."""
        state = await asyncio.to_thread(self.saves.newest)
        if state is None:
            start = self.config.model or self.task.start
            assert start is not None, "open_run refuses a plan without"
            await asyncio.to_thread(take, start, self.base)
            self.display.say(f"begin with the policy of {start}")
            self.model = await asyncio.to_thread(load_model, self.base)
            self.learner = self._learner(fresh=True)
            self.step = self.version = 0
            self.unsettled: list[str] = []
            await asyncio.to_thread(self._save, [])
        else:
            self.model = await asyncio.to_thread(load_model, self.base)
            self.learner = self._learner(fresh=False)
            await asyncio.to_thread(self.saves.load, self.learner)
            self.step, self.version = state.step, state.version
            self.unsettled = state.consumed
            self.totals = msgspec.convert(state.totals, report.Totals)
            self.wall_before = self.totals.wall_s
            for note in self.saves.notes:
                self.display.say(note)
            self.display.say(f"resumed after step {self.step}, policy version {self.version}")
        self.tokenizer = policy.load_tokenizer(self.base)
        await asyncio.to_thread(self._publish)

    async def _with_engine(self, host: Labelled) -> None:
        """The part of a run that needs an engine: evaluate, learn, evaluate."""
        launch = {"embedded": embedded, "vllm": vllm}[self.config.engine]()
        folder = path_of(self.weights, self.version)
        self.display.stage(f"starting the {self.config.engine} engine")
        async with EngineSupervisor(
            launch, folder, self.version, log=self.folder / "engine.log", roles=self.folder / "roles"
        ) as self.engine:
            self.controller = self._controller(host)
            await host.sweep(keep=self.controller.journalled_sandboxes())
            try:
                if self.totals.reward_before is None:
                    self.totals.reward_before = await self._evaluate("held-out reward before GRPO", 0, host)
                    await asyncio.to_thread(self._save, self.unsettled)
                if self.step < self.config.steps:
                    await self._learn(host)
                self.totals.reward_after = await self._evaluate("held-out reward after GRPO", self.step, host)
            finally:
                await self.controller.stop(leave=True)  # after `_learn` there is nothing to leave

    async def _learn(self, host: Labelled) -> None:
        """Consumes batches of complete groups. Waits for: the buffer. Produces one policy version per batch."""
        self.display.stage("GRPO", self.config.steps)
        self.display.advance(self.step)
        await self.controller.start()
        self.stream = Stream(self.controller, self.learner, samples)
        watcher = asyncio.create_task(self._watch(host))
        try:
            while self.step < self.config.steps:
                if 2 * self.step >= self.config.steps:
                    self.controller.faults = self._faults()  # for the groups that start from now on
                began, before = time.monotonic(), self.controller.meter.seconds()
                batch = await self.stream.next_batch() if self.config.stream else await self.controller.next_batch()
                waited, after = time.monotonic() - began, self.controller.meter.seconds()
                stats = await asyncio.to_thread(self._train, batch)
                self.step, self.version = self.step + 1, self.version + 1
                await asyncio.to_thread(self._account, batch)
                await asyncio.to_thread(self._save, [group.prompt for group in batch.groups])
                await self.controller.consumed(batch)
                folder = await asyncio.to_thread(self._publish)
                published = await self.engine.publish(folder, self.version)
                await self.controller.published(self.version)
                took = time.monotonic() - began
                parts = split(waited=waited, worked=took - waited, before=before, after=after)
                await self._record(host, batch, stats, parts, took, published.paused_s)
                every = self.config.evaluate_every
                if every and self.step % every == 0 and self.step < self.config.steps:
                    await self._evaluate(f"held-out reward after step {self.step}", self.step, host)
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
        await self.controller.stop()

    async def _evaluate(self, name: str, step: int, host: Labelled) -> float:
        """Mean reward over held-out seeds, sampled at T = 1 in real sandboxes."""
        self.display.stage(name)
        began = time.monotonic()
        seeds = [HELD_OUT + i for i in range(self.config.held_out)]
        trajectories = await self.controller.evaluate(seeds)
        rewards = [trajectory.reward for trajectory in trajectories if trajectory.scored]
        if not rewards:
            raise EngineFailed("no held-out episode could be completed", remedy=f"see {self.folder}/engine.log")
        self.totals.add(trajectories)
        self.totals.add_time({"evaluation": time.monotonic() - began})
        await asyncio.to_thread(self.recorder.turns, step, trajectories)
        self._measure()
        mean = sum(rewards) / len(rewards)
        self.recorder.step(step, {"reward_held_out": mean, "reward": mean, "held_out_episodes": len(rewards)})
        self.display.say(f"{name}: {mean:.1%} of {len(rewards)} episodes")
        return mean

    async def _finish(self, host: Labelled) -> dict[str, Any]:
        """Consumes the files of the run. Produces the summary and the plots."""
        from trainer import plots  # matplotlib takes a second to import

        self._measure()
        await host.sweep()  # what was being created when the rollouts were told to stop
        self.totals.wall_s = self._wall()
        content = report.summary(
            self.totals,
            engine=self.config.engine,
            seed=self.config.seed,
            steps=self.step,
            version=self.version,
            pace=self.sizing.pace,
            concurrency=self.sizing.concurrency,
            machine=f"{machine.processor()}, {self.sizing.reason}",
        )
        await asyncio.to_thread(report.write_summary, self.folder, content)
        await asyncio.to_thread(plots.draw, self.folder)
        return content

    # ------------------------------------------------------------------ parts

    def _controller(self, host: Labelled) -> RolloutController:
        config = self.config
        image, end = config.image, self.model.config.eos_token_id

        def environment() -> Environment:
            made = self.task.environment()
            if image is not None:
                made.image = image
            return made

        return RolloutController(
            environment=environment,
            host=host,
            engine=Paced(self.engine, seconds=self.sizing.pace),
            tokenizer=FolderTokenizer(self.tokenizer),
            config=RolloutConfig(
                groups=config.groups,
                size=config.size,
                concurrency=self.sizing.concurrency,
                staleness=1,
                sampling=Sampling(max_tokens=ACTION_TOKENS, temperature=1.0, stop_token_ids=[end]),
                seed=config.seed,
            ),
            folder=self.folder / "rollout",
            version=self.version,
            step=self.step,
            on_turn=lambda _, turn: self._on_turn(turn),
        )

    def _faults(self) -> Faults:
        """Strikes that hit about `config.faults` trajectories of the run's second half, at random turns."""
        half = (self.config.steps + 1) // 2 * self.config.groups * self.config.size
        return Faults(seed=self.config.seed, share=min(1.0, self.config.faults / half), turns=FAULT_TURNS)

    def _on_turn(self, turn: TurnRecord) -> None:
        if self.totals.first_rollout_s is None:
            self.totals.first_rollout_s = self._wall()
            self.display.say(f"first turn in a live sandbox after {self.totals.first_rollout_s:.1f} s")
        self.display.turn(turn.verdict)

    def _learner(self, *, fresh: bool) -> Learner:
        objective = with_corrections(named(self.config.objective), self.config.corrections)
        config = self.config
        settings = Settings(rate=config.rate, budget=config.budget, updates=config.updates)
        scorer = Scorer(self.model, recompute=config.recompute, critic=objective.value is not None)
        reference = None
        if objective.kl is not None:  # the fitted policy, which every process of this run must find again
            folder = self.folder / "reference"
            if fresh:
                save_model(self.model, folder)
            reference = Scorer(load_model(folder))
        return Learner(scorer, objective, settings, reference=reference)

    def _train(self, batch: Batch) -> StepStats:
        """Consumes a batch. Produces the next weights, in place."""
        rate = learning_rate(self.config.rate, self.step, self.config.steps)
        if self.config.stream:
            return self.stream.step(batch, rate=rate)
        return self.learner.step(samples(batch), rate=rate)

    def _account(self, batch: Batch) -> None:
        trajectories = batch.trajectories
        self.totals.add(trajectories)
        self.recorder.turns(self.step, trajectories)

    def _measure(self) -> None:
        """Brings the counters up to date."""
        self.meter.update_rollouts(self.totals, self.controller.statistics())

    def _save(self, consumed: list[str]) -> None:
        self.totals.wall_s = self._wall()
        state = resume.State(
            step=self.step,
            version=self.version,
            consumed=consumed,
            totals=msgspec.to_builtins(self.totals),
        )
        self.saves.save(self.learner, state)

    def _publish(self) -> Path:
        return publish(self.model, self.weights, self.version, tokenizer=self.base)

    def _wall(self) -> float:
        return self.wall_before + time.monotonic() - self.started

    async def _watch(self, host: Labelled) -> None:
        """Keeps the display's figures fresh."""
        while True:
            statistics = await host.statistics()
            self.display.figures.update(
                {
                    "checkpoints": f"{statistics.in_flight} in flight, {statistics.queued} queued",
                    "policy version": self.version,
                }
            )
            await asyncio.sleep(1.0)

    async def _record(
        self, host: Labelled, batch: Batch, stats: StepStats, parts: dict[str, float], took: float, paused: float
    ) -> None:
        """Produces one line of metrics and one of display."""
        self.totals.add_time(parts)
        trajectories = batch.trajectories
        self._measure()
        age = staleness(trajectories, self.version - 1)
        reward = sum(trajectory.reward for trajectory in trajectories) / max(1, len(trajectories))
        turns = self.totals.turns - self.last_turns
        self.last_turns = self.totals.turns
        self.recorder.step(
            self.step,
            {
                "reward": reward,
                "policy_version": self.version,
                "staleness": {str(key): count for key, count in sorted(age.items())},
                "degenerate_groups": sum(len({t.reward for t in group.trajectories}) == 1 for group in batch.groups),
                **{f"train/{key}": value for key, value in stats.items().items()},
                "idle_ratio": 1 - parts["trainer"] / took,
                "seconds": took,
                "wall": parts,
                "paused_s": paused,
                "turns_per_s": turns / took,
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
        summary = stats.summary
        figures = {
            "policy version": self.version,
            "staleness": ", ".join(f"{count} at {key}" for key, count in sorted(age.items())),
            "mismatch KL": f"{summary.mismatch_kl:.1e}, entropy {summary.entropy:.2f}, grad norm {stats.grad_norm:.2f}",
            "killed": f"{self.totals.killed}, recovered equal {self.totals.recovered_equal}",
        }
        self.display.step(self.step, reward, figures)


# ---------------------------------------------------------------------- pure helpers


def samples(batch: Batch) -> list[Sample]:
    """A batch as the learner sees it. Its groups are whole; tokens older than the bound bear no gradient."""
    return [
        Sample(
            tokens=trajectory.tokens,
            mask=trajectory.bearing(batch.oldest),
            logprobs=trajectory.logprobs,
            reward=trajectory.reward,
            group=group.prompt,
            temperature=trajectory.temperature,
            truncated=trajectory.status == "truncated",
            version=trajectory.oldest or 0,
            name=f"{trajectory.prompt}/{trajectory.index}",
        )
        for group in batch.groups
        for trajectory in group.trajectories
    ]


def staleness(trajectories: list[Trajectory], version: int) -> Counter[int]:
    """How many trajectories are how many versions old: `version` minus the oldest of their spans."""
    return Counter(
        version - min(known)
        for trajectory in trajectories
        if (known := [spoken for spoken in trajectory.versions if spoken >= 0])
    )


def preview(config: Config) -> int:
    """What a run of this configuration would do and take; nothing is started or written."""
    named(config.objective)
    with_corrections(named(config.objective), config.corrections)
    wanted = task.load(config.task)
    start = config.model or wanted.start
    if start is None:
        raise Invalid(f"{config.task} has no policy to begin with", remedy="name one: --model FOLDER")
    longest, flops = RolloutConfig().limits.max_length, estimate.measure_flops()
    with estimate.ghostly():
        found = estimate.estimate(
            Qwen3(ModelConfig.load(start)),
            budget=config.budget,
            longest=longest,
            tokens=config.groups * config.size * longest,
            recompute=config.recompute,
            flops=flops,
        )
    shown = Table(title=f"plan of {wanted.name}; nothing was started", show_header=False, title_justify="left")
    for name in KEYS:
        shown.add_row(name, str(getattr(config, name)))
    for name, value in estimate.table(found):
        shown.add_row(f"[bold]{name}[/bold]", value)
    Console().print(shown)
    return 0
