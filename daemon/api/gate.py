"""What stands before every route: who calls, may they, how often, was it done already; and what is counted.

Guarantee: no handler runs before its caller is known and admitted, and none is called for a sandbox that the caller
does not see.

::

    request ▸ caller ▸ scope ▸ rate ▸ sandbox ▸ at once ▸ key: kept? replay : handler ▸ answer ▸ kept
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Protocol

from aiohttp import ClientConnectionResetError, web
from aiohttp.http import SERVER_SOFTWARE

from daemon import metrics
from daemon.api.idempotency import Answers, fingerprint, identity
from daemon.api.login import shown_by
from daemon.api.route import ApiRoute, Handler
from daemon.api.wire import DISK, JSON, MEMORY, ROUTE, carry_out, content, refusal
from daemon.auth import access
from daemon.auth.access import CALLER, Caller
from daemon.auth.pace import TokenRateLimits
from daemon.auth.shares import MAX_DISK, Shares, memory_part
from daemon.auth.tokens import TokenStore
from daemon.auth.visibility import KEY
from daemon.host.host import Host
from daemon.logs import REQUEST, SUBJECT, request_id
from sandbox.errors import NotFound
from sandbox.page import Logins

log = logging.getLogger("pagurus.access")

STARTED = web.RequestKey("started", web.StreamResponse)
KEY_HEADER = "Idempotency-Key"
ID_HEADER = "X-Request-Id"
LARGE = 1 << 20  # bytes of an answer that count as long as the caller does not read them
_UNKEPT = (401, 403, 429, 503)  # answers that say: it was not carried out


class Dialect(Protocol):
    """How those who call say who they are, and how they are refused."""

    def caller(self, request: web.Request) -> Caller:
        """Who calls. Raises Unauthorized."""

    def refusal(self, request: web.Request, error: BaseException) -> web.Response:
        """The answer for an error."""


class OwnDialect:
    """Of our own API: a token, a browser's login, or the socket itself."""

    def __init__(self, tokens: TokenStore, logins: Logins) -> None:
        self._tokens, self._logins = tokens, logins
        self.refusal = refusal

    def caller(self, request: web.Request) -> Caller:
        return shown_by(request, self._tokens, self._logins)


