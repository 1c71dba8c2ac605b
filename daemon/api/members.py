"""Routes by which a coordinator makes many hosts one."""

from __future__ import annotations

from daemon.api.route import Area
from daemon.catalogue import ProgramRow
from daemon.host.arrive import arrive
from daemon.host.host import Host
from daemon.host.report import report
from sandbox.messages import SandboxInfo
from sandbox.messages.cluster import ArriveRequest, HostReport, LeaseRequest

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
    """Let a sandbox of another host go on here from a checkpoint, under its own id."""
    return await arrive(host, checkpoint, body)


@AREA("GET", "/v1/checkpoints/{checkpoint}/programs", scope="admin")
async def _programs(host: Host, checkpoint: str) -> dict[str, ProgramRow]:
    """The sessions, processes and terminals that a checkpoint holds, as another host needs them to know them again."""
    return host.checkpoint(checkpoint).programs
