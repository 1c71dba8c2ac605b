"""Routes of the tokens that callers over TCP show."""

from __future__ import annotations

import asyncio

import msgspec

from daemon.api.route import Area
from daemon.auth.access import Grant
from daemon.auth.tokens import TokenStore
from sandbox.messages.tokens import ApiToken, NewToken, TokenRequest

AREA = Area()


@AREA("POST", "/v1/tokens", status=201, scope="admin")
async def _create(tokens: TokenStore, body: TokenRequest) -> NewToken:
    """Make a token. Its text is shown this once."""
    grant, text = await asyncio.to_thread(tokens.create, **msgspec.structs.asdict(body))
    return NewToken(token=_reported(grant), text=text)


@AREA("GET", "/v1/tokens", scope="admin")
async def _list(tokens: TokenStore) -> list[ApiToken]:
    """The tokens, the oldest first."""
    return [_reported(grant) for grant in tokens.list()]


@AREA("DELETE", "/v1/tokens/{token}", scope="admin")
async def _revoke(tokens: TokenStore, token: str) -> ApiToken:
    """Refuse a token from now on. Its sandboxes stay."""
    return _reported(await asyncio.to_thread(tokens.revoke, token))


def _reported(grant: Grant) -> ApiToken:
    """What is shown of a token: all but the hash of its secret."""
    return msgspec.convert(grant, ApiToken, from_attributes=True)
