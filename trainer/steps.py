"""Who takes the steps of a run: this process alone, or ranks that it starts and watches.

Guarantee: when `step` returns, the step and the state of the run after it are on disk, saved or as a batch that is
taken again (`trainer.replay`), in the same directories no matter who took it, so that a run may continue with another
number of ranks; `publish` then says which version has the weights after it. Ranks publish their own shards: this
process holds no weights.

::

    samples, state ─▶ Alone:    learner ─▶ saves ─▶ encode ─▶ publish
                   └▶ Together: fleet ─▶ log ─▶ ranks ─▶ saves, weights ─▶ result
                                  ▲ a rank was lost: named, all are started again from the newest whole save
                                  ▲ ranks failed on the batch twice: halves of it are tried, by ranks that may die
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
from torch import nn

from rollout.weights.versions import VersionRef
from trainer.batches.aside import described, name_of
from trainer.batches.sample import Sample, SampleLog
from trainer.config import TrainConfig
from trainer.distributed.host_fleet import HostPlan
from trainer.distributed.launch import Fleet
from trainer.distributed.ranks import here, leave
from trainer.distributed.worker import Result, WorkPlan, make_learner
from trainer.errors import RankLost, SampleFailed, TrainerFailed
from trainer.isolate import FAILURES, TRIES, explained, few, find
from trainer.learner import streams
from trainer.models import verify
from trainer.models.load import Lora
from trainer.replay import Replay, SaveInterval, StateLog
from trainer.resume import ResumeState, Saves
from trainer.weights import ModelPublisher, Seconds

T = TypeVar("T")
MAX_LOSSES = 3  # of ranks in a row, without a step in between


def newest_state(saves: Saves, plan: WorkPlan) -> ResumeState | None:
    """After the last step that is saved, or can be taken again from the log; None where there is no save yet."""
    saved = saves.newest()
    return None if saved is None else StateLog(Path(plan.directory, "log")).latest(saved)


def work_plan(config: TrainConfig, run: Path) -> WorkPlan:
    """The input of the processes that take the steps. The policy that the run began with lies in its directory."""
    way = verify.way_of(run)
    return WorkPlan(
        model=str(run / "policy"),
        directory=str(run / "ranks"),
        saves=str(run / "resume"),
        weights=str(run / "weights"),
        versions=config.versions or 0,
        roles=str(run / "roles"),
        steps=config.steps,
        save_every=config.save_every,
        save_seconds=config.save_seconds,
        seed=config.seed,
        objective=config.objective,
        length=config.max_length,
        packs=way.packs,
        shares=way.shares,
        settings=config.optimiser,
        mesh=config.mesh,
        bf16=config.bf16,
        recompute=config.recompute,
        offload=config.offload,
        timeout=config.timeouts.collective,
        lora=Lora(rank=config.lora, alpha=2 * config.lora) if config.lora else None,
    )


class Steps(Protocol):
    """Calls block; one at a time, but for `poll`."""

    plan: WorkPlan

    def begin(self, state: ResumeState | None) -> None:
        """From the newest save, which has this state, or from the plan's model."""

    @property
    def streams(self) -> bool:
        """Whether `feed` may bring groups before their batch is complete."""

    def expect(self) -> None:
        """A new batch begins."""

    def feed(self, samples: Sequence[Sample]) -> None:
        """Whole groups of the batch that is not complete yet."""

    def step(self, samples: list[Sample], state: ResumeState) -> dict[str, Any]:
        """One step on this batch, saved with the state of the run after it; its figures."""

    def encode(self, version: int) -> None:
        """Begins to make this version of the weights as they are now, unless it is there; `publish` comes next."""

    def publish(self) -> VersionRef:
        """The version, visible."""

    @property
    def publication(self) -> Seconds:
        """What the last version took."""

    def note(self, state: ResumeState) -> None:
        """The state changed between two steps."""

    def poll(self) -> None:
        """Between steps: does everybody live?"""

    def close(self) -> None: ...


