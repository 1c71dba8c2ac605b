"""The embedded engine with steps that take as long for many answers as for one: as on a GPU, where most of a step's
time is reading the weights.

    python -m bench.harness.paced_engine MILLISECONDS --model DIR --port N
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from rollout.engine.embedded import server
from rollout.engine.embedded.core import Core, SamplingSequence
from rollout.engine.embedded.scheduler import EngineStep
from rollout.engine.launch import Launch, LaunchCommand


def paced(kind: Launch, milliseconds: float) -> Launch:
    """That embedded engine, but that no step takes less."""

    def command(directory: Path, port: int) -> LaunchCommand:
        plain = kind.command(directory, port)
        words = plain.argv[plain.argv.index("--model") :]
        return replace(plain, argv=[sys.executable, "-m", __name__, str(milliseconds), *words])

    return replace(kind, command=command, standby=None)


class PacedCore(Core):
    minimum = 0.0  # seconds
    began = ended = 0.0

    def _compute(self, plan: EngineStep) -> list[SamplingSequence]:
        now = time.monotonic()
        self.began = self.ended if now - self.ended < self.minimum else now
        finished = super()._compute(plan)
        self._wait()  # also where nothing was sampled
        self.ended = time.monotonic()
        return finished

    def _sample(self, requests: list[SamplingSequence], logits: Tensor) -> list[SamplingSequence]:
        self._wait()  # tokens come at the end of a step
        return super()._sample(requests, logits)

    def _wait(self) -> None:
        time.sleep(max(0.0, self.began + self.minimum - time.monotonic()))


if __name__ == "__main__":
    PacedCore.minimum = float(sys.argv[1]) / 1000
    server.Core = PacedCore  # type: ignore[misc, attr-defined]
    server.main(sys.argv[2:])
