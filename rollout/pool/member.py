"""One engine server of a pool: no matter who started it, how it is, what it has to do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rollout.decide.engines.routing import ServerView, Signs, State, Taking
from rollout.engine.client import EngineClient, PublishResult, wait_healthy
from rollout.engine.weights import AdapterWeights
from sandbox.errors import PagurusError

Note = Callable[[str, State, int, int], None]  # name, state, load, slots, whenever one of them has changed

POLL_INTERVAL = 0.25  # seconds
AT_ONCE = 16  # requests that leave a lost server in one turn of the event loop


class ServerHandle(Protocol):
    """An engine server: an `EngineSupervisor`, or a `Remote`."""

    @property
    def slots(self) -> int:
        """Requests at once."""

    async def wait_serving(self) -> EngineClient: ...

    async def fetch(self, version: int) -> None:
        """Have a version there before it is published; requests continue."""

    async def publish(self, weights: Path | str, version: int) -> PublishResult: ...

    def kill(self) -> None:
        """It hangs: end it, so that its supervisor starts it again."""


class Remote:
    """A server at an address, started and restarted by others. It pulls its weights (--weights), or reloads
    the mirror that is kept for it here, in a directory that it sees too."""

    def __init__(self, url: str, *, slots: int = 64, mirror: AdapterWeights | None = None):
        self.slots: int = slots
        self._mirror = mirror
        self._client = EngineClient(url)

    async def wait_serving(self) -> EngineClient:
        await wait_healthy(self._client)
        return self._client

    async def fetch(self, version: int) -> None:
        if self._mirror is not None:
            await self._mirror.fetch(self._client, version)
        else:
            await self._client.pull(version)

    async def publish(self, weights: Path | str, version: int) -> PublishResult:
        if self._mirror is not None:
            return await self._mirror.take(self._client, version)
        return await self._client.take(version)

    def kill(self) -> None:
        """Nothing: it is not ours to end. It is used again when it answers its health route."""

    async def close(self) -> None:
        await self._client.close()
        if self._mirror is not None:
            await self._mirror.close()


class ColocatedEngine(Remote):
    """An engine that serves users (rollout.engine.launch.colocated), for ``Pool.join(..., colocated=True)``: its slots
    are what
    users leave room for."""

    def __init__(self, url: str, *, mirror: AdapterWeights | None = None):
        super().__init__(url, slots=0, mirror=mirror)
        self._polls: asyncio.Task[None] | None = None

    async def wait_serving(self) -> EngineClient:
        client = await super().wait_serving()
        await self._poll()
        if self._polls is None:
            self._polls = asyncio.create_task(self._go_on_looking(), name="room on a co-located engine")
        return client

    async def close(self) -> None:
        if self._polls is not None:
            self._polls.cancel()
        await super().close()

    async def _go_on_looking(self) -> None:
        while True:
            await asyncio.sleep(POLL_INTERVAL)
            await self._poll()

    async def _poll(self) -> None:
        try:
            self.slots = (await self._client.statistics()).colocates
        except PagurusError:  # it is down, or too busy to say: nothing is known to be free
            self.slots = 0


@dataclass(eq=False)
class PoolMember:
    """A server in a pool."""

    name: str
    server: ServerHandle
    hardware: str = ""  # servers of one name are alike
    colocated: bool = False  # it serves users; `server.slots` is what they leave room for now
    version: int = -1
    state: State = "starting"
    client: EngineClient | None = None
    load: int = 0
    tokens: int = 0
    readers: int = 0  # requests that have not got a token yet
    reading: int = 0  # tokens of their prompts that it did not hold
    last_seen: float = 0.0  # a token
    probed: float | None = None  # since when a probe waits for its answer
    updating_since: float | None = None
    updates: int = 0  # that were begun
    restarts: int = 0
    waits: dict[asyncio.Timeout, float] = field(default_factory=dict)  # for a token, since when
    asleep: asyncio.Task[None] | None = None  # done when it rests
    note: Note | None = None

    def __setattr__(self, name: str, value: object) -> None:
        """Whatever changes its state or its load is noted."""
        before = self.__dict__.get(name)
        super().__setattr__(name, value)
        if name in ("state", "load") and value != before and (note := self.__dict__.get("note")) is not None:
            note(self.name, self.state, self.load, self.server.slots)

    @property
    def view(self) -> ServerView:
        return ServerView(
            self.name,
            self.state,
            self.server.slots,
            self.load,
            self.tokens,
            self.hardware,
            self.readers,
            self.reading,
            self.colocated,
        )

    @property
    def taking(self) -> Taking:
        return Taking(self.name, self.state, self.version)

    def signs(self) -> list[Signs]:
        """Its requests, and its probe, each a sign of its own: a server may answer one and not the other."""
        oldest = min(self.waits.values(), default=None)
        return [
            Signs(
                name=self.name,
                state=self.state,
                requested_since=oldest,
                last_seen=self.last_seen,
                updating_since=self.updating_since,
                colocated=self.colocated,
            ),
            Signs(name=self.name, state=self.state, requested_since=self.probed, updating_since=self.updating_since),
        ]

    def give_up(self) -> None:
        """Requests that wait for its tokens go elsewhere."""
        self.state = "down"
        self._let_go(list(self.waits))

    def _let_go(self, limits: list[asyncio.Timeout]) -> None:
        """Some in each turn of the event loop: each has a new server to find, and others wait for the loop."""
        loop = asyncio.get_running_loop()
        for limit in limits[:AT_ONCE]:
            if limit in self.waits and not limit.expired():
                limit.reschedule(loop.time())
        if limits[AT_ONCE:]:
            loop.call_soon(self._let_go, limits[AT_ONCE:])

    async def probe(self) -> None:
        """One question that a server answers at once when it is well."""
        client = self.client
        if client is None or self.probed is not None:
            return
        self.probed = time.monotonic()
        try:
            if not await client.healthy() and self.client is client and self.state == "serving":
                self.give_up()
        finally:
            self.probed = None