class LocalSteps:
    """This process takes the steps, on its GPU where there is one."""

    def __init__(self, plan: WorkPlan):
        self.plan = plan
        self.saves = Saves(plan.resume)
        self.log = SampleLog(Path(plan.directory, "log"))
        self.states = StateLog(self.log.directory)
        self.interval = SaveInterval(plan.save_every, plan.save_seconds)
        self.learner = make_learner(plan, here(offload=plan.offload))
        self.replay = Replay(self.learner, self.saves, self.log, plan)
        self._step = self._parts = 0  # steps that are done, parts of the next batch that were fed
        self.model: nn.Module = self.learner.scorer.model
        self.weights = ModelPublisher(
            self.model, plan.published, base=Path(plan.model), lora=plan.lora, keep=plan.versions
        )

    def begin(self, state: ResumeState | None) -> None:
        if state is None:
            self.saves.save(self.learner, ResumeState(step=0))
        else:
            again = self.replay.rewind(state.step)
            if again and again >= self.plan.save_every:  # who is killed more often than it saves gets on, too
                self.saves.save(self.learner, state)
                self.states.trim(self.plan.resume)
            self._step = state.step
        self.log.forget(self._step)

    @property
    def streams(self) -> bool:
        return self.learner.streams

    def expect(self) -> None:
        self.learner.begin()
        self.log.forget(self._step)
        self._parts = 0

    def feed(self, samples: Sequence[Sample]) -> None:
        if not self.interval.every:
            self.log.write_part(self._step, self._parts, samples)
            self._parts += 1
        try:
            self.learner.feed(samples)
        except FAILURES:  # the step of the complete batch finds out which sample it was
            self.learner.begin()

    def step(self, samples: list[Sample], state: ResumeState) -> dict[str, Any]:
        if not self.interval.every:
            self.log.write(state.step - 1, samples)
        stats = self.replay.take(state.step - 1, samples)
        named = described(state.step, samples, stats.put_aside)
        self._keep(msgspec.structs.replace(state, put_aside=named))
        self._step, self._parts = state.step, 0
        return stats.items()

    def _keep(self, state: ResumeState) -> None:
        """Saves the step; between saves it is noted, while the last save is written."""
        if self.interval.due(state.step, self.plan.steps):
            self.saves.start_save(self.learner, state)
        if self.interval.every or state.step == self.plan.steps:
            self.saves.wait_saved()
            return
        self.saves.poll()
        self.states.note(state)
        self.states.trim(self.plan.resume)

    def encode(self, version: int) -> None:
        self.weights.start(version)

    def publish(self) -> VersionRef:
        ref = self.weights.wait()
        assert ref is not None, "encode() comes first"
        return ref

    @property
    def publication(self) -> Seconds:
        return self.weights.seconds

    def note(self, state: ResumeState) -> None:
        if self.interval.every:
            self.saves.save(self.learner, state)
        else:
            self.states.note(state)

    def poll(self) -> None:
        pass

    def close(self) -> None:
        self.weights.close()
        leave()


