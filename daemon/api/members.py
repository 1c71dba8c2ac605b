"""Routes by which a coordinator makes many hosts one."""

from __future__ import annotations

from daemon.api.route import Area
from daemon.catalogue import ProgramRow
from daemon.host import leave
from daemon.host.host import Host
from daemon.host.report import report
from daemon.turns.turns import LiveSandbox
from sandbox.messages import SandboxInfo
from sandbox.messages.cluster import (
    ArriveRequest,
    ConversationExport,
    DepartedSandbox,
    HeldSandbox,
    HoldRequest,
    HostReport,
    LeaseRequest,
)

AREA = Area()


@AREA("POST", "/v1/host", scope="admin")
async def _report(host: Host, body: LeaseRequest) -> HostReport:
    """What this host has, holds and does; with a moment, its lease ends then, and its sandboxes freeze."""
    if body.release:
        host.fence.release()
    elif body.until is not None:
        host.fence.grant(body.until, body.boot)
    return await report(host)


@AREA("POST", "/v1/checkpoints/{checkpoint}/arrive", status=201, scope="admin")
async def _arrive(host: Host, checkpoint: str, body: ArriveRequest) -> SandboxInfo:
    """Continue a sandbox of another host here from a checkpoint, under its own id, or only prepare that."""
    arrivals = host.arrivals
    return await (arrivals.prepare(checkpoint, body) if body.ahead else arrivals.arrive(checkpoint, body))


@AREA("DELETE", "/v1/arrivals/{arrival}", scope="admin")
async def _drop(host: Host, arrival: str) -> None:
    """The sandbox with this id, for which something was prepared here, does not come."""
    await host.arrivals.drop(arrival)


@AREA("PUT", "/v1/sandboxes/{id}/hold", scope="admin")
async def _prepare(host: Host, live: LiveSandbox, body: HoldRequest) -> None:
    """Prepare to hold a sandbox that moves to another host."""
    await leave.prepare(host, live, body.since)


@AREA("POST", "/v1/sandboxes/{id}/hold", scope="admin")
async def _hold(host: Host, live: LiveSandbox) -> HeldSandbox:
    """Capture a sandbox; nothing of it runs from then on."""
    return await leave.held(host, live, (await leave.hold(host, live)).row)


@AREA("DELETE", "/v1/sandboxes/{id}/hold", scope="admin")
async def _release(host: Host, live: LiveSandbox) -> None:
    """Release a sandbox that was held."""
    await leave.release(host, live)


@AREA("POST", "/v1/sandboxes/{id}/left", scope="admin")
async def _left(host: Host, live: LiveSandbox) -> DepartedSandbox:
    """A sandbox went on elsewhere: remove it, but for its newest durable checkpoint."""
    return DepartedSandbox(checkpoint=await leave.left(host, live))


@AREA("GET", "/v1/checkpoints/{checkpoint}/programs", scope="admin")
async def _programs(host: Host, checkpoint: str) -> dict[str, ProgramRow]:
    """The sessions, processes and terminals that a checkpoint holds, as another host needs them to know them again."""
    return host.checkpoint(checkpoint).programs


@AREA("GET", "/v1/checkpoints/{checkpoint}/conversation", scope="admin")
async def _conversation(host: Host, checkpoint: str) -> ConversationExport:
    """What the gateway of another host must know of the sandbox to continue from this checkpoint."""
    row = host.checkpoint(checkpoint)
    return ConversationExport() if host.gateway is None else await host.gateway.conversation(row)
