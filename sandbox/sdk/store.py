"""The checkpoints of a host as content: ``host.store``."""

from __future__ import annotations

from collections.abc import AsyncIterator

from sandbox.messages import CheckpointInfo
from sandbox.messages.store import CheckpointReport, ImportResult, LabelRequest, PullRequest, VerifyRequest
from sandbox.sdk.handle import checkpoint_id
from sandbox.sdk.transport import Facet, encoded, part

BYTES = "application/octet-stream"
CHUNK = 1 << 18


class Store(Facet):
    """Checkpoints that lie on a host: list, label, remove, verify, move to another host.

    ::

        async for part in here.store.stream(checkpoint): ...       # a checkpoint as bytes
        await there.store.receive(here.store.stream(checkpoint))   # from one host to another, through this process
        await there.store.pull("https://here:8700", checkpoint)    # the daemon fetches only what it lacks
    """

    async def checkpoints(self) -> list[CheckpointInfo]:
        """All checkpoints of the host, oldest first."""
        return await self._client.call("GET", "/v1/checkpoints", list[CheckpointInfo])

    async def label(self, checkpoint: str | CheckpointInfo, label: str | None) -> CheckpointInfo:
        """Label a checkpoint, or take its label away (None)."""
        return await self._client.call("PUT", self._of(checkpoint, "/label"), CheckpointInfo, LabelRequest(label=label))

    async def remove(self, checkpoint: str | CheckpointInfo) -> None:
        """Remove a checkpoint. Raises Conflict when a sandbox is based on it."""
        await self._client.call("DELETE", self._of(checkpoint), dict)

    async def collect(self) -> None:
        """Apply every retention policy and free what nothing refers to, now instead of soon."""
        await self._client.call("POST", "/v1/checkpoints/collect", dict)

    async def verify(self, *checkpoints: str | CheckpointInfo, restore: bool = False) -> list[CheckpointReport]:
        """Hash checkpoints again; without any: all of the host, and its catalogue. Reads all of them."""
        request = VerifyRequest(checkpoints=[checkpoint_id(item) for item in checkpoints], restore=restore)
        return await self._client.call("POST", "/v1/checkpoints/verify", list[CheckpointReport], request)

    async def have(self) -> bytes:
        """What need not be sent to this host: give it to `stream` of another one."""
        return await self._client.raw("GET", "/v1/checkpoints/have", None, "")

    async def stream(
        self,
        checkpoint: str | CheckpointInfo,
        *,
        since: str | CheckpointInfo | None = None,
        have: bytes = b"",
        manifest: bool = False,
    ) -> AsyncIterator[bytes]:
        """A durable checkpoint as bytes, less what the other side has: a checkpoint, or what its `have` said."""
        query = {"since": checkpoint_id(since)} if since is not None else {}
        if manifest:
            query["manifest"] = "true"
        path = self._of(checkpoint, "/export") + (f"?{encoded(**query)}" if query else "")
        async with self._client.request("POST", path, have, BYTES) as response:
            async for part in response.content.iter_chunked(CHUNK):
                yield part

    async def receive(self, stream: AsyncIterator[bytes], *, mounts: bool = False) -> ImportResult:
        """Import what another host's `stream` gave. All or nothing.

        `mounts`: its forks may mount the directories of this host that it names; else such a checkpoint is refused.
        """
        from msgspec import msgpack

        query = "?mounts=true" if mounts else ""
        raw = await self._client.raw("POST", f"/v1/checkpoints/import{query}", stream, BYTES)
        return msgpack.decode(raw, type=ImportResult)

    async def pull(
        self,
        address: str,
        checkpoint: str | CheckpointInfo,
        *,
        token: str | None = None,
        ca: str | None = None,
        mounts: bool = False,
    ) -> ImportResult:
        """Let the daemon fetch a checkpoint from another one, only what it lacks. `mounts`: as for `receive`."""
        request = PullRequest(address=address, checkpoint=checkpoint_id(checkpoint), token=token, ca=ca, mounts=mounts)
        return await self._client.call("POST", "/v1/checkpoints/pull", ImportResult, request)

    @staticmethod
    def _of(checkpoint: str | CheckpointInfo, act: str = "") -> str:
        return f"/v1/checkpoints/{part(checkpoint_id(checkpoint))}{act}"
