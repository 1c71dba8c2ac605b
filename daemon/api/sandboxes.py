"""Routes of the host and of a sandbox as a whole."""

from __future__ import annotations

import os
from typing import Annotated, Any

import msgspec
from aiohttp import web

from daemon import metrics
from daemon.api.wire import HOST, JSON, Route, body, parameters, reply
from daemon.catalogue import put_sandbox
from sandbox.messages import CreateRequest, LabelsRequest, SandboxInfo, Statistics

DESCRIPTION: web.AppKey[dict[str, Any]] = web.AppKey("description", dict)


class Health(msgspec.Struct, kw_only=True):
    """daemon -> everybody: GET /v1/health"""

    status: str
    pid: int


async def _health(request: web.Request) -> web.Response:
    """Whether the daemon answers. Needs no token."""
    return reply(request, Health(status="ok", pid=os.getpid()))


async def _openapi(request: web.Request) -> web.Response:
    """This description. Needs no token."""
    return web.Response(body=msgspec.json.encode(request.app[DESCRIPTION]), content_type=JSON)


async def _metrics(request: web.Request) -> web.Response:
    """What Prometheus reads."""
    return web.Response(body=metrics.exposition(request.app[HOST]), headers={"Content-Type": metrics.CONTENT_TYPE})


async def _statistics(request: web.Request) -> web.Response:
    """Counts of the whole host since the daemon started."""
    return reply(request, request.app[HOST].statistics())


class ListQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    label: Annotated[str, msgspec.Meta(max_length=4096)] = ""  # "name=value,other": all of them must be there


async def _list(request: web.Request) -> web.Response:
    """The sandboxes of the caller that have these labels; an administrator sees all."""
    wanted = [part.partition("=") for part in parameters(request, ListQuery).label.split(",") if part]
    found = request.app[HOST].sandboxes()
    return reply(request, [info for info in found if _labelled(info.labels, wanted)])


def _labelled(labels: dict[str, str], wanted: list[tuple[str, str, str]]) -> bool:
    return all(name in labels and (not equals or labels[name] == value) for name, equals, value in wanted)


async def _set_labels(request: web.Request) -> web.Response:
    """Set labels of a sandbox; those with null are removed."""
    live = request.app[HOST].live(request.match_info["id"])
    wanted = await body(request, LabelsRequest)
    merged = {**live.row.labels, **wanted.labels}
    live.row.labels = {name: value for name, value in merged.items() if value is not None}
    await request.app[HOST].services.catalogue.write([put_sandbox(live.row)])
    return reply(request, live.row.info())


async def _create(request: web.Request) -> web.Response:
    """Make a sandbox from an image. It runs when the answer comes."""
    return reply(request, await request.app[HOST].create(await body(request, CreateRequest)), 201)


async def _info(request: web.Request) -> web.Response:
    """One sandbox."""
    return reply(request, request.app[HOST].live(request.match_info["id"]).row.info())


async def _remove(request: web.Request) -> web.Response:
    """Remove a sandbox with its checkpoints, but for what forks of it need."""
    await request.app[HOST].remove(request.match_info["id"])
    return reply(request, {})


async def _kill(request: web.Request) -> web.Response:
    """Kill all processes of a sandbox. A restore brings them back."""
    await request.app[HOST].kill(request.match_info["id"])
    return reply(request, {})


ROUTES: list[Route] = [
    Route("GET", "/v1/health", _health, answer=Health, scope="open"),
    Route("GET", "/v1/openapi.json", _openapi, answer=dict[str, Any], scope="open"),
    Route("GET", "/metrics", _metrics, answer=bytes, content="text/plain"),
    Route("GET", "/v1/statistics", _statistics, answer=Statistics),
    Route("GET", "/v1/sandboxes", _list, query=ListQuery, answer=list[SandboxInfo]),
    Route("PATCH", "/v1/sandboxes/{id}/labels", _set_labels, body=LabelsRequest, answer=SandboxInfo, scope="exec"),
    Route(
        "POST",
        "/v1/sandboxes",
        _create,
        body=CreateRequest,
        answer=SandboxInfo,
        status=201,
        scope="exec",
        keyed="anew",
    ),
    Route("GET", "/v1/sandboxes/{id}", _info, answer=SandboxInfo),
    Route("DELETE", "/v1/sandboxes/{id}", _remove, scope="exec"),
    Route("POST", "/v1/sandboxes/{id}/kill", _kill, scope="exec"),
]
