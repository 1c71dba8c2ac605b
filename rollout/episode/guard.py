"""A sandbox that survives its own death: the gate before every command, and recovery after a kill.

Guarantee: a command starts only when the state before it is captured, or cannot be. When the sandbox dies at any
instant, or the daemon died while it executed a command, the last captured state is restored *verified equal*, what came
after it is executed again, and must say what it said before; the caller sees one result per command and no death.

::

    exec ─▶ gate: last checkpoint captured ─▶ sandbox.exec ─▶ result, kept for repetition
                                                  │ SandboxDead, Interrupted
                                                  ▼
                     restore(last captured, verify) ─▶ repeat what came after it ─▶ the same command again
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from rollout.decide.blame import EpisodePhase
from rollout.episode_clock import PhaseMeter, TrajectoryClock
from rollout.messages import Recovery
from sandbox import Sandbox
from sandbox.errors import (
    CheckpointFailed,
    Conflict,
    Interrupted,
    NoSpace,
    NotEqual,
    NotFound,
    PagurusError,
    RestoreFailed,
    SandboxDead,
    Timeout,
)
from sandbox.messages import CheckpointInfo, CheckpointState, ExecResult, RestoreResult

log = logging.getLogger("pagurus.rollout")

KILLED = 128 + 9  # exit code of a command that SIGKILL ended
MAX_RESTORES = 3  # attempts to restore one death
MAX_DEATHS = 8  # of one trajectory
MAX_SAME_COMMAND = 3  # deaths under one command, each time from an equal state: it is the command
MAX_STALL = 300.0  # seconds that the host may take beyond what a command takes
MAX_COMMAND = 60.0  # seconds; the SDK's default
SHORTEST = 0.1  # seconds that a command gets when the trajectory's time is nearly used up
PLAYED_AGAIN = "nothing to do: the trajectory is played again"


class KilledItself(SandboxDead):
    """The same command killed the sandbox each time: the sandbox is not to blame."""


class ReplayDivergence(PagurusError):
    """What was executed again after a restore said something else than the agent has read."""

    code = "not_equal"


@dataclass
class GuardEntry:
    """Something done to the sandbox since its last captured state."""

    act: Callable[[], Awaitable[Any]]
    checkpoint: str | None = None  # holds the state after it
    executed: ExecutedCommand | None = None


@dataclass
class ExecutedCommand:
    """A command that ended its turn, or a check that did not."""

    started: float
    ended: float
    result: ExecResult
    info: CheckpointInfo | None = None  # of the turn's checkpoint, once captured
    waited_s: float = 0.0
    uncaptured: str = ""


Command = str | Sequence[str]


class GuardedSandbox:
    """What an environment gets. Example: ``result = await guarded.exec("ls")``."""

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        wall: Callable[[], float] = time.time,
        meter: PhaseMeter | None = None,
        epoch: str | None = None,
    ):
        self.sandbox = sandbox
        self.files = GuardedFiles(self)
        self.executed: list[ExecutedCommand] = []  # all, oldest first
        self.recoveries: list[Recovery] = []
        self.deaths = 0
        self.turn = -1  # of the trajectory, set by its loop; -1 is the reset
        self.clock: TrajectoryClock | None = None  # of the phase that runs
        self.phase: EpisodePhase | None = None  # that runs; the gate and recoveries are not its time
        self.failed_in: EpisodePhase | None = None  # where the last error came from, when it was not the phase itself
        self.head: str | None = None  # the last captured checkpoint that a turn ended with
        self.epoch = epoch or secrets.token_hex(8)
        self.on_exec: Callable[[], None] | None = None  # called once, when the next command is under way
        self.on_epoch: Callable[[str], Awaitable[None]] | None = None  # gets "" before a restore, a new epoch after
        self.adopted = 0  # the turn, counted from 1, in which this process took over
        self._calls = 0  # of this turn
        self._wall = wall
        self._meter = meter
        self._journal: list[GuardEntry] = []
        self._pending: ExecutedCommand | None = None
        self._settling: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self.sandbox.id

    @property
    def clean(self) -> bool:
        """Nothing has happened since the last captured state."""
        return not self._journal

    def begin_turn(self, index: int) -> None:
        self.turn, self._calls = index, 0

    async def exec(self, command: Command, *, timeout: float | None = MAX_COMMAND, **options: Any) -> ExecResult:
        """`sandbox.exec` with the gate before it and recovery around it."""
        started, ended = 0.0, 0.0
        self._calls += 1
        name = f"{self.turn}.{self._calls}"

        async def act() -> ExecResult:
            nonlocal started, ended
            started = self._wall()
            if self.on_exec is not None:
                signal, self.on_exec = self.on_exec, None
                signal()
            answer = await self._send(name, command, timeout, options)
            ended = self._wall()
            if answer.exit_code == KILLED and not answer.timed_out:
                # The command may have been killed with everything else, an instant before the death was noticed.
                await self.sandbox.exec("true", ends_turn=False)
            return answer

        result: ExecResult = await self._run(act)
        done = ExecutedCommand(started, ended, result)
        self.executed.append(done)
        self._journal.append(GuardEntry(lambda: self._send(name, command, timeout, options), result.checkpoint, done))
        if result.checkpoint is not None:
            self._pending = done
        return result

    async def _send(self, name: str, command: Command, timeout: float | None, options: dict[str, Any]) -> ExecResult:
        """One command, under a key that a successor of this process would use too. Its time is the trajectory's."""
        clock = self.clock
        if clock is not None and (timeout is None or clock.left < timeout):
            timeout = max(SHORTEST, clock.left)
        key = f"{self.epoch}.{name}"
        limit = None if timeout is None else timeout + MAX_STALL
        with clock.stopped() if clock is not None else contextlib.nullcontext():
            try:
                async with asyncio.timeout(limit):
                    answer = await self.sandbox.exec(command, timeout=timeout, key=key, **options)
            except TimeoutError:
                raise Timeout(
                    f"the host took {MAX_STALL:g} s longer than a command may",
                    sandbox=self.id,
                    hint="see the load of the host; the trajectory is played again",
                ) from None
            if clock is not None:
                clock.charge(answer.duration)
        return answer

    def start_settling(self) -> None:
        """Begin to wait for the last turn's checkpoint, in the background (the model thinks during this)."""
        if self._pending is not None and self._settling is None:
            self._settling = asyncio.get_running_loop().create_task(self._finalize(self._pending))

    async def finalized(self) -> None:
        """The gate. Returns when the last turn is captured; the time it held us counts as exposed."""
        pending = self._pending
        if pending is None:
            return
        self.start_settling()
        assert self._settling is not None
        began = self._wall()
        try:
            with self._elsewhere(EpisodePhase.CHECKPOINT):
                await self._settling
        finally:
            self._settling = None
            pending.waited_s += max(0.0, self._wall() - began)
        self._pending = None

    async def final(self) -> str:
        """The checkpoint that holds the state as it is now; a new one, where the last turn left none."""
        await self._run(_nothing)
        if self.head is not None and self.clean:
            return self.head
        await self._run(lambda: self.sandbox.exec("true", ends_turn=False))  # it lives, or is brought back
        with self._elsewhere(EpisodePhase.CHECKPOINT):
            return (await self.sandbox.checkpoint("final")).id

    async def close(self) -> None:
        """Stop waiting for a checkpoint that is no longer needed."""
        if self._settling is not None:
            settling, self._settling = self._settling, None
            settling.cancel()
            await asyncio.wait([settling])
            if not settling.cancelled():
                settling.exception()  # it failed before; the recovery or the end of the trajectory deals with why

    def adopt(self, checkpoint: str | None, deaths: int, recoveries: list[Recovery]) -> None:
        """Continue where another process was: `checkpoint` holds the state before the turn at hand."""
        self.head, self.deaths, self.recoveries = checkpoint, deaths, list(recoveries)
        self.adopted = self.turn + 1

    async def roll_back(self, checkpoint: str) -> RestoreResult:
        """Bring the sandbox back to this checkpoint because the agent requested it. What came after is forgotten."""
        with self._elsewhere(EpisodePhase.RECOVER):
            with contextlib.suppress(PagurusError):  # the state that is left behind
                await self.finalized()
            self._pending = None
            self._journal.clear()
            restored = await self._restored_to(checkpoint)
            await self._report(self.epoch)
            return restored

    async def _restored_to(self, checkpoint: str) -> RestoreResult:
        await self._report("")
        restored = await self.sandbox.restore(checkpoint, verify=True)
        self.head, self.epoch = checkpoint, secrets.token_hex(8)
        return restored

    async def back(self, checkpoint: str) -> None:
        """The sandbox is dead, or its state is unknown: bring it back to this checkpoint and to no other."""
        with self._elsewhere(EpisodePhase.RECOVER):
            self.deaths += 1
            began = time.monotonic()
            restored = await self._restored_to(checkpoint)
            self.recoveries.append(
                Recovery(
                    turn=self.turn,
                    checkpoint=checkpoint,
                    equal=restored.verified and not restored.differences,
                    differences=list(restored.differences),
                    milliseconds=1000 * (time.monotonic() - began),
                )
            )

    def _elsewhere(self, phase: EpisodePhase) -> Any:
        return _Elsewhere(self, phase)

    async def _run(self, act: Callable[[], Awaitable[Any]]) -> Any:
        deaths = 0
        while True:
            self.failed_in = None
            try:
                await self.finalized()
                return await act()
            except (SandboxDead, Interrupted, Conflict) as death:
                if isinstance(death, Conflict) and self.adopted != self.turn + 1:
                    raise  # in the turn of a takeover it may say that a key was used for other options
                deaths += isinstance(death, SandboxDead)
                if deaths >= MAX_SAME_COMMAND:
                    raise KilledItself(
                        f"one command killed it {deaths} times, each time from an equal state", sandbox=self.id
                    ) from death
                await self._recover(death)

    async def _finalize(self, pending: ExecutedCommand) -> None:
        try:
            pending.info = await self.sandbox.captured(pending.result)
        except CheckpointFailed:  # the turn is over but its state is not safe: take it again, for its own sake
            try:
                pending.info = await self.sandbox.checkpoint("retried")
            except (CheckpointFailed, NoSpace) as error:
                # What runs in there cannot be dumped: that must not end an episode. A death would repeat more turns.
                pending.uncaptured = str(error)
                return
        self.head = pending.info.id if pending.info is not None else pending.result.checkpoint
        self._trim(pending.result.checkpoint)

    def _trim(self, checkpoint: str | None) -> None:
        """Forget what `checkpoint` holds."""
        for index in range(len(self._journal) - 1, -1, -1):
            if self._journal[index].checkpoint == checkpoint:
                del self._journal[: index + 1]
                break

    async def _recover(self, death: PagurusError) -> None:
        """Back to the latest checkpoint, equal, then forward again through the journal."""
        with self._elsewhere(EpisodePhase.RECOVER):
            while True:
                self.deaths += 1
                if self.deaths > MAX_DEATHS:
                    raise death
                pending, self._pending = self._pending, None
                await self.close()
                began = time.monotonic()
                await self._report("")
                restored, attempts = await self._restore(pending)
                recovery = Recovery(
                    turn=self.turn,
                    checkpoint=restored.checkpoint,
                    equal=restored.verified and not restored.differences,
                    differences=list(restored.differences),
                    milliseconds=1000 * (time.monotonic() - began),
                    attempts=attempts,
                )
                self.recoveries.append(recovery)
                self.head, self.epoch = restored.checkpoint, secrets.token_hex(8)
                try:
                    recovery.replayed = await self._replay(restored.checkpoint)
                    await self._report(self.epoch)
                    return
                except (SandboxDead, Interrupted) as again:
                    death = again

    async def _report(self, epoch: str) -> None:
        if self.on_epoch is not None:
            await self.on_epoch(epoch)

    async def _restore(self, pending: ExecutedCommand | None) -> tuple[RestoreResult, int]:
        """The last state that was captured, equal, and how many attempts that took.

        The checkpoint of a turn whose capture was not awaited yet may be there or not. A restore that failed or
        came out unequal leaves its checkpoint whole: it is tried again.
        """
        existing = [pending.result.checkpoint if pending is not None else None, self.head]
        target: list[str | None] = list(dict.fromkeys(name for name in existing if name is not None)) or [None]
        if self.adopted and target == [None]:
            raise RestoreFailed(
                "its journal names no captured state",
                sandbox=self.id,
                hint=PLAYED_AGAIN,
            )
        for attempt in itertools.count(1):
            try:
                return await self.sandbox.restore(target[0], verify=True), attempt
            except (Conflict, NotFound):  # never captured
                if self.adopted and not target[1:]:
                    raise RestoreFailed(
                        "the state that its journal names was never captured",
                        sandbox=self.id,
                        hint=PLAYED_AGAIN,
                    ) from None
                target = target[1:] or await self._captured_last(target[0])
            except (RestoreFailed, NotEqual) as error:
                if attempt >= MAX_RESTORES:
                    raise
                log.warning("restore attempt %d: %s", attempt, error)
        raise AssertionError("unreachable")

    async def stored(self) -> dict[str, CheckpointInfo]:
        """Its checkpoints that are on the disk. None when the sandbox is gone, or its host is."""
        try:
            return {info.id: info for info in await self.sandbox.tree() if info.state is CheckpointState.DURABLE}
        except PagurusError:
            return {}

    async def _captured_last(self, refused: str | None) -> list[str | None]:
        complete = (CheckpointState.CAPTURED, CheckpointState.DURABLE)
        existing = [info.id for info in await self.sandbox.tree() if info.state in complete and info.id != refused]
        if not existing:
            raise RestoreFailed(
                "none of its checkpoints was captured",
                sandbox=self.id,
                hint=PLAYED_AGAIN,
            )
        return [existing[-1]]

    async def _replay(self, checkpoint: str) -> int:
        self._trim(checkpoint)
        for entry in self._journal:
            result = await entry.act()
            if not isinstance(result, ExecResult) or entry.executed is None:
                continue
            _need_same(entry.executed.result, result, self.id)
            if result.checkpoint is not None:
                entry.checkpoint = result.checkpoint
                try:
                    entry.executed.info = await self.sandbox.captured(result)
                    self.head = result.checkpoint
                except CheckpointFailed as error:
                    entry.executed.uncaptured = str(error)
        return len(self._journal)


