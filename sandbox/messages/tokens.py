"""CLI <-> daemon: the tokens that callers over TCP show."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

TokenScope = Literal["monitor", "read", "exec", "admin"]


class TokenQuota(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What one token may use at once. None: as much as there is. Example: ``TokenQuota(sandboxes=16, cpus=8)``."""

    sandboxes: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] | None = None
    cpus: Annotated[float, msgspec.Meta(ge=0, le=100_000)] | None = None  # sum of Limits.cpus
    memory: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)] | None = None  # bytes, sum of Limits.memory
    disk: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)] | None = None  # bytes, sum of Limits.disk
    requests_per_s: Annotated[float, msgspec.Meta(ge=0.001, le=1_000_000)] | None = None
    execs: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] | None = None  # calls that act, at the same time


class TokenRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """CLI -> daemon: POST /v1/tokens"""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
    scope: TokenScope = "exec"
    owner: Annotated[str, msgspec.Meta(pattern="^[a-zA-Z0-9._-]{1,64}$")] | None = None  # shared with other tokens
    lifetime: Annotated[float, msgspec.Meta(gt=0, le=1e10)] | None = None  # seconds; None: until it is revoked
    quota: TokenQuota = TokenQuota()


class ApiToken(msgspec.Struct, kw_only=True, omit_defaults=True):
    """daemon -> CLI: a token, as listed."""

    id: str
    name: str
    scope: TokenScope
    owner: str
    created_at: float  # seconds since the epoch
    expires_at: float | None = None
    revoked_at: float | None = None
    quota: TokenQuota = TokenQuota()


class NewToken(msgspec.Struct, kw_only=True, omit_defaults=True):
    """daemon -> CLI: a token just made. `text` is shown this once and kept nowhere."""

    token: ApiToken
    text: str


class LoginRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """page -> daemon: POST /v1/login. The answer sets a cookie, which counts together with the key."""

    token: Annotated[str, msgspec.Meta(max_length=200)]


class LoginInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """daemon -> page: who calls."""

    scope: str  # what the caller may do
    everything: bool = False  # sees the sandboxes of all owners
    owner: str = ""
    token: str = ""  # its id; "": the daemon's own user, over its socket
    key: str = ""  # of the login just made: the header X-Pagurus-Page of all further calls
    run: str = ""  # name of the run directory that `pagurus view` shows
    cluster: bool = False  # a coordinator answers, for all of its hosts
