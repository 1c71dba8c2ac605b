"""Sandboxes go on elsewhere: those of a lost host, and those that are moved.

Owns: the order of these acts. Does not own: when a host is lost (:mod:`coordinator.decide.lease`), which copy is used
(:mod:`coordinator.decide.failover`), how a sandbox comes back (:mod:`daemon.host.arrive`).

Guarantee: of one sandbox, one host acts. A lost host's lease is over before another one acts for it, and where a
sandbox belongs is written down before it runs there. A host that comes back has no lease until what went on elsewhere
has been removed from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence

import msgspec

from coordinator.copies import Copies
from coordinator.decide import failover, lease, replicate
from coordinator.decide.failover import Lost, Revive
from coordinator.decide.replicate import Copy
from coordinator.members import Members, Place
from sandbox.errors import Conflict, ConnectionBroken, NoDaemon, NotFound, PagurusError, Timeout
from sandbox.messages import CheckpointInfo, CheckpointRequest, SandboxInfo, TurnInfo
from sandbox.messages.cluster import ArriveRequest, HostedSandbox, Moved
from sandbox.sdk.transport import part

log = logging.getLogger("pagurus.cluster")

LOOK = 0.1  # seconds between two looks at the leases
UNKNOWN = (ConnectionBroken, NoDaemon, Timeout)  # after these a host may have done what it was asked, or may do it yet
PATIENCE = 120.0  # seconds for a sandbox to come back
TURNS_MOST = 256 << 10  # bytes of the record of turns that moves
AT_ONCE = 4  # sandboxes that come back at a time


class Failover:
    """See the module."""

    def __init__(self, members: Members, copies: Copies) -> None:
        self.members = members
        self.copies = copies
        self._room = asyncio.Semaphore(AT_ONCE)
        self._moving: dict[str, asyncio.Event] = {}

    async def run(self) -> None:
        """For as long as the coordinator lives."""
        while True:
            await asyncio.sleep(LOOK)
            revived = self._decided()
            if revived:
                hosts = {each.source for each in revived}
                log.warning("hosts are lost: %s; %d sandboxes go on elsewhere", ", ".join(hosts), len(revived))
                self.members.withheld |= hosts
                for host in hosts:
                    await self.members.member(host).upstream.drop()
                try:
                    await asyncio.gather(*(self._revive(each) for each in revived))
                finally:
                    self.members.withheld -= hosts

    def _decided(self) -> list[Revive]:
        now = time.monotonic()
        over = {name for name, member in self.members.hosts.items() if lease.over(member.lease, now)}
        if not over:
            return []
        rows = self.members.state.copies.items()
        lost = [
            Lost(id, known.host, row.checkpoint, row.host)
            for id, row in rows
            if (known := self.members.places.get(id)) is not None and known.host in over
        ]
        return failover.decide(lost, {member.name for member in self.members.living()}, over)

    async def _revive(self, wanted: Revive) -> None:
        async with self._room:
            known = self.members.places[wanted.sandbox]
            await self.members.state.decided("failover", {"from": wanted.source}, wanted)
            self.members.moving.add(wanted.sandbox)
            try:
                await self._arrive(wanted.sandbox, known.row, wanted.checkpoint, wanted.target)
            except UNKNOWN as error:  # it may run there: asked again, for the same
                log.error("%s: whether it is back on %s is unknown: %s", wanted.sandbox, wanted.target, error)
            except PagurusError as error:  # looked at again; until then it belongs where it was
                log.error("%s does not come back on %s: %s", wanted.sandbox, wanted.target, error)
                await self.members.state.put_home(wanted.sandbox, wanted.source)
            finally:
                self.members.moving.discard(wanted.sandbox)

    async def _arrive(
        self,
        sandbox: str,
        row: HostedSandbox,
        checkpoint: str,
        host: str,
        *,
        verify: bool = True,
        turns: Sequence[TurnInfo] = (),
    ) -> None:
        """It belongs there from now on, and runs."""
        member = self.members.member(host)
        await self.members.state.put_home(sandbox, host)
        copy = self.members.state.copies.get(sandbox)
        wanted = ArriveRequest(id=sandbox, name=row.name, owner=row.owner, created_at=row.created_at)
        wanted.verify, wanted.turns = verify, list(turns)
        wanted.programs = {} if copy is None else copy.programs
        path = f"/v1/checkpoints/{part(checkpoint)}/arrive"
        info = await member.upstream.call("POST", path, SandboxInfo, wanted, timeout=PATIENCE)
        moved = msgspec.structs.replace(row, head=info.head or "", turn=info.turn, durable="")
        self.members.places[sandbox] = Place(host, moved, time.monotonic())
        self.members.remember(checkpoint, host)
        await self.members.state.drop_copy(sandbox)  # it is the sandbox's own by now
        log.info("goes on at %s from %s", host, checkpoint, extra={"sandbox": sandbox})

    # ----------------------------------------------------------------- moving

    async def free(self, sandbox: str) -> None:
        """Until it is not being moved."""
        while (moving := self._moving.get(sandbox)) is not None:
            await moving.wait()

    async def move(self, sandbox: str, host: str) -> Moved:
        """Let a running sandbox go on at another host: copied while it runs, then once more while it waits."""
        known = self.members.places[sandbox]
        if sandbox in self.members.moving:
            raise Conflict("it is being moved", sandbox=sandbox)
        if known.host == host:
            return Moved(sandbox=sandbox, host=host, pause_ms=0.0)
        source = known.host
        self.members.moving.add(sandbox)
        try:
            before, size = await self._ahead(sandbox, source, host)
            clock = _Clock()
            size += await self._switch(sandbox, known, before, host, clock)
        finally:
            self.members.moving.discard(sandbox)
        with contextlib.suppress(PagurusError):  # it is removed with the next report, which finds it there
            await self._source(source, "DELETE", f"/v1/sandboxes/{sandbox}")
        pause = sum(clock.parts_ms.values())
        return Moved(sandbox=sandbox, host=host, pause_ms=pause, copied_bytes=size, parts_ms=clock.parts_ms)

    async def _ahead(self, sandbox: str, source: str, host: str) -> tuple[str, int]:
        """Copy it while it runs, until the rest is small. (the last copy, bytes)"""
        row = self.members.state.copies.get(sandbox)
        base, size = (row.checkpoint if row is not None and row.host == host else ""), 0
        took: list[float] = []
        while replicate.again(took):
            checkpoint = await self._checkpoint(sandbox, source)
            if checkpoint.id == base:
                break
            began = time.monotonic()
            size += await self.copies.make(Copy(sandbox, checkpoint.id, source, host, base=base))
            took.append(time.monotonic() - began)
            base = checkpoint.id
        return base, size

    async def _switch(self, sandbox: str, known: Place, before: str, host: str, clock: _Clock) -> int:
        """From one host to the other while calls on it wait; the bytes that were copied meanwhile."""
        source, size = known.host, 0
        self._moving[sandbox] = asyncio.Event()
        try:
            last = await self._checkpoint(sandbox, source)
            clock.passed("checkpoint")
            ending = asyncio.create_task(self._source(source, "POST", f"/v1/sandboxes/{sandbox}/kill"))
            try:
                if last.id != before:
                    size = await self.copies.make(Copy(sandbox, last.id, source, host, base=before))
                turns = await self._turns(sandbox, source)
            finally:
                await ending
            clock.passed("copy")
            await self._arrive(sandbox, known.row, last.id, host, verify=False, turns=turns)  # as restores and forks
            clock.passed("arrive")
        except BaseException:
            await asyncio.shield(self._back(sandbox, source, host))
            raise
        finally:
            self._moving.pop(sandbox).set()
        return size

    async def _turns(self, sandbox: str, host: str) -> list[TurnInfo]:
        """The record of its turns, the newest as far as they fit into a request."""
        path = f"/v1/sandboxes/{sandbox}/turns"
        found, size = await self.members.member(host).upstream.call("GET", path, list[TurnInfo]), 0
        for number, each in enumerate(reversed(found)):
            size += len(msgspec.msgpack.encode(each))
            if size > TURNS_MOST:
                return found[len(found) - number :]
        return found

    async def _checkpoint(self, sandbox: str, host: str) -> CheckpointInfo:
        upstream = self.members.member(host).upstream
        request = CheckpointRequest(wait="durable")
        return await upstream.call("POST", f"/v1/sandboxes/{sandbox}/checkpoints", CheckpointInfo, request, keyed=True)

    async def _source(self, host: str, method: str, path: str) -> None:
        await self.members.member(host).upstream.call(method, path, msgspec.Raw)

    async def _back(self, sandbox: str, source: str, target: str) -> None:
        """The move failed: it goes on where it was, once it surely does not run at the target."""
        try:
            with contextlib.suppress(NotFound):
                await self._source(target, "DELETE", f"/v1/sandboxes/{sandbox}")
        except PagurusError as error:
            log.error("may have arrived at %s, which does not say: %s", target, error, extra={"sandbox": sandbox})
            self.members.places[sandbox].host = target
            return
        await self.members.state.put_home(sandbox, source)
        try:
            await self._source(source, "POST", f"/v1/sandboxes/{sandbox}/restore")
        except PagurusError as error:
            log.error("cannot be restored at %s: %s", source, error, extra={"sandbox": sandbox})


class _Clock:
    """Milliseconds of each part of a pause."""

    def __init__(self) -> None:
        self.parts_ms: dict[str, float] = {}
        self._since = time.monotonic()

    def passed(self, part: str) -> None:
        now = time.monotonic()
        self.parts_ms[part], self._since = 1000 * (now - self._since), now
