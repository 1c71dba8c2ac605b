"""Checkpoints that outlive their host: copied to another one in the background, by content.

Owns: the streams from host to host and their bandwidth, the newest copy of each sandbox, what waits for one. Does not
own: which copy is made (:mod:`coordinator.decide.replicate`), what a stream holds (:mod:`sandbox.content.transfer`).

::

    a durable checkpoint ▸ export there, less what the other host has ▸ import here ▸ written down ▸ older copies go

Guarantee: a copy counts when it is durable on the other host and written down here, not before. Streams pass through
the coordinator, so no host needs to reach, or may call, another; what arrives is checked as a stream of a stranger.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from coordinator.decide import replicate
from coordinator.decide.replicate import Copy, Subject
from coordinator.forward import Answer, passed_on
from coordinator.members import Member, Members
from coordinator.state import CopyRow
from sandbox.errors import Conflict, ConnectionBroken, NoDaemon, NotFound, PagurusError, Timeout
from sandbox.image.store import filed
from sandbox.messages import CheckpointInfo, CheckpointState
from sandbox.messages.store import Imported
from sandbox.sdk.transport import MSGPACK, decoded_error, part

log = logging.getLogger("pagurus.cluster")

AT_ONCE = 2  # streams that a host has at a time
LOOK = 0.25  # seconds between two looks for what is to be copied
PATIENCE = 60.0  # seconds that an answer waits for its copy


class Pace:
    """At most `rate` bytes a second, all streams together; None: as fast as it goes."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._free_at = 0.0

    async def take(self, size: int) -> None:
        if self._rate is not None:
            self._free_at = max(self._free_at, time.monotonic()) + size / self._rate
            await asyncio.sleep(max(0.0, self._free_at - time.monotonic()))


