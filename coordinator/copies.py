"""Checkpoints that outlive their host: copied to another one, and to a store, in the background, by content.

::

    a durable checkpoint ▸ given, less what the holder has ▸ taken there ▸ written down ▸ older copies go

Guarantee: a copy counts when it is durable at its holder and written down here, not before. Streams pass through
the coordinator, so no host needs to reach, or may call, another; what arrives is checked as a stream of a stranger.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from coordinator.decide import replicate
from coordinator.decide.replicate import STORE, CopyAction, ReplicaCopy, Subject
from coordinator.holders import CopyHolder, OnHost
from coordinator.members import Members
from coordinator.state import CopyRow
from sandbox.errors import Conflict, ConnectionBroken, NoDaemon, NotFound, PagurusError, Timeout
from sandbox.image.store import filed
from sandbox.messages import CheckpointInfo, CheckpointState
from sandbox.messages.cluster import ArriveRequest, ConversationExport, HostedSandbox
from sandbox.sdk.transport import part

log = logging.getLogger("pagurus.cluster")

AT_ONCE = 2  # streams that a host has at a time
POLL_INTERVAL = 0.25  # seconds between two looks for what is to be copied
TIMEOUT = 60.0  # seconds that an answer waits for its copy
RETRY_DELAY, RESTS = 0.05, 20  # seconds, and how often, for which a copy that failed is not tried again
SWEEP = 60.0  # seconds between two looks for copies of sandboxes that are gone
STALLS = 60.0  # seconds for which a stream may stall
MIN_RATE = 64 << 10  # bytes a second at which it gets them back


class CopyRateLimit:
    """At most `rate` bytes a second, all streams together; None: as fast as it goes."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._free_at = 0.0

    async def take(self, size: int) -> float:
        """Seconds that it took."""
        if self._rate is None:
            return 0.0
        self._free_at = max(self._free_at, now := time.monotonic()) + size / self._rate
        await asyncio.sleep(max(0.0, self._free_at - now))
        return time.monotonic() - now


class MeteredStream:
    """A stream that passes by, not too fast, and is counted. Raises Timeout where either end holds it up: hosts have
    few streams at a time, and others wait for these."""

    def __init__(self, parts: AsyncIterator[bytes], pace: CopyRateLimit) -> None:
        self._parts, self._pace = parts, pace
        self.size = 0

    async def parts(self) -> AsyncIterator[bytes]:
        deadline = time.monotonic() + STALLS
        parts = aiter(self._parts)
        while True:
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    item = await anext(parts)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise Timeout(
                    f"a stream of a checkpoint stalls after {self.size} bytes",
                    hint="check the link between the hosts; the copy is tried again",
                ) from None
            self.size += len(item)
            deadline += len(item) / MIN_RATE + await self._pace.take(len(item))
            deadline = min(deadline, time.monotonic() + STALLS)
            yield item


@dataclass(frozen=True)
class _UnderWay:
    copy: CopyAction
    task: asyncio.Task[None]
    since: float


