"""Routes of a sandbox's network."""

from __future__ import annotations

from daemon.api.route import Area
from daemon.host.host import Host
from daemon.turns.turns import LiveSandbox
from sandbox.messages import Network, NetworkStatistics, NetworkStatus

AREA = Area()


@AREA("GET", "/v1/sandboxes/{id}/network")
async def _status(host: Host, live: LiveSandbox) -> NetworkStatus:
    """What a sandbox may reach, what it did, and what it was refused."""
    return await host.networks.status(live.row)


@AREA("PUT", "/v1/sandboxes/{id}/network", scope="exec")
async def _set(host: Host, live: LiveSandbox, body: Network) -> NetworkStatus:
    """Change what a sandbox may reach, at once. Connections that the new policy does not allow end."""
    return await host.set_network(live.row.id, body)


@AREA("GET", "/v1/network", scope="monitor")
async def _statistics(host: Host) -> NetworkStatistics:
    """The traffic of all sandboxes together."""
    return await host.networks.statistics()
