"""The wire of the API: bodies in, answers and errors out.

Guarantee: every refusal is a body of the closed error table; every body is bounded, in size and in the time that its
sender takes.

The wire is MessagePack where the caller says so (``application/msgpack``) and JSON otherwise. Raw
file content travels as ``application/octet-stream``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable
from typing import IO

import msgspec
from aiohttp import web

from daemon.api.route import ApiRoute
from daemon.auth.shares import CallShare
from daemon.auth.tokens import TokenStore
from daemon.host.host import Host
from daemon.wording import plain
from sandbox.container.pipes import in_thread
from sandbox.errors import Invalid, PagurusError, Timeout, Unsupported

log = logging.getLogger("pagurus.api")

MSGPACK = "application/msgpack"
JSON = "application/json"
RAW = "application/octet-stream"  # also what aiohttp says where a request names no type
CHUNK = 1 << 18  # bytes of a raw answer at once
TIMEOUT = 30.0  # seconds without a byte after which a sender is given up

HOST: web.AppKey[Host] = web.AppKey("host", Host)
TOKENS: web.AppKey[TokenStore] = web.AppKey("tokens", TokenStore)
ROUTE = web.RequestKey("route", ApiRoute)
CONTENT = web.RequestKey("content", bytes)
MEMORY = web.RequestKey("memory", CallShare)  # what the call holds of it
DISK = web.RequestKey("disk", CallShare)
RETAINED_FREE = 1 << 20  # bytes of each output of a command that a caller may have kept without being counted


class TooLarge(Invalid):
    """On the wire an ``invalid`` with its own status."""

    status = 413


class BadType(Invalid):
    status = 415


def refusal(request: web.Request, error: BaseException) -> web.Response:
    """The answer for an error. Anything that is no error of ours is a bug or the host's refusal."""
    if isinstance(error, PagurusError):
        if error.status >= 500:
            log.warning("%s %s: %s", request.method, request.path, error, extra={"sandbox": error.sandbox})
        answer = reply(request, error.body(), error.status)
        if (wait := getattr(error, "retry_after", None)) is not None:
            answer.headers["Retry-After"] = str(max(1, round(wait)))
        return answer
    if isinstance(error, web.HTTPException):
        return _routing(request, error)
    log.error("%s %s", request.method, request.path, exc_info=error)
    said = (
        f"the host refused: {error}" if isinstance(error, OSError) else f"a bug in the daemon: {type(error).__name__}"
    )
    return reply(request, PagurusError(said, hint="see the daemon's log and `pagurus doctor`").body(), 500)


def _routing(request: web.Request, error: web.HTTPException) -> web.Response:
    if isinstance(error, web.HTTPNotFound):
        hint = "ask a coordinator, whose socket or address PAGURUS_HOST names (`pagurus cluster up`)"
        cluster = request.path.startswith("/v1/cluster")
        return reply(request, Invalid(f"no such route: {request.path}", hint=hint if cluster else "").body(), 404)
    if isinstance(error, web.HTTPMethodNotAllowed):
        answer = reply(request, Invalid(f"{request.method} is not possible on {request.path}").body(), 405)
        answer.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
        return answer
    return reply(request, Invalid(error.text or error.reason).body(), error.status)


# --------------------------------------------------------------------------- out


def packed(request: web.Request) -> bool:
    return request.headers.get("Accept", "") == MSGPACK


def reply(request: web.Request, value: object, status: int = 200) -> web.Response:
    if packed(request):
        return web.Response(body=msgspec.msgpack.encode(value), status=status, content_type=MSGPACK)
    return web.Response(body=msgspec.json.encode(value), status=status, content_type=JSON)


def ready(request: web.Request, data: bytes) -> web.Response:
    """A value that was made in the form that the caller takes (:func:`packed`)."""
    return web.Response(body=data, content_type=MSGPACK if packed(request) else JSON)


def streaming(request: web.Request) -> web.StreamResponse:
    """An answer of many values, each a :func:`frame`."""
    return web.StreamResponse(headers={"Content-Type": MSGPACK if packed(request) else "application/x-ndjson"})


def frame(request: web.Request, value: object) -> bytes:
    """One value of a stream: behind its length in four bytes (MessagePack), or on a line of its own (JSON)."""
    if packed(request):
        data = msgspec.msgpack.encode(value)
        return len(data).to_bytes(4, "big") + data
    return msgspec.json.encode(value) + b"\n"


