"""Load is balanced: sandboxes move from full hosts to emptier ones, and away from hosts that are to be emptied.

Guarantee: nothing moves by itself that is in use: a sandbox that gets a request before it is frozen
stays where it is. While a host is silent that may be lost, while sandboxes of a lost one are restored, and for a moment
after that, nothing begins to move.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from coordinator.copies import images
from coordinator.decide import balance, lease
from coordinator.decide.balance import MovableSandbox, Move
from coordinator.decide.place import HostView
from coordinator.decide.replicate import STORE
from coordinator.members import Members, SandboxPlace
from coordinator.moves import Moves
from sandbox.errors import PagurusError

log = logging.getLogger("pagurus.cluster")

POLL_INTERVAL = 0.5  # seconds between two looks
CALM = 5.0  # seconds after that: what came back has answers to give first
RETRY_DELAY = 20.0  # seconds for which one that did not move is not tried again


class Balance:
    """See the module."""

    def __init__(self, members: Members, moves: Moves) -> None:
        self.members = members
        self.moves = moves
        self._tasks: dict[Move, asyncio.Task[None]] = {}
        self._alive: dict[str, float] = {}  # since when each host answers
        self._calm_at = 0.0  # from then on no host was in doubt or lost for long enough
        self._failed: dict[str, float] = {}  # when a sandbox could not be moved

    async def run(self) -> None:
        """For as long as the coordinator lives."""
        try:
            while True:
                await asyncio.sleep(POLL_INTERVAL)
                await self._poll()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _poll(self) -> None:
        now, hosts = time.monotonic(), [self._observed(host) for host in self.members.views()]
        steady = self._steady(hosts, now)
        leases = [member.lease for member in self.members.hosts.values()]
        if self.members.withheld or any(lease.doubted(item, now) and not lease.over(item, now) for item in leases):
            self._calm_at = now + CALM
        if now < self._calm_at:
            return
        under_way = list(self._tasks)
        givers = balance.givers(hosts, under_way, steady)
        if not givers:
            return
        self._failed = {id: when for id, when in self._failed.items() if when > now - RETRY_DELAY}
        residents = balance.offered(
            self._resident(id, existing)
            for id, existing in self.members.places.items()
            if existing.host in givers and self._may_move(id, existing, now)
        )
        begun = balance.decide(hosts, residents, under_way, steady)
        if begun:
            view = {"hosts": hosts, "residents": residents, "under_way": under_way, "steady": steady}
            await self.members.state.decided("balance", view, begun)
        for move in begun:
            self._tasks[move] = asyncio.create_task(self._move(move), name=f"move of {move.sandbox}")

    def _observed(self, host: HostView) -> HostView:
        """One that did not answer just now may be lost: nothing moves there until it does."""
        return replace(host, alive=host.alive and not self.members.member(host.name).error)

    def _steady(self, hosts: list[HostView], now: float) -> dict[str, float]:
        self._alive = {host.name: self._alive.get(host.name, now) for host in hosts if host.alive}
        return {name: now - since for name, since in self._alive.items()}

    def _may_move(self, id: str, existing: SandboxPlace, now: float) -> bool:
        row = existing.row
        still = row.state == "running" and not row.bound and row.idle_s is not None and not self.moves.in_use(id)
        finalized = now - existing.since >= balance.FINALIZED
        return still and finalized and id not in self.members.moving and id not in self._failed

    def _resident(self, id: str, existing: SandboxPlace) -> MovableSandbox:
        copies = self.members.state.copies.get(id, {}).values()
        return MovableSandbox(
            sandbox=id,
            host=existing.host,
            images=images(existing.row),
            idle=existing.row.idle_s or 0.0,
            labels=existing.row.labels,
            copies=frozenset(row.host for row in copies if row.host != STORE),
        )

    async def _move(self, move: Move) -> None:
        try:
            moved = await self.moves.move(move.sandbox, move.target, unasked=True)
            said = "%s moved from %s to %s, which is emptier: %.0f ms"
            log.info(said, move.sandbox, move.source, move.target, moved.pause_ms)
        except (PagurusError, KeyError) as error:  # used, removed or lost since, or a host refuses
            self._failed[move.sandbox] = time.monotonic()
            log.info("%s stays on %s: %s", move.sandbox, move.source, error)
        finally:
            del self._tasks[move]
