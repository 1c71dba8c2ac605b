"""Routes of the LLM gateway: upstreams, tokens, the record, commands of agents outside.

The requests of agents do not come this way: each sandbox has a listener of its own (:mod:`daemon.gateway.listener`).
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from aiohttp import web

from daemon.api.commands import MAX_STDIN
from daemon.api.route import Area
from daemon.auth import access
from daemon.gateway.service import GatewayService
from daemon.turns.turns import LiveSandbox
from sandbox.errors import Invalid
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

AREA = Area()


class _ListQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1000


@AREA("GET", "/v1/gateway", scope="monitor")
async def _statistics(gateway: GatewayService) -> GatewayStatistics:
    """What the gateway has done since the daemon started."""
    return gateway.statistics()


@AREA("GET", "/v1/gateway/upstreams")
async def _upstreams(gateway: GatewayService) -> list[UpstreamInfo]:
    """The upstreams by name, without their keys. Only administrators see their addresses."""
    result = gateway.handler.upstreams.list()
    if not access.CALLER.get().everything:
        result = [UpstreamInfo(name=item.name) for item in result]
    return result


@AREA("PUT", "/v1/gateway/upstreams/{name}", scope="admin")
async def _put_upstream(gateway: GatewayService, name: str, body: Upstream) -> None:
    """Make or change an upstream."""
    if not UPSTREAM_NAME.match(name):
        raise Invalid(f"no upstream may be called {name[:100]!r}", hint="letters, digits, dots, dashes")
    await gateway.put_upstream(name, body)


@AREA("DELETE", "/v1/gateway/upstreams/{name}", scope="admin")
async def _drop_upstream(gateway: GatewayService, name: str) -> None:
    """Remove an upstream that no sandbox uses."""
    await gateway.drop_upstream(name)


@AREA("POST", "/v1/sandboxes/{id}/gateway/token", status=201, scope="exec")
async def _token(gateway: GatewayService, live: LiveSandbox) -> TokenInfo:
    """A new token for the agent of this sandbox; the one before ends."""
    return await gateway.token(live.row.id)


@AREA("POST", "/v1/sandboxes/{id}/gateway/exec", scope="exec", keyed="again", max_body=MAX_STDIN)
async def _exec(request: web.Request, gateway: GatewayService, live: LiveSandbox, body: ExecRequest) -> ExecResult:
    """Run the next command of an agent outside, or return its recorded result."""
    call = request.headers.get("Idempotency-Key", "")[:200]
    return await gateway.exec(live.row.id, body, call)


@AREA("POST", "/v1/sandboxes/{id}/gateway/replay", scope="exec")
async def _replay(gateway: GatewayService, live: LiveSandbox, body: ReplayRequest) -> ReplayInfo:
    """Answer the coming requests from the record up to a checkpoint."""
    return ReplayInfo(exchanges=await gateway.replay(live.row.id, body.checkpoint))


@AREA("GET", "/v1/sandboxes/{id}/gateway/exchanges")
async def _exchanges(gateway: GatewayService, live: LiveSandbox, query: _ListQuery) -> list[ExchangeInfo]:
    """The last exchanges with the model, the oldest first."""
    return await gateway.journal.exchanges(live.row.id, query.limit)


@AREA("GET", "/v1/sandboxes/{id}/gateway/exchanges/{exchange}")
async def _exchange(gateway: GatewayService, live: LiveSandbox, exchange: str) -> Exchange:
    """One exchange with its content."""
    if not (exchange.isascii() and exchange.isdigit() and len(exchange) < 19):
        raise Invalid("an exchange is a number", hint="`exchanges` lists them")
    return await gateway.journal.read(live.row.id, int(exchange))
