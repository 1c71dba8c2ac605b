"""Routes by which a browser logs in with a token, once, and asks who it is."""

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
    caller = tokens.identify(body.token)
    login = request.app[LOGINS].begin(caller.token, tokens.expiry(caller.token))
    response = reply(request, msgspec.structs.replace(_reported(caller), key=login.key))
    login.put_into(request, response)
    return response


@AREA("GET", "/v1/login")
async def _who() -> LoginInfo:
    """Who calls, and what they may do."""
    return _reported(CALLER.get())


@AREA("DELETE", "/v1/login", scope="open")
async def _logout(request: web.Request) -> web.Response:
    """Have the browser forget its login."""
    response = reply(request, {})
    request.app[LOGINS].end(request, response)
    return response


def _reported(caller: Caller) -> LoginInfo:
    return LoginInfo(scope=caller.scope, everything=caller.everything, owner=caller.owner, token=caller.token)
