"""Steps since the newest save: the batch of each, and what the run was after it.

Guarantee: a step is taken when its note is on disk. From the newest save the noted steps are taken again, in order and
from the same batches, so that a killed run has the weights of one that was not: on one rank bit by bit.

::

    save n ─▶ batch n+1 ─▶ step ─▶ note n+1 ─▶ batch n+2 ─▶ ... ─▶ save n+k: what is older than the save before goes
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from sandbox import durable
from trainer.batches.sample import Sample, SampleLog
from trainer.isolate import careful_step, failures
from trainer.learner import Learner, StepStats
from trainer.resume import KEEP, ResumeState, Saves, saves_in


class StateLog:
    """What the run is after each step, next to the batches: as the sender of the batch expects it, and once the step
    is taken."""

    def __init__(self, directory: Path):
        self.directory = directory

    def path(self, step: int) -> Path:
        return self.directory / f"state-{step:06d}.json"

    def noted(self, step: int) -> Path:
        return self.directory / f"taken-{step:06d}.json"

    def write(self, state: ResumeState) -> None:
        """Before the batch is given."""
        self._write(self.path(state.step), state)

    def read(self, step: int) -> ResumeState:
        return self._read(self.path(step)) or ResumeState(step=step, version=step)

    def note(self, state: ResumeState) -> None:
        """The step is taken; it may be acknowledged."""
        self._write(self.noted(state.step), state)

    def latest(self, saved: ResumeState) -> ResumeState:
        """After the last step that can be taken again from this save."""
        state = self._read(self.noted(saved.step)) or saved  # the state changed after the save
        batches = SampleLog(self.directory)
        while batches.path(state.step).exists() and (after := self._read(self.noted(state.step + 1))) is not None:
            state = after
        return state

    def forget(self, first: int) -> None:
        """Steps that the saves of step `first` and later contain."""
        batches = SampleLog(self.directory)
        for step in batches.steps():
            if step < first:
                batches.forget(step)
        for path in (*self.directory.glob("state-*.json"), *self.directory.glob("taken-*.json")):
            if int(path.stem.partition("-")[2]) < first:
                path.unlink(missing_ok=True)

    def trim(self, saves: Path) -> None:
        """Leaves what follows the oldest save: the newest may be damaged."""
        there = saves_in(saves)
        if len(there) >= KEEP:
            self.forget(int(there[0].name.removeprefix("step-")))

    def _write(self, path: Path, state: ResumeState) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        durable.publish(path, msgspec.json.encode(state))

    def _read(self, path: Path) -> ResumeState | None:
        try:
            return msgspec.json.decode(path.read_bytes(), type=ResumeState)
        except FileNotFoundError:
            return None


class StepPlan(Protocol):
    """The part of a `WorkPlan` that is needed here. Steps are counted from 0."""

    def rate(self, step: int) -> float: ...

    def critic_only(self, step: int) -> bool: ...


@dataclass(frozen=True)
class Replay:
    """``replay.rewind(12)``: a learner with the weights after 12 steps. All ranks call the same."""

    learner: Learner
    saves: Saves
    log: SampleLog
    plan: StepPlan

    def rewind(self, step: int) -> int:
        """From the newest save, by the batches of the log; how many of them."""
        self.saves.wait_saved()
        state = self.saves.load(self.learner)
        saved = 0 if state is None else state.step
        for number in range(saved, step):
            self.take(number, self._fed(number))
        return step - saved

    def take(self, number: int, samples: list[Sample]) -> StepStats:
        """Step `number`, counted from 0, of a batch of which parts may have been fed."""
        self.learner.critic_only = self.plan.critic_only(number)
        rate = self.plan.rate(number)
        return careful_step(self.learner, samples, rate=rate, restore=lambda: self.rewind(number))

    def _fed(self, step: int) -> list[Sample]:
        """The batch of a step that was taken before; what came before the batch is fed as it was then."""
        self.learner.begin()
        number = 0
        while self.learner.streams and (part := self.log.read_part(step, number)) is not None:
            try:
                self.learner.feed(part)
            except failures(self.learner.ranks):  # the step of the complete batch finds out which sample it was
                self.learner.begin()
            number += 1
        return self.log.read(step)


class SaveInterval:
    """``interval.due(step, last)``: every so many steps (0: never by steps), or after so many seconds (0: never)."""

    def __init__(self, steps: int, seconds: float):
        self.steps, self.seconds = steps, seconds
        self._last = time.monotonic()

    @property
    def every(self) -> bool:
        """Each step: then it is saved before it is acknowledged."""
        return self.steps == 1

    def due(self, step: int, last: int) -> bool:
        now = time.monotonic()
        by_time = self.seconds > 0 and now - self._last >= self.seconds
        result = step == last or by_time or (self.steps > 0 and step % self.steps == 0)
        if result:
            self._last = now
        return result
