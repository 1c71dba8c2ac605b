"""Routes of the file tree of a sandbox: single files, directories, whole trees as tar, watching, comparing."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from aiohttp import web

from daemon.api.wire import HOST, frame, query, reply, streaming
from daemon.turns import TurnLoop
from sandbox import archive, beneath, files
from sandbox.cgroup import parse_bytes
from sandbox.errors import Invalid, PagurusError, SandboxDead
from sandbox.messages import FileEvent
from sandbox.pipes import in_thread, put
from sandbox.watch import Watch

TREE_MOST = 64 << 30  # bytes of the files of one upload where the sandbox has no disk limit
CHUNK = 1 << 18
WATCHES_MOST = 64  # at once; the kernel allows few inotify instances
BACKLOG = 10_000  # events between a watch and a reader that is slower

_watches = asyncio.Semaphore(WATCHES_MOST)


def _loop(request: web.Request) -> TurnLoop:
    loop = request.app[HOST].loop(request.match_info["id"])
    loop.need_alive()
    return loop


def _flag(request: web.Request, name: str) -> bool:
    return request.query.get(name) == "1"


def _mode(request: web.Request, default: int) -> int:
    text = request.query.get("mode", f"{default:o}")
    if not text or set(text) - set("01234567") or int(text, 8) > 0o7777:
        raise Invalid(f"mode must be octal permission bits, not {text!r}")
    return int(text, 8)


def _count(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    if not text.isdecimal() or int(text) > 1 << 62:
        raise Invalid(f"{name} must be a number of bytes, not {text!r}")
    return int(text)


# --------------------------------------------------------------------------- single files


async def _read(request: web.Request) -> web.Response:
    """A part of a regular file, or all of it."""
    loop, path = _loop(request), query(request, "path")
    offset, limit = _count(request, "offset", 0), _count(request, "limit", files.READ_LIMIT)
    data = await asyncio.to_thread(
        files.read, loop.container.init_pid, path, offset=offset, limit=min(limit, files.READ_LIMIT)
    )
    return web.Response(body=data, content_type="application/octet-stream")


async def _write(request: web.Request) -> web.Response:
    """Write a regular file, or append to it."""
    loop, path, mode, append = _loop(request), query(request, "path"), _mode(request, 0o644), _flag(request, "append")
    data = await request.read()
    await _alter(loop, path, files.write, path, data, mode=mode, append=append)
    return reply(request, {})


async def _status(request: web.Request) -> web.Response:
    """What a path is; links are not followed."""
    loop, path = _loop(request), query(request, "path")
    return reply(request, await asyncio.to_thread(files.status, loop.container.init_pid, loop.row.uid_base, path))


async def _entries(request: web.Request) -> web.Response:
    """The entries of a directory."""
    loop, path = _loop(request), query(request, "path")
    return reply(request, await asyncio.to_thread(files.entries, loop.container.init_pid, loop.row.uid_base, path))


async def _make_directory(request: web.Request) -> web.Response:
    """Make a directory with its parents."""
    path = query(request, "path")
    await _alter(_loop(request), path, files.make_directory, path, mode=_mode(request, 0o755))
    return reply(request, {})


async def _move(request: web.Request) -> web.Response:
    """Rename a file or directory."""
    source, target = query(request, "path"), query(request, "to")
    await _alter(_loop(request), source, files.move, source, target)
    return reply(request, {})


async def _remove(request: web.Request) -> web.Response:
    """Remove a file, or a directory with what is in it."""
    path = query(request, "path")
    await _alter(_loop(request), path, files.remove, path, recursive=_flag(request, "recursive"))
    return reply(request, {})


async def _alter(loop: TurnLoop, path: str, change: Callable[..., Any], *args: Any, **named: Any) -> Any:
    async with loop.altering(path):
        return await asyncio.to_thread(change, loop.container.init_pid, loop.row.uid_base, *args, **named)


# --------------------------------------------------------------------------- whole trees


async def _download(request: web.Request) -> web.StreamResponse:
    """A directory (its content) or a file as a tar stream."""
    loop, path = _loop(request), query(request, "path")
    pid, base = loop.container.init_pid, loop.row.uid_base
    await asyncio.to_thread(files.status, pid, base, path) if path.strip("/") else None  # refused before the stream
    response = web.StreamResponse(headers={"Content-Type": "application/x-tar"})
    reader, writer = os.pipe2(os.O_CLOEXEC)
    packing = in_thread(_pack, pid, base, path, writer)
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


def _pack(pid: int, base: int, path: str, writer: int) -> None:
    with (
        contextlib.suppress(BrokenPipeError),  # the reader went away
        os.fdopen(writer, "wb", buffering=CHUNK) as out,
        beneath.sandbox_root(pid) as root,
    ):
        archive.pack(root, path, out, uid_base=base)


async def _upload(request: web.Request) -> web.Response:
    """Unpack a tar stream into a directory, which is made when need be."""
    loop, path = _loop(request), query(request, "path")
    limit = parse_bytes(loop.row.limits.disk) if loop.row.limits.disk is not None else TREE_MOST
    async with loop.altering(path):
        reader, writer = os.pipe2(os.O_CLOEXEC)
        unpacking = in_thread(_unpack, loop.container.init_pid, loop.row.uid_base, path, reader, limit)
        try:
            with os.fdopen(writer, "wb", buffering=0) as out:
                async for part in request.content.iter_chunked(CHUNK):
                    if not unpacking.done():  # after a refusal the rest is read all the same: then the answer arrives
                        with contextlib.suppress(BrokenPipeError):
                            await asyncio.to_thread(put, out, part)
        finally:
            written = await unpacking
    return reply(request, {"bytes": written})


def _unpack(pid: int, base: int, path: str, reader: int, limit: int) -> int:
    with (
        os.fdopen(reader, "rb", buffering=CHUNK) as stream,
        beneath.sandbox_root(pid) as root,
        beneath.as_sandbox_root(base),
    ):
        beneath.make_parents(root, files.absolute(path))
        with beneath.opened(root, path, os.O_RDONLY | os.O_DIRECTORY) as directory:
            return archive.unpack(stream, directory, limit=limit)


# --------------------------------------------------------------------------- watching


async def _watch(request: web.Request) -> web.StreamResponse:
    """Changes below a directory as they happen, until it is gone or the sandbox is restored."""
    loop, path = _loop(request), query(request, "path")
    container, pid = loop.container, loop.container.init_pid

    @contextlib.contextmanager
    def root() -> Iterator[int]:
        if not container.alive or container.init_pid != pid:
            raise SandboxDead("it was restored or died")
        with beneath.sandbox_root(pid) as opened:
            if not container.alive:
                raise SandboxDead("it died")
            yield opened

    if _watches.locked():
        raise Invalid(f"more than {WATCHES_MOST} watches at once", remedy="end some")
    async with _watches:
        watch = await asyncio.to_thread(Watch, root, path, recursive=_flag(request, "recursive"))
        try:
            return await _send_events(request, watch, loop)
        finally:
            asyncio.get_running_loop().remove_reader(watch.descriptor)
            watch.close()


async def _send_events(request: web.Request, watch: Watch, loop: TurnLoop) -> web.StreamResponse:
    events: asyncio.Queue[FileEvent] = asyncio.Queue(BACKLOG)

    def arrived() -> None:
        try:
            found = watch.read()
        except PagurusError:
            found = [FileEvent(kind="end")]
        for event in found:
            if events.qsize() >= BACKLOG - 2 and event.kind != "end":
                event = FileEvent(kind="overflow")
            with contextlib.suppress(asyncio.QueueFull):  # an overflow is in it already
                events.put_nowait(event)

    asyncio.get_running_loop().add_reader(watch.descriptor, arrived)
    response = streaming(request)
    try:
        await response.prepare(request)
        while True:
            event = await events.get()
            await response.write(frame(request, event))
            if event.kind == "end":
                break
        await response.write_eof()
    except ConnectionError:
        pass  # the reader went away
    return response


# --------------------------------------------------------------------------- comparing


async def _diff(request: web.Request) -> web.Response:
    """How the file tree differs from a checkpoint."""
    return reply(request, await request.app[HOST].diff(request.match_info["id"], query(request, "checkpoint")))


ROUTES: list[web.RouteDef] = [
    web.get("/v1/sandboxes/{id}/files", _read),
    web.put("/v1/sandboxes/{id}/files", _write),
    web.delete("/v1/sandboxes/{id}/files", _remove),
    web.get("/v1/sandboxes/{id}/files/status", _status),
    web.post("/v1/sandboxes/{id}/files/move", _move),
    web.get("/v1/sandboxes/{id}/files/watch", _watch),
    web.get("/v1/sandboxes/{id}/entries", _entries),
    web.put("/v1/sandboxes/{id}/entries", _make_directory),
    web.get("/v1/sandboxes/{id}/tree", _download),
    web.put("/v1/sandboxes/{id}/tree", _upload),
    web.get("/v1/sandboxes/{id}/diff", _diff),
]
