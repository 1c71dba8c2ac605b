"""The LLM gateway, as the SDK offers it: of a sandbox (``sb.gateway``) and of the host (``host.gateway``)."""

from __future__ import annotations

from collections.abc import Sequence

from sandbox.messages import (
    CheckpointInfo,
    Exchange,
    ExchangeInfo,
    ExecRequest,
    ExecResult,
    GatewayStatistics,
    ReplayInfo,
    ReplayRequest,
    TokenInfo,
    Upstream,
    UpstreamInfo,
)
from sandbox.sdk.transport import Facet


class Conversation(Facet):
    """What the agent of one sandbox and its model say to each other."""

    area = "/gateway"

    async def token(self) -> TokenInfo:
        """A new token by which an agent outside is known as this sandbox's. The one before ends."""
        return await self._client.call("POST", f"{self._path}/token", TokenInfo)

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = 60.0,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: int | str | None = None,
        output_limit: int = 1 << 20,
    ) -> ExecResult:
        """The next command of an agent outside. It ends no turn: the agent's next request does.

        While the sandbox is dead it waits for a restore (up to ten minutes). What a restore undid of this turn runs
        again first. An agent that started over gets the recorded results, until it is where its sandbox is; Conflict
        where it runs something else than before.
        """
        request = ExecRequest(
            command=command if isinstance(command, str) else list(command),
            timeout=timeout,
            stdin=stdin,
            cwd=cwd,
            env=env or {},
            user=user,
            output_limit=output_limit,
            ends_turn=False,
        )
        return await self._client.call("POST", f"{self._path}/exec", ExecResult, request, keyed=True)

    async def replay(self, to: CheckpointInfo | str) -> int:
        """Answer the coming requests from the record up to a checkpoint, of this sandbox or another.

        For an agent inside that is started over in a fresh or restored sandbox: its commands take effect, its model is
        not called. From the first request that differs on, the model is called again. Returns the number of exchanges.
        """
        request = ReplayRequest(checkpoint=to if isinstance(to, str) else to.id)
        return (await self._client.call("POST", f"{self._path}/replay", ReplayInfo, request)).exchanges

    async def exchanges(self, limit: int = 1000) -> list[ExchangeInfo]:
        """The last exchanges, the oldest first."""
        return await self._client.call("GET", f"{self._path}/exchanges?limit={limit}", list[ExchangeInfo])

    async def exchange(self, of: ExchangeInfo | int) -> Exchange:
        """One exchange with its content."""
        number = of if isinstance(of, int) else of.id
        return await self._client.call("GET", f"{self._path}/exchanges/{number}", Exchange)


class Models(Facet):
    """The gateway of the host."""

    async def statistics(self) -> GatewayStatistics:
        return await self._client.call("GET", "/v1/gateway", GatewayStatistics)

    async def upstreams(self) -> list[UpstreamInfo]:
        """Where requests may go. Keys are not shown."""
        return await self._client.call("GET", "/v1/gateway/upstreams", list[UpstreamInfo])

    async def put(self, name: str, upstream: Upstream) -> None:
        """Make or change an upstream. Its key lies in a file of the host's."""
        await self._client.call("PUT", f"/v1/gateway/upstreams/{name}", dict[str, str], upstream)

    async def drop(self, name: str) -> None:
        """Remove an upstream that no sandbox uses."""
        await self._client.call("DELETE", f"/v1/gateway/upstreams/{name}", dict[str, str])