class DistributedSteps:
    """Ranks take the steps. `report` hears of each one that was lost. `hosts`: where they are not on this one alone."""

    def __init__(
        self,
        plan: WorkPlan,
        *,
        ranks: int,
        report: Callable[[str], None],
        hosts: HostPlan | None = None,
        **watch: float,
    ):
        self.plan, self.report = plan, report
        self.fleet = Fleet(plan, ranks=ranks, **watch) if hosts is None else hosts.open(plan, ranks=ranks, **watch)
        self.streams = streams(plan.chosen, plan.settings)
        self._last: Result | None = None
        self._losses = 0
        self._step = self._parts = 0  # steps that are done, parts of the next batch that were fed
        self._busy = threading.Lock()

    def begin(self, state: ResumeState | None) -> None:
        with self._busy:
            self._step = 0 if state is None else state.step
            self.fleet.forget(self._step)
            self.fleet.start()
            self._result(self._step)

    def expect(self) -> None:
        """Parts that were fed stay: ranks may have computed them. Those of an abandoned batch are found out."""

    def feed(self, samples: Sequence[Sample]) -> None:
        self.fleet.feed(self._step, self._parts, samples)
        self._parts += 1

    def step(self, samples: list[Sample], state: ResumeState) -> dict[str, Any]:
        with self._busy:
            self.fleet.give(samples, state)
            stats = self._tried(samples, state)
            self._step, self._parts = state.step, 0
            if slow := self.fleet.slow():
                self.report(slow)
            return stats

    def _tried(self, samples: list[Sample], state: ResumeState) -> dict[str, Any]:
        """The figures of the step on this batch, if need be without the samples that ranks fail on."""
        failure: TrainerFailed | None = None
        for _ in range(TRIES):
            try:
                return self._result(state.step).stats
            except SampleFailed as error:
                self.report(f"step {state.step} failed: {error.message}; the ranks are started again")
                failure = error
                self.fleet.start()
            except RankLost as error:  # again and again: a sample may be what they die of
                failure = error
                break
        assert failure is not None
        self.report(f"step {state.step} failed again: the samples at fault are looked for")
        self.fleet.withdraw(state.step)
        self.fleet.start()
        at_fault = find(len(samples), lambda chosen: self._probed([samples[number] for number in chosen], state.step))
        if not few(at_fault, samples):
            raise explained(failure)
        reasons = {name_of(samples[number]): reason for number, reason in at_fault.items()}
        named = described(state.step, samples, reasons)
        rest = [item for number, item in enumerate(samples) if number not in at_fault]
        self.fleet.give(rest, msgspec.structs.replace(state, put_aside=named))
        stats = self._result(state.step).stats
        return {**stats, "put_aside": {**stats.get("put_aside", {}), **reasons}}

    def _probed(self, samples: list[Sample], step: int) -> str | None:
        """Why ranks can make no gradient of these samples, or None."""
        number = self.fleet.request(samples, step)
        try:
            reason = self._living(lambda: self.fleet.answer(number))
        except SampleFailed as error:
            reason = error.message
        except RankLost as error:
            reason = f"ranks died of it: {error.message}"
        else:
            self._losses = 0
            return reason
        self._losses = 0
        self.fleet.take_back()
        self.fleet.start()
        return reason

    def encode(self, version: int) -> None:
        """Ranks have published it with the step."""

    def publish(self) -> VersionRef:
        assert self._last is not None and self._last.weights is not None, "begin() comes first"
        return self._last.weights

    @property
    def publication(self) -> Seconds:
        return Seconds() if self._last is None else self._last.publication

    def note(self, state: ResumeState) -> None:
        """Goes to disk with the next step: what changed until then is found out again."""

    def poll(self) -> None:
        if not self._busy.acquire(blocking=False):
            return  # a step is under way, which looks by itself
        try:
            self._living(self.fleet.check)
        except SampleFailed:  # of a group that was fed early: the step of the complete batch finds it
            self.fleet.forget(self._step)
            self.fleet.start()
        finally:
            self._busy.release()

    def close(self) -> None:
        self.fleet.close()

    def _result(self, step: int) -> Result:
        result = self._living(lambda: self.fleet.wait(step))
        self._losses, self._last = 0, result
        return result

    def _living(self, call: Callable[[], T]) -> T:
        """The call's result, even if ranks are lost."""
        while True:
            size = self.fleet.total
            try:
                return call()
            except RankLost as lost:
                self._losses += 1
                if self._losses > MAX_LOSSES:
                    raise RankLost(
                        f"{lost.message}; {self._losses} times in a row",
                        hint=f"see {self.fleet.directory / 'ranks.log'}; continue with another number: --ranks N",
                    ) from lost
                self.report(f"{lost.message}: all {size} ranks are started again from the last save")
                self.fleet.start()