async def _nothing() -> None:
    """What an act is that needs no more than the gate."""


def _need_same(observed: ExecResult, now: ExecResult, sandbox: str) -> None:
    """What the agent has read must still be true after a repetition."""
    for name in ("exit_code", "timed_out", "stdout", "stderr"):
        before, after = getattr(observed, name), getattr(now, name)
        if before != after:
            raise ReplayDivergence(f"executed again, a command had another {name}: {after!r:.80}, not {before!r:.80}")


class _Elsewhere:
    """Within a phase: time that is not its own. Remembers where an error came from."""

    def __init__(self, guarded: GuardedSandbox, phase: EpisodePhase):
        self._guarded, self._phase = guarded, phase
        self._clock = guarded.clock.stopped() if guarded.clock is not None else contextlib.nullcontext()
        meter = guarded._meter
        self._meter = meter.phase(phase, guarded.phase) if meter is not None else contextlib.nullcontext()

    def __enter__(self) -> None:
        self._clock.__enter__()
        self._meter.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._meter.__exit__(kind, error, trace)
        self._clock.__exit__(kind, error, trace)
        if isinstance(error, PagurusError) and self._guarded.failed_in is None:
            self._guarded.failed_in = self._phase


class GuardedFiles:
    """`sandbox.tree.files` with the same promise."""

    def __init__(self, guarded: GuardedSandbox):
        self._guarded = guarded

    async def read(self, path: str) -> bytes:
        content: bytes = await self._guarded._run(lambda: self._guarded.sandbox.files.read(path))
        return content

    async def write(self, path: str, data: bytes | str, **options: Any) -> None:
        def act() -> Awaitable[None]:
            return self._guarded.sandbox.files.write(path, data, **options)

        await self._guarded._run(act)
        self._guarded._journal.append(GuardEntry(act))
