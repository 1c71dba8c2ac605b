"""The forms of E2B's wire: errors with a number as their code, and Connect's messages as JSON.

Guarantee: a message is bounded before it is read, and what cannot be read is refused, never passed over.

A message of a stream is one byte of flags, four of length and JSON; the last one of an answer has the flag END.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import AsyncIterator
from typing import TypeVar

import msgspec
from aiohttp import web

from daemon.api import wire
from daemon.api.route import MAX_BODY
from daemon.api.wire import JSON, MEMORY
from daemon.auth.access import Caller
from daemon.e2b.keys import Keys
from daemon.wording import plain
from sandbox.errors import (
    Closed,
    Invalid,
    NotFound,
    PagurusError,
    SandboxDead,
    Timeout,
    TooMany,
    Unauthorized,
    Unsupported,
)

STREAM = "application/connect+json"
END = 0x02
COMPRESSED = 0x01
T = TypeVar("T")

# Connect's word for a status of ours, and the status that Connect gives a single answer of this word.
_WORDS = {
    400: ("invalid_argument", 400),
    401: ("unauthenticated", 401),
    403: ("permission_denied", 403),
    404: ("not_found", 404),
    409: ("failed_precondition", 400),
    410: ("unavailable", 503),
    413: ("resource_exhausted", 429),
    415: ("invalid_argument", 400),
    422: ("invalid_argument", 400),
    429: ("resource_exhausted", 429),
    501: ("unimplemented", 501),
    504: ("deadline_exceeded", 504),
    507: ("resource_exhausted", 429),
}


class AlreadyExists(PagurusError):
    """Connect alone has a word for it."""

    code, status = "conflict", 409


def quoted(data: bytes) -> str:
    return base64.b64encode(data).decode()


def unquoted(text: str) -> bytes:
    """Bytes of proto3's JSON, in either alphabet."""
    try:
        return base64.b64decode(text.replace("-", "+").replace("_", "/") + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise Invalid("bytes that are no base64") from None


def word(error: BaseException) -> tuple[str, int, str]:
    """Connect's code, the status of a single answer, and the message."""
    if isinstance(error, AlreadyExists):
        return "already_exists", 409, error.message
    if isinstance(error, SandboxDead | Closed):
        return "unavailable", 502, "The sandbox was not found: it was paused, or has ended"
    if isinstance(error, PagurusError):
        name, status = _WORDS.get(error.status, ("internal", 500))
        return name, status, str(error)
    return "internal", 500, "internal error"


class ControlDialect:
    """Callers with an API key, and errors whose code is a number."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys

    def caller(self, request: web.Request) -> Caller:
        return self.keys.owner(request.headers.get("X-API-KEY"), request)

    def refusal(self, request: web.Request, error: BaseException) -> web.Response:
        answer = wire.refusal(request, error)
        message = str(error) if isinstance(error, PagurusError) else f"{answer.status}: internal error"
        if isinstance(error, web.HTTPException):
            message = error.reason
        made = number_error(answer.status, message)
        for name in ("Retry-After", "Allow"):
            if name in answer.headers:
                made.headers[name] = answer.headers[name]
        if isinstance(error, TooMany) and "Retry-After" not in made.headers:
            made.headers["Should-Retry"] = "false"  # a quota: the same call is refused again
        return made


def number_error(status: int, message: str) -> web.Response:
    return web.Response(
        body=msgspec.json.encode({"code": status, "message": message}), status=status, content_type=JSON
    )


class EnvdDialect(ControlDialect):
    """Callers with the token of one sandbox, and files' errors."""

    def caller(self, request: web.Request) -> Caller:
        return self.keys.visitor(request.headers.get("X-Access-Token"), request.match_info["id"])

    def refusal(self, request: web.Request, error: BaseException) -> web.Response:
        if is_gone(error):
            return gone(request.match_info["id"])
        return super().refusal(request, error)


class FilesDialect(EnvdDialect):
    """The same, or a signed address."""

    def caller(self, request: web.Request) -> Caller:
        if "X-Access-Token" not in request.headers and "signature" in request.query:
            return self.keys.bearer_of_signature(request)
        return super().caller(request)


class ConnectDialect(EnvdDialect):
    """The same, and Connect's errors."""

    def refusal(self, request: web.Request, error: BaseException) -> web.Response:
        super().refusal(request, error)  # it logs
        if is_gone(error):
            return gone(request.match_info["id"])
        name, status, message = word(error)
        if request.content_type == STREAM:
            return web.Response(body=last(error), content_type=STREAM)
        return web.Response(
            body=msgspec.json.encode({"code": name, "message": message}), status=status, content_type=JSON
        )


def is_gone(error: BaseException) -> bool:
    """Whether there is no such sandbox, or none that runs."""
    absent = isinstance(error, NotFound) and error.message.startswith("no such sandbox")
    return absent or isinstance(error, SandboxDead | Closed)


def gone(sandbox: str) -> web.Response:
    """What E2B's proxy says of a sandbox that does not run."""
    return proxy_error(sandbox, "The sandbox was not found")


def proxy_error(sandbox: str, message: str) -> web.Response:
    body = {"sandboxId": sandbox, "message": message, "code": 502}
    return web.Response(
        body=msgspec.json.encode(body), status=502, content_type=JSON, headers={"Should-Retry": "false"}
    )


# --------------------------------------------------------------------------- out


def message(value: object, flags: int = 0) -> bytes:
    """One message of a stream."""
    data = msgspec.json.encode(value)
    return bytes([flags]) + len(data).to_bytes(4, "big") + data


def last(error: BaseException | None = None) -> bytes:
    """The message that ends a stream."""
    if error is None:
        return message({}, END)
    name, _, text = word(error)
    return message({"error": {"code": name, "message": text}}, END)


# --------------------------------------------------------------------------- in


def taken(raw: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw or b"{}", type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(
            f"the request cannot be taken: {plain(error)}", hint="GET /e2b/openapi.json describes it"
        ) from None


async def single(request: web.Request, kind: type[T]) -> T:
    """The body of a call with one message and one answer."""
    if request.content_type != JSON:
        raise Unsupported(f"a body of type {request.content_type}", hint=f"this server speaks {JSON} alone")
    return taken(await wire.content(request), kind)


async def messages(request: web.Request, kind: type[T], limit: int = MAX_BODY) -> AsyncIterator[T]:
    """The messages of a stream of the client. One that pauses is waited for; one that stops within a message is not."""
    if request.content_type != STREAM:
        raise Unsupported(f"a stream of type {request.content_type}", hint=f"this server speaks {STREAM} alone")
    while True:
        try:
            head = await request.content.readexactly(5)
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise Invalid("the stream ends within a message") from None
            return
        size = int.from_bytes(head[1:], "big")
        if size > limit:
            raise wire.TooLarge(f"a message of {size} bytes", hint=f"send {limit} at most")
        if head[0] & COMPRESSED:
            raise Unsupported("compressed messages", hint="send them uncompressed")
        request[MEMORY].add(size)
        try:
            async with asyncio.timeout(wire.TIMEOUT):
                data = await request.content.readexactly(size)
        except asyncio.IncompleteReadError:
            raise Invalid("the stream ends within a message") from None
        except TimeoutError:
            raise Timeout(f"no complete message came within {wire.TIMEOUT:g} s") from None
        if head[0] & END:
            return
        yield taken(data, kind)
        request[MEMORY].count(-size)


async def first(request: web.Request, kind: type[T]) -> T:
    """The one message of a call whose answer is a stream."""
    try:
        async with asyncio.timeout(wire.TIMEOUT):
            async for item in messages(request, kind):
                return item
    except TimeoutError:
        raise Timeout(f"no message came within {wire.TIMEOUT:g} s") from None
    raise Invalid("the stream holds no message")


def basic_user(request: web.Request) -> str | None:
    """The user that a call is for; None: the sandbox's default."""
    scheme, _, value = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name = base64.b64decode(value, validate=True).decode().partition(":")[0]
    except (binascii.Error, ValueError):
        raise Unauthorized(
            "the Authorization header cannot be read", hint="send it as the client of E2B does"
        ) from None
    return name or None
