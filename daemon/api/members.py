"""Routes by which a coordinator makes many hosts one."""

from __future__ import annotations

from daemon.api.route import Area
from daemon.host.host import Host
from daemon.host.report import report
from sandbox.messages.cluster import HostReport

AREA = Area()


@AREA("GET", "/v1/host", scope="admin")
async def _report(host: Host) -> HostReport:
    """What this host has, holds and does."""
    return await report(host)