class Copies:
    """See the module."""

    def __init__(self, members: Members, *, rate: float | None = None) -> None:
        self.members = members
        self.state = members.state
        self.copies = self.copied_bytes = self.whole_bytes = 0
        self._whole: dict[str, int] = {}  # bytes of the last copy of each sandbox that travelled whole
        self._pace = Pace(rate)
        self._since: dict[str, float] = {}
        self._waited: Counter[str] = Counter()
        self._busy: Counter[str] = Counter()
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._changed = asyncio.Condition()
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """For as long as the coordinator lives."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK):
                    await self._wake.wait()
            self._wake.clear()
            subjects = [each for each in self._subjects() if each.sandbox not in self._under_way]
            for copy in replicate.decide(self.members.views(), subjects, self._busy, AT_ONCE):
                self._busy.update((copy.source, copy.target))
                task = asyncio.create_task(self._make(copy), name=f"copy of {copy.sandbox}")
                self._under_way[copy.sandbox] = task

    def _subjects(self) -> list[Subject]:
        found = []
        for id, known in self.members.places.items():
            if id in self.members.moving:
                continue
            row = self.state.copies.get(id)
            if not known.row.durable or (row is not None and row.checkpoint == known.row.durable):
                self._since.pop(id, None)
                continue
            names = frozenset(filter(None, map(filed, (known.row.image, f"{known.row.image}:latest"))))
            found.append(
                Subject(
                    sandbox=id,
                    host=known.host,
                    durable=known.row.durable,
                    images=names,
                    copied="" if row is None else row.checkpoint,
                    holder="" if row is None else row.host,
                    waited=self._waited[id] > 0,
                    since=self._since.setdefault(id, time.monotonic()),
                )
            )
        return found

    async def _make(self, copy: Copy) -> None:
        try:
            await self.make(copy)
        except (PagurusError, OSError) as error:
            log.warning("%s is not copied to %s yet: %s", copy.sandbox, copy.target, error)
            await asyncio.sleep(1.0)  # a host that refuses is not asked all the time
        finally:
            self._busy.subtract((copy.source, copy.target))
            del self._under_way[copy.sandbox]
            self._wake.set()

    async def make(self, copy: Copy) -> int:
        """Copy one checkpoint; the bytes that travelled. Of one sandbox, one at a time."""
        async with self._locks.setdefault(copy.sandbox, asyncio.Lock()):
            return await self._copy(copy)

    async def _copy(self, copy: Copy) -> int:
        former = self.state.copies.get(copy.sandbox)
        if former is not None and (former.checkpoint, former.host) == (copy.checkpoint, copy.target):
            return 0
        source, target = self.members.member(copy.source), self.members.member(copy.target)
        try:
            size = await self._stream(source, target, copy.checkpoint, copy.base)
        except (NotFound, Conflict):
            if not copy.base:
                raise
            log.info("%s is copied whole: %s is not on both hosts any more", copy.checkpoint, copy.base)
            size = await self._stream(source, target, copy.checkpoint, "")
        path = f"/v1/checkpoints/{part(copy.checkpoint)}/programs"
        programs = await source.upstream.call("GET", path, dict[str, Any])
        self._count(copy, size)
        known = self.members.places.get(copy.sandbox)
        if known is None:  # removed meanwhile
            await self._discard(target, copy.checkpoint)
            return size
        row = CopyRow(
            checkpoint=copy.checkpoint, host=copy.target, source=copy.source, sandbox=known.row, programs=programs
        )
        await self.state.put_copy(copy.sandbox, row)
        async with self._changed:
            self._changed.notify_all()
        if former is not None and former.checkpoint != copy.checkpoint and former.host in self.members.hosts:
            await self._discard(self.members.member(former.host), former.checkpoint)
        return size

    async def rest(self, source: str, target: str, checkpoint: str, base: str, sandbox: str) -> int:
        """The last copy of a sandbox that stands still, to a host that has `base` and has prepared for it; bytes."""
        there = self.members.member(target)
        try:
            return await self._stream(self.members.member(source), there, checkpoint, base, arriving=sandbox)
        except (NotFound, Conflict) as error:
            log.info("%s is copied once it is durable: %s", checkpoint, error)
            return await self._stream(self.members.member(source), there, checkpoint, base)

    def _count(self, copy: Copy, size: int) -> None:
        self.copies += 1
        self.copied_bytes += size
        if not copy.base:
            self._whole[copy.sandbox] = size
        self.whole_bytes += max(size, self._whole.get(copy.sandbox, 0))

    def counters(self) -> dict[str, tuple[str, float]]:
        """For Prometheus."""
        return {
            "pagurus_cluster_copies": ("Copies of checkpoints that were made.", self.copies),
            "pagurus_cluster_copied_bytes": ("Bytes of checkpoints that travelled.", self.copied_bytes),
            "pagurus_cluster_whole_bytes": (
                "Bytes that had travelled if each copy were whole, as large as the last one that was.",
                self.whole_bytes,
            ),
        }

    async def _stream(self, source: Member, target: Member, checkpoint: str, base: str, *, arriving: str = "") -> int:
        """`arriving`: the sandbox that waits for it, there; else it is durable, at both ends."""
        size = 0
        query = (f"?since={part(base)}" if base else "") + ("&soon=true" if arriving else "")
        path = f"/v1/checkpoints/{part(checkpoint)}/export{query}"

        async def paced(parts: Any) -> AsyncIterator[bytes]:
            nonlocal size
            async for each in parts:
                size += len(each)
                await self._pace.take(len(each))
                yield each

        async with source.upstream.answered("POST", path, {"Accept": MSGPACK}, None, source.row.token) as found:
            if found.status >= 400:
                raise decoded_error(found.status, await found.read(), path)
            headers = {"Accept": MSGPACK, "Content-Type": "application/octet-stream"}
            data = paced(found.content.iter_any())
            url = "/v1/checkpoints/import" + (f"?arriving={part(arriving)}" if arriving else "")
            async with target.upstream.answered("POST", url, headers, data, target.row.token) as taken:
                answer = Answer(taken.status, passed_on(taken.headers), await taken.read())
        if answer.status >= 400:
            raise decoded_error(answer.status, answer.body, url)
        answer.decoded(Imported)
        return size

    async def _discard(self, member: Member, checkpoint: str) -> None:
        """Remove an older copy; one that something stands on by now stays."""
        with contextlib.suppress(PagurusError):
            await member.upstream.call("DELETE", f"/v1/checkpoints/{part(checkpoint)}", msgspec.Raw)

    # ----------------------------------------------------------------- waiting

    async def wait(self, sandbox: str, checkpoint: str, host: str) -> bool:
        """Until another host than `host`, where it runs, holds this state; False: it went on elsewhere without it.

        Raises Timeout.
        """
        if self._is_copied(sandbox, checkpoint, host):
            return True
        self._waited[sandbox] += 1
        try:
            async with asyncio.timeout(PATIENCE):
                while not self._is_copied(sandbox, checkpoint, host):
                    if self._host(sandbox) != host:
                        return False
                    await self._hasten(sandbox, checkpoint, host)
        except TimeoutError:
            raise Timeout(
                f"no other host holds checkpoint {checkpoint} yet", remedy="see `pagurus cluster ls`", sandbox=sandbox
            ) from None
        finally:
            self._waited[sandbox] -= 1
        return True

    async def _hasten(self, sandbox: str, checkpoint: str, host: str) -> None:
        """Wait a while: until the checkpoint is durable where the sandbox runs, then until something was copied."""
        known = self.members.places[sandbox]
        try:
            if known.row.durable != checkpoint:
                path = f"/v1/checkpoints/{part(checkpoint)}?wait=durable&timeout=5"
                info = await self.members.member(host).upstream.call("GET", path, CheckpointInfo, timeout=10)
                if info.state is CheckpointState.DURABLE and self.members.places.get(sandbox) is known:
                    known.row.durable = checkpoint
        except (NoDaemon, ConnectionBroken, Timeout):
            await asyncio.sleep(LOOK)  # the host is away: it comes back, or its lease ends
        self._wake.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK), self._changed:
                await self._changed.wait()

    def _host(self, sandbox: str) -> str | None:
        known = self.members.places.get(sandbox)
        return None if known is None else known.host

    def _is_copied(self, sandbox: str, checkpoint: str, host: str) -> bool:
        """Whether a copy of this state is the one that counts, or the sandbox went on from it elsewhere."""
        known, row = self.members.places.get(sandbox), self.state.copies.get(sandbox)
        if known is None:
            return True  # removed: there is nothing to lose
        if known.host != host:
            return known.row.head == checkpoint
        return row is not None and row.checkpoint == checkpoint

    async def forget(self, sandbox: str) -> None:
        """It was removed: its copies go."""
        self._locks.pop(sandbox, None)
        self._whole.pop(sandbox, None)
        row = self.state.copies.get(sandbox)
        if row is not None:
            await self.state.drop_copy(sandbox)
            if row.host in self.members.hosts:
                await self._discard(self.members.member(row.host), row.checkpoint)

    async def close(self) -> None:
        for task in list(self._under_way.values()):
            task.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)
