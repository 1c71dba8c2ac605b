"""Routes of a sandbox's network."""

from __future__ import annotations

import logging

import msgspec

from daemon.api.route import Area
from daemon.auth import access, visibility
from daemon.host.host import Host
from daemon.turns.turns import LiveSandbox
from sandbox.errors import Invalid
from sandbox.messages import Credential, CredentialInfo, Network, NetworkStatistics, NetworkStatus
from sandbox.messages.network import CredentialName

AREA = Area()
log = logging.getLogger("pagurus.credentials")


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


# --------------------------------------------------------------------------- credentials


@AREA("GET", "/v1/credentials")
async def _credentials(host: Host) -> list[CredentialInfo]:
    """The caller's credentials, without their values."""
    return host.credentials.store.infos(visibility.caller_owner())


@AREA("PUT", "/v1/credentials/{name}", scope="exec")
async def _put_credential(host: Host, name: str, body: Credential) -> CredentialInfo:
    """Make or change a credential. Its value is never shown again; the next request to its hosts has it."""
    try:
        msgspec.convert(name, CredentialName)
    except msgspec.ValidationError:
        raise Invalid("no credential may be called so", hint="letters, digits, dots, dashes, underscores") from None
    made = await host.credentials.store.put(visibility.caller_owner(), name, body)
    log.info("credential %s for %s was put by %s", name, " ".join(made.hosts), access.CALLER.get().token or "local")
    return made


@AREA("DELETE", "/v1/credentials/{name}", scope="exec")
async def _drop_credential(host: Host, name: str) -> None:
    """Remove a credential: requests of sandboxes whose policy names it are refused from now on."""
    await host.credentials.store.drop(visibility.caller_owner(), name)
    log.info("credential %s was removed by %s", name, access.CALLER.get().token or "local")
