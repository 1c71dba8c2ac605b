"""The file tree of a sandbox, as the SDK offers it: ``sb.files``."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sandbox.container.pipes import in_thread, put
from sandbox.descriptors import closing
from sandbox.errors import Invalid, NotFound, PagurusError
from sandbox.messages import FileEvent, FileInfo
from sandbox.sdk.transport import Facet, encoded

if TYPE_CHECKING:
    from aiohttp import ClientResponse

BYTES = "application/octet-stream"
TAR = "application/x-tar"
CHUNK = 1 << 18
MAX_READ = 1 << 30  # bytes of a file read into memory, when the caller sets no limit
MAX_TREE = 64 << 30  # bytes of the data of a downloaded tree, when the caller sets no limit


class Files(Facet):
    """The file tree of a sandbox. Paths are absolute or relative to its root.

    `service`: of a composition, whose paths are meant; None: its main one.

    Changes made here belong to the next turn's effects: the next checkpoint holds them. Raises NotFound,
    Invalid (not that kind of file, or not part of the tree), NoSpace, SandboxDead.
    """

    # ----------------------------------------------------------------- single files

    async def read(self, path: str, *, offset: int = 0, limit: int | None = None, service: str | None = None) -> bytes:
        """The content of a regular file: at most `limit` bytes from `offset`.

        Raises Invalid where no `limit` is given and there is more than 1 GiB, such as a sparse file of the sandbox's.
        """
        async with self._content(path, offset, limit, service) as response:
            if limit is None and (size := response.content_length or 0) > MAX_READ:
                raise Invalid(f"{path} holds {size} bytes, too many at once", hint="give a limit, or use stream()")
            return await response.read()

    async def stream(
        self, path: str, *, offset: int = 0, limit: int | None = None, service: str | None = None
    ) -> AsyncIterator[bytes]:
        """The same bytes in parts as they come, at most 256 KiB each. The host reads no faster than the caller.

        The file's size is that of the beginning: what is appended since is not included. Raises when the
        stream breaks off before its end.
        """
        async with self._content(path, offset, limit, service) as response:
            async for data in response.content.iter_chunked(CHUNK):
                yield data

    def _content(
        self, path: str, offset: int, limit: int | None, service: str | None
    ) -> AbstractAsyncContextManager[ClientResponse]:
        part = {"limit": str(limit)} if limit is not None else {}
        return self._client.request("GET", self._url("files", service, path=path, offset=str(offset), **part), None, "")

    async def write(
        self, path: str, data: bytes | str, *, mode: int = 0o644, append: bool = False, service: str | None = None
    ) -> None:
        """Write a regular file, of at most 256 MiB at once; missing parents are made. Text is UTF-8.

        `mode` is for a new file. Nothing is changed before all of `data` has arrived.
        """
        if not isinstance(data, bytes | bytearray | memoryview | str):  # bytes(5) would be five zeros
            raise TypeError(f"the content of a file is bytes or text, not {type(data).__name__}")
        url = self._url("files", service, path=path, mode=f"{mode:o}", append="1" if append else "0")
        raw = data.encode() if isinstance(data, str) else bytes(data)
        await self._client.raw("PUT", url, raw if len(raw) <= CHUNK else _slices(raw), BYTES)

    async def append(self, path: str, data: bytes | str, *, service: str | None = None) -> None:
        """Write at the end of a regular file, which is made when it is missing."""
        await self.write(path, data, append=True, service=service)

    async def stat(self, path: str, *, service: str | None = None) -> FileInfo:
        """What `path` is; a symbolic link is not followed."""
        return await self._client.call("GET", self._url("files/status", service, path=path), FileInfo)

    async def exists(self, path: str, *, service: str | None = None) -> bool:
        """Whether there is anything at `path`; a dangling link counts."""
        try:
            await self.stat(path, service=service)
        except NotFound:
            return False
        return True

    async def list(self, path: str = "/", *, service: str | None = None) -> list[FileInfo]:
        """The entries of a directory, by name."""
        return await self._client.call("GET", self._url("entries", service, path=path), list[FileInfo])

    async def mkdir(self, path: str, *, mode: int = 0o755, service: str | None = None) -> None:
        """Make a directory with its missing parents; one that exists stays as it is."""
        await self._client.call("PUT", self._url("entries", service, path=path, mode=f"{mode:o}"), dict[str, Any])

    async def move(self, source: str, target: str, *, service: str | None = None) -> None:
        """Rename a file or directory, over a file that is there; missing parents of `target` are made."""
        await self._client.call("POST", self._url("files/move", service, path=source, to=target), dict[str, Any])

    async def remove(self, path: str, *, recursive: bool = False, service: str | None = None) -> None:
        """Remove a file, a link or an empty directory; with `recursive`, a directory and what is in it."""
        url = self._url("files", service, path=path, recursive="1" if recursive else "0")
        await self._client.call("DELETE", url, dict[str, Any])

    # ----------------------------------------------------------------- whole trees

    async def upload(
        self,
        local: str | Path,
        path: str,
        *,
        progress: Callable[[int], Any] | None = None,
        service: str | None = None,
        without: Collection[str] = (),
    ) -> int:
        """Copy a local file, or the content of a local directory, into the directory `path`.

        Modes, times, links and hard links are kept; everything belongs to the sandbox's root. `progress` is
        called with the bytes sent so far. `without`: paths below the directory that are left out, such as
        ``["node_modules"]``. Returns the bytes of the files.
        """
        source = Path(local)
        if not await asyncio.to_thread(source.exists):
            raise Invalid(f"{source} does not exist", hint="name a local file or directory")
        reader, writer = os.pipe()
        packing = in_thread(_pack, source, writer, without)
        try:
            answer = await self._client.raw(
                "PUT", self._url("tree", service, path=path), _chunks(reader, progress), TAR
            )
        finally:
            await packing
        return int(msgspec.msgpack.decode(answer, type=dict[str, int])["bytes"])

    async def download(
        self,
        path: str,
        local: str | Path,
        *,
        below: str = "",
        limit: int = MAX_TREE,
        progress: Callable[[int], Any] | None = None,
        service: str | None = None,
    ) -> int:
        """Copy a file, or the content of a directory, into the local directory `local`, made when need be.

        Nothing outside `local` is touched, whatever the sandbox put into the tree: links are copied as links, and
        nothing is written through one, not even through one that came with an earlier download. What is needed for
        that is that `local` itself is a path of yours; a part of it that a sandbox may have filled, or has chosen,
        belongs into `below`, a path in `local`. If `local` is a symbolic link it is followed only where it ends with a
        slash. Modes are kept but for set-id and sticky bits, holes stay holes; devices, FIFOs and owners are left out.
        Raises Invalid beyond `limit` bytes of data, NoSpace before the disk is full. Returns the bytes of the files.
        """
        from sandbox.tree import host_files  # only trees need it: tarfile and its kin

        opening = contextlib.ExitStack()
        directory = await asyncio.to_thread(opening.enter_context, host_files.target(local, below))
        reader, writer = os.pipe()
        unpacking = in_thread(_unpack, opening, directory, reader, limit)
        sent = 0
        try:
            with os.fdopen(writer, "wb", buffering=0) as out:
                async with self._client.request("GET", self._url("tree", service, path=path), None, "") as response:
                    async for part in response.content.iter_chunked(CHUNK):
                        try:
                            await asyncio.to_thread(put, out, part)
                        except BrokenPipeError:
                            break  # the archive was refused; unpacking says why
                        sent += len(part)
                        if progress is not None:
                            progress(sent)
        except BaseException:
            with contextlib.suppress(PagurusError):  # it saw half an archive
                await unpacking
            raise
        return int(await unpacking)

    async def archive(self, path: str, *, service: str | None = None) -> AsyncIterator[bytes]:
        """A directory (its content) or a file as a tar stream, owners as the sandbox sees them."""
        async with self._client.request("GET", self._url("tree", service, path=path), None, "") as response:
            async for data in response.content.iter_chunked(CHUNK):
                yield data

    # ----------------------------------------------------------------- watching

    async def watch(
        self, path: str = "/", *, recursive: bool = False, service: str | None = None
    ) -> AsyncIterator[FileEvent]:
        """Changes below a directory as they happen; paths are relative to it.

        Ends with an ``end`` event when the directory is gone or the sandbox was restored. A store through a
        shared mapping raises no event.
        """
        url = self._url("files/watch", service, path=path, recursive="1" if recursive else "0")
        async with contextlib.aclosing(self._client.frames("GET", url, FileEvent)) as events:
            async for event in events:
                yield event
                if event.kind == "end":
                    return

    def _url(self, area: str, service: str | None, **query: str) -> str:
        named = {} if service is None else {"service": service}
        return f"{self._path}/{area}?{encoded(**query, **named)}"


# --------------------------------------------------------------------------- pipes between threads and the loop


async def _slices(data: bytes) -> AsyncIterator[memoryview]:
    view = memoryview(data)
    for start in range(0, len(view), CHUNK):
        yield view[start : start + CHUNK]


async def _chunks(reader: int, progress: Callable[[int], Any] | None) -> AsyncIterator[bytes]:
    sent = 0
    with os.fdopen(reader, "rb", buffering=0) as stream:
        while part := await asyncio.to_thread(stream.read, CHUNK):
            yield part
            sent += len(part)
            if progress is not None:
                progress(sent)


def _pack(source: Path, writer: int, without: Collection[str]) -> None:
    from sandbox.tree import archive

    directory = source if source.is_dir() else source.absolute().parent
    with (
        closing(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as root,
        contextlib.suppress(BrokenPipeError),
        os.fdopen(writer, "wb", buffering=CHUNK) as out,
    ):
        archive.pack(root, "/" if source.is_dir() else f"/{source.name}", out, without=without)


def _unpack(opening: contextlib.ExitStack, directory: int, reader: int, limit: int) -> int:
    from sandbox.tree import host_files

    with opening, os.fdopen(reader, "rb", buffering=CHUNK) as stream:
        return host_files.unpack(stream, directory, limit=limit)
