"""The wire of the coordinator's API: the formats of a daemon's (:mod:`daemon.api.wire`), for what is answered here."""

from __future__ import annotations

import logging
from typing import TypeVar

import msgspec
from aiohttp import web

from daemon.wording import plain
from sandbox.errors import Invalid, PagurusError
from sandbox.sdk.transport import MSGPACK

log = logging.getLogger("pagurus.cluster")
T = TypeVar("T")


def reply(request: web.Request, value: object, status: int = 200) -> web.Response:
    packed = request.headers.get("Accept", "") == MSGPACK
    data = msgspec.msgpack.encode(value) if packed else msgspec.json.encode(value)
    return web.Response(body=data, status=status, content_type=MSGPACK if packed else "application/json")


def refusal(request: web.Request, error: Exception) -> web.Response:
    """The answer that tells of an error. Anything that is no error of ours is a bug."""
    if isinstance(error, web.HTTPException):
        return reply(request, Invalid(f"{request.method} {request.path}: {error.reason}").body(), error.status)
    if not isinstance(error, PagurusError):
        log.error("%s %s", request.method, request.path, exc_info=error)
        error = PagurusError(f"a bug in the coordinator: {type(error).__name__}", remedy="see its log")
    return reply(request, error.body(), error.status)


async def body(request: web.Request, kind: type[T]) -> T:
    """The decoded body. Raises Invalid."""
    raw = await request.read()
    try:
        if request.content_type == MSGPACK:
            return msgspec.msgpack.decode(raw, type=kind)
        return msgspec.json.decode(raw or b"{}", type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(f"the request cannot be taken: {plain(error)}") from None
