"""The wire of the coordinator's API: the formats of a daemon's (:mod:`daemon.api.wire`), for what is answered here."""

from __future__ import annotations

import asyncio
import logging
from typing import TypeVar

import msgspec
from aiohttp import web

from coordinator.forward import MEMORY
from daemon.wording import plain
from sandbox.errors import Invalid, PagurusError, Timeout
from sandbox.sdk.transport import MSGPACK

log = logging.getLogger("pagurus.cluster")
T = TypeVar("T")
RAW = web.RequestKey("raw", bytes)
MAX_BODY = 64 << 20  # bytes of a call that is held here: a command with its stdin. Others pass by
MAX_STRUCT = 4 << 20  # bytes of what is decoded here
TIMEOUT = 30.0  # seconds without a byte after which a sender is given up


def reply(request: web.Request, value: object, status: int = 200) -> web.Response:
    packed = request.headers.get("Accept", "") == MSGPACK
    data = msgspec.msgpack.encode(value) if packed else msgspec.json.encode(value)
    return web.Response(body=data, status=status, content_type=MSGPACK if packed else "application/json")


def refusal(request: web.Request, error: Exception) -> web.Response:
    """The answer for an error. Anything that is no error of ours is a bug."""
    if isinstance(error, web.HTTPException):
        return reply(request, Invalid(f"{request.method} {request.path}: {error.reason}").body(), error.status)
    if not isinstance(error, PagurusError):
        log.error("%s %s", request.method, request.path, exc_info=error)
        error = PagurusError(f"a bug in the coordinator: {type(error).__name__}", hint="see its log")
    answer = reply(request, error.body(), error.status)
    if (wait := getattr(error, "retry_after", None)) is not None:
        answer.headers["Retry-After"] = str(max(1, round(wait)))
    return answer


async def raw(request: web.Request, limit: int = MAX_BODY) -> bytes:
    """The whole body, which the call holds. Raises TooMany where the calls of its owner hold too much."""
    if RAW not in request:
        memory, result = MEMORY.get(), bytearray()
        while part := await _part(request):
            if memory is not None:
                memory.add(len(part))
            result += part
            if len(result) > limit:
                raise web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=len(result))
        request[RAW] = bytes(result)
    return request[RAW]


async def _part(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(TIMEOUT):
            return await request.content.readany()
    except TimeoutError:
        raise Timeout(f"no byte of the body came for {TIMEOUT:g} s", hint="send the request again") from None
    except web.RequestPayloadError as error:
        raise Invalid(f"the body cannot be read: {error}", hint="send the request again") from None


async def body(request: web.Request, kind: type[T]) -> T:
    """The decoded body. Raises Invalid."""
    data = await raw(request, MAX_STRUCT)
    try:
        if request.content_type == MSGPACK:
            return msgspec.msgpack.decode(data, type=kind)
        return msgspec.json.decode(data or b"{}", type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(f"the request cannot be taken: {plain(error)}", hint="see GET /v1/openapi.json") from None
