"""The network of a sandbox, as the SDK offers it, and the credentials of a host."""

from __future__ import annotations

from sandbox.messages import Credential, CredentialInfo, Network, NetworkStatus
from sandbox.sdk.transport import Facet, part


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


class Credentials(Facet):
    """Headers that requests of sandboxes get on their way out: ``host.credentials``.

    A sandbox has those that its policy names: ``Network.allow(names=["pypi.org"], credentials=["github"])``.
    """

    async def put(self, name: str, credential: Credential) -> CredentialInfo:
        """Make or change one. The next request to its hosts has it; its value is never shown again."""
        return await self._client.call("PUT", f"/v1/credentials/{part(name)}", CredentialInfo, credential)

    async def list(self) -> list[CredentialInfo]:
        """The caller's, without their values."""
        return await self._client.call("GET", "/v1/credentials", list[CredentialInfo])

    async def remove(self, name: str) -> None:
        """From now on requests of sandboxes whose policy names it are refused."""
        await self._client.call("DELETE", f"/v1/credentials/{part(name)}", dict[str, str])
