"""Watches whose events are fetched call by call, as E2B's blocking client does.

Guarantee: each takes a place as every watch does; one that was not polled for a while is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import dataclass, field

from aiohttp import web

from daemon.turns import watches
from daemon.turns.turns import LiveSandbox
from sandbox.errors import NotFound
from sandbox.messages import FileEvent

UNASKED = 600.0  # seconds after which a watcher ends


@dataclass(eq=False)
class Watcher:
    live: LiveSandbox
    path: str
    recursive: bool
    owner: str
    events: asyncio.Queue[FileEvent] | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    requested: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def taken(self) -> list[FileEvent]:
        """What happened since the last call."""
        self.requested.set()
        result = []
        with contextlib.suppress(asyncio.QueueEmpty):
            while self.events is not None:
                result.append(self.events.get_nowait())
        return result

    async def run(self) -> None:
        """For as long as it is polled."""
        try:
            inside = self.live.root.opened
            with watches.place(self.owner):
                async with watches.events(inside, self.path, recursive=self.recursive) as self.events:
                    self.begun.set()
                    with contextlib.suppress(TimeoutError):
                        while True:
                            self.requested.clear()
                            async with asyncio.timeout(UNASKED):
                                await self.requested.wait()
        finally:
            self.begun.set()


class Watchers:
    """Those of all sandboxes."""

    def __init__(self) -> None:
        self._existing: dict[str, Watcher] = {}

    async def add(self, watcher: Watcher) -> str:
        """Its id, once it watches. Raises what kept it from that."""
        name = secrets.token_hex(8)
        watcher.task = asyncio.ensure_future(watcher.run())
        watcher.task.add_done_callback(lambda _: self._existing.pop(name, None))
        try:
            await watcher.begun.wait()
        except asyncio.CancelledError:
            watcher.task.cancel()
            raise
        if watcher.events is None:
            await watcher.task
        self._existing[name] = watcher
        return name

    def find(self, live: LiveSandbox, name: str) -> Watcher:
        result = self._existing.get(name)
        if result is None or result.live is not live:
            raise NotFound(f"watcher with id {name[:40]} not found", sandbox=live.row.id)
        return result

    async def remove(self, live: LiveSandbox, name: str) -> None:
        watcher = self.find(live, name)
        del self._existing[name]
        await _ended(watcher)

    async def close(self, app: web.Application) -> None:
        """The daemon stops."""
        for watcher in list(self._existing.values()):
            await _ended(watcher)


async def _ended(watcher: Watcher) -> None:
    if watcher.task is not None:
        watcher.task.cancel()
        await asyncio.wait({watcher.task})


WATCHERS: web.AppKey[Watchers] = web.AppKey("e2b watchers", Watchers)
