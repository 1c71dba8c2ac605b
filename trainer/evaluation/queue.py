"""Evaluations in the background of training, each of one version, one after the other, in a process of its own.

Guarantee: an evaluation that was begun is recorded once, also when the trainer or its process is killed: it is on disk
until its episodes were recorded.

::

    begin: export the version ▸ order.json ──▶ [process: play] ──▶ result.msgpack ──▶ record ▸ remove the directory
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from rollout import Trajectory
from rollout.background_evaluation import MODEL, ORDER, RESULT, EvaluationOrder
from rollout.store.lock import OWNED
from rollout.weights.export import export
from sandbox import durable
from sandbox.errors import EngineFailed
from sandbox.paths import CHECKOUT

DIRECTORY = "evaluations"
MAX_STARTS = 6
RETRY_S = 5.0  # seconds before the second start; twice as long before each further one
END_TIMEOUT = 20.0  # seconds after SIGTERM

log = logging.getLogger("pagurus.trainer.evaluation.evaluations")
Record = Callable[[EvaluationOrder, Path, dict[str, list[Trajectory]]], Awaitable[object]]


class EvaluationQueue:
    """``async with EvaluationQueue(run, record) as made: await made.begin(order); ...; await made.finish()``

    `record(order, model, episodes)` is called for each, in order; `model` is the version's directory until it returns.
    """

    def __init__(self, run: Path, record: Record):
        self.directory = run / DIRECTORY
        self._run, self._record = run, record
        self._queue: asyncio.Queue[Path] = asyncio.Queue()
        self._work: asyncio.Task[None] | None = None

    async def __aenter__(self) -> EvaluationQueue:
        for directory in await asyncio.to_thread(self._pending):
            self._queue.put_nowait(directory)
        self._work = asyncio.create_task(self._run_all(), name="evaluations")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._work is not None
        self._work.cancel()
        await asyncio.wait([self._work])

    def has(self, step: int) -> bool:
        """Whether one of this step waits or is being played."""
        return (self.directory / str(step) / ORDER).exists()

    async def begin(self, order: EvaluationOrder) -> None:
        """Returns when the version is on disk: it may be collected from the run's weights then."""
        directory = self.directory / str(order.step)
        await asyncio.to_thread(self._write, directory, order)
        self._queue.put_nowait(directory)

    async def finish(self) -> None:
        """Wait until all are recorded. Raises EngineFailed when one could not be played."""
        assert self._work is not None
        done = asyncio.ensure_future(self._queue.join())
        await asyncio.wait([done, self._work], return_when=asyncio.FIRST_COMPLETED)
        if self._work.done():
            done.cancel()
            self._work.result()

    def check(self) -> None:
        """Raise what ended it: EngineFailed."""
        if self._work is not None and self._work.done():
            self._work.result()

    def _pending(self) -> list[Path]:
        """What a process before us left, in the order of steps; what was not complete is removed."""
        result = []
        for directory in self.directory.iterdir() if self.directory.exists() else ():
            if directory.name.isdecimal() and (directory / ORDER).exists():
                result.append(directory)
            else:
                shutil.rmtree(directory)
        return sorted(result, key=lambda item: int(item.name))

    def _write(self, directory: Path, order: EvaluationOrder) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        export(self._run, directory / MODEL, order.version)
        durable.publish(directory / ORDER, msgspec.json.encode(order))

    async def _run_all(self) -> None:
        while True:
            directory = await self._queue.get()
            order = msgspec.json.decode((directory / ORDER).read_bytes(), type=EvaluationOrder)
            await self._play(directory)
            content = await asyncio.to_thread((directory / RESULT).read_bytes)
            episodes = msgspec.msgpack.decode(content, type=dict[str, list[Trajectory]])
            await self._record(order, directory / MODEL, episodes)
            await asyncio.to_thread(shutil.rmtree, directory)
            self._queue.task_done()

    async def _play(self, directory: Path) -> None:
        """Until its result is there."""
        for start in range(MAX_STARTS):
            if (directory / RESULT).exists():
                return
            if start:
                await asyncio.sleep(RETRY_S * 2 ** (start - 1))
            status, reason = await self._started(directory)
            while status == OWNED:  # the process of a trainer that was killed plays it still
                await asyncio.sleep(RETRY_S)
                status, reason = await self._started(directory)
            if status:
                log.warning("the evaluation in %s ended with status %d: %s", directory, status, reason)
        if not (directory / RESULT).exists():
            raise EngineFailed(
                f"the evaluation of step {directory.name} failed: {reason}", hint=f"see {directory}/evaluation.log"
            )

    async def _started(self, directory: Path) -> tuple[int, str]:
        """Exit status of a process that plays it, and the last line that it wrote."""
        search = os.pathsep.join(part for part in (str(CHECKOUT), os.environ.get("PYTHONPATH")) if part)
        with (directory / "evaluation.log").open("ab") as out:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "rollout.background_evaluation",
                str(directory),
                stdout=out,
                stderr=out,
                env={**os.environ, "PYTHONPATH": search},
            )
        try:
            status = await process.wait()
        except asyncio.CancelledError:
            await asyncio.shield(_end(process))
            raise
        lines = (directory / "evaluation.log").read_bytes()[-2000:].decode(errors="replace").splitlines()
        return status, lines[-1] if lines else "no output"


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), END_TIMEOUT)
    except TimeoutError:
        process.kill()
        await process.wait()
