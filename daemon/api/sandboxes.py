"""Routes of the host and of a sandbox as a whole."""

from __future__ import annotations

import asyncio
import os

from aiohttp import web

from daemon.api.wire import HOST, body, reply
from sandbox.messages import (
    CreateRequest,
)


async def _health(request: web.Request) -> web.Response:
    return reply(request, {"status": "ok", "pid": os.getpid()})


async def _statistics(request: web.Request) -> web.Response:
    return reply(request, request.app[HOST].statistics())


async def _images(request: web.Request) -> web.Response:
    return reply(request, await asyncio.to_thread(request.app[HOST].images.list))


async def _list(request: web.Request) -> web.Response:
    return reply(request, request.app[HOST].sandboxes())


async def _create(request: web.Request) -> web.Response:
    return reply(request, await request.app[HOST].create(await body(request, CreateRequest)), 201)


async def _info(request: web.Request) -> web.Response:
    return reply(request, request.app[HOST].loop(request.match_info["id"]).row.info())


async def _remove(request: web.Request) -> web.Response:
    await request.app[HOST].remove(request.match_info["id"])
    return reply(request, {})


async def _kill(request: web.Request) -> web.Response:
    await request.app[HOST].kill(request.match_info["id"])
    return reply(request, {})


ROUTES: list[web.RouteDef] = [
    web.get("/v1/health", _health),
    web.get("/v1/statistics", _statistics),
    web.get("/v1/images", _images),
    web.get("/v1/sandboxes", _list),
    web.post("/v1/sandboxes", _create),
    web.get("/v1/sandboxes/{id}", _info),
    web.delete("/v1/sandboxes/{id}", _remove),
    web.post("/v1/sandboxes/{id}/kill", _kill),
]
