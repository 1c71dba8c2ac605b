"""A sandbox that survives its own death: the gate before every command, and recovery after a kill.

Owns: the wait for the last turn's checkpoint (I2, seen from the agent), the journal of what has happened since the
last captured state, restore and replay. Does not own: when to kill, tokens, rewards.
Guarantee: a command starts only when the state before it is captured; when the sandbox dies at any instant, the
latest checkpoint is restored *verified equal* and what came after it is executed again, so that the caller sees one
result per command and no death.

::

    exec ─▶ gate: last checkpoint captured ─▶ sandbox.exec ─▶ result, journal
                                                  │ SandboxDead
                                                  ▼
                     restore(latest, verify) ─▶ replay the journal after it ─▶ the same command again
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rollout.messages import Recovery
from sandbox.errors import CheckpointFailed, Conflict, NotEqual, RestoreFailed, SandboxDead
from sandbox.messages import CheckpointInfo, CheckpointState, ExecResult, RestoreResult

log = logging.getLogger("pagurus.rollout")

KILLED = 128 + 9  # exit code of a command that SIGKILL ended
RESTORES_MOST = 3  # attempts to restore one death
DEATHS_MOST = 8  # of one trajectory; more means that its own commands kill it


@dataclass
class _Entry:
    """Something done to the sandbox since its last captured state."""

    act: Callable[[], Awaitable[Any]]
    checkpoint: str | None = None  # holds the state after it
    executed: Executed | None = None


@dataclass
class Executed:
    """A command that ended its turn, or a check that did not."""

    started: float
    ended: float
    result: ExecResult
    info: CheckpointInfo | None = None  # of the turn's checkpoint, once captured
    waited_s: float = 0.0


class GuardedSandbox:
    """What an environment gets. Example: ``result = await guarded.exec("ls")``."""

    def __init__(self, sandbox: Any, *, clock: Callable[[], float] = time.time):
        self.sandbox = sandbox
        self.files = GuardedFiles(self)
        self.executed: list[Executed] = []  # all, oldest first
        self.recoveries: list[Recovery] = []
        self.deaths = 0
        self.turn = 0  # of the trajectory; set by its loop
        self.on_exec: Callable[[], None] | None = None  # called once, when the next command is under way
        self._clock = clock
        self._journal: list[_Entry] = []
        self._pending: Executed | None = None
        self._settling: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self.sandbox.id

    async def exec(self, command: Any, **options: Any) -> ExecResult:
        """`sandbox.exec` with the gate before it and recovery around it."""
        result: ExecResult
        started, ended = 0.0, 0.0

        async def act() -> ExecResult:
            nonlocal started, ended
            started = self._clock()
            if self.on_exec is not None:
                signal, self.on_exec = self.on_exec, None
                signal()
            answer = await self.sandbox.exec(command, **options)
            ended = self._clock()
            if answer.exit_code == KILLED and not answer.timed_out:
                # The command may have been killed with everything else, an instant before the death was noticed.
                await self.sandbox.exec("true", ends_turn=False)
            return answer

        result = await self._run(act)
        done = Executed(started, ended, result)
        self.executed.append(done)
        self._journal.append(_Entry(lambda: self.sandbox.exec(command, **options), result.checkpoint, done))
        if result.checkpoint is not None:
            self._pending = done
        return result

    def start_settling(self) -> None:
        """Begin to wait for the last turn's checkpoint, in the background (the model thinks meanwhile)."""
        if self._pending is not None and self._settling is None:
            self._settling = asyncio.get_running_loop().create_task(self._settle(self._pending))

    async def settled(self) -> None:
        """The gate. Returns when the last turn is captured; the time it held us counts as exposed."""
        pending = self._pending
        if pending is None:
            return
        self.start_settling()
        assert self._settling is not None
        began = self._clock()
        try:
            await self._settling
        finally:
            self._settling = None
            pending.waited_s += max(0.0, self._clock() - began)
        self._pending = None

    async def close(self) -> None:
        """Stop waiting for a checkpoint that nobody needs any more."""
        if self._settling is not None:
            settling, self._settling = self._settling, None
            settling.cancel()
            await asyncio.wait([settling])
            if not settling.cancelled():
                settling.exception()  # it failed before; the recovery or the end of the trajectory deals with why

    async def _run(self, act: Callable[[], Awaitable[Any]]) -> Any:
        while True:
            try:
                await self.settled()
                return await act()
            except SandboxDead as death:
                await self._recover(death)

    async def _settle(self, pending: Executed) -> None:
        try:
            pending.info = await self.sandbox.captured(pending.result)
        except CheckpointFailed:  # the turn is over but its state is not safe: take it again, for its own sake
            pending.info = await self.sandbox.checkpoint("retried")
        for index in range(len(self._journal) - 1, -1, -1):
            if self._journal[index].checkpoint == pending.result.checkpoint:
                del self._journal[: index + 1]
                break

    async def _recover(self, death: SandboxDead) -> None:
        """Back to the latest checkpoint, equal, then forward again through the journal."""
        while True:
            self.deaths += 1
            if self.deaths > DEATHS_MOST:
                raise death
            await self.close()
            self._pending = None
            began = time.monotonic()
            restored, attempts = await self._restore()
            recovery = Recovery(
                turn=self.turn,
                checkpoint=restored.checkpoint,
                equal=restored.verified and not restored.differences,
                differences=list(restored.differences),
                milliseconds=1000 * (time.monotonic() - began),
                attempts=attempts,
            )
            self.recoveries.append(recovery)
            try:
                recovery.replayed = await self._replay(restored.checkpoint)
                return
            except SandboxDead as again:
                death = again

    async def _restore(self) -> tuple[RestoreResult, int]:
        """The latest checkpoint that was captured, equal, and how many attempts that took.

        A restore that failed or came out unequal leaves its checkpoint whole: it is tried again.
        """
        to: CheckpointInfo | None = None
        for attempt in itertools.count(1):
            try:
                return await self.sandbox.restore(to, verify=True), attempt
            except Conflict:  # the latest was never captured
                whole = (CheckpointState.CAPTURED, CheckpointState.DURABLE)
                known = [info for info in await self.sandbox.tree() if info.state in whole]
                if not known or to is not None:
                    raise
                to = known[-1]
            except (RestoreFailed, NotEqual) as error:
                if attempt >= RESTORES_MOST:
                    raise
                log.warning("restore attempt %d: %s", attempt, error)
        raise AssertionError("unreachable")

    async def _replay(self, checkpoint: str) -> int:
        for index in range(len(self._journal) - 1, -1, -1):
            if self._journal[index].checkpoint == checkpoint:
                del self._journal[: index + 1]
                break
        for entry in self._journal:
            result = await entry.act()
            if isinstance(result, ExecResult) and result.checkpoint is not None:
                entry.checkpoint = result.checkpoint
                info = await self.sandbox.captured(result)
                if entry.executed is not None:
                    entry.executed.info = info
        return len(self._journal)


class GuardedFiles:
    """`sandbox.tree.files` with the same promise."""

    def __init__(self, guarded: GuardedSandbox):
        self._guarded = guarded

    async def read(self, path: str) -> bytes:
        return await self._guarded._run(lambda: self._guarded.sandbox.files.read(path))

    async def write(self, path: str, data: bytes | str, **options: Any) -> None:
        def act() -> Awaitable[None]:
            return self._guarded.sandbox.files.write(path, data, **options)

        await self._guarded._run(act)
        self._guarded._journal.append(_Entry(act))
