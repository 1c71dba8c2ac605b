"""Routes by which a browser logs in with a token, once, and asks who it is. A coordinator's are made of the same."""

from __future__ import annotations

import msgspec
from aiohttp import web

from daemon.api.route import Area
from daemon.api.wire import reply
from daemon.auth.access import CALLER, Caller
from daemon.auth.tokens import TokenStore
from sandbox.messages.tokens import LoginInfo, LoginRequest
from sandbox.page import Logins

AREA = Area()
LOGINS: web.AppKey[Logins] = web.AppKey("logins", Logins)


@AREA("POST", "/v1/login", answer=LoginInfo, scope="open")
async def _login(request: web.Request, tokens: TokenStore, body: LoginRequest) -> web.Response:
    """Log a browser in with a token: a cookie, and the key that goes with it. Ends with the token."""
    return begun(request, tokens, request.app[LOGINS], body)


def begun(
    request: web.Request, tokens: TokenStore, logins: Logins, body: LoginRequest, *, cluster: bool = False
) -> web.Response:
    """The answer that logs a browser in. Raises Unauthorized."""
    caller = tokens.identify(body.token)
    login = logins.begin(caller.token, tokens.expiry(caller.token))
    response = reply(request, msgspec.structs.replace(reported(caller, cluster=cluster), key=login.key))
    login.put_into(request, response)
    return response


@AREA("GET", "/v1/login")
async def _who() -> LoginInfo:
    """Who calls, and what they may do."""
    return reported(CALLER.get())


@AREA("DELETE", "/v1/login", scope="open")
async def _logout(request: web.Request) -> web.Response:
    """Have the browser forget its login."""
    response = reply(request, {})
    request.app[LOGINS].end(request, response)
    return response


def reported(caller: Caller, *, cluster: bool = False) -> LoginInfo:
    return LoginInfo(
        scope=caller.scope, everything=caller.everything, owner=caller.owner, token=caller.token, cluster=cluster
    )


def shown_by(request: web.Request, tokens: TokenStore, logins: Logins) -> Caller:
    """Who calls: by a token, a browser's login, or the socket itself. Raises Unauthorized."""
    if "Authorization" not in request.headers and (token := logins.subject(request)) is not None:
        return tokens.existing(token)
    return tokens.caller(request)
