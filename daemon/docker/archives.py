"""`docker cp`: files of a container as an archive, and an archive into a container."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import posixpath
from typing import IO

from aiohttp import web

from daemon.docker import shown, streams
from daemon.docker.engine import Engine
from daemon.docker.paths import ROUTES, Call
from sandbox.container import services
from sandbox.container.cgroup import parse_bytes
from sandbox.container.pipes import in_thread
from sandbox.errors import NotFound
from sandbox.messages import FileInfo
from sandbox.tree import archive, files, safe_path

MAX_ARCHIVE = 64 << 30  # bytes where the sandbox has no limit of its disk
CHUNK = 1 << 18
_TYPES = {"directory": 1 << 31, "symlink": 1 << 27}  # of Go's os.FileMode


def _stat(engine: Engine, call: Call) -> tuple[str, str, FileInfo]:
    """The container and the path that are meant, and what is there. Raises NotFound. Blocks."""
    name, path = engine.name(call.id), posixpath.normpath("/" + call.query.get("path", "").lstrip("/"))
    if path == "/":
        return name, path, FileInfo(name="/", kind="directory", mode=0o755)
    own, inner = engine.live.located(name, path)
    try:
        if inner == "/":  # of a volume
            return name, path, FileInfo(name=posixpath.basename(path), kind="directory", mode=0o755)
        return name, path, files.status(own, engine.live.row.uid_base, inner)
    except NotFound:
        raise NotFound(f"Could not find the file {path} in container {name}", hint="look with ls") from None


def _header(info: FileInfo) -> dict[str, str]:
    said = {
        "name": info.name,
        "size": info.size,
        "mode": info.mode | _TYPES.get(info.kind, 0),
        "mtime": shown.timestamp(info.modified_at),
        "linkTarget": info.target or "",
    }
    return {"X-Docker-Container-Path-Stat": base64.b64encode(json.dumps(said).encode()).decode()}


@ROUTES("HEAD", "/containers/{id}/archive")
async def _stat_route(engine: Engine, call: Call) -> web.StreamResponse:
    _, _, info = await asyncio.to_thread(_stat, engine, call)
    return web.Response(headers=_header(info))


@ROUTES("GET", "/containers/{id}/archive")
async def _get(engine: Engine, call: Call) -> web.StreamResponse:
    name, path, info = await asyncio.to_thread(_stat, engine, call)
    response = web.StreamResponse(headers={"Content-Type": "application/x-tar", **_header(info)})
    reader, writer = os.pipe2(os.O_CLOEXEC)
    packing = in_thread(_pack, engine, name, path, writer)
    await response.prepare(call.request)
    with os.fdopen(reader, "rb", buffering=0) as packed:
        while part := await asyncio.to_thread(packed.read, CHUNK):
            await response.write(part)
    await packing
    await response.write_eof()
    return response


def _pack(engine: Engine, name: str, path: str, writer: int) -> None:
    """The entry at a path by its own name; of a directory with all that is in it."""
    (own, inner), base = engine.live.located(name, path), engine.live.row.uid_base
    with contextlib.suppress(BrokenPipeError), os.fdopen(writer, "wb") as out, own.opened() as root:
        archive.pack(root, inner, out, uid_base=base, named=inner != "/")


@ROUTES("PUT", "/containers/{id}/archive")
async def _put(engine: Engine, call: Call) -> web.StreamResponse:
    live = engine.live
    name, path, _ = await asyncio.to_thread(_stat, engine, call)
    disk, base = live.row.limits.disk, live.row.uid_base
    limit = MAX_ARCHIVE if disk is None else parse_bytes(disk)

    def unpack(stream: IO[bytes]) -> None:
        own, inner = live.located(name, path)
        rules = archive.Rules(owners=True, reserve=True, uid_base=base)
        with (
            own.opened() as root,
            safe_path.as_sandbox_root(base),
            safe_path.opened(root, inner, os.O_RDONLY | os.O_DIRECTORY) as directory,
        ):
            archive.unpack(stream, directory, limit=limit, rules=rules)

    async with live.altering("docker cp", services.below(name, path)):
        await streams.fed(call.request, unpack)
    return web.Response(status=200)
