"""The sandboxes of a lost host continue elsewhere.

::

    a host is silent ▸ others bring its sandboxes back, frozen ─┬▶ its lease is over ▸ written down ▸ they run there
                                                                └▶ it reports again ▸ they go

Guarantee: of one sandbox, one host acts. A lost host's lease is over before another one acts for it, and where a
sandbox belongs is written down before it runs there. A host that returns has no lease until what continued elsewhere
has been removed from it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from coordinator.copies import Copies, images
from coordinator.decide import failover, lease
from coordinator.decide.failover import CheckpointCopy, LostSandbox, Revive
from coordinator.decide.replicate import STORE
from coordinator.members import HostMember, Members, SandboxPlace
from coordinator.state import CopyRow
from sandbox.errors import ConnectionBroken, NoDaemon, PagurusError, Timeout
from sandbox.messages import SandboxInfo
from sandbox.messages.cluster import ArriveRequest, HostedSandbox
from sandbox.sdk.transport import part

if TYPE_CHECKING:
    from coordinator.moves import Moves

log = logging.getLogger("pagurus.cluster")

POLL_INTERVAL = 0.05  # seconds between two looks at the leases
UNKNOWN = (ConnectionBroken, NoDaemon, Timeout)  # after these a host may have done what was requested, or may do it yet
TIMEOUT = 120.0  # seconds for a sandbox to be restored
RETRY_DELAY = 0.5  # seconds before one that was not restored is tried again
SPARED = 60.0  # seconds for which nothing is prepared again for a host that was silent and reported again
AT_ONCE = 2  # sandboxes restored at a host at a time, or as many as it has processors


def arrival(row: HostedSandbox) -> ArriveRequest:
    """The sandbox as itself."""
    return ArriveRequest(id=row.id, name=row.name, owner=row.owner, created_at=row.created_at)


async def arrive(
    members: Members, row: HostedSandbox, checkpoint: str, host: str, target: ArriveRequest, *, moved: bool
) -> None:
    """Let a sandbox run at a host that holds this state of it, and know that it is there."""
    path = f"/v1/checkpoints/{part(checkpoint)}/arrive"
    info = await members.member(host).upstream.call("POST", path, SandboxInfo, target, timeout=TIMEOUT)
    there = msgspec.structs.replace(row, head=info.head or "", turn=info.turn, durable="", durable_turn=0, idle_s=None)
    members.places[row.id] = SandboxPlace(host, there, time.monotonic(), moved, checkpoint, info.turn)
    members.remember(checkpoint, host)
    log.info("continues at %s from %s", host, checkpoint, extra={"sandbox": row.id})


@dataclass(frozen=True)
class FailoverPreparation:
    """What waits for a sandbox elsewhere, once the task has ended."""

    target: Revive
    task: asyncio.Task[None]


class Failover:
    """See the module."""

    def __init__(self, members: Members, copies: Copies, moves: Moves, *, verify: bool = False) -> None:
        """`verify`: a restored sandbox is compared before it runs."""
        self.members = members
        self.copies = copies
        self._moves = moves
        self._verify = verify
        self._capacity: dict[str, asyncio.Semaphore] = {}  # at each host
        self._under_way: dict[str, str] = {}  # sandboxes that are being restored, and where they were
        self._prepared: dict[str, FailoverPreparation] = {}
        self._spared: dict[str, float] = {}  # hosts, and until when nothing is prepared for them

    async def run(self) -> None:
        """For as long as the coordinator lives. One that takes long, or fails, keeps no other one waiting."""
        existing: set[str] = set()
        async with asyncio.TaskGroup() as coming:
            while True:
                await asyncio.sleep(POLL_INTERVAL)
                now = time.monotonic()
                over = {name for name, member in self.members.hosts.items() if lease.over(member.lease, now)}
                doubted = {name for name, member in self.members.hosts.items() if lease.doubted(member.lease, now)}
                revived = self._decided(over) if over else []
                if revived:
                    hosts = ", ".join(sorted({item.source for item in revived}))
                    log.warning("hosts are lost: %s; %d sandboxes continue elsewhere", hosts, len(revived))
                self._under_way |= {item.sandbox: item.source for item in revived}
                self.members.withheld = set(self._under_way.values())
                for host in over - existing:  # also one without sandboxes: copies may be on their way there
                    member = self.members.hosts[host]
                    coming.create_task(member.upstream.drop(), name=f"end of what {host} was asked")
                existing = over
                for item in revived:
                    coming.create_task(self._come(item), name=f"return of {item.sandbox}")
                waited = {name for name in doubted - over if self._spared.get(name, 0.0) < now}
                for item in self._decided(waited) if waited else []:
                    if not item.stored and item.sandbox not in self._prepared:
                        task = coming.create_task(self._prepare(item), name=f"what waits for {item.sandbox}")
                        self._prepared[item.sandbox] = FailoverPreparation(item, task)
                for prepared in [*self._prepared.values()]:
                    target = prepared.target
                    if target.source not in doubted | over or target.sandbox not in self.members.places:
                        del self._prepared[target.sandbox]
                        if target.source not in doubted | over:
                            self._spared[target.source] = now + SPARED
                        coming.create_task(self._drop(prepared), name=f"end of what waits for {target.sandbox}")

    async def _prepare(self, required: Revive) -> None:
        """Restore all of it and keep it frozen, while its host may act yet."""
        if (existing := self.members.places.get(required.sandbox)) is None:
            return  # it was removed
        request = arrival(existing.row)
        request.ahead, request.newer, request.verify = True, False, self._verify
        path = f"/v1/checkpoints/{part(required.checkpoint)}/arrive"
        try:
            target = self.members.member(required.target)
            with self.members.coming(target):
                async with self._rooms(target):
                    await target.upstream.call("POST", path, SandboxInfo, request, timeout=TIMEOUT)
        except PagurusError as error:
            log.info("nothing waits for %s on %s: %s", required.sandbox, required.target, error)

    async def _drop(self, prepared: FailoverPreparation) -> None:
        await asyncio.wait([prepared.task])
        try:
            target = self.members.member(prepared.target.target)
            path = f"/v1/arrivals/{prepared.target.sandbox}"
            await target.upstream.call("DELETE", path, msgspec.Raw, timeout=TIMEOUT)
        except PagurusError as error:  # it goes by itself
            log.info("what waits for %s goes later: %s", prepared.target.sandbox, error)

    def _rooms(self, member: HostMember) -> asyncio.Semaphore:
        """For those that are restored there at a time."""
        limit = AT_ONCE if member.report is None else max(AT_ONCE, member.report.cpus)
        return self._capacity.setdefault(member.name, asyncio.Semaphore(limit))

    async def _come(self, target: Revive) -> None:
        try:
            if (prepared := self._prepared.pop(target.sandbox, None)) is not None:
                if prepared.target.target == target.target:
                    await asyncio.wait([prepared.task])
                else:
                    await self._drop(prepared)
            with self.members.coming(self.members.member(target.target)):
                if not await self._revive(target):
                    await asyncio.sleep(RETRY_DELAY)
        except PagurusError as error:  # the host was removed from the cluster, or the disk is full: looked at again
            log.warning("%s: %s", target.sandbox, error)
            await asyncio.sleep(RETRY_DELAY)
        finally:
            del self._under_way[target.sandbox]
            self.members.withheld = set(self._under_way.values())

    def _decided(self, over: set[str]) -> list[Revive]:
        """For the sandboxes of these hosts, of which none is to act any more."""
        state = self.members.state
        lost = [
            LostSandbox(
                id,
                existing.host,
                held,
                state.homes.get(id, ""),
                images(existing.row),
                self._waited(id),
                self._waits_at(id),
            )
            for id, rows in state.copies.items()
            if id not in self.members.moving  # these are completed first
            and id not in self._under_way
            and (existing := self.members.places.get(id)) is not None
            and existing.host in over
            and (
                held := [
                    CheckpointCopy(row.checkpoint, row.host, row.number) for row in rows.values() if self._counts(row)
                ]
            )
        ]
        views = [replace(view, alive=view.alive and view.name not in over) for view in self.members.views()]
        return failover.decide(lost, views, over)

    def _waits_at(self, sandbox: str) -> str:
        """Where its return was prepared."""
        prepared = self._prepared.get(sandbox)
        return "" if prepared is None else prepared.target.target

    def _waited(self, sandbox: str) -> bool:
        return self._moves.in_use(sandbox) or self.copies.is_waited(sandbox)

    def _counts(self, row: CopyRow) -> bool:
        """Whether a sandbox may continue from it. For a host that was removed from the cluster no call waits."""
        return not row.old and (row.host == STORE or row.host in self.members.hosts)

    async def _revive(self, target: Revive) -> bool:
        """Whether it runs there now."""
        async with self._rooms(self.members.member(target.target)):
            if (existing := self.members.places.get(target.sandbox)) is None:
                return False  # it was removed, or its host came back without it
            await self.members.state.decided("failover", {"from": target.source}, target)
            self.members.moving.add(target.sandbox)
            begun = self.members.state.homes.get(target.sandbox) == target.target  # and its end is unknown
            try:
                if target.stored:
                    await self.copies.fetch(target.sandbox, target.checkpoint, target.target)
                await self._arrive(target.sandbox, existing.row, target.checkpoint, target.target)
                return True
            except UNKNOWN as error:  # it may run there: requested again, the same
                log.error("%s: whether it is back on %s is unknown: %s", target.sandbox, target.target, error)
            except PagurusError as error:  # looked at again; until then it belongs where it was
                log.error("%s is not restored on %s: %s", target.sandbox, target.target, error)
                if not begun:
                    await self.members.state.put_home(target.sandbox, target.source)
            finally:
                self.members.moving.discard(target.sandbox)
            return False

    async def _arrive(self, sandbox: str, row: HostedSandbox, checkpoint: str, host: str) -> None:
        """It belongs there from now on, and runs."""
        await self.members.state.put_home(sandbox, host)
        target = arrival(row)
        target.verify = self._verify
        for copy in self.members.state.copies.get(sandbox, {}).values():
            if copy.checkpoint == checkpoint:
                target.programs, target.conversation = copy.programs, copy.conversation
        await arrive(self.members, row, checkpoint, host, target, moved=False)
        await self.members.state.went_on(sandbox, host, checkpoint)
