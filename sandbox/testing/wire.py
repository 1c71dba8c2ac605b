"""The wire of the fake host: bodies in, answers and errors out, trees copied and deleted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from sandbox.errors import Invalid, PagurusError, Unsupported
from sandbox.messages import Chunk, ExecRequest, ExecResult
from sandbox.sdk.transport import MSGPACK

T = TypeVar("T")


@web.middleware
async def errors(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except PagurusError as error:
        return reply(error.body(), error.status)
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed):
        missing = Unsupported(f"the fake host has no {request.method} {request.path}", hint="use a real daemon")
        return reply(missing.body(), missing.status)


def reply(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.msgpack.encode(value), status=status, content_type=MSGPACK)


async def streamed(request: web.Request, result: ExecResult) -> web.StreamResponse:
    """A result as a stream: its outputs, then what is left of it, each behind its length."""
    response = web.StreamResponse(headers={"Content-Type": MSGPACK})
    await response.prepare(request)
    chunks = [Chunk(stream="stdout", data=result.stdout), Chunk(stream="stderr", data=result.stderr)]
    last = Chunk(stream="result", result=msgspec.structs.replace(result, stdout=b"", stderr=b""))
    for chunk in (*(chunk for chunk in chunks if chunk.data), last):
        data = msgspec.msgpack.encode(chunk)
        await response.write(len(data).to_bytes(4, "big") + data)
    await response.write_eof()
    return response


async def body(request: web.Request, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(await request.read(), type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise Invalid(f"bad {kind.__name__}: {error}") from None


def cut(data: bytes, target: ExecRequest) -> tuple[bytes, int]:
    limit = target.output_limit or len(data)  # 0: streamed
    return data[:limit], max(0, len(data) - limit)


def copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, symlinks=True)


def delete(path: Path) -> None:
    shutil.rmtree(path)


def encoded(text: bytes | str) -> bytes:
    return text.encode() if isinstance(text, str) else text
