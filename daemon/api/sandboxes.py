"""Routes of the host and of a sandbox as a whole."""

from __future__ import annotations

import os
from typing import Annotated, Any

import msgspec
from aiohttp import web

from daemon import metrics
from daemon.api.route import Area
from daemon.api.wire import JSON
from daemon.auth.access import CALLER
from daemon.auth.tokens import is_local
from daemon.catalogue import put_sandbox
from daemon.host.create import need_labels
from daemon.host.expiry_watch import move_end
from daemon.host.host import Host
from daemon.turns.turns import LiveSandbox
from sandbox.messages import CreateRequest, LabelsRequest, LifetimeRequest, SandboxInfo, Statistics

AREA = Area()
DESCRIPTION: web.AppKey[dict[str, Any]] = web.AppKey("description", dict)


class Health(msgspec.Struct, kw_only=True):
    """daemon -> everybody: GET /v1/health"""

    status: str
    pid: int | None = None  # of the daemon, over its own socket only


@AREA("GET", "/v1/health", scope="open")
async def _health(request: web.Request) -> Health:
    """Whether the daemon answers. Needs no token."""
    return Health(status="ok", pid=os.getpid() if is_local(request) else None)


@AREA("GET", "/v1/openapi.json", answer=dict[str, Any], scope="open")
async def _openapi(request: web.Request) -> web.Response:
    """This description. Needs no token."""
    return web.Response(body=msgspec.json.encode(request.app[DESCRIPTION]), content_type=JSON)


@AREA("GET", "/metrics", answer=bytes, content="text/plain", scope="monitor")
async def _metrics(host: Host) -> web.StreamResponse:
    """What Prometheus reads."""
    return web.Response(body=metrics.exposition(host), headers={"Content-Type": metrics.CONTENT_TYPE})


@AREA("GET", "/v1/statistics")
async def _statistics(host: Host) -> Statistics:
    """Counts of the whole host since the daemon started; for others than administrators, of their sandboxes alone."""
    if not CALLER.get().everything:
        return Statistics(sandboxes=len(host.sandboxes()))
    return host.statistics()


class ListQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    label: Annotated[str, msgspec.Meta(max_length=4096)] = ""  # "name=value,other": all of them must be there


@AREA("GET", "/v1/sandboxes")
async def _list(host: Host, query: ListQuery) -> list[SandboxInfo]:
    """The sandboxes of the caller that have these labels; an administrator sees all."""
    target = [part.partition("=") for part in query.label.split(",") if part]
    return [info for info in host.sandboxes() if _labelled(info.labels, target)]


def _labelled(labels: dict[str, str], target: list[tuple[str, str, str]]) -> bool:
    return all(name in labels and (not equals or labels[name] == value) for name, equals, value in target)


@AREA("PATCH", "/v1/sandboxes/{id}/labels", scope="exec")
async def _set_labels(host: Host, live: LiveSandbox, body: LabelsRequest) -> SandboxInfo:
    """Set labels of a sandbox; those with null are removed."""
    merged = {**live.row.labels, **body.labels}
    labels = {name: value for name, value in merged.items() if value is not None}
    need_labels(labels)
    live.row.labels = labels
    await host.services.catalogue.write([put_sandbox(live.row)])
    return live.row.info()


@AREA("PUT", "/v1/sandboxes/{id}/lifetime", scope="exec")
async def _set_lifetime(host: Host, live: LiveSandbox, body: LifetimeRequest) -> SandboxInfo:
    """Move the end of a sandbox, counted from now."""
    await move_end(host, live, body.seconds)
    return live.row.info()


@AREA("POST", "/v1/sandboxes", status=201, scope="exec", keyed="redo")
async def _create(host: Host, body: CreateRequest) -> SandboxInfo:
    """Make a sandbox from an image. It runs when the answer comes."""
    return await host.create(body)


@AREA("GET", "/v1/sandboxes/{id}")
async def _info(live: LiveSandbox) -> SandboxInfo:
    """One sandbox."""
    return live.row.info()


@AREA("DELETE", "/v1/sandboxes/{id}", scope="exec")
async def _remove(host: Host, live: LiveSandbox) -> None:
    """Remove a sandbox with its checkpoints, but for what forks of it need."""
    await host.remove(live.row.id)


@AREA("POST", "/v1/sandboxes/{id}/kill", scope="exec")
async def _kill(host: Host, live: LiveSandbox) -> None:
    """Kill all processes of a sandbox. A restore brings them back."""
    await host.kill(live.row.id)