# --------------------------------------------------------------------------- in


async def chunks(request: web.Request) -> AsyncIterator[bytes]:
    """The body as it comes, within the bound of the route. A sender that stalls is given up."""
    limit, size = request[ROUTE].max_body, 0
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    while True:
        try:
            async with asyncio.timeout(TIMEOUT):
                part = await request.content.readany()
        except TimeoutError:
            raise Timeout(
                f"no byte of the body came for {TIMEOUT:g} s", hint="send the body without a pause, or again"
            ) from None
        except web.RequestPayloadError as error:
            raise Invalid(f"the body cannot be read: {error}", hint="check its length and encoding") from None
        if not part:
            return
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        yield part


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body is larger than {limit} bytes", hint="large content goes through the files API")


async def content(request: web.Request) -> bytes:
    """The whole body."""
    if CONTENT not in request:
        request[CONTENT] = await _content(request)
    return request[CONTENT]


async def _content(request: web.Request) -> bytes:
    if not request.body_exists:
        return b""
    if request.content.is_eof() and request.content.exception() is None:  # all here already: nothing to wait for
        raw = await request.content.read()
        if len(raw) > request[ROUTE].max_body:
            raise _too_large(request[ROUTE].max_body)
        return raw
    parts = []
    async for part in chunks(request):
        request[MEMORY].add(len(part))
        parts.append(part)
    return b"".join(parts)


async def _body(request: web.Request) -> object:
    """The decoded body."""
    kind = request[ROUTE].body or bytes
    raw = await content(request)
    if request.content_type not in (MSGPACK, JSON, RAW):
        raise BadType(f"a body of type {request.content_type}", hint=f"send {JSON} or {MSGPACK}")
    try:
        if request.content_type == MSGPACK:
            body: object = msgspec.msgpack.decode(raw, type=kind)
        else:
            body = msgspec.json.decode(raw or b"{}", type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(
            f"the request cannot be taken: {plain(error)}", hint="GET /v1/openapi.json describes it"
        ) from None
    request[MEMORY].add(2 * max(0, getattr(body, "output_limit", 0) - RETAINED_FREE))
    return body


def _query(request: web.Request) -> object:
    """The query parameters, as a struct."""
    kind = request[ROUTE].query or msgspec.Struct
    try:
        return msgspec.convert(dict(request.query), kind, strict=False)
    except msgspec.ValidationError as error:
        raise Invalid(f"the query cannot be taken: {plain(error)}", hint="GET /v1/openapi.json describes it") from None


# --------------------------------------------------------------------------- handlers


async def carry_out(request: web.Request, route: ApiRoute) -> web.StreamResponse:
    """Call the handler of `route` with what its parameters name (:mod:`daemon.api.route`), and encode its answer."""
    given = {name: await _given(request, name) for name in route.takes}
    answer = await route.handler(**given)
    if isinstance(answer, web.StreamResponse):
        return answer
    return reply(request, {} if answer is None else answer, route.status)


async def _given(request: web.Request, name: str) -> object:
    host = request.app[HOST]
    match name:
        case "request":
            return request
        case "host":
            return host
        case "tokens":
            return request.app[TOKENS]
        case "gateway":
            if host.gateway is None:
                raise Unsupported("this daemon has no gateway", hint="start it with --gateway-config")
            return host.gateway
        case "live" | "alive":
            live = host.live(request.match_info["id"])
            if name == "alive":
                live.need_alive()
            return live
        case "body":
            return await _body(request)
        case "query":
            return _query(request)
    return request.match_info[name]


async def piped(request: web.Request, content: str, write: Callable[[IO[bytes]], None]) -> web.StreamResponse:
    """An answer of what `write` puts into a file, while a thread of its own does so. A failure breaks it off: half of
    something must not look like all of it."""
    response = web.StreamResponse(headers={"Content-Type": content})
    reader, writer = os.pipe2(os.O_CLOEXEC)

    def fill() -> None:
        with contextlib.suppress(BrokenPipeError), os.fdopen(writer, "wb", buffering=CHUNK) as out:
            write(out)  # a closed pipe: the reader went away

    writing = in_thread(fill)
    with os.fdopen(reader, "rb", buffering=0) as stream:
        try:
            await response.prepare(request)
            while part := await asyncio.to_thread(stream.read, CHUNK):
                await response.write(part)
        except ConnectionError:
            return response
    await writing
    await response.write_eof()
    return response
