"""Routes of checkpoints as content: list, label, remove, verify, export, import, pull."""

from __future__ import annotations

import msgspec
from aiohttp import web

from daemon.api.presence import while_asked
from daemon.api.wire import HOST, Route, body, chunks, content, parameters, reply
from sandbox.errors import Invalid, Protocol
from sandbox.messages import CheckpointInfo
from sandbox.messages.store import CheckpointReport, Imported, LabelRequest, PullRequest, VerifyRequest

STREAM_MOST = 1 << 46  # bytes of an imported stream: the disk is the bound
HAVE_MOST = 1 << 30


class ExportQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`since`: a checkpoint that the other side has. `manifest`: say what there is, and send none of it."""

    since: str | None = None
    manifest: bool = False


class ReceiveQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`mounts`: forks of the checkpoint may mount the directories of this host that it names."""

    mounts: bool = False


async def _list(request: web.Request) -> web.Response:
    """All checkpoints of the host, the oldest first."""
    return reply(request, request.app[HOST].store.checkpoints())


async def _label(request: web.Request) -> web.Response:
    """Label a checkpoint, or take its label away."""
    wanted = await body(request, LabelRequest)
    return reply(request, await request.app[HOST].store.label(request.match_info["checkpoint"], wanted.label))


async def _remove(request: web.Request) -> web.Response:
    """Remove a checkpoint that nothing stands on."""
    await request.app[HOST].store.remove(request.match_info["checkpoint"])
    return reply(request, {})


async def _collect(request: web.Request) -> web.Response:
    """Apply every retention policy and free what nothing refers to, now."""
    await request.app[HOST].store.collect()
    return reply(request, {})


async def _verify(request: web.Request) -> web.Response:
    """Hash checkpoints again and report what is damaged."""
    wanted = await body(request, VerifyRequest)
    return reply(request, await while_asked(request, request.app[HOST].store.verify(wanted.checkpoints)))


async def _have(request: web.Request) -> web.Response:
    """What need not be sent to this host, for an export elsewhere."""
    return web.Response(body=await request.app[HOST].store.have(), content_type="application/octet-stream")


async def _export(request: web.Request) -> web.StreamResponse:
    """A checkpoint as one stream. The body, if any, is what the other side has."""
    asked = parameters(request, ExportQuery)
    have = await content(request)
    store = request.app[HOST].store
    name = request.match_info["checkpoint"]
    async with store.exporting(name, since=asked.since, have=have, manifest=asked.manifest) as parts:
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        await response.prepare(request)
        async for part in parts:
            await response.write(part)
        await response.write_eof()
    return response


async def _import(request: web.Request) -> web.Response:
    """A checkpoint from a stream that an export made. All or nothing."""
    asked = parameters(request, ReceiveQuery)
    try:
        imported = await request.app[HOST].store.receive(chunks(request), host_mounts=asked.mounts)
        return reply(request, imported, 201)
    except Protocol as error:  # the peer who broke the protocol is the caller
        raise Invalid(error.message, remedy=error.remedy) from error


async def _pull(request: web.Request) -> web.Response:
    """Fetch a checkpoint from another daemon, only what is missing here."""
    return reply(request, await request.app[HOST].store.pull(await body(request, PullRequest)), 201)


ROUTES: list[Route] = [
    Route("GET", "/v1/checkpoints", _list, answer=list[CheckpointInfo], scope="admin"),
    Route("POST", "/v1/checkpoints/verify", _verify, body=VerifyRequest, answer=list[CheckpointReport], scope="admin"),
    Route("POST", "/v1/checkpoints/collect", _collect, scope="admin"),
    Route("GET", "/v1/checkpoints/have", _have, answer=bytes, scope="admin"),
    Route(
        "POST",
        "/v1/checkpoints/import",
        _import,
        query=ReceiveQuery,
        body=bytes,
        body_most=STREAM_MOST,
        answer=Imported,
        status=201,
        scope="admin",
    ),
    Route("POST", "/v1/checkpoints/pull", _pull, body=PullRequest, answer=Imported, status=201, scope="admin"),
    Route("PUT", "/v1/checkpoints/{checkpoint}/label", _label, body=LabelRequest, answer=CheckpointInfo, scope="exec"),
    Route("DELETE", "/v1/checkpoints/{checkpoint}", _remove, scope="exec"),
    Route(
        "POST",
        "/v1/checkpoints/{checkpoint}/export",
        _export,
        body=bytes,
        body_most=HAVE_MOST,
        query=ExportQuery,
        answer=bytes,
        scope="admin",
    ),
]
