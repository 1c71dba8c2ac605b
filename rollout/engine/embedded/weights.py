"""Weights that the embedded engine fetches by itself: pulled while it generates, applied between two steps.

Guarantee: what is applied leads from exactly the weights that the engine has to exactly those of the version; where
that is not certain, all weights are written. The engine pauses for the writing alone.
"""

from __future__ import annotations

import asyncio
import time

from rollout.engine import protocol as wire
from rollout.engine.embedded.apply import StagedChanges, everything, prepare
from rollout.engine.embedded.core import Core
from rollout.weights.mirror import Mirror, Write
from rollout.weights.process import PullerProcess
from sandbox.errors import Invalid


class PulledWeights:
    """``await weights.pull(core, 7)``, then in the engine's thread ``weights.apply(core, 7, recompute=True)``."""

    def __init__(self, puller: PullerProcess):
        self._puller = puller
        self._mirror: str | None = None  # digest of the version that the mirror was brought to last
        self._writes: list[Write] | None = None  # they lead there from the core's weights; None: all must be written
        self._ready: tuple[int, StagedChanges] | None = None
        self._pulling = asyncio.Lock()

    async def first(self, version: int | None) -> int:
        """Before the engine loads the mirror: bring it to a version; which one it is."""
        pulled = await self._puller.first(version)
        self._mirror, self._writes = pulled.digest, []
        return pulled.version

    async def pull(self, core: Core, version: int | None) -> wire.PullTimings:
        """Fetch a version (None: the newest) and have it ready. The engine keeps generating."""
        async with self._pulling:
            began = time.monotonic()
            pulled = await self._puller.pull(version)
            goes_on = self._writes is not None and pulled.writes is not None and pulled.since == self._mirror
            self._ready = None
            self._writes = [*(self._writes or []), *(pulled.writes or [])] if goes_on else None
            self._mirror = pulled.digest
            self._ready = (pulled.version, await asyncio.to_thread(self._prepare, core))
            return wire.PullTimings(
                version=pulled.version,
                bytes=pulled.spent.bytes,
                seconds=time.monotonic() - began,
                fetch_s=pulled.spent.fetch_s,
                write_s=pulled.spent.write_s,
                check_s=pulled.spent.check_s,
                complete=self._writes is None,
            )

    def apply(self, core: Core, version: int, *, recompute: bool) -> float:
        """Between two steps, in the engine's thread: serve the version that is ready. Seconds that it took."""
        if self._pulling.locked():
            raise Invalid("another version is being pulled", hint="wait for it")
        if self._ready is None or self._ready[0] != version:
            has = "none is" if self._ready is None else f"version {self._ready[0]} is"
            raise Invalid(f"version {version} is not ready ({has})", hint="pull it first")
        began = time.monotonic()
        core.adopt(self._ready[1], version, recompute=recompute)
        self._writes, self._ready = [], None
        return time.monotonic() - began

    async def close(self) -> None:
        await self._puller.close()

    def _prepare(self, core: Core) -> StagedChanges:
        """The mirror does not change: nothing is pulled at that time."""
        parameters, mirror = core.weights, Mirror(self._puller.mirror)
        dtypes = mirror.dtypes()
        if core.facts.tied:
            dtypes.pop("lm_head.weight", None)
        if self._writes is None:
            tables = {name: table for name, table in mirror.tables().items() if name in dtypes}
            return everything(parameters, dtypes, tables)
        return prepare(parameters, dtypes, [write for write in self._writes if write.name in dtypes])
