"""Routes of commands: run one, stream its output, list the turns.

A stream is one Chunk after another, each with its length in four bytes (MessagePack) or on a line of
its own (JSON).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from aiohttp import web

from daemon.api.presence import while_there
from daemon.api.wire import HOST, Route, Stream, body, frame, log, reply, streaming
from sandbox.container.outlet import Outlet
from sandbox.errors import PagurusError
from sandbox.messages import Chunk, ExecRequest, ExecResult, SignalRequest, TurnInfo


async def _exec(request: web.Request) -> web.Response:
    """Run a command to its end, and end the turn."""
    live = request.app[HOST].live(request.match_info["id"])
    return reply(request, await live.exec(await body(request, ExecRequest)))


async def _stream(request: web.Request) -> web.StreamResponse:
    """Output as it comes. The command waits for a slow reader; when that leaves, it ends as after its deadline."""
    live = request.app[HOST].live(request.match_info["id"])
    command = await body(request, ExecRequest)
    return await streamed(request, live.row.id, lambda outlet: live.exec(command, outlet))


async def _signal(request: web.Request) -> web.Response:
    """Send a signal to a command that runs; it is known by the key with which it was started."""
    wanted = await body(request, SignalRequest)
    live = request.app[HOST].live(request.match_info["id"])
    await live.signal(request.match_info["command"], wanted.signal, group=wanted.group)
    return reply(request, {})


async def streamed(
    request: web.Request, sandbox: str, work: Callable[[Outlet], Awaitable[ExecResult]]
) -> web.StreamResponse:
    """What `work` puts into the outlet that it is given, and at last its result, as a stream of chunks."""
    outlet, response = Outlet(), streaming(request)
    running = asyncio.ensure_future(work(outlet))
    running.add_done_callback(lambda _: outlet.end())
    try:
        if not await while_there(request, _send(request, response, outlet, running, sandbox)):
            log.info("the reader of a stream went away", extra={"sandbox": sandbox})
            outlet.leave()
            with contextlib.suppress(PagurusError):  # nobody is left to be told
                await running
    finally:
        if not running.done():  # the daemon stops
            running.cancel()
            await asyncio.wait({running})
    return response


async def _send(
    request: web.Request,
    response: web.StreamResponse,
    outlet: Outlet,
    running: asyncio.Future[ExecResult],
    sandbox: str,
) -> None:
    part = await outlet.get()
    if part is None:  # refused, perhaps, before there was any output
        await running
    await response.prepare(request)
    while part is not None:
        await response.write(frame(request, Chunk(stream=part[0], data=part[1])))
        part = await outlet.get()
    if (error := running.exception()) is not None:  # it failed after some output: the stream breaks off
        log.warning("a streamed command failed: %s", error, extra={"sandbox": sandbox})
        if request.transport is not None:
            request.transport.close()
        return
    result = running.result()
    result.stdout = result.stderr = b""
    await response.write(frame(request, Chunk(stream="result", result=result)))
    await response.write_eof()


async def _turns(request: web.Request) -> web.Response:
    """The last turns of a sandbox, the oldest first."""
    host = request.app[HOST]
    return reply(request, await host.services.catalogue.turns(host.live(request.match_info["id"]).row.id))


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
    Route(
        "POST",
        "/v1/sandboxes/{id}/exec/{command}/signal",
        _signal,
        body=SignalRequest,
        scope="exec",
        keyed="once",
    ),
    Route("GET", "/v1/sandboxes/{id}/turns", _turns, answer=list[TurnInfo]),
]
