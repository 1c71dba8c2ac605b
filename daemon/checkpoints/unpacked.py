"""Process images of stored checkpoints, unpacked once for all forks that read them soon.

Guarantee: what cannot be unpacked, or has no room, costs only that: each restore then unpacks for itself, and says what
is wrong.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from sandbox.content import dumpfile
from sandbox.criu import recent
from sandbox.errors import PagurusError

if TYPE_CHECKING:
    from daemon.catalogue import CheckpointRow
    from daemon.checkpoints.capture import Capturer

log = logging.getLogger("pagurus.capture")


class UnpackedImages:
    """Those of one host. They are kept among the recent images."""

    def __init__(self, capturer: Capturer) -> None:
        self._capturer = capturer
        self._making: dict[str, asyncio.Task[None]] = {}  # by dump

    async def provide(self, row: CheckpointRow) -> None:
        """Have the images of a checkpoint unpacked, if there is room. The caller pins the checkpoint."""
        dump = row.dump
        if dump is None or self._capturer.process_images(dump) != self._capturer.places.packed(dump):
            return
        if (task := self._making.get(dump)) is None:
            task = self._making[dump] = asyncio.ensure_future(self._make(dump))
            task.add_done_callback(lambda _: self._making.pop(dump, None))
        await asyncio.shield(task)

    async def _make(self, dump: str) -> None:
        capturer, retained = self._capturer, self._capturer.checkpointer.recent
        place, packed = retained.place(), capturer.places.packed(dump)
        try:
            if retained.fits(await asyncio.to_thread(dumpfile.unpacked_bytes, packed)):
                await asyncio.to_thread(dumpfile.unpack, packed, place, capturer.checkpointer.pages)
                await asyncio.to_thread(recent.remove, retained.keep(dump, place, busy=capturer.is_read))
        except (OSError, PagurusError) as error:
            log.info("the images of %s are unpacked by each restore: %s", dump, error)
            await asyncio.to_thread(recent.remove, [place])
