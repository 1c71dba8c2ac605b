"""`Fleet`: the ranks of one trainer on this machine, started by torchrun, watched, named when lost, started again.

Owns: torchrun's process, the decision that a rank is lost. Does not own: what ranks do (worker).
Guarantee: a rank that dies is named at once, one that is stopped within `silent` seconds, one that hangs in its own
code within `stuck`; then no rank of this fleet is left, and `start` goes on from the last save, with any number of
ranks.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file

from sandbox.errors import Invalid
from trainer.batches.sample import Sample, SampleLog
from trainer.distributed.watch import judge, read
from trainer.distributed.worker import Result, WorkPlan
from trainer.errors import RankLost

POLL = 0.1
KILL_PATIENCE = 30.0  # seconds for a killed rank to be gone
# What torchrun writes of the first rank that failed.
CAUSE = re.compile(r"rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+) \(pid: (\d+)\)", re.DOTALL)


class Fleet:
    """``with Fleet(plan, ranks=2) as fleet: result = fleet.step(samples)``"""

    def __init__(self, plan: WorkPlan, *, ranks: int, silent: float = 10.0, stuck: float = 900.0):
        self.plan, self.ranks, self.silent, self.stuck = plan, ranks, silent, stuck
        self.folder = Path(plan.folder)
        self.log = SampleLog(self.folder / "log")
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Fleet:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts all ranks; they go on from the last save."""
        self.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in (*(self.folder / "beats").glob("rank-*"), *(self.folder / "results").glob("step-*")):
            old.unlink()
        path = self.folder / "plan.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self.plan), indent=1))
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.plan.threads), "TOKENIZERS_PARALLELISM": "false"}
        with (self.folder / "ranks.log").open("ab") as log:
            self._began = log.tell()
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "0"),
                    *("--nproc-per-node", str(self.ranks), "-m", "trainer.distributed.worker", str(path)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def step(self, samples: list[Sample], *, number: int) -> Result:
        """Gives batch `number` (from 0) and waits for the step that it makes. Raises RankLost, naming the rank."""
        self.log.write(number, samples)
        return self.wait(number + 1)

    def wait(self, step: int) -> Result:
        """Until step `step` is taken."""
        path = self.folder / "results" / f"step-{step:06d}.json"
        while not path.exists():
            if step > self.plan.steps:
                raise Invalid(f"the plan ends with step {self.plan.steps}", remedy="start with a longer plan")
            self.check()
            time.sleep(POLL)
        return msgspec.json.decode(path.read_bytes(), type=Result)

    def weights(self, step: int) -> dict[str, torch.Tensor]:
        """Of the model after step `step`, whole."""
        return load_file(self.folder / "weights" / f"step-{step:06d}.safetensors")

    def check(self) -> None:
        """Raises RankLost if a rank died or hangs; then none is left."""
        assert self._process is not None, "start() comes first"
        code = self._process.poll()
        if code is not None and code != 0:
            reason = self._cause()
            self.stop()
            raise RankLost(reason, remedy=f"see {self.folder / 'ranks.log'}; start again to go on from the last save")
        lost = judge(read(self.folder / "beats"), time.time(), silent=self.silent, stuck=self.stuck)
        if lost and code is None:
            self.stop()
            raise RankLost("; ".join(each.reason for each in lost), remedy="start again to go on from the last save")

    def stop(self) -> None:
        """Ends all ranks, whatever state they are in. Idempotent."""
        if self._process is None:
            return
        for beat in read(self.folder / "beats"):  # torchrun's children have sessions of their own
            _kill(beat.pid, self._process.pid)
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def _cause(self) -> str:
        with (self.folder / "ranks.log").open("rb") as log:
            log.seek(self._began)
            text = log.read().decode("utf-8", "replace")
        found = CAUSE.search(text[text.rfind("Root Cause") :])
        if found is None:
            return f"torchrun ended: {text.strip().splitlines()[-1] if text.strip() else 'no output'}"
        rank, code, pid = found.groups()
        how = f"was killed by signal {-int(code)}" if int(code) < 0 else f"ended with status {code}"
        return f"rank {rank} (pid {pid}) {how}"


def _kill(pid: int, torchrun: int) -> None:
    """Ends a rank and waits for its end: only a process that torchrun has started, so that a number used again hits
    nobody else."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if parent == torchrun:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            select.select([handle], [], [], KILL_PATIENCE)
    except (ProcessLookupError, FileNotFoundError):
        return
    finally:
        os.close(handle)
