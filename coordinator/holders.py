"""Who holds states of sandboxes: hosts, and the store. To both the same is said.

Guarantee: a state that was taken is durable there and whole; one of which the stream broke off was never there.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from coordinator.forward import HostResponse, gathered, passed_on
from coordinator.members import HostMember
from sandbox import errors
from sandbox.errors import PagurusError
from sandbox.messages.store import ImportResult
from sandbox.sdk.transport import MSGPACK, decoded_error, part

MAX_HAVE = 1 << 30  # bytes, as a daemon takes them


class CopyHolder(Protocol):
    """See the module."""

    def given(
        self, sandbox: str, checkpoint: str, since: str, have: bytes = b"", *, brief: bool = False
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """The stream of a state, less what `since` has, another one that is here, and less what `have` lists.

        `brief`: the receiver is a host. Raises NotFound or Conflict where one of the two is not here.
        """

    async def take(self, sandbox: str, checkpoint: str, stream: AsyncIterator[bytes], since: str) -> None:
        """Keep a state, this one of this sandbox. Raises NotFound or Conflict where `since`, which it builds upon, is
        not here."""

    async def discard(self, sandbox: str, checkpoint: str) -> None:
        """This state is not needed any more. What others build upon stays."""


class OnHost:
    """Checkpoints of a host."""

    def __init__(self, member: HostMember, *, arriving: bool = False) -> None:
        """`arriving`: what is given and taken is what a sandbox on its way waits for, and need not be durable."""
        self._member = member
        self._arriving = arriving

    @contextlib.asynccontextmanager
    async def given(
        self, sandbox: str, checkpoint: str, since: str, have: bytes = b"", *, brief: bool = False
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        query = (f"?since={part(since)}" if since else "?") + ("&soon=true" if self._arriving else "")
        query += "&brief=true" if brief else ""
        async with self._export(f"/v1/checkpoints/{part(checkpoint)}/export{query}", have) as result:
            yield result

    @contextlib.asynccontextmanager
    async def manifest(self, checkpoint: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """What a state consists of, as a stream."""
        async with self._export(f"/v1/checkpoints/{part(checkpoint)}/export?manifest=true", b"") as result:
            yield result

    async def has(self, manifest: AsyncIterator[bytes]) -> bytes:
        """What of that is here, as a list for the sender."""
        headers = {"Accept": MSGPACK, "Content-Type": "application/octet-stream"}
        url = "/v1/checkpoints/survey"
        async with self._member.upstream.answered("POST", url, headers, manifest, self._member.row.token) as result:
            have = await gathered(result, MAX_HAVE)
            if result.status >= 400:
                raise decoded_error(result.status, have, url)
            return have

    @contextlib.asynccontextmanager
    async def _export(self, path: str, have: bytes) -> AsyncIterator[AsyncIterator[bytes]]:
        headers = {"Accept": MSGPACK}
        async with self._member.upstream.answered("POST", path, headers, have, self._member.row.token) as result:
            if result.status >= 400:
                raise decoded_error(result.status, await gathered(result), path)
            yield result.content.iter_any()

    async def take(self, sandbox: str, checkpoint: str, stream: AsyncIterator[bytes], since: str) -> None:
        url = "/v1/checkpoints/import?" + (f"since={part(since)}" if since and not self._arriving else "")
        url += f"arriving={part(sandbox)}" if self._arriving else ""  # what is prepared has its own
        headers = {"Accept": MSGPACK, "Content-Type": "application/octet-stream"}
        async with self._member.upstream.answered("POST", url, headers, stream, self._member.row.token) as taken:
            answer = HostResponse(taken.status, passed_on(taken.headers), await gathered(taken))
        if answer.status >= 400:
            raise decoded_error(answer.status, answer.body, url)
        result = answer.decoded(ImportResult)
        if (result.checkpoint.sandbox, result.checkpoint.id) != (sandbox, checkpoint):
            if not result.already:
                await self.discard(sandbox, result.checkpoint.id)
            raise errors.Protocol(f"{result.checkpoint.id} of {result.checkpoint.sandbox} came instead of {checkpoint}")

    async def discard(self, sandbox: str, checkpoint: str) -> None:
        with contextlib.suppress(PagurusError):  # something is based on it by now
            await self._member.upstream.call("DELETE", f"/v1/checkpoints/{part(checkpoint)}", msgspec.Raw)
