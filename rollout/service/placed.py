"""An engine server of a run on a machine of its own, as the rollout's pool sees it: a process there keeps it.

Guarantee: the server is found wherever it is started next. A peer without the run's key is not believed.

::

    rollout: Placed ─┬─ serving, fetch, change, end ─▶ keeper ─▶ EngineSupervisor ─▶ engine
                     ╰─ generate ───────────────────────────────────────────────────▶ ╯
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TypeVar

import msgspec

from rollout.engine import tls
from rollout.engine.client import EngineClient, PublishResult
from rollout.service import protocol as wire
from sandbox.errors import EngineFailed, Invalid, NotFound, PagurusError, Timeout
from sandbox.sdk.transport import Transport

T = TypeVar("T")
ADDRESS = "keeper.at"  # in the server's directory: the URL of its keeper
AGAIN = 0.5  # seconds between two looks for a keeper
log = logging.getLogger("pagurus.rollout.placed")


def name_of(number: int) -> str:
    return f"engine-{number}"


def directory_of(run: Path, number: int) -> Path:
    return run / "engines" / name_of(number)


class PlacedServer:
    """A server of a run, wherever its keeper is by now. For a `Pool`."""

    def __init__(self, run: Path, number: int, *, slots: int):
        self.slots: int = slots
        self._reported, self._tls = directory_of(run, number) / ADDRESS, tls.directory_of(run)
        self._keeper: Transport | None = None
        self._at = ""
        self._client: EngineClient | None = None
        self._ending: asyncio.Task[None] | None = None

    async def wait_serving(self) -> EngineClient:
        while True:
            try:
                served = await self._request(wire.Serving(), wire.ServedAddress)
                break
            except PagurusError as error:
                log.debug("%s: %s", self._reported.parent.name, error)
                await asyncio.sleep(AGAIN)
        if self._client is None or self._client.url != served.url:
            if self._client is not None:
                await self._client.close()
            self._client = EngineClient(served.url, tls=self._tls)
        return self._client

    async def fetch(self, version: int) -> None:
        await self._request(wire.Fetch(version=version), wire.Done)

    async def publish(self, weights: Path | str, version: int) -> PublishResult:
        return await self._request(wire.ServeVersion(directory=str(weights), version=version), PublishResult)

    def kill(self) -> None:
        self._ending = asyncio.get_running_loop().create_task(self._end(), name=f"end of {self._reported.parent.name}")

    async def _end(self) -> None:
        try:
            await self._request(wire.RestartEngine(), wire.Done)
        except PagurusError as error:
            log.warning("%s may hang still: %s", self._reported.parent.name, error)

    async def close(self) -> None:
        for item in (self._keeper, self._client):
            if item is not None:
                await item.close()

    async def _request(self, body: msgspec.Struct, answer: type[T]) -> T:
        """EngineFailed where nothing answers, or not the keeper."""
        try:
            keeper = await self._reached()
            return await keeper.call("POST", f"/{wire.method(type(body))}", answer, body)
        except (EngineFailed, Timeout, NotFound, Invalid):  # its own words
            raise
        except (OSError, PagurusError) as error:
            raise EngineFailed(
                f"{self._reported.parent.name} is out of reach: {error}",
                hint="see `pagurus roles RUN`, and the network between the machines",
            ) from None

    async def _reached(self) -> Transport:
        at = await asyncio.to_thread(self._reported.read_text)
        if self._keeper is None or at != self._at:
            if self._keeper is not None:
                await self._keeper.close()
            self._keeper, self._at = Transport(at, ca=tls.calling(self._tls), timeout=0.0), at
        return self._keeper
