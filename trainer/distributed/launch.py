"""`Fleet`: the ranks of one trainer on this machine, started by torchrun, watched, named when lost, started again.

Guarantee: a rank that dies is named at once, one that is stopped within `silent` seconds, one that hangs in its own
code within `stuck`; then no rank of this fleet is left, and `start` continues from the last save, with any number of
ranks. What a rank itself said it cannot continue for (a number that is not finite, a full disk) is raised as that.
Ranks end when the process that started them has ended; what is left of them (stopped ones) is ended by the next start.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from sandbox.errors import Invalid
from trainer.batches.sample import Probe, Sample, SampleLog
from trainer.distributed.torchrun import KILL_TIMEOUT, Torchrun, has_ended
from trainer.distributed.watch import Beat, WaitCount, judge, read
from trainer.distributed.worker import ProbeAnswer, Result, Said, WorkPlan
from trainer.errors import RankLost, SampleFailed, TrainerFailed
from trainer.replay import StateLog
from trainer.resume import ResumeState, weights_of

POLL = 0.1
SILENT, STUCK = 30.0, 300.0  # seconds until a stopped rank is named, and one that hangs in its own code
FULL = 1 << 20  # bytes free, or fewer


class Fleet:
    """``with Fleet(plan, ranks=2) as fleet: result = fleet.step(samples)``"""

    def __init__(self, plan: WorkPlan, *, ranks: int, silent: float = SILENT, stuck: float = STUCK):
        self.plan, self.ranks, self.silent, self.stuck = plan, ranks, silent, stuck
        self.directory = Path(plan.directory)
        self.log = SampleLog(self.directory / "log")
        self.states = StateLog(self.directory / "log")
        self.torchrun = Torchrun(plan, ranks=ranks)
        self._probes = 0
        self.waits = WaitCount()

    def __enter__(self) -> Fleet:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def total(self) -> int:
        """Ranks, of all hosts."""
        return self.ranks

    def start(self) -> None:
        """Starts all ranks; they continue from the last save."""
        self.torchrun.ranks = self.ranks
        self.torchrun.start()

    def feed(self, step: int, number: int, samples: Sequence[Sample]) -> None:
        """A part of the batch of step `step`, counted from 0, before the batch is given."""
        self.log.write_part(step, number, samples)

    def forget(self, step: int) -> None:
        """What a trainer before this one gave for step `step` and did not finish. No rank may be left that reads it."""
        self.stop()
        self.torchrun.end_left()
        self.log.forget(step)

    def withdraw(self, step: int) -> None:
        """The batch that was given for step `step`, counted from 1. Ends the ranks."""
        self.forget(step - 1)

    def request(self, samples: list[Sample], step: int) -> int:
        """Asks the ranks whether a gradient can be made of these. The number to ask for the answer by."""
        self._probes += 1
        self.log.write_probe(Probe(number=self._probes, step=step, samples=samples))
        return self._probes

    def answer(self, number: int) -> str | None:
        """Until request `number` is answered."""
        path = self.directory / "results" / "probed.json"
        while (
            not path.exists() or (answer := msgspec.json.decode(path.read_bytes(), type=ProbeAnswer)).number != number
        ):
            self.check()
            time.sleep(POLL)
        return answer.reason

    def _answer(self, path: Path) -> ProbeAnswer | None:
        return msgspec.json.decode(path.read_bytes(), type=ProbeAnswer) if path.exists() else None

    def take_back(self) -> None:
        """The request that ranks died of."""
        self.log.forget_probe()

    def give(self, samples: list[Sample], state: ResumeState) -> None:
        """The batch of the step after which the run is in this state; forgets what no save can ask for any more."""
        self.log.forget_probe()
        self.states.write(state)
        self.log.write(state.step - 1, samples)
        self.states.trim(self.plan.resume)

    def wait(self, step: int) -> Result:
        """Until step `step` is taken."""
        path = self.directory / "results" / f"step-{step:06d}.json"
        while not path.exists():
            if step > self.plan.steps:
                raise Invalid(f"the plan ends with step {self.plan.steps}", hint="start with a longer plan")
            self.check()
            time.sleep(POLL)
        return msgspec.json.decode(path.read_bytes(), type=Result)

    def weights(self, step: int) -> dict[str, torch.Tensor]:
        """Of the model after step `step`, complete in this process: for comparisons. The step must be saved."""
        return weights_of(self.plan.resume / f"step-{step:06d}")

    def check(self) -> None:
        """Raises RankLost if a rank died or hangs; then none is left."""
        code = self.torchrun.poll()
        if code is not None and code != 0:
            self.stop()
            cause = self.torchrun.cause()
            self._raise_said(killed="killed by signal" in cause)
            raise RankLost(
                cause, hint=f"see {self.directory / 'ranks.log'}; start again to continue from the last save"
            )
        beats = self.beats()
        self.waits.note(beats)
        lost = judge(beats, time.time(), silent=self.silent, stuck=self.stuck)
        if lost and code is None:
            if any(has_ended(beat.process) for beat in read(self.directory / "beats")):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.torchrun.wait(KILL_TIMEOUT)  # torchrun is about to say how it ended
                    self.check()
                    return
            self.stop()
            self._raise_said()
            raise RankLost("; ".join(item.reason for item in lost), hint="start again to continue from the last save")

    def slow(self) -> str:
        """Which rank the others wait for, in words; nothing where none is slow."""
        result = self.waits.slow()
        if result is None:
            return ""
        place = self.place_of(result.rank)
        return (
            f"rank {result.rank}{place} is slow: it waits for others in {result.waits:.0%} of the time of steps, "
            f"they in {result.others:.0%} at least"
        )

    def place_of(self, rank: int) -> str:
        """On which host, where there are several."""
        return ""

    def beats(self) -> list[Beat]:
        """The newest sign of each rank."""
        return read(self.directory / "beats")

    def stop(self) -> None:
        """Ends all ranks, whatever state they are in. Idempotent."""
        self.torchrun.stop()

    def close(self) -> None:
        """As the process ends."""
        self.stop()

    def _raise_said(self, *, killed: bool = False) -> None:
        """What a rank knew of why it could not continue. That its sums failed is no news where another was `killed`."""
        if shutil.disk_usage(self.directory).free < FULL:
            raise OSError(errno.ENOSPC, f"no space left in {self.directory}")
        paths = (self.directory / "results").glob("said-*.json")
        for said in sorted((msgspec.json.decode(path.read_bytes(), type=Said) for path in paths), key=_order):
            if said.sample and killed:
                continue
            if said.sample:
                raise SampleFailed(said.message, hint=f"see {self.directory / 'ranks.log'}")
            if said.errno is not None:
                raise OSError(said.errno, said.message)
            raise TrainerFailed(said.message, hint=said.hint)


def _order(said: Said) -> tuple[bool, float]:
    """What a rank knew first; then which came first, as others fail when one is gone."""
    return said.sample, said.at
