"""`WorkerPool`: processes that run reward functions; one that hangs or dies costs one try.

Guarantee: a try ends within its limit, not counting what the host takes for its calls; a worker that overran it, died,
or said something unexpected is killed with all that it started, and replaced. What it said for another try is not taken
for an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout.episode_clock import TrajectoryClock
from rollout.rewards import wire
from rollout.rewards.messages import ForkCall, ForkReply, RewardMessage, Score, ScorerFailed, ScoringRequest, TooSlow
from sandbox import Sandbox
from sandbox.errors import PagurusError

START = 120.0  # seconds until a worker is ready, or has loaded a function
GRACE = 2.0  # seconds beyond the limit of its commands that a function has for itself


class _Worker:
    def __init__(self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.process, self.reader, self.writer = process, reader, writer

    async def end(self) -> None:
        """With all that it has started."""
        self.writer.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await asyncio.to_thread(self.process.wait)


class WorkerPool:
    """``score = await pool.run(ask, fork)``. At most `size` processes, begun when they are needed."""

    def __init__(
        self,
        size: int = 2,
        *,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = ("rollout.rewards.worker",),
    ):
        """`program`: a module and its arguments, before the number of the descriptor."""
        self.size, self._log, self._program = size, log, program
        self._environment = {**os.environ, **(environment or {})}
        self._slots = asyncio.Semaphore(size)
        self._idle: list[_Worker] = []
        self.replaced = 0

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().end()

    @contextlib.asynccontextmanager
    async def slot(self) -> Any:
        """A worker is free within. Take it before there is a fork: forks that wait hold memory."""
        async with self._slots:
            yield

    async def run(self, request: ScoringRequest, sandbox: Sandbox | None) -> tuple[Score, float]:
        """One try, within a slot: the score, and its seconds. Raises ScorerFailed, TooSlow, and the host's errors."""
        worker = self._idle.pop() if self._idle else await self._start()
        try:
            result = await self._try(worker, request, sandbox)
        except BaseException as error:
            if isinstance(error, TooSlow):
                self._idle.append(worker)
            else:
                self.replaced += isinstance(error, ScorerFailed)
                await asyncio.shield(worker.end())
            raise
        self._idle.append(worker)
        return result

    async def _start(self) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.to_thread(self._spawn, theirs.fileno())
        ours.setblocking(False)
        worker = _Worker(process, *await asyncio.open_connection(sock=ours, limit=wire.MAX_FRAME))
        try:
            async with asyncio.timeout(START):
                if not (await wire.read(worker.reader)).ready:
                    raise ScorerFailed("a worker did not begin as workers do")
        except TimeoutError:
            await worker.end()
            raise ScorerFailed(f"no worker within {START:g} s") from None
        except BaseException:
            await asyncio.shield(worker.end())
            raise
        return worker

    def _spawn(self, descriptor: int) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(dict.fromkeys([str(Path(__file__).parents[2]), *filter(None, sys.path)]))
        with open(self._log or os.devnull, "ab") as said:
            return subprocess.Popen(
                [sys.executable, "-m", *self._program, str(descriptor)],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
                env=self._environment | {"PYTHONPATH": path},
            )

    async def _try(self, worker: _Worker, request: ScoringRequest, sandbox: Sandbox | None) -> tuple[Score, float]:
        await wire.write(worker.writer, RewardMessage(request=request))
        clock = TrajectoryClock(START)
        try:
            async with clock.running():
                first = await wire.read(worker.reader)
            if first.begun and first.id == request.id:
                clock = TrajectoryClock(request.limit + GRACE)
                async with clock.running():
                    first = await self._talk(worker, sandbox, clock)
        except TimeoutError:
            raise ScorerFailed(f"it took more than {clock.budget:g} s") from None
        if first.id != request.id:
            raise ScorerFailed("it sent an unexpected response")
        if first.slow:
            raise TooSlow(first.error)
        if first.score is None:
            raise ScorerFailed(first.error or "it said nothing", raised=bool(first.error))
        return first.score, clock.used

    async def _talk(self, worker: _Worker, sandbox: Sandbox | None, clock: TrajectoryClock) -> RewardMessage:
        """Carry out its calls until it says something else. The host's time is not its own."""
        while True:
            frame = await wire.read(worker.reader)
            if frame.call is None:
                return frame
            with clock.stopped():
                answered = await _carry_out(frame.call, sandbox, clock)
            await wire.write(worker.writer, RewardMessage(answer=answered))


class RewardModels:
    """``score, seconds = await models.run(request)``: a process for each reward model, which has it in memory."""

    def __init__(self, *, log: Path | None = None):
        self._log = log
        self._pools: dict[str, WorkerPool] = {}

    async def close(self) -> None:
        for pool in self._pools.values():
            await pool.close()

    async def run(self, request: ScoringRequest) -> tuple[Score, float]:
        """One try. Raises ScorerFailed."""
        directory = request.scoring.model
        if directory not in self._pools:
            program = ("rollout.service.reward_model", directory)
            self._pools[directory] = WorkerPool(1, log=self._log, program=program)
        pool = self._pools[directory]
        async with pool.slot():
            return await pool.run(request, None)


async def _carry_out(call: ForkCall, sandbox: Sandbox | None, clock: TrajectoryClock) -> ForkReply:
    """In the fork. Seconds of a command are the scorer's."""
    try:
        if sandbox is None:
            raise ScorerFailed("it looks into a sandbox, and was registered with forks=False")
        if call.what == "exec":
            left = max(0.1, clock.left)
            timeout = left if call.timeout is None else min(call.timeout, left)
            result = await sandbox.exec(
                call.command, timeout=timeout, cwd=call.cwd, env=call.env, user=call.user, stdin=call.stdin,
                ends_turn=False,
            )  # fmt: skip
            clock.charge(result.duration)
            return ForkReply(result=result)
        if call.what == "read":
            return ForkReply(data=await sandbox.files.read(call.path))
        if call.what == "write":
            await sandbox.files.write(call.path, call.data)
            return ForkReply()
        raise ScorerFailed(f"it requested {call.what!r:.40}")
    except PagurusError as error:
        if error.code in ("no_daemon", "interrupted", "timeout", "protocol", "internal"):
            raise  # the platform's, which the function must not turn into a reward
        return ForkReply(error=error.body())
