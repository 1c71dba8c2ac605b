"""Routes of commands: run one, stream its output, list the turns.

A stream is one Chunk after another, each with its length in four bytes (MessagePack) or on a line of
its own (JSON).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from daemon.api.wire import HOST, Route, Stream, body, frame, log, reply, streaming
from sandbox.messages import Chunk, ExecRequest, ExecResult, TurnInfo

STREAM_BACKLOG = 32 << 20  # bytes between a command and a reader that is slower


async def _exec(request: web.Request) -> web.Response:
    """Run a command to its end, and end the turn."""
    loop = request.app[HOST].loop(request.match_info["id"])
    return reply(request, await loop.exec(await body(request, ExecRequest)))


async def _stream(request: web.Request) -> web.StreamResponse:
    """Output as it comes. The command does not run ahead of a slow reader by more than the backlog."""
    loop = request.app[HOST].loop(request.match_info["id"])
    command = await body(request, ExecRequest)
    return await streamed(request, loop.row.id, lambda put: loop.exec(command, put))


async def streamed(
    request: web.Request, sandbox: str, work: Callable[[Callable[[str, bytes], Any]], Awaitable[ExecResult]]
) -> web.StreamResponse:
    """What `work` tells to the function that it is given, and at last its result, as a stream of chunks."""
    backlog = _Backlog()

    async def run() -> ExecResult:
        try:
            result = await work(backlog.put)
        except BaseException:
            backlog.broken()
            raise
        backlog.end(result)
        return result

    running = asyncio.ensure_future(run())
    first = await backlog.get()
    if first is None:  # refused before there was any output
        await running
    response = streaming(request)
    await response.prepare(request)
    try:
        chunk: Chunk | None = first
        while chunk is not None:
            await response.write(frame(request, chunk))
            chunk = None if chunk.stream == "result" else await backlog.get()
        if running.done() and running.exception() is None:
            await response.write_eof()
        elif request.transport is not None:  # it failed after some output: the stream breaks off
            log.warning("a streamed command failed: %s", running.exception(), extra={"sandbox": sandbox})
            request.transport.close()
    except ConnectionError:  # the reader went away; the command still ends its turn
        log.info("the reader of a stream went away", extra={"sandbox": sandbox})
        backlog.close()
        await running
    return response


class _Backlog:
    """Output between a command and a reader that may be slower. Beyond STREAM_BACKLOG it is dropped and counted."""

    def __init__(self) -> None:
        self._chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()
        self._size = 0
        self._dropped = {"stdout": 0, "stderr": 0}
        self._closed = False

    def put(self, stream: Any, data: bytes) -> None:
        if self._closed or self._size + len(data) > STREAM_BACKLOG:
            self._dropped[stream] += len(data)
            return
        self._size += len(data)
        self._chunks.put_nowait(Chunk(stream=stream, data=data))

    def end(self, result: ExecResult) -> None:
        result.stdout = result.stderr = b""
        result.stdout_dropped, result.stderr_dropped = self._dropped["stdout"], self._dropped["stderr"]
        self._chunks.put_nowait(Chunk(stream="result", result=result))

    def broken(self) -> None:
        """There will be no result."""
        self._chunks.put_nowait(None)

    async def get(self) -> Chunk | None:
        chunk = await self._chunks.get()
        self._size -= len(chunk.data) if chunk is not None else 0
        return chunk

    def close(self) -> None:
        self._closed = True


async def _turns(request: web.Request) -> web.Response:
    """The last turns of a sandbox, the oldest first."""
    host = request.app[HOST]
    return reply(request, await host.services.catalogue.turns(host.loop(request.match_info["id"]).row.id))


ROUTES: list[Route] = [
    Route(
        "POST",
        "/v1/sandboxes/{id}/exec",
        _exec,
        body=ExecRequest,
        answer=ExecResult,
        scope="exec",
        keyed="once",
        body_most=64 << 20,  # its stdin
    ),
    Route(
        "POST",
        "/v1/sandboxes/{id}/stream",
        _stream,
        body=ExecRequest,
        answer=Stream(Chunk),
        scope="exec",
        body_most=64 << 20,
    ),
    Route("GET", "/v1/sandboxes/{id}/turns", _turns, answer=list[TurnInfo]),
]
