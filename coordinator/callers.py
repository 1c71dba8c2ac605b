"""Who calls a cluster, and as whom each host sees the caller.

A caller's token is the cluster's and stays here. For each host that its calls reach, the coordinator makes one there
with the same scope and owner, so that the host itself decides what the caller sees and may. What a host learns is good
for that host alone.
"""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from coordinator.members import HostMember, Members, answering
from daemon.auth.access import CALLER
from daemon.auth.tokens import TokenStore
from sandbox.errors import PagurusError
from sandbox.messages.tokens import NewToken, TokenRequest
from sandbox.page import Logins


class Callers:
    """Tokens and logins of the cluster, and tokens that stand for them on its hosts."""

    def __init__(self, tokens: TokenStore, logins: Logins, members: Members) -> None:
        self.tokens, self.logins = tokens, logins
        self._members = members
        self._making: dict[str, asyncio.Lock] = {}  # by host

    async def token(self, member: HostMember) -> str | None:
        """What the call under way shows to a host; None: nothing, on a socket that is root's alone."""
        caller = CALLER.get()
        if caller.everything:
            return member.row.token
        state = self._members.state
        if (existing := state.tokens.get((caller.token, member.name))) is not None:
            return str(existing[1])
        async with self._making.setdefault(member.name, asyncio.Lock()), answering(member):
            if (existing := state.tokens.get((caller.token, member.name))) is not None:
                return str(existing[1])
            quota = msgspec.structs.replace(caller.quota, requests_per_s=None, execs=None)  # of these, all hosts' count
            target = TokenRequest(name=f"cluster {caller.token}", scope=caller.scope, owner=caller.owner, quota=quota)  # type: ignore[arg-type]
            made = await member.upstream.call("POST", "/v1/tokens", NewToken, target)
            await state.put_token(caller.token, member.name, made.token.id, made.text)
            return made.text

    async def revoke(self, token: str) -> None:
        """Take back what stands for a token on the hosts. The cluster itself refuses it already."""
        state = self._members.state
        for (caller, host), (number, _) in list(state.tokens.items()):
            member = self._members.hosts.get(host)
            if caller == token and member is not None:
                with contextlib.suppress(PagurusError):  # away: only the coordinator ever had it
                    await member.upstream.call("DELETE", f"/v1/tokens/{number}", msgspec.Raw)
                await state.drop_token(caller, host)
