"""Whether checkpoints can be restored: tried, not concluded.

::

    row of a fork ▸ tree, container ▸ restored, compared, frozen ▸ removed ▸ `proved_at` or `refuted`

Guarantee: no instruction of the checkpoint runs, and nothing of the sandbox that is made for it is left. One at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from daemon.catalogue import CheckpointRow, put_checkpoint
from daemon.checkpoints.schedule import CheckpointStage
from daemon.host.fence import HELD
from sandbox.errors import NotEqual, PagurusError, RestoreFailed
from sandbox.messages import CheckpointState

if TYPE_CHECKING:
    from daemon.host.host import Host

log = logging.getLogger("pagurus.prove")

BUSY_LOAD = 0.5  # load of the host for each of its processors, above which it has no time


class CheckpointProver:
    """Tries checkpoints of one host."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._one_at_a_time = asyncio.Lock()

    async def prove(self, row: CheckpointRow) -> str:
        """Why it cannot be restored as it was; "" when it can. Raises where that could not be tried."""
        async with self._one_at_a_time:
            self._host.fence.need_lease()
            origin = await self._host.restorable(row.id)
            with self._host.collector.pin(origin):
                try:
                    await self._restore(origin)
                except (NotEqual, RestoreFailed) as error:
                    await self._note(origin, error.message)
                    return error.message
                await self._note(origin, None)
                return ""

    async def _restore(self, origin: CheckpointRow) -> None:
        host = self._host
        row, checkpointer = host.forked(origin), host.services.capturer.checkpointer
        try:
            with host.making.admitted(row):
                async with contextlib.AsyncExitStack() as undo:
                    container = await host.restorer.capacity(row, host.restorer.tree_below(row), origin.files, undo)
                    undo.push_async_callback(checkpointer.forget, container)
                    # By the mark a lease that begins again lets it not go.
                    held = (host.run_dir / row.id / HELD).touch
                    if differences := await host.restorer.bring_back(container, origin, verify=True, hold=held):
                        raise NotEqual(
                            "; ".join(differences[:3]), hint="restore another checkpoint, and report this one"
                        )
        finally:
            host.give_up(row)

    async def _note(self, row: CheckpointRow, refuted: str | None) -> None:
        if row.id not in self._host.services.checkpoints:
            return
        row.refuted, row.proved_at = refuted, None if refuted else time.time()
        if refuted:
            log.error("checkpoint %s cannot be restored: %s", row.id, refuted)
        await self._host.services.catalogue.write([put_checkpoint(row)])

    # ----------------------------------------------------------------- in the background

    async def keep_proving(self, interval: float) -> None:
        """Try one after another while the host has time, `interval` seconds apart. Ends when it is cancelled."""
        while True:
            await asyncio.sleep(interval)
            if (row := untried(self._host.services.checkpoints.values())) is None or not self._has_time():
                continue
            try:
                await self.prove(row)
            except (PagurusError, OSError) as error:  # no room, no lease, removed since: later
                log.info("checkpoint %s could not be tried: %s", row.id, error)

    def _has_time(self) -> bool:
        queue = self._host.services.queue
        waits = queue.queued(*CheckpointStage) + queue.running(*CheckpointStage)
        return not waits and os.getloadavg()[0] < BUSY_LOAD * (os.cpu_count() or 1)


def untried(rows: Iterable[CheckpointRow]) -> CheckpointRow | None:
    """The newest checkpoint with processes of its own that was never tried, of the sandbox that was tried least."""
    tried: dict[str, int] = {}
    open_ones: list[CheckpointRow] = []
    for row in rows:
        if row.proved_at is not None or row.refuted is not None:
            tried[row.sandbox] = tried.get(row.sandbox, 0) + 1
        elif row.state is CheckpointState.DURABLE and row.dump == row.id and not row.damaged:
            open_ones.append(row)
    return max(open_ones, key=lambda row: (-tried.get(row.sandbox, 0), row.number), default=None)
