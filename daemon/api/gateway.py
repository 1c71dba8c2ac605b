"""Routes of the LLM gateway: upstreams, tokens, the record, commands of agents outside.

The requests of agents do not come this way: each sandbox has a listener of its own (:mod:`daemon.gateway.listener`).
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from aiohttp import web

from daemon.api.wire import HOST, Route, body, parameters, reply
from daemon.auth import access
from daemon.gateway.service import GatewayService
from sandbox.errors import Invalid, Unsupported
from sandbox.messages import (
    Exchange,
    ExchangeInfo,
    ExecRequest,
    ExecResult,
    GatewayStatistics,
    ReplayInfo,
    ReplayRequest,
    TokenInfo,
    Upstream,
    UpstreamInfo,
)
from sandbox.messages.gateway import UPSTREAM_NAME


class _ListQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1000


def _gateway(request: web.Request) -> GatewayService:
    found: GatewayService | None = request.app[HOST].gateway
    if found is None:
        raise Unsupported("this daemon has no gateway")
    return found


def _sandbox(request: web.Request) -> str:
    return request.app[HOST].live(request.match_info["id"]).row.id


async def _statistics(request: web.Request) -> web.StreamResponse:
    """What the gateway has done since the daemon started."""
    return reply(request, _gateway(request).statistics())


async def _upstreams(request: web.Request) -> web.StreamResponse:
    """The upstreams by name, without their keys. Where they lie is told to administrators only."""
    found = _gateway(request).desk.upstreams.list()
    if not access.CALLER.get().everything:
        found = [UpstreamInfo(name=each.name) for each in found]
    return reply(request, found)


async def _put_upstream(request: web.Request) -> web.StreamResponse:
    """Make or change an upstream."""
    name = request.match_info["name"]
    if not UPSTREAM_NAME.match(name):
        raise Invalid(f"no upstream may be called {name[:100]!r}", remedy="letters, digits, dots, dashes")
    await _gateway(request).put_upstream(name, await body(request, Upstream))
    return reply(request, {})


async def _drop_upstream(request: web.Request) -> web.StreamResponse:
    """Remove an upstream that no sandbox uses."""
    await _gateway(request).drop_upstream(request.match_info["name"])
    return reply(request, {})


async def _token(request: web.Request) -> web.StreamResponse:
    """A new token for the agent of this sandbox; the one before ends."""
    return reply(request, await _gateway(request).token(_sandbox(request)), 201)


async def _exec(request: web.Request) -> web.StreamResponse:
    """Run the next command of an agent outside, or tell its recorded result."""
    call = request.headers.get("Idempotency-Key", "")[:200]
    return reply(request, await _gateway(request).exec(_sandbox(request), await body(request, ExecRequest), call))


async def _replay(request: web.Request) -> web.StreamResponse:
    """Answer the coming requests from the record up to a checkpoint."""
    wanted = await body(request, ReplayRequest)
    count = await _gateway(request).replay(_sandbox(request), wanted.checkpoint)
    return reply(request, ReplayInfo(exchanges=count))


async def _exchanges(request: web.Request) -> web.StreamResponse:
    """The last exchanges with the model, the oldest first."""
    asked = parameters(request, _ListQuery)
    return reply(request, await _gateway(request).journal.exchanges(_sandbox(request), asked.limit))


async def _exchange(request: web.Request) -> web.StreamResponse:
    """One exchange with its content."""
    number = request.match_info["exchange"]
    if not (number.isascii() and number.isdigit() and len(number) < 19):
        raise Invalid("an exchange is a number")
    return reply(request, await _gateway(request).journal.read(_sandbox(request), int(number)))


ROUTES: list[Route] = [
    Route("GET", "/v1/gateway", _statistics, answer=GatewayStatistics),
    Route("GET", "/v1/gateway/upstreams", _upstreams, answer=list[UpstreamInfo]),
    Route("PUT", "/v1/gateway/upstreams/{name}", _put_upstream, body=Upstream, scope="admin"),
    Route("DELETE", "/v1/gateway/upstreams/{name}", _drop_upstream, scope="admin"),
    Route("POST", "/v1/sandboxes/{id}/gateway/token", _token, answer=TokenInfo, status=201, scope="exec"),
    Route(
        "POST",
        "/v1/sandboxes/{id}/gateway/exec",
        _exec,
        body=ExecRequest,
        answer=ExecResult,
        scope="exec",
        keyed="again",  # the journal knows it
        body_most=64 << 20,  # its stdin
    ),
    Route("POST", "/v1/sandboxes/{id}/gateway/replay", _replay, body=ReplayRequest, answer=ReplayInfo, scope="exec"),
    Route("GET", "/v1/sandboxes/{id}/gateway/exchanges", _exchanges, query=_ListQuery, answer=list[ExchangeInfo]),
    Route("GET", "/v1/sandboxes/{id}/gateway/exchanges/{exchange}", _exchange, answer=Exchange),
]
