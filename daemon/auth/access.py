"""Who may do what: the decision, without I/O and without a clock.

Guarantee: a caller sees its own sandboxes and no others; what it may not see does not exist for it.

A token is ``pgr_<id>_<secret>``. The secret is 256 random bits, so a plain SHA-256 of it is kept: there is
nothing to guess that a slow, salted hash would protect, and it is compared on every request. Clients of E2B refuse
whatever is not ``e2b_<hexadecimal>``: so each token has a second spelling of that form.
"""

from __future__ import annotations

import base64
import contextvars
import hashlib
import hmac
import re
from typing import Literal

import msgspec

from daemon.auth.quota import Quota
from sandbox.errors import Forbidden, PagurusError, Unauthorized
from sandbox.messages.tokens import TokenScope

Scope = Literal["open"] | TokenScope  # of a route, or of a caller
GRANTED: dict[str, tuple[str, ...]] = {  # the routes that a caller of a scope may use
    "open": ("open",),
    "monitor": ("open", "monitor"),  # totals of the host, which count all owners
    "read": ("open", "read"),
    "exec": ("open", "read", "exec"),
    "admin": ("open", "monitor", "read", "exec", "admin"),
}

PREFIX = "pgr"
_FORM = re.compile(rf"{PREFIX}_([0-9a-f]{{12}})_([A-Za-z0-9_-]{{43}})", re.ASCII)
_E2B = re.compile(r"e2b_([0-9a-f]{12})([0-9a-f]{64})", re.ASCII)
_NOBODY = hashlib.sha256(b"nobody").hexdigest()  # compared with where there is no such token


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """What one token grants."""

    id: str
    name: str
    scope: TokenScope
    owner: str  # whose sandboxes: its own id, or one that several tokens share
    secret: str  # SHA-256 of it, in hexadecimal
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None
    quota: Quota = Quota()


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """The caller of a request. ``owner`` "" with ``everything`` is the host itself."""

    token: str = ""  # id; "": the daemon's own user, over its socket
    owner: str = ""
    scope: Scope = "admin"
    everything: bool = True  # sees the sandboxes of all owners
    quota: Quota = Quota()


LOCAL = Caller()
NOBODY = Caller(scope="open", everything=False)
CALLER: contextvars.ContextVar[Caller] = contextvars.ContextVar("caller", default=LOCAL)


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def split(token: str) -> tuple[str, str] | None:
    """(id, secret) of what looks like a token.

    >>> split("pgr_0123456789ab_" + "x" * 43)[0]
    '0123456789ab'
    """
    if (spelled := _E2B.fullmatch(token)) is not None:
        return spelled[1], base64.urlsafe_b64encode(bytes.fromhex(spelled[2])).decode().rstrip("=")
    result = _FORM.fullmatch(token)
    return None if result is None else (result[1], result[2])


def e2b_spelling(token: str) -> str:
    """The same token as clients of E2B accept it.

    >>> split(e2b_spelling("pgr_0123456789ab_" + "x" * 42 + "w")) == split("pgr_0123456789ab_" + "x" * 42 + "w")
    True
    """
    number, secret = split(token) or ("", "")
    return f"e2b_{number}{base64.urlsafe_b64decode(secret + '=').hex()}"


def bearer(header: str | None) -> str | None:
    """The token of an Authorization header, "" where it holds something else, None where there is none."""
    if header is None:
        return None
    kind, _, token = header.partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


def identify(secret: str, grant: Grant | None, now: float) -> Caller:
    """The caller who shows `secret` for `grant` (None: there is no such token). Raises Unauthorized.

    Unknown, wrong, expired and revoked take the same time and sound the same: callers do not learn which tokens exist.
    """
    expected = _NOBODY if grant is None else grant.secret
    same = hmac.compare_digest(digest(secret), expected)
    return holder(grant if same else None, now)


def holder(grant: Grant | None, now: float) -> Caller:
    """Who holds the token of `grant`. Raises Unauthorized where it is not valid any more."""
    if grant is None or grant.revoked_at is not None or (grant.expires_at is not None and now >= grant.expires_at):
        raise Unauthorized("this token is not valid", hint="make one with `pagurus token create` on the host")
    return Caller(
        token=grant.id, owner=grant.owner, scope=grant.scope, everything=grant.scope == "admin", quota=grant.quota
    )


def refusal(caller: Caller, needed: Scope) -> PagurusError | None:
    """Why `caller` may not use a route that needs `needed`; None: it may."""
    if needed in GRANTED[caller.scope]:
        return None
    if caller.scope == "open":
        return Unauthorized("a token is needed", hint="Authorization: Bearer TOKEN; see `pagurus token create`")
    return Forbidden(f"this needs a token of scope {needed}, not {caller.scope}", hint="see `pagurus token create`")


def sees(caller: Caller, owner: str) -> bool:
    """Whether something of `owner` exists for `caller`."""
    return caller.everything or (bool(caller.owner) and caller.owner == owner)
