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
from daemon.api.route import Area, ValueStream
from daemon.api.wire import frame, log, streaming
from daemon.host.host import Host
from daemon.turns.turns import LiveSandbox
from sandbox.container.outlet import Outlet
from sandbox.errors import PagurusError
from sandbox.messages import Chunk, ExecRequest, ExecResult, SignalRequest, TurnInfo

AREA = Area()
MAX_STDIN = 64 << 20  # bytes of a body: the stdin of a command is in it


@AREA("POST", "/v1/sandboxes/{id}/exec", scope="exec", keyed="once", max_body=MAX_STDIN)
async def _exec(live: LiveSandbox, body: ExecRequest) -> ExecResult:
    """Run a command to its end, and end the turn."""
    return await live.exec(body)


@AREA("POST", "/v1/sandboxes/{id}/stream", answer=ValueStream(Chunk), scope="exec", max_body=MAX_STDIN)
async def _stream(request: web.Request, live: LiveSandbox, body: ExecRequest) -> web.StreamResponse:
    """Output as it comes. The command waits for a slow reader; when that leaves, it ends as after its deadline."""
    return await streamed(request, live.row.id, lambda outlet: live.exec(body, outlet))


@AREA("POST", "/v1/sandboxes/{id}/exec/{command}/signal", scope="exec", keyed="once")
async def _signal(live: LiveSandbox, command: str, body: SignalRequest) -> None:
    """Send a signal to a command that runs; it is known by the key with which it was started."""
    await live.signal(command, body.signal, group=body.group)


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
            with contextlib.suppress(PagurusError):  # no caller is left
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


@AREA("GET", "/v1/sandboxes/{id}/turns")
async def _turns(host: Host, live: LiveSandbox) -> list[TurnInfo]:
    """The last turns of a sandbox, the oldest first."""
    return await host.services.catalogue.turns(live.row.id)
