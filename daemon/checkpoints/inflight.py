"""Checkpoints on their way, and what all turn loops of a host share.

Guarantee: ``captured`` and ``durable`` of every flight end.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import logging
import secrets
import shutil
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from daemon.aside import Aside
from daemon.auth import budget
from daemon.catalogue import Catalogue, CheckpointRow, SandboxRow
from daemon.checkpoints.capture import Capturer
from daemon.checkpoints.queue import CheckpointQueue, QueuedCapture
from daemon.network.addresses import ServiceAddresses
from sandbox.errors import CheckpointFailed, NoSpace, PagurusError
from sandbox.messages import CheckpointState, Statistics, Verdict

if TYPE_CHECKING:
    from daemon.host.outcomes import Outcomes
    from ebpf.inspector import Inspector

log = logging.getLogger("pagurus.turns")

SUMMED = 5.0  # seconds after which sums over all checkpoints are made again: of removed ones they know only then
MAX_MOVE = 5.0  # seconds for which a checkpoint that moves is not stored
EXPOSED_RETAINED = 4096  # waits of commands that the statistics look back on


def _tally() -> Statistics:
    counted = {verdict.value: 0 for verdict in Verdict}
    return Statistics(verdicts=counted, checkpoints={name: 0 for name in counted if name != Verdict.NONE})


@dataclass
class Services:
    """What all turn loops of a host share."""

    catalogue: Catalogue
    queue: CheckpointQueue
    capturer: Capturer
    inspector: Inspector
    aside: Aside
    checkpoints: dict[str, CheckpointRow] = field(default_factory=dict)
    inflights: dict[str, InFlight] = field(default_factory=dict)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)  # work in the background that comes to an end
    _images: collections.Counter[str] = field(default_factory=collections.Counter)  # by sandbox, by owner, of all
    _summed: float = -SUMMED
    lasting: set[asyncio.Task[Any]] = field(default_factory=set)  # what runs for as long as the daemon does
    tally: Statistics = field(default_factory=_tally)  # counts since the daemon started
    exposed: collections.deque[float] = field(default_factory=lambda: collections.deque(maxlen=EXPOSED_RETAINED))  # ms
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    outcomes: Outcomes = field(init=False)  # what follows when one is durable, lost or damaged; the host sets it
    addresses: ServiceAddresses = field(default_factory=ServiceAddresses)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str, *, lasting: bool = False) -> asyncio.Task[Any]:
        """Run `work` in the background; a bug in it is logged, not lost. No caller waits for the end of `lasting`
        work."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        (self.lasting if lasting else self.tasks).add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        self.lasting.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", task.get_name(), exc_info=error)

    def new_checkpoint(self, sandbox: SandboxRow, verdict: Verdict, label: str | None = None) -> CheckpointRow:
        """A row for a checkpoint that does not exist yet; the caller publishes it."""
        return CheckpointRow(
            id=f"c-{secrets.token_hex(6)}",
            sandbox=sandbox.id,
            number=next(self.numbers),
            state=CheckpointState.PENDING,
            verdict=verdict,
            parent=sandbox.head,
            label=label,
            turn=sandbox.turn,
            created_at=time.time(),
            owner=sandbox.owner,
            composition=sandbox.composition if sandbox.docker else msgspec.UNSET,
        )

    def captured(self, row: CheckpointRow, parent: CheckpointRow) -> InFlight:
        """One that is captured, and now on its way to durable."""
        inflight = self.inflights[row.id] = InFlight(row, parent)
        inflight.captured.set_result(None)
        return inflight

    def need_capacity(self, sandbox: SandboxRow) -> None:
        """Raise NoSpace when checkpoints of this sandbox, or of its owner, hold as much memory as they may."""
        now = time.monotonic()
        if now - self._summed < SUMMED and not self._overfull(sandbox):
            return
        self._images.clear()
        for row in self.checkpoints.values():
            self.count_images(row)
        self._summed = now
        if why := self._overfull(sandbox):
            raise NoSpace(
                why,
                hint="remove checkpoints, keep fewer (retention), or raise Limits.checkpoints; the sandbox runs on",
                sandbox=sandbox.id,
                turn=sandbox.turn,
            )

    async def need_memory(self, coming: InFlight) -> None:
        """Return once the captures of this owner that are not stored yet leave memory for those of other owners."""
        capacity = shutil.disk_usage(self.capturer.places.dumps).total
        while True:
            mine = [item for item in self.inflights.values() if _sharer(item.row) == _sharer(coming.row)]
            held = {item: size for item in mine if item is not coming and (size := item.in_memory())}
            if not budget.crowds(sum(held.values()), coming.expected_bytes, capacity):
                return
            await asyncio.shield(next(iter(held)).durable)

    def count_images(self, row: CheckpointRow) -> None:
        """Add what the process images of `row` took of the disk to the sums of its sandbox and its owner."""
        if row.images_bytes:
            for name in {row.sandbox, f"owner {_sharer(row)}", ""}:
                self._images[name] += row.images_bytes

    def _overfull(self, sandbox: SandboxRow) -> str:
        mine, owners = self._images[sandbox.id], self._images[f"owner {sandbox.owner or sandbox.id}"]
        capacity = self._images[""] + shutil.disk_usage(self.capturer.places.stored).free
        return budget.overfull(sandbox.limits, mine, owners, capacity)


