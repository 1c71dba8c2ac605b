"""Routes of checkpoints, restores and forks."""

from __future__ import annotations

from aiohttp import web

from daemon.api.wire import HOST, body, number, reply
from sandbox.errors import Invalid
from sandbox.messages import (
    CheckpointRequest,
    ForkRequest,
    RestoreRequest,
)

WAIT_MOST = 600.0  # seconds of one long poll


async def _tree(request: web.Request) -> web.Response:
    return reply(request, request.app[HOST].tree(request.match_info["id"]))


async def _checkpoint(request: web.Request) -> web.Response:
    host = request.app[HOST]
    wanted = await body(request, CheckpointRequest)
    flight = await host.loop(request.match_info["id"]).checkpoint(wanted.label)
    await flight.settled(durable=wanted.wait == "durable")
    if flight.error is not None:
        raise flight.error
    return reply(request, flight.row.info(), 201)


async def _restore(request: web.Request) -> web.Response:
    wanted = await body(request, RestoreRequest)
    return reply(request, await request.app[HOST].restore(request.match_info["id"], wanted))


async def _fork_sandbox(request: web.Request) -> web.Response:
    wanted = await body(request, ForkRequest)
    return reply(request, await request.app[HOST].fork_sandbox(request.match_info["id"], wanted.count), 201)


async def _wait(request: web.Request) -> web.Response:
    wait = request.query.get("wait")
    if wait not in (None, "captured", "durable"):
        raise Invalid(f"wait must be captured or durable, not {wait!r}")
    timeout = number(request, "timeout", 60.0, WAIT_MOST)
    return reply(
        request,
        await request.app[HOST].wait_checkpoint(request.match_info["id"], wait, timeout),  # type: ignore[arg-type]
    )


async def _fork(request: web.Request) -> web.Response:
    wanted = await body(request, ForkRequest)
    return reply(request, await request.app[HOST].fork(request.match_info["id"], wanted.count), 201)


ROUTES: list[web.RouteDef] = [
    web.get("/v1/sandboxes/{id}/checkpoints", _tree),
    web.post("/v1/sandboxes/{id}/checkpoints", _checkpoint),
    web.post("/v1/sandboxes/{id}/restore", _restore),
    web.post("/v1/sandboxes/{id}/fork", _fork_sandbox),
    web.get("/v1/checkpoints/{id}", _wait),
    web.post("/v1/checkpoints/{id}/fork", _fork),
]
