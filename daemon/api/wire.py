"""The wire of the API: bodies in, answers and errors out.

Owns: formats, bounds, the translation of errors. Does not own: any route. Guarantee: every refusal is
a body of the closed error table; every body is bounded.

The wire is MessagePack where the caller says so (``application/msgpack``) and JSON otherwise. Raw
file content travels as ``application/octet-stream``.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from daemon.host import Host
from sandbox.errors import Invalid, PagurusError

log = logging.getLogger("pagurus.api")

BODY_MOST = 256 << 20  # bytes of one request
MSGPACK = "application/msgpack"

HOST: web.AppKey[Host] = web.AppKey("host", Host)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except PagurusError as error:
        if error.status >= 500:
            log.warning("%s %s: %s", request.method, request.path, error, extra={"sandbox": error.sandbox})
        return reply(request, error.body(), error.status)
    except OSError as error:  # the host refused something that nobody foresaw: the caller hears it, the log has it all
        log.exception("%s %s", request.method, request.path)
        remedy = "see the daemon's log and `pagurus doctor`"
        return reply(request, PagurusError(f"the host refused: {error}", remedy=remedy).body(), 500)
    except web.HTTPRequestEntityTooLarge:
        return reply(request, Invalid(f"the body is larger than {BODY_MOST} bytes").body(), 413)
    except web.HTTPNotFound:
        return reply(request, Invalid(f"no such route: {request.path}").body(), 404)
    except web.HTTPMethodNotAllowed as error:
        return reply(request, Invalid(f"{request.method} is not possible on {request.path}").body(), error.status)


def packed(request: web.Request) -> bool:
    return request.headers.get("Accept", "") == MSGPACK


def reply(request: web.Request, value: Any, status: int = 200) -> web.Response:
    if packed(request):
        return web.Response(body=msgspec.msgpack.encode(value), status=status, content_type=MSGPACK)
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


async def body(request: web.Request, kind: type[Any]) -> Any:
    raw = await request.read()
    try:
        if request.content_type == MSGPACK:
            return msgspec.msgpack.decode(raw, type=kind)
        return msgspec.json.decode(raw or b"{}", type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise Invalid(f"bad {kind.__name__}: {error}") from None


def query(request: web.Request, name: str) -> str:
    try:
        return request.query[name]
    except KeyError:
        raise Invalid(f"the query parameter {name} is missing") from None


def number(request: web.Request, name: str, default: float, most: float) -> float:
    text = request.query.get(name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        raise Invalid(f"{name} must be a number, not {text!r}") from None
    if not 0 <= value <= most:
        raise Invalid(f"{name} must lie between 0 and {most:g}")
    return value
