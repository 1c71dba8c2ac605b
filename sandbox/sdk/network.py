"""The network of a sandbox, as the SDK offers it."""

from __future__ import annotations

from sandbox.messages import Network, NetworkStatus
from sandbox.sdk.transport import Facet


class Networking(Facet):
    """What a sandbox may reach: ``sb.network``."""

    area = "/network"

    async def status(self) -> NetworkStatus:
        """The policy, the sandbox's address, its traffic, and the latest things that it was refused."""
        return await self._client.call("GET", self._path, NetworkStatus)

    async def set(self, network: Network) -> NetworkStatus:
        """Change the policy of the running sandbox. In force when this returns; connections that it does not allow
        end. A restore keeps it, a fork inherits it. Raises Invalid for what cannot be enforced."""
        return await self._client.call("PUT", self._path, NetworkStatus, network)
