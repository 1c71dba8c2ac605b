"""The checkpoints of one sandbox on their way: begun, captured, stored, failed.

Guarantee: what waits for a checkpoint hears of its end, whatever that is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Protocol

from daemon import metrics
from daemon.catalogue import CheckpointRow, SandboxRow, put_checkpoint, put_sandbox
from daemon.checkpoints.capture import NeedsDump, failure
from daemon.checkpoints.inflight import InFlight, Services
from daemon.checkpoints.lifecycle import CheckpointEvent, after
from daemon.checkpoints.persist import store
from daemon.checkpoints.schedule import MIN_DUMP_SECONDS, CheckpointStage, expected
from daemon.turns import excluded
from daemon.verdict.ignore import checked
from sandbox.container.unstoppable import Unstoppable, need_stoppable
from sandbox.errors import CheckpointFailed, PagurusError
from sandbox.messages import CheckpointState, Verdict

if TYPE_CHECKING:
    from sandbox.container.container import Container

log = logging.getLogger("pagurus.turns")

THINK_WEIGHT = 0.3  # of the newest think time in the running mean


class CapturableSandbox(Protocol):
    """The sandbox whose checkpoints these are."""

    row: SandboxRow
    services: Services
    active: int  # commands and writes under way

    @property
    def container(self) -> Container: ...


class Captures:
    """See the module."""

    def __init__(self, of: CapturableSandbox) -> None:
        self._of = of
        self.inflight: InFlight | None = None
        self._failed: PagurusError | None = None  # why the last checkpoint failed, until an answer has said it
        self._leaving = False
        self._think = 1.0  # seconds that the model took lately

    async def finalized(self) -> None:
        """Wait until the last turn is captured, or durable where the sandbox asks for it (I2)."""
        while (inflight := self.inflight) is not None:
            await inflight.finalized(durable=self._of.row.durable_answers)

    def thought(self, seconds: float) -> None:
        """The model took so long: by then the next checkpoint should be captured."""
        self._think += THINK_WEIGHT * (min(seconds, 60.0) - self._think)

    def reported_failure(self) -> str | None:
        """Why the last checkpoint failed, to be reported once."""
        failed, self._failed = self._failed, None
        return str(failed) if failed else None

    async def same_content(self, label: str | None) -> InFlight:
        """A new id for the content that its head has."""
        head = self._of.services.checkpoints[self._of.row.head]
        row = self._of.services.new_checkpoint(self._of.row, Verdict.NONE, label)
        row.files, row.dump, row.ipc, row.held = head.files, head.dump, head.ipc, head.held
        self._note_state(row)
        row.files_bytes, row.dump_bytes = head.files_bytes, head.dump_bytes
        row.full_bytes = row.files_bytes + row.dump_bytes
        row.started_at = row.captured_at = time.time()
        row.state = after(row.state, CheckpointEvent.CAPTURE)
        self._of.services.checkpoints[row.id] = row
        self._of.row.head = row.id
        await self._of.services.catalogue.write([put_checkpoint(row), put_sandbox(self._of.row)])
        inflight = self._of.services.captured(row, head)
        self._of.services.spawn(self.store(inflight), f"store {row.id}")
        return inflight

    def _note_state(self, row: CheckpointRow) -> None:
        """What the host knows of the state that this checkpoint will hold."""
        row.programs = excluded.retained(self._of.row.programs)
        if self._of.row.docker:
            row.composition = self._of.row.composition

    def begin(self, verdict: Verdict, *, label: str | None = None, ipc: bool = False, hold: bool = False) -> InFlight:
        """Begin the checkpoint of a turn. From here on the gate is closed until it is captured."""
        row = self._of.services.new_checkpoint(self._of.row, verdict, label)
        row.ipc = ipc
        return self.resume(row, hold=hold)

    def resume(self, row: CheckpointRow, *, hold: bool = False) -> InFlight:
        """Take the checkpoint that `row` describes: begun now, or by a daemon that died."""
        self._note_state(row)
        inflight = InFlight(row, self._of.services.checkpoints[self._of.row.head])
        inflight.hold = inflight.moving = hold
        self._of.services.checkpoints[row.id] = row
        self._of.services.inflights[row.id] = inflight
        self.inflight = inflight
        inflight.task = self._of.services.spawn(self._fly(inflight), f"checkpoint {row.id}")
        return inflight

    def leave(self) -> None:
        """The sandbox is about to be removed: a checkpoint that has not begun need not begin."""
        inflight = self.inflight
        if inflight is None or inflight.task is None or inflight.captured.done():
            return
        if inflight.ticket is None or inflight.ticket.started is None:
            self._leaving = True
            inflight.task.cancel()

    async def _fly(self, inflight: InFlight) -> None:
        row = inflight.row
        try:
            await self._capture(inflight)
        except asyncio.CancelledError:
            if self._leaving:
                why = CheckpointFailed("the sandbox was removed before its state was captured", sandbox=self._of.row.id)
                await self._fail(inflight, why)
            raise
        except Exception as error:  # noqa: BLE001 - also a bug: the turn stays pending, and no caller waits for ever
            await self._fail(inflight, error)
            return
        finally:
            if not inflight.captured.done():
                inflight.captured.set_result(None)
            if self.inflight is inflight and not self._of.row.durable_answers:
                self.inflight = None
            if row.state is CheckpointState.PENDING:  # cancelled with the daemon, or a bug: never wait for ever
                self._land(inflight)
        await self.store(inflight)

    async def _capture(self, inflight: InFlight) -> None:
        row, services = inflight.row, self._of.services
        stage = CheckpointStage.DUMP if row.verdict.processes else CheckpointStage.SNAPSHOT
        while True:
            if stage is CheckpointStage.DUMP:
                services.need_capacity(self._of.row)
                inflight.expected_bytes = max(inflight.parent.dump_bytes, self._of.container.cgroup.anonymous())
                await services.need_memory(inflight)
            await need_stoppable(self._of.container)  # before there is a slot to hold
            inflight.ticket = services.queue.submit(
                stage,
                sandbox=self._of.row.id,
                owner=self._of.row.owner,
                deadline=services.queue.now() + self._think,
                waited=inflight.waited,
                expected=self._expected(inflight) if stage is CheckpointStage.DUMP else MIN_DUMP_SECONDS,
            )
            try:
                async with inflight.ticket:
                    await services.capturer.take(
                        self._of.container,
                        self._of.row.tree or "",
                        row,
                        inflight.parent,
                        busy=self._of.active > 0,
                        rules=checked(self._of.row.ignore),
                        hold=inflight.hold,
                    )
                services.queue.succeeded(self._of.row.id)
                break
            except Unstoppable:
                services.queue.inject(self._of.row.id)
                raise
            except CheckpointFailed:
                services.queue.refuse(self._of.row.id)
                raise
            except NeedsDump as reason:
                log.info("%s: %s", row.id, reason, extra={"sandbox": self._of.row.id, "turn": row.turn})
                row.verdict, stage = Verdict.BOTH, CheckpointStage.DUMP
        row.state = after(row.state, CheckpointEvent.CAPTURE)
        before, self._of.row.head = self._of.row.head, row.id
        try:
            await services.catalogue.write([put_checkpoint(row), put_sandbox(self._of.row)])
        except PagurusError:
            self._of.row.head = before
            services.capturer.taint(
                self._of.container, "the catalogue refused a checkpoint", files=True, processes=True
            )
            raise
        services.tally.checkpoints[row.verdict.value] += 1
        metrics.captured(row)

    def _expected(self, inflight: InFlight) -> float:
        """Seconds for its dump on a host without other work: pages that were not written are only looked at."""
        container = self._of.container
        size = self._of.services.capturer.checkpointer.expected_bytes(container, inflight.expected_bytes)
        return expected(container.cgroup.tasks(), size)

    async def _fail(self, inflight: InFlight, error: Exception) -> None:
        row = inflight.row
        existing = failure(error)
        row.state = after(row.state, CheckpointEvent.FAIL)
        row.error = f"{existing.message} ({existing.hint})" if existing.hint else existing.message
        existing.sandbox, existing.turn = self._of.row.id, row.turn
        inflight.error = self._failed = existing
        self._of.services.tally.checkpoints_failed += 1
        bug = None if isinstance(error, PagurusError | OSError) else error
        where = {"sandbox": self._of.row.id, "turn": row.turn}
        log.warning("checkpoint %s failed: %s", row.id, existing, extra=where, exc_info=bug)
        self._land(inflight)
        self._of.services.catalogue.later([put_checkpoint(row)])
        await asyncio.to_thread(self._of.services.capturer.discard, row.id)

    async def store(self, inflight: InFlight) -> None:
        """From captured to durable."""
        try:
            await inflight.unneeded()
            await store(self._of.services, inflight, durable_answers=self._of.row.durable_answers)
        finally:
            if self._of.row.durable_answers and inflight.unstored is not None:
                self._failed = inflight.unstored
            self._land(inflight)

    def _land(self, inflight: InFlight) -> None:
        inflight.finish()
        self._of.services.inflights.pop(inflight.row.id, None)
        if self.inflight is inflight:
            self.inflight = None