class Copies:
    """See the module."""

    def __init__(self, members: Members, *, rate: float | None = None, store: CopyHolder | None = None) -> None:
        self.members = members
        self._store = store
        self.state = members.state
        self.copies = self.copied_bytes = self.total_bytes = 0
        self._complete: dict[str, int] = {}  # bytes of the last copy of each sandbox that travelled whole
        self._pace = CopyRateLimit(rate)
        self._since: dict[tuple[str, bool], float] = {}
        self._waited: Counter[str] = Counter()
        self._busy: Counter[str] = Counter()
        self._under_way: dict[tuple[str, bool], _UnderWay] = {}  # of a sandbox, to the store or a host
        self._locks: dict[tuple[str, bool], asyncio.Lock] = {}
        self._keeping: set[asyncio.Task[None]] = set()
        rows = (row for rows in self.state.copies.values() for row in rows.values())
        self._numbers = itertools.count(1 + max((row.number for row in rows), default=0))
        self._sweep_at = time.monotonic() + SWEEP
        self._changed = asyncio.Condition()
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """For as long as the coordinator lives."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_INTERVAL):
                    await self._wake.wait()
            self._wake.clear()
            subjects = [item for item in self._subjects() if (item.sandbox, item.store) not in self._under_way]
            for copy in replicate.decide(self.members.views(), subjects, self._busy, AT_ONCE):
                self._busy.update((copy.source, copy.target))
                task = asyncio.create_task(self._make(copy), name=f"copy of {copy.sandbox}")
                self._under_way[copy.sandbox, copy.target == STORE] = _UnderWay(copy, task, time.monotonic())
            if time.monotonic() > self._sweep_at:
                self._sweep_at = time.monotonic() + SWEEP
                for sandbox in self.state.copies.keys() - self.members.places.keys() - self.members.moving:
                    await self._try_to_forget(sandbox)

    def _subjects(self) -> list[Subject]:
        result = []
        for id, existing in self.members.places.items():
            for store in (False, True) if self._store is not None else (False,):
                rows = self._rows(id, store)
                subject = Subject(
                    sandbox=id,
                    host=existing.host,
                    durable=existing.row.durable,
                    images=images(existing.row),
                    retained=tuple(ReplicaCopy(row.checkpoint, row.host, row.old) for row in rows),
                    waited=self._waited[id] > 0,
                    since=self._since.setdefault((id, store), time.monotonic()),
                    store=store,
                    new=time.monotonic() < existing.since + replicate.NEW,
                    fresh=time.monotonic() < existing.since + replicate.FRESH,
                )
                if not existing.row.durable or subject.copied:
                    del self._since[id, store]
                if id not in self.members.leaving:
                    result.append(subject)
        return result

    def _rows(self, sandbox: str, store: bool) -> list[CopyRow]:
        """The copies in the store, or at hosts, the newest first."""
        rows = [row for row in self.state.copies.get(sandbox, {}).values() if (row.host == STORE) == store]
        return sorted(rows, key=lambda row: -row.number)

    async def _make(self, copy: CopyAction) -> None:
        try:
            await self.make(copy)
        except (PagurusError, OSError) as error:
            log.warning("%s is not copied to %s yet: %s", copy.sandbox, copy.target, error)
            for _ in range(RESTS):  # a host that refuses is not tried all the time; one that took it over is tried now
                if self._host(copy.sandbox) == copy.source:
                    await asyncio.sleep(RETRY_DELAY)
        finally:
            self._busy.subtract((copy.source, copy.target))
            del self._under_way[copy.sandbox, copy.target == STORE]
            self._wake.set()

    async def make(self, copy: CopyAction) -> int:
        """Copy one checkpoint; the bytes that travelled. Of one sandbox, one to a host, one to the store at a time."""
        number = next(self._numbers)
        async with self._locks.setdefault((copy.sandbox, copy.target == STORE), asyncio.Lock()):
            return await self._copy(copy, number)

    async def _copy(self, copy: CopyAction, number: int) -> int:
        rows = self._rows(copy.sandbox, copy.target == STORE)
        there = [row for row in rows if (row.checkpoint, row.host) == (copy.checkpoint, copy.target)]
        if any(not row.old for row in there):
            return 0
        source, target = self.members.member(copy.source), self._holder(copy.target)
        size = 0 if there else await self._stream(OnHost(source), target, copy)  # one that was kept counts again
        path = f"/v1/checkpoints/{part(copy.checkpoint)}"
        programs, conversation = await asyncio.gather(
            source.upstream.call("GET", f"{path}/programs", dict[str, Any]),
            source.upstream.call("GET", f"{path}/conversation", ConversationExport),
        )
        self._count(copy, size)
        existing = self.members.places.get(copy.sandbox)
        if existing is None:  # removed since
            await target.discard(copy.sandbox, copy.checkpoint)
            return size
        row = CopyRow(
            checkpoint=copy.checkpoint,
            host=copy.target,
            source=copy.source,
            sandbox=existing.row,
            programs=programs,
            conversation=conversation,
            number=number,
        )
        former = await self.state.put_copy(copy.sandbox, row)
        async with self._changed:
            self._changed.notify_all()
        if former is not None and former.checkpoint != copy.checkpoint:
            await self._discard(copy.sandbox, former)
        return size

    async def fetch(self, sandbox: str, checkpoint: str, host: str) -> None:
        """From the store to a host, all of it."""
        await self._stream(
            self._holder(STORE), OnHost(self.members.member(host)), CopyAction(sandbox, checkpoint, STORE, host)
        )

    async def rest(self, source: str, target: str, checkpoint: str, base: str, sandbox: str) -> int:
        """The last copy of a sandbox that is frozen, to a host that has `base` and has prepared for it; bytes."""
        here, there = self.members.member(source), self.members.member(target)
        copy = CopyAction(sandbox, checkpoint, source, target, base)
        try:
            return await self._sent(OnHost(here, arriving=True), OnHost(there, arriving=True), copy, base)
        except (NotFound, Conflict) as error:
            log.info("%s is copied once it is durable: %s", checkpoint, error)
            return await self._stream(OnHost(here), OnHost(there), copy)

    def _holder(self, name: str) -> CopyHolder:
        if name != STORE:
            return OnHost(self.members.member(name))
        if self._store is None:
            raise NotFound("the cluster has no store now", hint="pagurus cluster up --replicate-store")
        return self._store

    def _count(self, copy: CopyAction, size: int) -> None:
        self.copies += 1
        self.copied_bytes += size
        if not copy.base:
            self._complete[copy.sandbox] = max(size, self._complete.get(copy.sandbox, 0))
        self.total_bytes += max(size, self._complete.get(copy.sandbox, 0))

    def counters(self) -> dict[str, tuple[str, float]]:
        """For Prometheus."""
        return {
            "pagurus_cluster_copies": ("Copies of checkpoints that were made.", self.copies),
            "pagurus_cluster_copied_bytes": ("Bytes of checkpoints that travelled.", self.copied_bytes),
            "pagurus_cluster_whole_bytes": (
                "Bytes that had travelled if each copy were whole, as large as the last one that was.",
                self.total_bytes,
            ),
        }

    async def _stream(self, source: CopyHolder, target: CopyHolder, copy: CopyAction) -> int:
        """The bytes that travelled: what changed, or what the target lacks, or all of it."""
        if copy.base:
            with contextlib.suppress(NotFound, Conflict):
                return await self._sent(source, target, copy, copy.base)
            log.info("%s: %s is not at both ends any more", copy.checkpoint, copy.base)
        if isinstance(source, OnHost) and isinstance(target, OnHost):
            with contextlib.suppress(NotFound, Conflict):
                have, size = await self._surveyed(source, target, copy.checkpoint)
                return size + await self._sent(source, target, copy, have=have)
            log.info("%s is copied whole", copy.checkpoint)
        return await self._sent(source, target, copy)

    async def _surveyed(self, source: OnHost, target: OnHost, checkpoint: str) -> tuple[bytes, int]:
        """What the target has of it already, and the bytes that it took to learn that."""
        async with source.manifest(checkpoint) as stream:
            paced = MeteredStream(stream, self._pace)
            have = await target.has(paced.parts())
        return have, paced.size + len(have)

    async def _sent(
        self, source: CopyHolder, target: CopyHolder, copy: CopyAction, base: str = "", have: bytes = b""
    ) -> int:
        brief = bool(base) and isinstance(source, OnHost) and isinstance(target, OnHost)
        async with source.given(copy.sandbox, copy.checkpoint, base, have, brief=brief) as stream:
            paced = MeteredStream(stream, self._pace)
            await target.take(copy.sandbox, copy.checkpoint, paced.parts(), base)
        return paced.size

    async def _discard(self, sandbox: str, row: CopyRow) -> None:
        """Remove what an older copy needed and the newest does not."""
        if row.host == STORE or row.host in self.members.hosts:
            await self._holder(row.host).discard(sandbox, row.checkpoint)

    # ----------------------------------------------------------------- waiting

    async def wait(self, sandbox: str, checkpoint: str, host: str, turn: int | None = None) -> bool:
        """Until another host than `host`, where it runs, or the store holds this state; False: it went on without it.

        `turn`: after which it was taken, of a command. Then a later state will do, after that turn or another: it
        reports of this one too, and a copy of this one that came after that would undo what was reported since. Raises
        Timeout.
        """
        if self._is_copied(sandbox, checkpoint, host, turn):
            return True
        self._waited[sandbox] += 1
        try:
            async with asyncio.timeout(TIMEOUT):
                while not self._is_copied(sandbox, checkpoint, host, turn):
                    existing = self.members.places[sandbox]
                    if existing.host != host and not existing.moved:
                        return False
                    if existing.host != host:  # as it was: what it has there includes this state too
                        checkpoint, host, turn = existing.row.head, existing.host, existing.row.turn
                        continue
                    if turn is not None and turn <= existing.row.durable_turn and checkpoint != existing.row.durable:
                        checkpoint, turn = existing.row.durable, existing.row.durable_turn
                    else:
                        await self._hasten(sandbox, checkpoint, host, turn or 0)
        except TimeoutError:
            why = f"no other host holds checkpoint {checkpoint} yet: {self._why_not(sandbox, checkpoint)}"
            raise Timeout(why, hint="see `pagurus cluster ls`", sandbox=sandbox) from None
        finally:
            self._waited[sandbox] -= 1
        return True

    async def _hasten(self, sandbox: str, checkpoint: str, host: str, turn: int) -> None:
        """Wait a while: until the checkpoint is durable where the sandbox runs, then until something was copied."""
        existing = self.members.places[sandbox]
        try:
            if existing.row.durable != checkpoint:
                path = f"/v1/checkpoints/{part(checkpoint)}?wait=durable&timeout=5"
                info = await self.members.member(host).upstream.call("GET", path, CheckpointInfo, timeout=10)
                if info.state is CheckpointState.DURABLE and self.members.places.get(sandbox) is existing:
                    existing.row.durable, existing.row.durable_turn = checkpoint, turn
        except (NoDaemon, ConnectionBroken, Timeout):
            await asyncio.sleep(POLL_INTERVAL)  # the host is away: it returns, or its lease ends
        self._wake.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_INTERVAL), self._changed:
                await self._changed.wait()

    def _why_not(self, sandbox: str, checkpoint: str) -> str:
        for store in (False, True):
            if (result := self._under_way.get((sandbox, store))) is not None:
                seconds = time.monotonic() - result.since
                return f"{result.copy.checkpoint} is on its way to {result.copy.target} for {seconds:.0f} s"
        existing = self.members.places.get(sandbox)
        if existing is not None and existing.row.durable != checkpoint:
            return f"it is not durable on {existing.host}"
        return "the sandbox is about to move" if sandbox in self.members.leaving else "no host takes it"

    def is_waited(self, sandbox: str) -> bool:
        """Whether an answer waits for a copy of it."""
        return self._waited[sandbox] > 0

    def _host(self, sandbox: str) -> str | None:
        existing = self.members.places.get(sandbox)
        return None if existing is None else existing.host

    def _is_copied(self, sandbox: str, checkpoint: str, host: str, turn: int | None) -> bool:
        """Whether a copy of this state is the one that counts, or the sandbox went on elsewhere from it, or from one
        that was taken later."""
        existing, rows = self.members.places.get(sandbox), self.state.copies.get(sandbox, {})
        if existing is None:
            return True  # removed: there is nothing to lose
        if existing.host != host:
            return existing.tells(checkpoint, turn)
        return any(row.checkpoint == checkpoint and not row.old for row in rows.values())

    def keep_later(self, sandbox: str, host: str, checkpoint: str) -> None:
        """Likewise, while no caller waits."""
        task = asyncio.create_task(self._try_to_keep(sandbox, host, checkpoint), name=f"what {host} keeps of {sandbox}")
        self._keeping.add(task)
        task.add_done_callback(self._keeping.discard)

    async def _try_to_keep(self, sandbox: str, host: str, checkpoint: str) -> None:
        try:
            await self.keep(sandbox, host, checkpoint)
        except (PagurusError, OSError) as error:
            log.warning("%s of %s stays on %s, with an unknown outcome: %s", checkpoint, sandbox, host, error)

    async def keep(self, sandbox: str, host: str, checkpoint: str, newest: ArriveRequest | None = None) -> None:
        """A host that a sandbox left still has this state of it, for the next copy there to build upon.

        `newest`: it is the one that the sandbox continues from, with what else is known of that.
        """
        async with self._locks.setdefault((sandbox, False), asyncio.Lock()):  # or it may be a copy that comes just now
            existing, rows = self.members.places.get(sandbox), self._rows(sandbox, store=False)
            if not checkpoint or any((row.checkpoint, row.host) == (checkpoint, host) for row in rows):
                return
            there = any(row.host == host for row in rows)
            if existing is None or (newest is None and (there or len(rows) >= replicate.HOLDERS)):
                await OnHost(self.members.member(host)).discard(sandbox, checkpoint)
                return
            row = CopyRow(
                checkpoint=checkpoint, host=host, source=existing.host, sandbox=existing.row, old=newest is None
            )
            if newest is not None:
                row.programs, row.conversation, row.number = newest.programs, newest.conversation, next(self._numbers)
            former = await self.state.put_copy(sandbox, row)
            if former is not None and former.checkpoint != checkpoint:
                await self._discard(sandbox, former)
        self._wake.set()

    async def forget(self, sandbox: str) -> None:
        """It was removed: its copies go."""
        for store in (False, True):
            self._locks.pop((sandbox, store), None)
        self._complete.pop(sandbox, None)
        for row in list(self.state.copies.get(sandbox, {}).values()):
            await self._discard(sandbox, row)
        await self.state.drop_copies(sandbox)

    async def _try_to_forget(self, sandbox: str) -> None:
        try:
            await self.forget(sandbox)
        except (PagurusError, OSError) as error:  # tried again
            log.warning("copies of %s are not removed yet: %s", sandbox, error)

    async def close(self) -> None:
        tasks = [*(item.task for item in self._under_way.values()), *self._keeping]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def images(row: HostedSandbox) -> frozenset[str]:
    """Names of files that the image of a sandbox may be."""
    return frozenset(filter(None, map(filed, (row.image, f"{row.image}:latest"))))