def _sharer(row: CheckpointRow) -> str:
    return row.owner or row.sandbox


class InFlight:
    """A checkpoint on its way, from the verdict to durable. ``captured`` and ``durable`` always end."""

    def __init__(self, row: CheckpointRow, parent: CheckpointRow) -> None:
        loop = asyncio.get_running_loop()
        self.row = row
        self.parent = parent
        self.expected_bytes = parent.dump_bytes  # of its process images
        self.captured: asyncio.Future[None] = loop.create_future()
        self.durable: asyncio.Future[None] = loop.create_future()
        self.ticket: QueuedCapture | None = None
        self.task: asyncio.Task[None] | None = None  # what moves it on
        self.hold = False  # the sandbox stays frozen when it is captured
        self.moving = False  # a host waits for the sandbox: what is not needed for that comes later
        self._requested = asyncio.Event()  # for it to be durable
        self.waited = False
        self.durable_waited = False
        self.error: PagurusError | None = None  # why it was not captured
        self.unstored: PagurusError | None = None  # why it is not durable
        self.before: InFlight | None = None  # the one that has to be durable first

    def in_memory(self) -> int:
        """Bytes that its process images take of the memory for captures, or will once they are there."""
        if self.ticket is None or not self.row.verdict.processes:
            return 0
        if not self.captured.done():
            return self.expected_bytes
        return self.row.dump_bytes if self.row.dump == self.row.id else 0

    def promote(self) -> None:
        """A caller waits for this checkpoint."""
        self.waited = True
        if self.ticket is not None:
            self.ticket.promote()

    async def finalized(self, *, durable: bool) -> None:
        """Wait until captured (or durable), or failed. The row says which."""
        if durable:
            self.expedite()
        else:
            self.promote()
        await asyncio.shield(self.durable if durable else self.captured)

    async def unneeded(self) -> None:
        """Until no move needs the processors and the disk more: until it is requested, or `MAX_MOVE` seconds."""
        if self.moving:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(MAX_MOVE):
                    await self._requested.wait()

    def expedite(self) -> None:
        """A caller waits until it is durable, and with it for all that have to be so before."""
        inflight: InFlight | None = self
        while inflight is not None and not inflight.durable_waited:
            inflight.durable_waited = True
            inflight._requested.set()
            inflight.promote()
            inflight = inflight.before

    def trouble(self, *, durable: bool) -> PagurusError | None:
        """Once finalized: why it was not captured, or is not durable."""
        if self.error is not None or not durable or self.row.state is CheckpointState.DURABLE:
            return self.error
        return self.unstored or CheckpointFailed(
            f"checkpoint {self.row.id} is captured, but not durable: the daemon was stopped before that",
            hint="its successor makes it durable; wait for that",
            sandbox=self.row.sandbox,
            turn=self.row.turn,
        )

    def finish(self) -> None:
        """Nothing more will happen to it."""
        for future in (self.captured, self.durable):
            if not future.done():
                future.set_result(None)
