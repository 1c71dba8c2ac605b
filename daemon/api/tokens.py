"""Routes of the tokens that callers over TCP show."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from daemon.api.wire import TOKENS, Route, body, reply
from daemon.auth.access import Grant
from sandbox.messages.tokens import ApiToken, NewToken, TokenRequest


async def _create(request: web.Request) -> web.Response:
    """Make a token. Its text is told this once."""
    wanted = await body(request, TokenRequest)
    grant, text = await asyncio.to_thread(
        request.app[TOKENS].create,
        name=wanted.name,
        scope=wanted.scope,
        owner=wanted.owner,
        lifetime=wanted.lifetime,
        quota=wanted.quota,
    )
    return reply(request, NewToken(token=_told(grant), text=text), 201)


async def _list(request: web.Request) -> web.Response:
    """The tokens, the oldest first."""
    return reply(request, [_told(grant) for grant in request.app[TOKENS].list()])


async def _revoke(request: web.Request) -> web.Response:
    """Refuse a token from now on. Its sandboxes stay."""
    grant = await asyncio.to_thread(request.app[TOKENS].revoke, request.match_info["token"])
    return reply(request, _told(grant))


def _told(grant: Grant) -> ApiToken:
    """What is told of a token: all but the hash of its secret."""
    return msgspec.convert(grant, ApiToken, from_attributes=True)


ROUTES: list[Route] = [
    Route("POST", "/v1/tokens", _create, body=TokenRequest, answer=NewToken, status=201, scope="admin"),
    Route("GET", "/v1/tokens", _list, answer=list[ApiToken], scope="admin"),
    Route("DELETE", "/v1/tokens/{token}", _revoke, answer=ApiToken, scope="admin"),
]
