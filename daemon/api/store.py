"""Routes of checkpoints as content: list, label, remove, verify, export, import, pull."""

from __future__ import annotations

import msgspec
from aiohttp import web

from daemon.api.presence import while_requested
from daemon.api.route import Area
from daemon.api.wire import chunks, content
from daemon.host.host import Host
from sandbox.errors import Conflict, Invalid, Protocol
from sandbox.messages import CheckpointInfo
from sandbox.messages.store import CheckpointReport, ImportResult, LabelRequest, PullRequest, VerifyRequest

AREA = Area()
MAX_STREAM = 1 << 46  # bytes of an imported stream: the disk is the bound
MAX_HAVE = 1 << 30


class ExportQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`since`: a checkpoint that the other side has. `manifest`: say what there is, and send none of it."""

    since: str | None = None
    manifest: bool = False
    soon: bool = False  # it need not be durable
    brief: bool = False  # the import knows `since` as well


class ReceiveQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`mounts`: forks of the checkpoint may mount the directories of this host that it names."""

    mounts: bool = False
    since: str | None = None  # a checkpoint that is here, which a brief stream builds upon
    arriving: str = ""  # id of the sandbox for which something is prepared: its next checkpoint, durable later


@AREA("GET", "/v1/checkpoints", scope="admin")
async def _list(host: Host) -> list[CheckpointInfo]:
    """All checkpoints of the host, the oldest first."""
    return host.store.checkpoints()


@AREA("PUT", "/v1/checkpoints/{checkpoint}/label", scope="exec")
async def _label(host: Host, checkpoint: str, body: LabelRequest) -> CheckpointInfo:
    """Label a checkpoint, or take its label away."""
    return await host.store.label(checkpoint, body.label)


@AREA("DELETE", "/v1/checkpoints/{checkpoint}", scope="exec")
async def _remove(host: Host, checkpoint: str) -> None:
    """Remove a checkpoint that nothing is based on."""
    await host.store.remove(checkpoint)


@AREA("POST", "/v1/checkpoints/collect", scope="admin")
async def _collect(host: Host) -> None:
    """Apply every retention policy and free what nothing refers to, now."""
    await host.store.collect()


@AREA("POST", "/v1/checkpoints/verify", scope="admin")
async def _verify(request: web.Request, host: Host, body: VerifyRequest) -> list[CheckpointReport]:
    """Hash checkpoints again, restore them separately if requested, and report what is damaged."""
    return await while_requested(request, host.store.verify(body.checkpoints, restore=body.restore))


@AREA("GET", "/v1/checkpoints/have", answer=bytes, scope="admin")
async def _have(host: Host) -> web.StreamResponse:
    """What need not be sent to this host, for an export elsewhere."""
    return web.Response(body=await host.store.have(), content_type="application/octet-stream")


@AREA("POST", "/v1/checkpoints/{checkpoint}/export", body=bytes, max_body=MAX_HAVE, answer=bytes, scope="admin")
async def _export(request: web.Request, host: Host, checkpoint: str, query: ExportQuery) -> web.StreamResponse:
    """A checkpoint as one stream. The body, if any, is what the other side has."""
    have = await content(request)
    async with host.store.exporting(
        checkpoint, since=query.since, have=have, manifest=query.manifest, soon=query.soon, brief=query.brief
    ) as parts:
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        await response.prepare(request)
        async for part in parts:
            await response.write(part)
        await response.write_eof()
    return response


@AREA("POST", "/v1/checkpoints/import", body=bytes, max_body=MAX_STREAM, status=201, scope="admin")
async def _import(request: web.Request, host: Host, query: ReceiveQuery) -> ImportResult:
    """A checkpoint from a stream that an export made. All or nothing."""
    try:
        former = None
        if query.arriving and (former := host.arrivals.former(query.arriving)) is None:
            raise Conflict(f"nothing is prepared for {query.arriving}", hint="import it once it is durable")
        stream = chunks(request)
        return await host.store.receive(stream, host_mounts=query.mounts, former=former, since=query.since)
    except Protocol as error:  # the peer who broke the protocol is the caller
        raise Invalid(error.message, hint=error.hint) from error


@AREA("POST", "/v1/checkpoints/survey", body=bytes, max_body=MAX_STREAM, answer=bytes, scope="admin")
async def _survey(request: web.Request, host: Host) -> web.StreamResponse:
    """What of a manifest is here already, for an export elsewhere."""
    try:
        have = await host.store.survey(chunks(request))
    except Protocol as error:
        raise Invalid(error.message, hint=error.hint) from error
    return web.Response(body=have, content_type="application/octet-stream")


@AREA("POST", "/v1/checkpoints/pull", status=201, scope="admin")
async def _pull(host: Host, body: PullRequest) -> ImportResult:
    """Fetch a checkpoint from another daemon, only what is missing here."""
    return await host.store.pull(body)
