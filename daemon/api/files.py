"""Routes of the file tree of a sandbox: single files, directories, whole trees as tar, watching, comparing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable
from typing import IO, Annotated, Any

import msgspec
from aiohttp import web

from daemon.api.presence import while_requested, while_there
from daemon.api.route import Area, ValueStream
from daemon.api.wire import CHUNK, DISK, RAW, chunks, frame, packed, piped, ready, streaming
from daemon.auth.access import CALLER
from daemon.host import compare
from daemon.host.host import Host
from daemon.turns import watches
from daemon.turns.turns import LiveSandbox
from sandbox.container.cgroup import parse_bytes
from sandbox.container.pipes import in_thread, put
from sandbox.errors import Invalid
from sandbox.messages import Change, FileEvent, FileInfo, FileVersions
from sandbox.messages.processes import ServiceName
from sandbox.names import native
from sandbox.tree import archive, diff, files, safe_path

AREA = Area()
MAX_TREE = 64 << 30  # bytes of the files of one upload where the sandbox has no disk limit
MAX_WRITE = 256 << 20  # bytes of a file that is written by one request
_TAR = "application/x-tar"


_Path = Annotated[str, msgspec.Meta(min_length=1, max_length=4096, pattern=r"^[^\0]*$")]  # as it is shown
_Mode = Annotated[str, msgspec.Meta(pattern="^[0-7]{1,4}$")]  # permission bits, octal
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class PathQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    path: _Path
    service: ServiceName | None = None  # of a composition, whose path it is; None: its main one


class ReadQuery(PathQuery):
    offset: _Bytes = 0
    limit: _Bytes = 1 << 62


class WriteQuery(PathQuery):
    mode: _Mode = "644"
    append: bool = False


class MakeQuery(PathQuery):
    mode: _Mode = "755"


class MoveQuery(PathQuery):
    to: _Path


class BranchQuery(PathQuery):
    recursive: bool = False


_Checkpoint = Annotated[str, msgspec.Meta(max_length=100)]


class DiffQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    checkpoint: _Checkpoint
    to: _Checkpoint | None = None  # another checkpoint; none: as it is now
    why: bool = False


class VersionsQuery(PathQuery):
    checkpoint: _Checkpoint
    to: _Checkpoint | None = None


class UnpackResult(msgspec.Struct, kw_only=True):
    """daemon -> SDK: how much of a tree was unpacked."""

    bytes: int


# --------------------------------------------------------------------------- single files


@AREA("GET", "/v1/sandboxes/{id}/files", answer=bytes)
async def _read(request: web.Request, alive: LiveSandbox, query: ReadQuery) -> web.StreamResponse:
    """A part of a regular file, or all of it, as it is read: at the pace of a slow reader."""
    inside, path = alive.located(query.service, query.path)
    part, first = await asyncio.to_thread(_begin, inside, path, query)
    with part:
        if not part.left:
            return web.Response(body=first, content_type=RAW)
        response = web.StreamResponse(headers={"Content-Type": RAW})
        response.content_length = part.size  # less than that is half a file, and the reader knows
        with contextlib.suppress(ConnectionError):  # the reader went away
            await response.prepare(request)
            await response.write(first)
            while data := await asyncio.to_thread(part.next):
                await response.write(data)
            await response.write_eof()
        return response


def _begin(inside: safe_path.SandboxRoot, path: str, requested: ReadQuery) -> tuple[files.FileRange, bytes]:
    part = files.FileRange(inside, path, requested.offset, requested.limit)
    with contextlib.ExitStack() as undo:
        undo.enter_context(part)
        first = part.next()
        undo.pop_all()
    return part, first


@AREA("PUT", "/v1/sandboxes/{id}/files", body=bytes, max_body=MAX_WRITE, scope="exec")
async def _write(request: web.Request, host: Host, alive: LiveSandbox, query: WriteQuery) -> None:
    """Write a regular file, or append to it. A body that breaks off changes nothing."""
    with tempfile.SpooledTemporaryFile(files.CHUNK, dir=str(host.images.directory)) as spool:
        try:
            async for data in chunks(request):
                request[DISK].add(len(data))
                await asyncio.to_thread(spool.write, data)  # to the disk, under no name, what is larger than a chunk
        except OSError as error:
            raise safe_path.refused(error, query.path) from error
        spool.seek(0)
        await _alter(alive, query, files.write, spool, mode=int(query.mode, 8), append=query.append)


@AREA("GET", "/v1/sandboxes/{id}/files/status")
async def _status(alive: LiveSandbox, query: PathQuery) -> FileInfo:
    """What a path is; links are not followed."""
    inside, path = alive.located(query.service, query.path)
    return await asyncio.to_thread(files.status, inside, alive.row.uid_base, path)


@AREA("GET", "/v1/sandboxes/{id}/entries")
async def _entries(alive: LiveSandbox, query: PathQuery) -> list[FileInfo]:
    """The entries of a directory."""
    inside, path = alive.located(query.service, query.path)
    return await asyncio.to_thread(files.entries, inside, alive.row.uid_base, path)


@AREA("PUT", "/v1/sandboxes/{id}/entries", scope="exec")
async def _make_directory(alive: LiveSandbox, query: MakeQuery) -> None:
    """Make a directory with its parents."""
    await _alter(alive, query, files.make_directory, mode=int(query.mode, 8))


@AREA("POST", "/v1/sandboxes/{id}/files/move", scope="exec")
async def _move(alive: LiveSandbox, query: MoveQuery) -> None:
    """Rename a file or directory."""
    async with alive.altering("move", query.path, query.to):
        (inside, source), (other, target) = (alive.located(query.service, path) for path in (query.path, query.to))
        with inside.opened() as before, other.opened() as after:
            if not os.path.samestat(os.fstat(before), os.fstat(after)):
                raise Invalid("a move begins and ends in one volume or outside of all", hint="copy it, then remove it")
        await asyncio.to_thread(files.move, inside, alive.row.uid_base, source, target)


@AREA("DELETE", "/v1/sandboxes/{id}/files", scope="exec")
async def _remove(alive: LiveSandbox, query: BranchQuery) -> None:
    """Remove a file, or a directory with what is in it."""
    await _alter(alive, query, files.remove, recursive=query.recursive)


async def _alter(alive: LiveSandbox, query: PathQuery, change: Callable[..., Any], *args: Any, **named: Any) -> Any:
    async with alive.altering(change.__name__, query.path):
        inside, path = alive.located(query.service, query.path)
        return await asyncio.to_thread(change, inside, alive.row.uid_base, path, *args, **named)


# --------------------------------------------------------------------------- whole trees


@AREA("GET", "/v1/sandboxes/{id}/tree", answer=bytes, content=_TAR)
async def _download(request: web.Request, alive: LiveSandbox, query: PathQuery) -> web.StreamResponse:
    """A directory (its content) or a file as a tar stream."""
    (inside, path), base = alive.located(query.service, query.path), alive.row.uid_base
    await asyncio.to_thread(files.reach, inside, path)  # refused before the stream

    def pack(out: IO[bytes]) -> None:
        with inside.opened() as root:
            archive.pack(root, native(path), out, uid_base=base)

    return await piped(request, _TAR, pack)


@AREA("PUT", "/v1/sandboxes/{id}/tree", body=bytes, max_body=MAX_TREE, content=_TAR, scope="exec")
async def _upload(request: web.Request, alive: LiveSandbox, query: PathQuery) -> UnpackResult:
    """Unpack a tar stream into a directory, which is made when need be."""
    path = query.path
    limit = parse_bytes(alive.row.limits.disk) if alive.row.limits.disk is not None else MAX_TREE
    async with alive.altering("unpack", path):
        reader, writer = os.pipe2(os.O_CLOEXEC)
        inside, below = alive.located(query.service, path)
        unpacking = in_thread(unpack, inside, alive.row.uid_base, below, reader, limit)
        try:
            with os.fdopen(writer, "wb", buffering=0) as out:
                async for part in chunks(request):
                    if not unpacking.done():  # after a refusal the rest is read all the same: then the answer arrives
                        with contextlib.suppress(BrokenPipeError):
                            await asyncio.to_thread(put, out, part)
        finally:
            written = await unpacking
    return UnpackResult(bytes=written)


def unpack(inside: safe_path.SandboxRoot, base: int, path: str, reader: int, limit: int) -> int:
    """Unpack what comes from the descriptor `reader`, which is closed, into a directory of a living sandbox."""
    with (
        os.fdopen(reader, "rb", buffering=CHUNK) as stream,
        inside.opened() as root,
        safe_path.as_sandbox_root(base),
    ):
        safe_path.make_parents(root, files.absolute(path))
        with safe_path.opened(root, native(path), os.O_RDONLY | os.O_DIRECTORY) as directory:
            return archive.unpack(stream, directory, limit=limit)


# --------------------------------------------------------------------------- watching


@AREA("GET", "/v1/sandboxes/{id}/files/watch", answer=ValueStream(FileEvent))
async def _watch(request: web.Request, alive: LiveSandbox, query: BranchQuery) -> web.StreamResponse:
    """Changes below a directory as they happen, until it is gone or the sandbox is restored."""
    inside, path = alive.located(query.service, query.path)
    response = streaming(request)

    async def send() -> None:
        async with watches.events(inside.opened, path, recursive=query.recursive) as events:
            await response.prepare(request)
            event = None
            while event is None or event.kind != "end":
                event = await events.get()
                await response.write(frame(request, event))
            await response.write_eof()

    with watches.place(CALLER.get().owner):
        await while_there(request, send())
    return response


# --------------------------------------------------------------------------- comparing


@AREA("GET", "/v1/sandboxes/{id}/diff", answer=list[Change])
async def _diff(request: web.Request, host: Host, live: LiveSandbox, query: DiffQuery) -> web.Response:
    """How the file tree differs from a checkpoint."""
    work = compare.changes(host, live.row.id, query.checkpoint, to=query.to, why=query.why, form=_form(request))
    return ready(request, await while_requested(request, work))


@AREA("GET", "/v1/sandboxes/{id}/diff/file", answer=FileVersions)
async def _versions(request: web.Request, host: Host, live: LiveSandbox, query: VersionsQuery) -> web.Response:
    """How one path was in a checkpoint and how it is now: kind, size, and the beginning of what is in it."""
    work = compare.versions(host, live.row.id, query.checkpoint, query.path, to=query.to, form=_form(request))
    return ready(request, await while_requested(request, work))


def _form(request: web.Request) -> diff.Form:
    return "msgpack" if packed(request) else "json"
