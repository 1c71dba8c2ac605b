"""Routes of the file tree of a sandbox: single files, directories, whole trees as tar, watching, comparing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from aiohttp import web

from daemon.api.presence import while_asked, while_there
from daemon.api.wire import HOST, RAW, Route, Stream, chunks, frame, packed, parameters, ready, reply, streaming
from daemon.auth.access import CALLER
from daemon.turns import watches
from daemon.turns.turns import LiveSandbox
from sandbox.container.cgroup import parse_bytes
from sandbox.container.pipes import in_thread, put
from sandbox.messages import Change, FileEvent, FileInfo
from sandbox.names import native
from sandbox.tree import archive, diff, files, safe_path

TREE_MOST = 64 << 30  # bytes of the files of one upload where the sandbox has no disk limit
CHUNK = 1 << 18


def _live(request: web.Request) -> LiveSandbox:
    live = request.app[HOST].live(request.match_info["id"])
    live.need_alive()
    return live


_Path = Annotated[str, msgspec.Meta(min_length=1, max_length=4096, pattern=r"^[^\0]*$")]  # as it is told
_Mode = Annotated[str, msgspec.Meta(pattern="^[0-7]{1,4}$")]  # permission bits, octal
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class PathQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    path: _Path


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


class DiffQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    checkpoint: Annotated[str, msgspec.Meta(max_length=100)]
    why: bool = False


class Written(msgspec.Struct, kw_only=True):
    """daemon -> SDK: how much of a tree was unpacked."""

    bytes: int


# --------------------------------------------------------------------------- single files


async def _read(request: web.Request) -> web.StreamResponse:
    """A part of a regular file, or all of it, as it is read: at the pace of a slow reader."""
    live, asked = _live(request), parameters(request, ReadQuery)
    part, first = await asyncio.to_thread(_begin, live.container.inside, asked)
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


def _begin(inside: safe_path.SandboxRoot, asked: ReadQuery) -> tuple[files.Part, bytes]:
    part = files.Part(inside, asked.path, asked.offset, asked.limit)
    with contextlib.ExitStack() as undo:
        undo.enter_context(part)
        first = part.next()
        undo.pop_all()
    return part, first


async def _write(request: web.Request) -> web.Response:
    """Write a regular file, or append to it. A body that breaks off changes nothing."""
    live, asked = _live(request), parameters(request, WriteQuery)
    with tempfile.SpooledTemporaryFile(files.CHUNK, dir=str(request.app[HOST].images.folder)) as spool:
        try:
            async for data in chunks(request):
                await asyncio.to_thread(spool.write, data)  # to the disk, under no name, what is larger than a chunk
        except OSError as error:
            raise safe_path.refused(error, asked.path) from error
        spool.seek(0)
        await _alter(live, asked.path, files.write, asked.path, spool, mode=int(asked.mode, 8), append=asked.append)
    return reply(request, {})


async def _status(request: web.Request) -> web.Response:
    """What a path is; links are not followed."""
    live, path = _live(request), parameters(request, PathQuery).path
    return reply(request, await asyncio.to_thread(files.status, live.container.inside, live.row.uid_base, path))


async def _entries(request: web.Request) -> web.Response:
    """The entries of a directory."""
    live, path = _live(request), parameters(request, PathQuery).path
    return reply(request, await asyncio.to_thread(files.entries, live.container.inside, live.row.uid_base, path))


async def _make_directory(request: web.Request) -> web.Response:
    """Make a directory with its parents."""
    asked = parameters(request, MakeQuery)
    await _alter(_live(request), asked.path, files.make_directory, asked.path, mode=int(asked.mode, 8))
    return reply(request, {})


async def _move(request: web.Request) -> web.Response:
    """Rename a file or directory."""
    asked = parameters(request, MoveQuery)
    live = _live(request)
    async with live.altering("move", asked.path, asked.to):
        await asyncio.to_thread(files.move, live.container.inside, live.row.uid_base, asked.path, asked.to)
    return reply(request, {})


async def _remove(request: web.Request) -> web.Response:
    """Remove a file, or a directory with what is in it."""
    asked = parameters(request, BranchQuery)
    await _alter(_live(request), asked.path, files.remove, asked.path, recursive=asked.recursive)
    return reply(request, {})


async def _alter(live: LiveSandbox, path: str, change: Callable[..., Any], *args: Any, **named: Any) -> Any:
    async with live.altering(change.__name__, path):
        return await asyncio.to_thread(change, live.container.inside, live.row.uid_base, *args, **named)


# --------------------------------------------------------------------------- whole trees


async def _download(request: web.Request) -> web.StreamResponse:
    """A directory (its content) or a file as a tar stream."""
    live, path = _live(request), parameters(request, PathQuery).path
    inside, base = live.container.inside, live.row.uid_base
    await asyncio.to_thread(files.status, inside, base, path) if path.strip("/") else None  # refused before the stream
    response = web.StreamResponse(headers={"Content-Type": "application/x-tar"})
    reader, writer = os.pipe2(os.O_CLOEXEC)
    packing = in_thread(_pack, inside, base, path, writer)
    with os.fdopen(reader, "rb", buffering=0) as stream:
        try:
            await response.prepare(request)
            while part := await asyncio.to_thread(stream.read, CHUNK):
                await response.write(part)
        except ConnectionError:
            return response  # the reader went away; the packer meets a closed pipe
    await packing  # a failure breaks the stream off: half a tree must not look like a whole one
    await response.write_eof()
    return response


def _pack(inside: safe_path.SandboxRoot, base: int, path: str, writer: int) -> None:
    with (
        contextlib.suppress(BrokenPipeError),  # the reader went away
        os.fdopen(writer, "wb", buffering=CHUNK) as out,
        inside.opened() as root,
    ):
        archive.pack(root, native(path), out, uid_base=base)


async def _upload(request: web.Request) -> web.Response:
    """Unpack a tar stream into a directory, which is made when need be."""
    live, path = _live(request), parameters(request, PathQuery).path
    limit = parse_bytes(live.row.limits.disk) if live.row.limits.disk is not None else TREE_MOST
    async with live.altering("unpack", path):
        reader, writer = os.pipe2(os.O_CLOEXEC)
        unpacking = in_thread(_unpack, live.container.inside, live.row.uid_base, path, reader, limit)
        try:
            with os.fdopen(writer, "wb", buffering=0) as out:
                async for part in chunks(request):
                    if not unpacking.done():  # after a refusal the rest is read all the same: then the answer arrives
                        with contextlib.suppress(BrokenPipeError):
                            await asyncio.to_thread(put, out, part)
        finally:
            written = await unpacking
    return reply(request, Written(bytes=written))


def _unpack(inside: safe_path.SandboxRoot, base: int, path: str, reader: int, limit: int) -> int:
    with (
        os.fdopen(reader, "rb", buffering=CHUNK) as stream,
        inside.opened() as root,
        safe_path.as_sandbox_root(base),
    ):
        safe_path.make_parents(root, files.absolute(path))
        with safe_path.opened(root, native(path), os.O_RDONLY | os.O_DIRECTORY) as directory:
            return archive.unpack(stream, directory, limit=limit)


# --------------------------------------------------------------------------- watching


async def _watch(request: web.Request) -> web.StreamResponse:
    """Changes below a directory as they happen, until it is gone or the sandbox is restored."""
    live, asked = _live(request), parameters(request, BranchQuery)
    inside = live.container.inside
    response = streaming(request)

    async def send() -> None:
        async with watches.events(inside.opened, asked.path, recursive=asked.recursive) as events:
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


async def _diff(request: web.Request) -> web.Response:
    """How the file tree differs from a checkpoint."""
    asked = parameters(request, DiffQuery)
    form: diff.Form = "msgpack" if packed(request) else "json"
    work = request.app[HOST].diff(request.match_info["id"], asked.checkpoint, why=asked.why, form=form)
    return ready(request, await while_asked(request, work))


_WRITE = 256 << 20  # bytes of a file that is written by one request
_TAR = "application/x-tar"
ROUTES: list[Route] = [
    Route("GET", "/v1/sandboxes/{id}/files", _read, query=ReadQuery, answer=bytes),
    Route("PUT", "/v1/sandboxes/{id}/files", _write, query=WriteQuery, body=bytes, body_most=_WRITE, scope="exec"),
    Route("DELETE", "/v1/sandboxes/{id}/files", _remove, query=BranchQuery, scope="exec"),
    Route("GET", "/v1/sandboxes/{id}/files/status", _status, query=PathQuery, answer=FileInfo),
    Route("POST", "/v1/sandboxes/{id}/files/move", _move, query=MoveQuery, scope="exec"),
    Route("GET", "/v1/sandboxes/{id}/files/watch", _watch, query=BranchQuery, answer=Stream(FileEvent)),
    Route("GET", "/v1/sandboxes/{id}/entries", _entries, query=PathQuery, answer=list[FileInfo]),
    Route("PUT", "/v1/sandboxes/{id}/entries", _make_directory, query=MakeQuery, scope="exec"),
    Route("GET", "/v1/sandboxes/{id}/tree", _download, query=PathQuery, answer=bytes, content=_TAR),
    Route(
        "PUT",
        "/v1/sandboxes/{id}/tree",
        _upload,
        query=PathQuery,
        body=bytes,
        body_most=TREE_MOST,
        content=_TAR,
        answer=Written,
        scope="exec",
    ),
    Route("GET", "/v1/sandboxes/{id}/diff", _diff, query=DiffQuery, answer=list[Change]),
]
