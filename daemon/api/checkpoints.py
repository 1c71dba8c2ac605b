"""Routes of checkpoints, restores and forks."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from aiohttp import web

from daemon.api.wire import HOST, Route, body, parameters, reply
from sandbox.messages import CheckpointInfo, CheckpointRequest, ForkEntry, ForkRequest, RestoreRequest, RestoreResult

WAIT_MOST = 600.0  # seconds of one long poll


class WaitQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What to wait for, and how many seconds at most. Without `wait` the answer comes at once."""

    wait: Literal["captured", "durable"] | None = None
    timeout: Annotated[float, msgspec.Meta(ge=0, le=WAIT_MOST)] = 60.0


async def _tree(request: web.Request) -> web.Response:
    """The checkpoints of a sandbox and those that they descend from, the oldest first."""
    return reply(request, request.app[HOST].tree(request.match_info["id"]))


async def _checkpoint(request: web.Request) -> web.Response:
    """Capture the state of a sandbox as it is now."""
    host = request.app[HOST]
    wanted = await body(request, CheckpointRequest)
    inflight = await host.live(request.match_info["id"]).checkpoint(wanted.label)
    durable = wanted.wait == "durable"
    await inflight.settled(durable=durable)
    if (trouble := inflight.trouble(durable=durable)) is not None:
        raise trouble
    return reply(request, inflight.row.info(), 201)


async def _restore(request: web.Request) -> web.Response:
    """Take a sandbox back to a checkpoint, in place. Also revives a dead one."""
    wanted = await body(request, RestoreRequest)
    return reply(request, await request.app[HOST].restore(request.match_info["id"], wanted))


async def _fork_sandbox(request: web.Request) -> web.Response:
    """Make sandboxes that continue from the state as it is now. Each succeeds or fails alone."""
    wanted = await body(request, ForkRequest)
    return reply(request, await request.app[HOST].fork_sandbox(request.match_info["id"], wanted.count), 201)


async def _wait(request: web.Request) -> web.Response:
    """A checkpoint, once it is captured or durable, or has failed, or the time is over."""
    asked = parameters(request, WaitQuery)
    info = await request.app[HOST].wait_checkpoint(request.match_info["checkpoint"], asked.wait, asked.timeout)
    return reply(request, info)


async def _fork(request: web.Request) -> web.Response:
    """Make sandboxes that continue from a checkpoint. Each succeeds or fails alone."""
    wanted = await body(request, ForkRequest)
    return reply(request, await request.app[HOST].fork(request.match_info["checkpoint"], wanted.count), 201)


ROUTES: list[Route] = [
    Route("GET", "/v1/sandboxes/{id}/checkpoints", _tree, answer=list[CheckpointInfo]),
    Route(
        "POST",
        "/v1/sandboxes/{id}/checkpoints",
        _checkpoint,
        body=CheckpointRequest,
        answer=CheckpointInfo,
        status=201,
        scope="exec",
        keyed="again",
    ),
    Route(
        "POST",
        "/v1/sandboxes/{id}/restore",
        _restore,
        body=RestoreRequest,
        answer=RestoreResult,
        scope="exec",
        keyed="again",
    ),
    Route(
        "POST",
        "/v1/sandboxes/{id}/fork",
        _fork_sandbox,
        body=ForkRequest,
        answer=list[ForkEntry],
        status=201,
        scope="exec",
        keyed="anew",
    ),
    Route("GET", "/v1/checkpoints/{checkpoint}", _wait, query=WaitQuery, answer=CheckpointInfo),
    Route(
        "POST",
        "/v1/checkpoints/{checkpoint}/fork",
        _fork,
        body=ForkRequest,
        answer=list[ForkEntry],
        status=201,
        scope="exec",
        keyed="anew",
    ),
]
