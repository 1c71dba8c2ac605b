"""Where a reader gets versions from: a folder on this host, or a relay over HTTP.

Owns: the two sources. Does not own: what is fetched, in which order (puller).
Guarantee: content is returned only when its hash is right; a broken connection costs the bytes that were on the way,
a flipped byte one more fetch of that chunk.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import aiohttp
import msgspec

from rollout.weights.store import Lease, VersionStore
from rollout.weights.versions import Ref, VersionRef, digest
from sandbox.errors import EngineFailed, Invalid, NotFound, PagurusError, Unauthorized

T = TypeVar("T")
ATTEMPTS = 6  # in a row without a byte of progress
PATIENCE = 20.0  # seconds without a byte
BLOCK = 1 << 18
LISTING_MOST = 64 << 20


class Source(Protocol):
    async def versions(self) -> list[VersionRef]:
        """Oldest first."""

    async def chunk(self, ref: Ref) -> bytes:
        """Its content, whose hash was checked. Raises NotFound, EngineFailed."""

    async def lease(self, reader: str, lease: Lease) -> None:
        """Say what this reader stands on and fetches, so that it is not collected."""

    async def close(self) -> None: ...


class FolderSource:
    """A store on this host; below ``/dev/shm`` it is shared memory."""

    def __init__(self, store: VersionStore):
        self.store = store

    async def versions(self) -> list[VersionRef]:
        return await asyncio.to_thread(self.store.versions)

    async def chunk(self, ref: Ref) -> bytes:
        return await asyncio.to_thread(self.store.get, ref)

    async def lease(self, reader: str, lease: Lease) -> None:
        await asyncio.to_thread(self.store.lease, reader, lease)

    async def close(self) -> None:
        return None


class Rate:
    """At most so many bytes a second, over all connections that share it. A burst of a quarter of a second passes."""

    def __init__(self, bytes_s: float | None):
        self.bytes_s = bytes_s
        self._free = 0.0

    async def spend(self, count: int) -> None:
        if self.bytes_s is None:
            return
        now = time.monotonic()
        self._free = max(self._free, now - 0.25) + count / self.bytes_s
        if self._free > now:
            await asyncio.sleep(self._free - now)


class HttpSource:
    """A relay, or the publisher's own server. `rate` bounds what is read, in bytes a second."""

    def __init__(
        self, url: str, *, token: str | None = None, tls: ssl.SSLContext | None = None, rate: float | None = None
    ):
        self.url, self._token, self._tls = url.rstrip("/"), token, tls
        self.rate = Rate(rate)
        self.received = 0  # bytes of content, those that were thrown away as well
        self.refetched = 0  # chunks whose hash was wrong
        self._session: aiohttp.ClientSession | None = None

    async def versions(self) -> list[VersionRef]:
        raw = await self._again(lambda: self._bytes("/versions"))
        try:
            return msgspec.msgpack.decode(raw, type=list[VersionRef])
        except msgspec.MsgspecError as error:
            raise EngineFailed(f"{self.url}/versions answered nonsense: {error}", remedy="is it a relay?") from None

    async def chunk(self, ref: Ref) -> bytes:
        got = bytearray()
        damaged = False

        async def go_on() -> bytes:
            nonlocal damaged
            await self._read(f"/chunks/{ref.digest}", got, ref.size, fresh=damaged)
            content = bytes(got)
            if digest(content) != ref.digest:
                self.refetched += 1
                damaged = True
                got.clear()
                raise EngineFailed(f"{self.url} sent weights {ref.digest[:12]} that have another hash")
            return content

        return await self._again(go_on, lambda: len(got))

    async def lease(self, reader: str, lease: Lease) -> None:
        async def put() -> bytes:
            async with self._open().put(f"{self.url}/readers/{reader}", data=msgspec.msgpack.encode(lease)) as response:
                await _refused(response)
            return b""

        await self._again(put)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _again(self, act: Callable[[], Awaitable[T]], progress: Callable[[], int] = lambda: 0) -> T:
        """Carry out `act` until it succeeds; given up after `ATTEMPTS` in a row that brought nothing."""
        failed, before = 0, 0
        while True:
            try:
                return await act()
            except (aiohttp.ClientError, TimeoutError, EngineFailed) as error:
                failed = 1 if progress() > before else failed + 1
                before = progress()
                if failed >= ATTEMPTS:
                    raise EngineFailed(f"{self.url} gives no weights: {error}", remedy="look at the relay") from error
                await asyncio.sleep(min(2.0, 0.05 * 2**failed))

    async def _bytes(self, path: str) -> bytes:
        got = bytearray()
        await self._read(path, got, LISTING_MOST)
        return bytes(got)

    async def _read(self, path: str, got: bytearray, most: int, *, fresh: bool = False) -> None:
        """Adds what is missing in `got`, `most` bytes in all. `fresh`: the other side looks at its copy first."""
        headers = {"Range": f"bytes={len(got)}-"} if got else {}
        if fresh:
            headers["Cache-Control"] = "no-cache"
        async with self._open().get(self.url + path, headers=headers) as response:
            if response.status == 416:  # all of it is here
                return
            await _refused(response)
            if got and response.status != 206:
                got.clear()
            async for block in response.content.iter_chunked(BLOCK):
                if len(got) + len(block) > most:
                    got.clear()
                    raise EngineFailed(f"{self.url}{path} is longer than its {most} bytes")
                got += block
                self.received += len(block)
                await self.rate.spend(len(block))

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None, connect=10, sock_read=PATIENCE),
                connector=aiohttp.TCPConnector(limit=8, ssl=self._tls if self._tls is not None else True),
                headers={"Authorization": f"Bearer {self._token}"} if self._token else {},
                read_bufsize=BLOCK,
                auto_decompress=False,
            )
        return self._session


def source_of(place: str, *, token: str | None = None) -> Source:
    """Of an URL or a folder."""
    return HttpSource(place, token=token) if "://" in place else FolderSource(VersionStore(place))


async def _refused(response: aiohttp.ClientResponse) -> None:
    """Raise what a refusal means; one that may pass as EngineFailed, which is tried again."""
    if response.status < 400:
        return
    text = (await response.content.read(500)).decode("utf-8", "replace")
    kinds: dict[int, type[PagurusError]] = {400: Invalid, 401: Unauthorized, 403: Unauthorized, 404: NotFound}
    raise kinds.get(response.status, EngineFailed)(f"{response.url} answered {response.status}: {text}")