class Gate:
    """The gate of one host's API."""

    def __init__(self, host: Host, tokens: TokenStore, logins: Logins, answers: Answers | None) -> None:
        self._own = OwnDialect(tokens, logins)
        self.host = host
        self.tokens = tokens
        self._answers = answers
        self._pace = TokenRateLimits()
        self._memory = Shares("in memory", memory_part())
        self._disk = Shares("of uploads", MAX_DISK)

    def handler(self, route: ApiRoute, dialect: Dialect | None = None) -> Handler:
        """What the router calls for `route`. `dialect`: None is our own API's."""
        spoken = dialect or self._own

        async def handle(request: web.Request) -> web.StreamResponse:
            request[ROUTE] = route
            began = time.monotonic()
            answer: web.StreamResponse | None = None
            try:
                answer = await self._admit(request, route, spoken)
            except Exception as error:  # noqa: BLE001 - the boundary: a bug in one route is an answer and a log entry
                answer = _broken_off(request, error) if STARTED in request else spoken.refusal(request, error)
            finally:
                metrics.request(route.name, answer.status if answer is not None else 499, time.monotonic() - began)
            if log.isEnabledFor(logging.DEBUG):
                log.debug("%s %s %d", request.method, request.path, answer.status)
            return answer

        return handle

    async def _admit(self, request: web.Request, route: ApiRoute, dialect: Dialect) -> web.StreamResponse:
        CALLER.set(access.NOBODY)
        SUBJECT.set(None)
        caller = access.NOBODY if route.scope == "open" else dialect.caller(request)
        if (refused := access.refusal(caller, route.scope)) is not None:
            raise refused
        CALLER.set(caller)
        if route.scope == "exec" and route.method != "DELETE":
            self.host.fence.need_lease()
        self._pace.need(caller)
        if "/sandboxes/{id}" in route.path:
            # From here on the id, whether a name was given or not: handlers and keys see one spelling.
            row = self.host.live(request.match_info["id"]).row
            request.match_info["id"] = row.id
            SUBJECT.set(row)
        acting = self._pace.acting(caller) if route.scope == "exec" else contextlib.nullcontext()
        watched = self.tokens.watched(caller, request)
        with acting, watched, self._memory.call(caller) as memory, self._disk.call(caller) as disk:
            request[MEMORY], request[DISK] = memory, disk
            if not route.keyed or self._answers is None or KEY_HEADER not in request.headers:
                answer = await carry_out(request, route)
            else:
                answer = await self._once(request, route, dialect, caller, self._answers)
            if isinstance(answer, web.Response) and (answer.content_length or 0) > LARGE:
                memory.count(answer.content_length or 0)
                await _sent(request, answer)
            return answer

    # ----------------------------------------------------------------- once

    async def _once(
        self, request: web.Request, route: ApiRoute, dialect: Dialect, caller: Caller, answers: Answers
    ) -> web.StreamResponse:
        """Carry a keyed call out, or give the answer that it had."""
        assert route.keyed is not None
        form, query = request.headers.get("Accept", ""), request.rel_url.raw_query_string
        requested = fingerprint(request.content_type, f"{form}?{query}" if query else form, await content(request))
        name = identity(caller.token, request.method, request.path, request.headers[KEY_HEADER])
        retained, undo = await answers.claim(name, requested, route.keyed, caller.token)
        if retained is not None:
            metrics.replays.inc()
            replay = web.Response(
                body=retained.answer, status=retained.status or 200, headers={"Idempotency-Replayed": "true"}
            )
            replay.content_type = retained.kind or JSON
            return replay
        KEY.set(name)
        try:
            if undo:
                await self._undo(name)
            try:
                answer = await carry_out(request, route)
            except Exception as error:  # noqa: BLE001 - an error is an answer, and kept like one
                answer = dialect.refusal(request, error)
        except BaseException:
            answers.abandon(name)
            raise
        finally:
            KEY.set("")
        if answer.status in _UNKEPT or not isinstance(answer, web.Response):
            answers.release(name)
        else:
            body = bytes(answer.body or b"")  # type: ignore[arg-type]
            # The answer goes out first: who has it does not ask again, and who asks in between waits.
            asyncio.get_running_loop().call_soon(answers.finalize, name, answer.status, answer.content_type, body)
        return answer

    async def _undo(self, name: str) -> None:
        """Remove the sandboxes that a call made of which no caller got an answer."""
        for live in [live for live in self.host.live_sandboxes.values() if live.row.made_by == name]:
            with contextlib.suppress(NotFound):  # removed since
                await self.host.remove(live.row.id)


async def _sent(request: web.Request, answer: web.Response) -> None:
    """Returns when the answer has been taken, but for what is on its way; or the caller has gone."""
    with contextlib.suppress(ConnectionError):
        await answer.prepare(request)
        await answer.write_eof()


async def started(request: web.Request, response: web.StreamResponse) -> None:
    """Called as the head of an answer is sent."""
    request[STARTED] = response
    response.headers.setdefault("X-Content-Type-Options", "nosniff")
    response.headers[ID_HEADER] = REQUEST.get()
    if response.headers.get("Server") == SERVER_SOFTWARE:  # versions of ours; a sandbox's server may say its own
        del response.headers["Server"]


def _broken_off(request: web.Request, error: Exception) -> web.StreamResponse:
    """An error in the middle of an answer: the connection breaks, so that half of it does not look like all of it."""
    if isinstance(error, ClientConnectionResetError):  # the caller has gone
        log.info("%s %s: the caller has gone: %s", request.method, request.path, error)
    else:
        log.error("%s %s broke off", request.method, request.path, exc_info=error)
    if request.transport is not None:
        request.transport.abort()
    return request[STARTED]


@web.middleware
async def named(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every request has an id, and those that no route takes an answer in our form."""
    REQUEST.set(request_id(request.headers.get(ID_HEADER)))
    try:
        return await handler(request)
    except web.HTTPException as error:
        return refusal(request, error)
