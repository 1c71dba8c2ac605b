"""The hosts of a cluster, as the coordinator knows them: polled every second, found by what they hold.

Guarantee: what a call was answered is known here when the answer goes out; a report that was made before does not undo
it. A host that cannot be reached keeps its sandboxes in the list: they are somewhere, and run.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from coordinator.decide import lease
from coordinator.decide.place import HostView
from coordinator.forward import HostConnection
from coordinator.state import CoordinatorState, HostRow
from sandbox.content.transfer import CHECKPOINT_ID
from sandbox.errors import Conflict, ConnectionBroken, NoDaemon, NotFound, PagurusError, Timeout
from sandbox.image.store import filed
from sandbox.messages import CheckpointInfo
from sandbox.messages.cluster import DepartedSandbox, HostedSandbox, HostInfo, HostReport, LeaseRequest
from sandbox.sdk.transport import part

if TYPE_CHECKING:
    from coordinator.copies import Copies

log = logging.getLogger("pagurus.cluster")

TTL = 5.0  # seconds without a report after which a host counts as silent
CHECKPOINTS = 100_000  # of which the host is remembered
ANSWER = 30.0  # seconds for which a host that reports may take to report what it has
FOREVER = 1e9  # seconds
NOWHERE = ""  # home of a sandbox that was removed, while a host that it left may still have it
TokenFor = Callable[["HostMember"], Awaitable[str | None]]  # what a caller shows to a host


@dataclass
class SandboxPlace:
    """Where a sandbox is. `row` makes it what :mod:`daemon.auth.visibility` looks through."""

    host: str
    row: HostedSandbox
    since: float  # when we learnt it
    moved: bool = False  # it came from another host as it was there
    origin: str = ""  # the checkpoint from which it went on here; "": it always was here, as far as is known
    origin_turn: int = 0  # the turn that this was taken after

    def tells(self, checkpoint: str, turn: int | None) -> bool:
        """Whether it continued from this state, or from one after that turn, which this state includes."""
        return self.origin != "" and (self.origin == checkpoint or (turn is not None and turn <= self.origin_turn))


class HostMember:
    """One host."""

    def __init__(self, name: str, row: HostRow, ttl: float) -> None:
        self.name = name
        self.row = row
        self.upstream = HostConnection(row.address, token=row.token, ca=row.ca)
        self.lease = lease.HostLease(ttl)
        self.report: HostReport | None = None
        self.requested_at = float("-inf")  # when that was requested
        self.images: frozenset[str] = frozenset()  # names of files that its images are
        self.error = ""
        self.coming = 0  # sandboxes on their way here that no report counts yet

    def alive(self) -> bool:
        return lease.alive(self.lease, time.monotonic())

    async def request(self, *, grant: bool = False) -> HostReport:
        """One report; with it goes a lease, if `grant`. Raises when none comes in time."""
        until, existing, before = None, self.report, self.lease
        if grant and existing is not None:
            self.lease, until = lease.requested(self.lease, clock=existing.clock)
        target = LeaseRequest(until=until, boot="" if existing is None else existing.boot)
        requested_at = time.monotonic()
        try:
            report = await self.upstream.call("POST", "/v1/host", HostReport, target, timeout=self.lease.ttl / 2)
        except NoDaemon:
            self.lease = lease.refused(self.lease, before)
            raise
        self.lease = lease.last_seen(self.lease, time.monotonic(), requested_at=requested_at, clock=report.clock)
        if existing is None or existing.images != report.images:
            self.images = frozenset(name for name in map(filed, report.images) if name is not None)
        self.report, self.requested_at, self.error = report, requested_at, ""
        return report

    def view(self, sandboxes: int) -> HostView:
        result, last_seen = self.report, self.lease.last_seen_at
        if result is None or last_seen is None:
            return HostView(self.name, 1, 1, 0, alive=False, silent=FOREVER)
        alive = self.alive()
        return HostView(
            name=self.name,
            cpus=result.cpus,
            memory_bytes=result.memory_bytes,
            memory_free=result.memory_free,
            disk_bytes=result.disk_bytes,
            disk_free=result.disk_free,
            load=result.load,
            sandboxes=sandboxes,
            coming=self.coming,
            labels=self.row.labels,
            images=self.images,
            alive=alive,
            silent=0.0 if alive else time.monotonic() - last_seen,
            doubted=lease.doubted(self.lease, time.monotonic()),
            draining=self.row.draining,
        )

    def info(self, sandboxes: int) -> HostInfo:
        result = self.report
        state: Literal["alive", "draining", "silent"] = "draining" if self.row.draining else "alive"
        state = state if self.alive() else "silent"
        last_seen = self.lease.last_seen_at
        info = HostInfo(name=self.name, address=self.row.address, state=state, labels=self.row.labels, error=self.error)
        info.sandboxes, info.since_seen_s = sandboxes, None if last_seen is None else time.monotonic() - last_seen
        if result is not None:
            info.cpus, info.load = result.cpus, result.load
            info.memory_bytes, info.memory_free = result.memory_bytes, result.memory_free
            info.disk_free = result.disk_free
        return info


class Members:
    """All hosts. Use from one event loop."""

    def __init__(self, state: CoordinatorState, *, ttl: float = TTL, leasing: bool = False) -> None:
        self.state = state
        self.ttl = ttl
        self.leasing = leasing  # whether sandboxes may continue elsewhere, so that hosts need leases
        self._left: dict[tuple[str, str], float] = {}  # hosts and sandboxes that they have removed, and when
        self.withheld: set[str] = set()  # hosts that get none now: their sandboxes are on the way elsewhere
        self.moving: set[str] = set()  # sandboxes on the way from one host to another: nothing of them is removed
        self.leaving: set[str] = set()  # those of them that are about to be frozen, or are: no copies are made
        self.copies: Copies | None = None  # which go with a sandbox, and build upon what it leaves
        self.hosts: dict[str, HostMember] = {}
        self.places: dict[str, SandboxPlace] = {}
        self._gone: dict[str, float] = {}  # sandboxes that were removed, and when
        self._checkpoints: collections.OrderedDict[str, str] = collections.OrderedDict()  # id -> host
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Condition()

    # ----------------------------------------------------------------- hosts

    async def open(self) -> None:
        """Poll every known host once, and then repeatedly."""
        self.hosts = {name: HostMember(name, row, self.ttl) for name, row in self.state.hosts.items()}
        for member in self.hosts.values():  # a former coordinator may have granted a lease right before it died
            member.lease = lease.unknown(member.lease, time.monotonic())
        for id, copies in self.state.copies.items():
            newest = max(copies.values(), key=lambda copy: copy.number)
            self.places[id] = SandboxPlace(self.state.homes.get(id, newest.source), newest.sandbox, 0.0)
        for id, move in self.state.moves.items():
            self.places[id] = SandboxPlace(move.source, move.sandbox, 0.0)
        await asyncio.gather(*(self._request(member) for member in self.hosts.values()))
        for member in self.hosts.values():
            self._watch(member)
        for id in [id for id, home in self.state.homes.items() if home == NOWHERE]:
            if not any(self._may_have(member, id) for member in self.hosts.values()):
                await self.state.drop_home(id)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for member in self.hosts.values():
            await member.upstream.close()

    async def add(self, name: str, row: HostRow) -> HostMember:
        """Register a host, or change where it is reached. It must answer."""
        member = HostMember(name, row, self.ttl)
        try:
            report = await member.request()
        except BaseException:
            await member.upstream.close()
            raise
        await self.state.put_host(name, row)
        old = self.hosts.get(name)
        self.hosts[name] = member
        if old is not None:
            self._tasks.pop(name).cancel()
            await old.upstream.close()
        self._take(member, report, time.monotonic())
        self._watch(member)
        return member

    async def change(self, name: str, *, draining: bool | None, labels: dict[str, str | None]) -> HostMember:
        member = self.member(name)
        merged = {key: value for key, value in {**member.row.labels, **labels}.items() if value is not None}
        member.row.labels = merged
        member.row.draining = member.row.draining if draining is None else draining
        await self.state.put_host(name, member.row)
        return member

    async def drop(self, name: str) -> None:
        """Forget a host. Its sandboxes keep running there."""
        member = self.member(name)
        self._tasks.pop(name).cancel()
        del self.hosts[name]
        self.places = {id: place for id, place in self.places.items() if place.host != name}
        await self.state.drop_host(name)
        with contextlib.suppress(PagurusError):  # one that is away keeps its lease, which ends
            await member.upstream.call("POST", "/v1/host", HostReport, LeaseRequest(release=True))
        await member.upstream.close()

    def member(self, name: str) -> HostMember:
        if name not in self.hosts:
            raise NotFound(f"no such host: {name}", hint="list those there are with `pagurus cluster ls`")
        return self.hosts[name]

    def living(self) -> list[HostMember]:
        return [member for member in self.hosts.values() if member.alive()]

    def _watch(self, member: HostMember) -> None:
        self._tasks[member.name] = asyncio.create_task(self._watching(member), name=f"reports of {member.name}")

    async def _watching(self, member: HostMember) -> None:
        while True:
            await asyncio.sleep(self.ttl / 5)
            await self._request(member)

    async def _request(self, member: HostMember) -> None:
        requested_at = time.monotonic()
        strays = self._strays(member)
        try:
            for id in strays:
                with contextlib.suppress(NotFound):  # gone since its last report
                    retained = await member.upstream.call("POST", f"/v1/sandboxes/{id}/left", DepartedSandbox)
                    if self.copies is not None:
                        self.copies.keep_later(id, member.name, retained.checkpoint)
                log.info("removed from %s: it went on elsewhere", member.name, extra={"sandbox": id})
            report = await member.request(grant=self.leasing and not strays and member.name not in self.withheld)
        except (PagurusError, OSError) as error:
            if not member.error:
                log.warning("host %s does not answer: %s", member.name, error)
            member.error = str(error)
            return
        self._take(member, report, requested_at)
        async with self._changed:
            self._changed.notify_all()

    def _take(self, member: HostMember, report: HostReport, requested_at: float) -> None:
        """What a host reported, where nothing newer is known."""
        now = time.monotonic()
        reported = {item.id: item for item in report.sandboxes}
        for id, item in reported.items():
            existing = self.places.get(id)
            if self._gone.get(id, 0.0) >= requested_at or (existing is not None and existing.since >= requested_at):
                continue
            if self.state.homes.get(id, member.name) == member.name and (
                existing is None or existing.host == member.name
            ):
                self.places[id] = (
                    SandboxPlace(member.name, item, now) if existing is None else replace(existing, row=item)
                )
        for id, existing in list(self.places.items()):
            if existing.host == member.name and id not in reported and existing.since < requested_at:
                del self.places[id]
        self._gone = {id: when for id, when in self._gone.items() if when > now - 60}

    def _strays(self, member: HostMember) -> list[str]:
        """Sandboxes that the host still has, though they went on elsewhere."""
        here = [] if member.report is None else [item.id for item in member.report.sandboxes]
        gone = (id for id, home in self.state.homes.items() if home != member.name and id not in self.moving)
        left = (id for id in here if self._left.get((member.name, id), member.requested_at) > member.requested_at)
        return sorted(set(here).intersection(gone).difference(left))

    def has_left(self, sandbox: str, host: str) -> None:
        """The host has removed it. A report that was requested before does not know."""
        now = time.monotonic()
        self._left = {which: when for which, when in self._left.items() if when > now - 60} | {(host, sandbox): now}

    # ----------------------------------------------------------------- views

    def counts(self) -> collections.Counter[str]:
        return collections.Counter(place.host for place in self.places.values())

    def views(self) -> list[HostView]:
        counts = self.counts()
        return [member.view(counts[member.name]) for member in self.hosts.values()]

    def infos(self) -> list[HostInfo]:
        counts = self.counts()
        return [member.info(counts[member.name]) for _, member in sorted(self.hosts.items())]

    @contextlib.contextmanager
    def coming(self, member: HostMember, count: int = 1) -> Iterator[None]:
        """Sandboxes are being made there."""
        member.coming += count
        try:
            yield
        finally:
            member.coming -= count

    # ----------------------------------------------------------------- finding

    def made(self, host: str, sandbox: HostedSandbox) -> None:
        self.places[sandbox.id] = SandboxPlace(host, sandbox, time.monotonic())

    async def removed(self, sandbox: str) -> None:
        self.places.pop(sandbox, None)
        self._gone[sandbox] = time.monotonic()
        if self.copies is not None:
            await self.copies.forget(sandbox)
        left = self.state.homes.get(sandbox) is not None and any(
            self._may_have(m, sandbox) for m in self.hosts.values()
        )
        await self.state.drop_home(sandbox)
        if left:
            await self.state.put_home(sandbox, NOWHERE)

    def _may_have(self, member: HostMember, sandbox: str) -> bool:
        """Whether a host has a sandbox that continued elsewhere: it reports so, or is silent."""
        if member.name == self.state.homes.get(sandbox):
            return False
        reported = [] if member.report is None else member.report.sandboxes
        return bool(member.error) or not member.alive() or any(item.id == sandbox for item in reported)

    def remember(self, checkpoint: str, host: str) -> None:
        self._checkpoints[checkpoint] = host
        self._checkpoints.move_to_end(checkpoint)
        while len(self._checkpoints) > CHECKPOINTS:
            self._checkpoints.popitem(last=False)

    async def holders(self, checkpoint: str, token: TokenFor) -> dict[str, CheckpointInfo]:
        """Hosts that have what this id, beginning or label means to the caller, and what they say of it.

        Raises Conflict where it means different checkpoints on different hosts, NotFound where none has it.
        """
        existing = self._checkpoints.get(checkpoint)
        requested = [self.hosts[existing]] if existing in self.hosts and self.hosts[existing].alive() else self.living()
        result, troubles = await self._of(checkpoint, requested, token)
        if not result and len(requested) < len(self.living()):
            result, troubles = await self._of(checkpoint, self.living(), token)
        if len({info.id for info in result.values()}) > 1:
            names = ", ".join(f"{info.id} on {host}" for host, info in sorted(result.items()))
            raise Conflict(f"several checkpoints are meant by {checkpoint}: {names}", hint="use the id")
        for host, info in result.items():
            self.remember(info.id, host)
        if not result and troubles:
            raise troubles[0]
        if not result:
            raise NotFound(f"no such checkpoint: {checkpoint}", hint="list those there are with `pagurus tree`")
        return result

    async def _of(
        self, checkpoint: str, requested: Iterable[HostMember], token: TokenFor
    ) -> tuple[dict[str, CheckpointInfo], list[PagurusError]]:
        """What hosts say of it, and why others said nothing: its holder need not wait for these."""
        result: dict[str, CheckpointInfo] = {}
        troubles: list[PagurusError] = []

        async def one(member: HostMember) -> None:
            path = f"/v1/checkpoints/{part(checkpoint)}"
            try:
                async with answering(member):
                    info = await member.upstream.request_as("GET", path, CheckpointInfo, token=await token(member))
            except (NotFound, NoDaemon, ConnectionBroken):
                return
            except PagurusError as error:
                log.warning("%s does not say whether it has %s: %s", member.name, checkpoint, error)
                troubles.append(error)
                return
            if info.id == checkpoint or not CHECKPOINT_ID.fullmatch(checkpoint):
                result[member.name] = info

        await asyncio.gather(*(one(member) for member in requested))
        return result, troubles


@contextlib.asynccontextmanager
async def answering(member: HostMember) -> AsyncIterator[None]:
    """A host is called within. Raises Timeout, which names it, where it does not answer for long."""
    try:
        async with asyncio.timeout(ANSWER):
            yield
    except TimeoutError:
        why = f"host {member.name} reports, but has not answered for {ANSWER:g} s"
        raise Timeout(why, hint="start its daemon again, or `pagurus cluster rm` it") from None
