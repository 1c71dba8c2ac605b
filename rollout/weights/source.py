"""Where a reader gets versions from: a directory on this host, a relay over HTTP, several of either.

Guarantee: content is returned only when its hash is right; a broken connection costs the bytes that were on the way, a
flipped byte one more fetch of that chunk.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

from rollout.weights.http import Connections, ResumableBody
from rollout.weights.store import ReaderLease, VersionStore
from rollout.weights.versions import Content, Ref, VersionRef
from sandbox.errors import EngineFailed, NotFound

T = TypeVar("T")
ATTEMPTS = 6  # in a row without a byte of progress
MAX_LISTING = 64 << 20


class WeightSource(Protocol):
    async def versions(self) -> list[VersionRef]:
        """Oldest first."""

    async def chunk(self, ref: Ref) -> Content:
        """Its content, whose hash was checked. Raises NotFound, EngineFailed."""

    async def lease(self, reader: str, lease: ReaderLease) -> None:
        """Say what this reader is based on and fetches, so that it is not collected."""

    async def close(self) -> None: ...

    @property
    def refetched(self) -> int:
        """Chunks that arrived damaged."""


class DirectorySource:
    """A store on this host; below ``/dev/shm`` it is shared memory."""

    refetched = 0

    def __init__(self, store: VersionStore):
        self.store = store

    async def versions(self) -> list[VersionRef]:
        return await asyncio.to_thread(self.store.versions)

    async def chunk(self, ref: Ref) -> bytes:
        return await asyncio.to_thread(self.store.get, ref)

    async def lease(self, reader: str, lease: ReaderLease) -> None:
        await asyncio.to_thread(self.store.lease, reader, lease)

    async def close(self) -> None:
        return None


class HttpSource:
    """A relay, or the publisher's own server. `rate` bounds what is read, in bytes a second."""

    def __init__(
        self, url: str, *, token: str | None = None, tls: ssl.SSLContext | None = None, rate: float | None = None
    ):
        """Raises Invalid for what is no URL."""
        self._connections = Connections(url, token=token, tls=tls, rate=rate)
        self.url = self._connections.url
        self.received = 0  # bytes of content, those that were thrown away as well
        self.refetched = 0  # chunks whose hash was wrong

    async def versions(self) -> list[VersionRef]:
        raw = await self.read("/versions")
        try:
            return msgspec.msgpack.decode(raw, type=list[VersionRef])
        except msgspec.MsgspecError as error:
            raise EngineFailed(f"{self.url}/versions answered nonsense: {error}", hint="is it a relay?") from None

    async def read(self, path: str) -> Content:
        """A small answer, as it is."""

        async def get() -> Content:
            body = ResumableBody(MAX_LISTING)
            await self._connections.get(path, body)
            return body.content

        return await self._again(get)

    async def chunk(self, ref: Ref) -> Content:
        body = ResumableBody(ref.size)
        damaged = False

        async def go_on() -> Content:
            nonlocal damaged
            if not body.complete:
                await self._connections.get(f"/chunks/{ref.digest}", body, fresh=damaged)
            if body.hasher.hexdigest() != ref.digest:
                self.refetched += 1
                damaged = True
                body.clear()
                raise EngineFailed(
                    f"{self.url} sent weights {ref.digest[:12]} that do not match their hash",
                    hint="`pagurus weights verify` tells on the publisher; the next pull fetches it again",
                )
            return body.content

        try:
            return await self._again(go_on, lambda: body.got)
        finally:
            self.received += body.received

    async def lease(self, reader: str, lease: ReaderLease) -> None:
        await self._again(lambda: self._connections.put(f"/readers/{reader}", msgspec.msgpack.encode(lease)))

    async def close(self) -> None:
        await self._connections.close()

    async def _again(self, act: Callable[[], Awaitable[T]], progress: Callable[[], int] = lambda: 0) -> T:
        """Carry out `act` until it succeeds; given up after `ATTEMPTS` in a row that brought nothing."""
        failed, before = 0, 0
        while True:
            try:
                return await act()
            except EngineFailed as error:
                failed = 1 if progress() > before else failed + 1
                before = progress()
                if failed >= ATTEMPTS:
                    raise EngineFailed(f"{self.url} gives no weights: {error}", hint="look at the relay") from error
                await asyncio.sleep(min(2.0, 0.05 * 2**failed))


class Spread:
    """Several places that hold a version together: each trainer rank's host serves what that rank wrote.

    The first of them says which versions there are. All hear of a reader's lease, so that none collects under it.
    """

    def __init__(self, sources: Sequence[WeightSource]):
        self.sources = list(sources)
        self._last = 0  # which one had the last chunk: one rank's follow one another

    @property
    def refetched(self) -> int:
        return sum(source.refetched for source in self.sources)

    async def versions(self) -> list[VersionRef]:
        return await self.sources[0].versions()

    async def chunk(self, ref: Ref) -> Content:
        missing: NotFound | None = None
        first = self._last  # others may change it
        for number in range(len(self.sources)):
            at = (first + number) % len(self.sources)
            try:
                content = await self.sources[at].chunk(ref)
            except NotFound as error:
                missing = missing or error
            else:
                self._last = at
                return content
        assert missing is not None, "there is a source"
        raise missing

    async def lease(self, reader: str, lease: ReaderLease) -> None:
        await asyncio.gather(*(source.lease(reader, msgspec.structs.replace(lease)) for source in self.sources))

    async def close(self) -> None:
        await asyncio.gather(*(source.close() for source in self.sources))


def source_of(
    place: str, *, token: str | None = None, tls: ssl.SSLContext | None = None, rate: float | None = None
) -> WeightSource:
    """Of an URL, a directory, or several with commas between them. `rate` bounds all together."""
    places = place.split(",")
    shared = None if rate is None else rate / len(places)
    sources: list[WeightSource] = [
        HttpSource(item, token=token, tls=tls, rate=shared) if "://" in item else DirectorySource(VersionStore(item))
        for item in places
    ]
    return sources[0] if len(sources) == 1 else Spread(sources)
