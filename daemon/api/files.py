"""Routes of the file tree of a sandbox."""

from __future__ import annotations

import asyncio

from aiohttp import web

from daemon.api.wire import HOST, query, reply
from sandbox import files
from sandbox.errors import Invalid


async def _read(request: web.Request) -> web.Response:
    loop = request.app[HOST].loop(request.match_info["id"])
    loop.need_alive()
    data = await asyncio.to_thread(files.read, loop.container.init_pid, query(request, "path"))
    return web.Response(body=data, content_type="application/octet-stream")


async def _write(request: web.Request) -> web.Response:
    loop = request.app[HOST].loop(request.match_info["id"])
    path, mode = query(request, "path"), request.query.get("mode", "644")
    if not mode or set(mode) - set("01234567") or int(mode, 8) > 0o7777:
        raise Invalid(f"mode must be octal permission bits, not {mode!r}")
    append = request.query.get("append") == "1"
    data = await request.read()
    async with loop.altering(path):
        pid, base = loop.container.init_pid, loop.row.uid_base
        await asyncio.to_thread(files.write, pid, base, path, data, mode=int(mode, 8), append=append)
    return reply(request, {})


async def _entries(request: web.Request) -> web.Response:
    loop = request.app[HOST].loop(request.match_info["id"])
    loop.need_alive()
    return reply(request, await asyncio.to_thread(files.entries, loop.container.init_pid, query(request, "path")))


async def _diff(request: web.Request) -> web.Response:
    return reply(request, await request.app[HOST].diff(request.match_info["id"], query(request, "checkpoint")))


ROUTES: list[web.RouteDef] = [
    web.get("/v1/sandboxes/{id}/files", _read),
    web.put("/v1/sandboxes/{id}/files", _write),
    web.get("/v1/sandboxes/{id}/entries", _entries),
    web.get("/v1/sandboxes/{id}/diff", _diff),
]
