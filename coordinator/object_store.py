"""States of sandboxes in a directory or in a bucket of the S3 protocol: they outlive all hosts.

::

    SANDBOX/00000001-whole-CHECKPOINT   everything
    SANDBOX/00000002-since-CHECKPOINT   what it has and the one before lacks

Guarantee: an object is there when all of it is, by the hash of the stream; one that breaks off is never seen. What is
there is found by its names alone, so that nothing can disagree with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.decide import replicate
from sandbox.content.joined import StreamChecker, joined
from sandbox.content.transfer import CHECKPOINT_ID, SANDBOX_ID
from sandbox.errors import Invalid, NoDaemon, NotFound, Protocol, Unsupported

NAME = re.compile(rf"(\d{{8}})-(whole|since)-({CHECKPOINT_ID.pattern})")
PART = 4 << 20  # bytes read at a time; what is smaller is sent in one request


@dataclass(frozen=True)
class StoredObject:
    """One object."""

    number: int
    complete: bool
    checkpoint: str
    size: int = 0

    def path(self, sandbox: str) -> str:
        return f"{sandbox}/{self.number:08d}-{'whole' if self.complete else 'since'}-{self.checkpoint}"

    @classmethod
    def of(cls, path: str, size: int) -> StoredObject | None:
        """None: it belongs to another program."""
        result = NAME.fullmatch(path.rpartition("/")[2])
        return None if result is None else cls(int(result[1]), result[2] == "whole", result[3], size)


class ObjectStore:
    """A :class:`coordinator.holders.CopyHolder`. One coordinator writes to it."""

    def __init__(self, url: str) -> None:
        """`url`: a directory, or ``s3://BUCKET/PREFIX``. Raises Invalid, Unsupported."""
        try:
            import obstore
            from obstore.store import LocalStore, S3Store
        except ImportError:
            raise Unsupported("obstore is not installed", hint='pip install "pagurus-runtime[cluster]"') from None
        self._obstore: Any = obstore
        self.directory = None if "://" in url else Path(url).absolute()
        try:
            if self.directory is not None:
                self._store: Any = LocalStore(self.directory, mkdir=True, automatic_cleanup=True)
                for torn in self.directory.glob("*/*#*"):
                    torn.unlink()
            elif url.startswith("s3://"):
                self._store = S3Store.from_url(url)
            else:
                raise Invalid(f"{url} is no store", hint="give a directory, or s3://BUCKET/PREFIX")
        except (obstore.exceptions.BaseError, ValueError, OSError) as error:
            raise Invalid(f"{url}: {_first(error)}", hint="see AWS_* in docs/cluster.md") from error
        self._links: dict[str, list[StoredObject]] = {}

    # ----------------------------------------------------------------- as a holder

    async def take(self, sandbox: str, checkpoint: str, stream: AsyncIterator[bytes], since: str) -> None:
        if not SANDBOX_ID.fullmatch(sandbox) or not CHECKPOINT_ID.fullmatch(checkpoint):
            raise Invalid(
                f"{sandbox} or {checkpoint} is no id", hint="give ids as `pagurus ls` and `pagurus tree` print them"
            )
        links = await self._listed(sandbox)
        chain = _upto(links, since) if since else []
        await self._remove(sandbox, [item for item in links if chain and item not in chain])  # what no chain names
        await self._put(sandbox, StoredObject(links[-1].number + 1 if links else 1, not since, checkpoint), stream)

    async def discard(self, sandbox: str, checkpoint: str) -> None:
        links = await self._listed(sandbox)
        keep = [] if links and links[-1].checkpoint == checkpoint else _chain(links)
        await self._remove(sandbox, [item for item in links if item not in keep])
        if replicate.join([item.size for item in keep]):
            await self._join(sandbox, keep)

    @contextlib.asynccontextmanager
    async def given(
        self, sandbox: str, checkpoint: str, since: str, have: bytes = b"", *, brief: bool = False
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        if since:
            raise NotFound("the object store cannot serve incremental checkpoints", hint="request it without a base")
        chain = _upto(await self._listed(sandbox), checkpoint)
        yield _threaded(joined(self._read(item.path(sandbox)) for item in reversed(chain)))

    # ----------------------------------------------------------------- objects

    async def _put(self, sandbox: str, link: StoredObject, stream: AsyncIterator[bytes]) -> None:
        size, checked = 0, StreamChecker()

        async def complete() -> AsyncIterator[bytes]:
            nonlocal size
            async for data in stream:
                size += len(data)
                checked.feed(data)
                yield data
            checked.finish()  # raised here, the object never becomes visible

        path = link.path(sandbox)
        with self._reported():
            parts = _gathered(complete())
            first = await anext(parts, b"")
            data = first if len(first) < PART else _before(first, parts)
            await self._obstore.put_async(self._store, path, data)
            if self.directory is not None:
                await asyncio.to_thread(_sync, self.directory / path)
        self._links.setdefault(sandbox, []).append(StoredObject(link.number, link.complete, link.checkpoint, size))

    async def _join(self, sandbox: str, chain: Sequence[StoredObject]) -> None:
        """One object instead of many: most of what they hold is not needed any more. Damaged ones go."""
        complete = StoredObject(chain[-1].number + 1, True, chain[-1].checkpoint)
        try:
            async with self.given(sandbox, complete.checkpoint, "") as stream:
                await self._put(sandbox, complete, stream)
        except (Protocol, NotFound) as error:
            await self._remove(sandbox, chain)
            raise NotFound(f"{sandbox} is damaged in the store, and is copied whole: {error}") from error
        await self._remove(sandbox, chain)

    async def _remove(self, sandbox: str, doomed: Sequence[StoredObject]) -> None:
        """The newest first: what is left has all that it builds upon."""
        with self._reported():
            for item in sorted(doomed, key=lambda item: -item.number):
                with contextlib.suppress(FileNotFoundError):
                    await self._obstore.delete_async(self._store, item.path(sandbox))
        self._links[sandbox] = [item for item in self._links[sandbox] if item not in doomed]

    async def _listed(self, sandbox: str) -> list[StoredObject]:
        if sandbox not in self._links:
            with self._reported():
                result = await self._obstore.list(self._store, sandbox).collect_async()
            links = filter(None, (StoredObject.of(item["path"], item["size"]) for item in result))
            self._links[sandbox] = sorted(links, key=lambda link: link.number)
        return self._links[sandbox]

    def _read(self, path: str) -> Iterator[bytes]:
        """Blocks."""
        with self._reported():
            for data in self._obstore.get(self._store, path).stream(min_chunk_size=PART):
                yield bytes(data)

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """Errors of the store, as ours."""
        try:
            yield
        except FileNotFoundError as error:
            raise NotFound(
                f"not in the store: {_first(error)}", hint="check the bucket or directory of --replicate-store"
            ) from error
        except self._obstore.exceptions.BaseError as error:
            raise NoDaemon(
                f"the store does not answer: {_first(error)}",
                hint="check address, credentials and network of --replicate-store",
            ) from error


def _upto(links: Sequence[StoredObject], checkpoint: str) -> list[StoredObject]:
    """The objects that make up a state, the oldest first. Raises NotFound."""
    last = max((at for at, item in enumerate(links) if item.checkpoint == checkpoint), default=-1)
    chain = _chain(links[: last + 1])
    if not chain:
        raise NotFound(f"checkpoint {checkpoint} is not in the store", hint="choose another checkpoint")
    return chain


def _chain(links: Sequence[StoredObject]) -> list[StoredObject]:
    """From the last whole one on."""
    start = max((at for at, item in enumerate(links) if item.complete), default=len(links))
    return list(links[start:])


def _first(error: Exception) -> str:
    return str(error).partition("\n")[0]


async def _gathered(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """In pieces of at least PART bytes, but for the last."""
    pending = bytearray()
    async for data in stream:
        pending += data
        if len(pending) >= PART:
            yield bytes(pending)
            pending.clear()
    yield bytes(pending)


async def _before(first: bytes, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for data in parts:
        yield data


async def _threaded(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    """A blocking iterator, each piece made on a worker thread."""
    while (data := await asyncio.to_thread(_take, parts)) is not None:
        yield data


def _take(parts: Iterator[bytes]) -> bytes | None:
    taken = bytearray()
    for data in parts:
        taken += data
        if len(taken) >= PART:
            break
    return bytes(taken) or None


def _sync(path: Path) -> None:
    """The file, its name and that of its directory outlive the loss of power."""
    for item in (path, path.parent, path.parent.parent):
        fd = os.open(item, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
