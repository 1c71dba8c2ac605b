"""The tokens of this host: made, found, revoked.

Guarantee: no secret is ever written; a revoked token is refused from the moment that `revoke` returns, also by the next
daemon: of calls at the same time each file holds what all before it did.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from aiohttp import web

from daemon.auth import access
from daemon.auth.access import Caller, Grant
from daemon.auth.quota import Quota
from sandbox import durable
from sandbox.errors import NotFound, PagurusError, Unauthorized
from sandbox.messages.tokens import TokenScope

NO_QUOTA = Quota()
POLL_INTERVAL = 1.0  # seconds between two looks at the token of a call that lasts
RETAINED_REVOKED = 1000  # revoked and expired ones are listed until there are more


class TokenFile(msgspec.Struct):
    grants: list[Grant]


class TokenStore:
    """The tokens in the file `path`. Reads it once; one daemon owns it. Changes may come from any thread."""

    def __init__(self, path: Path, *, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        try:
            grants = msgspec.json.decode(path.read_bytes(), type=TokenFile).grants
        except FileNotFoundError:
            grants = []
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise PagurusError(f"{path} cannot be read: {error}", hint="move it away; its tokens are lost") from error
        self._grants = {grant.id: grant for grant in grants}  # replaced, never changed: readers take no lock
        self._changing = threading.Lock()

    def create(
        self,
        *,
        name: str,
        scope: TokenScope,
        owner: str | None = None,
        lifetime: float | None = None,
        quota: Quota = NO_QUOTA,
    ) -> tuple[Grant, str]:
        """A new token: what it grants, and its text, which is shown this once. Blocks: it is on the disk then."""
        number, secret, now = secrets.token_hex(6), secrets.token_urlsafe(32), self._clock()
        grant = Grant(
            id=number,
            name=name,
            scope=scope,
            owner=owner or f"t-{number}",
            secret=access.digest(secret),
            created_at=now,
            expires_at=None if lifetime is None else now + lifetime,
            quota=quota,
        )
        with self._changing:
            grants = _pruned({**self._grants, number: grant})
            self._write(grants)
            self._grants = grants
        return grant, f"{access.PREFIX}_{number}_{secret}"

    def list(self) -> list[Grant]:
        return sorted(self._grants.values(), key=lambda grant: grant.created_at)

    def revoke(self, token: str) -> Grant:
        """From now on it is refused. Its sandboxes stay. Blocks.

        When the file cannot be written, this daemon refuses it all the same; call again, or the next one will not.
        """
        with self._changing:
            grant = self._grants.get(token)
            if grant is None:
                raise NotFound(f"no such token: {token}", hint="list those there are with `pagurus token ls`")
            if grant.revoked_at is None:
                grant = msgspec.structs.replace(grant, revoked_at=self._clock())
            self._grants = _pruned({**self._grants, token: grant})
            self._write(self._grants)
        return grant

    def identify(self, text: str) -> Caller:
        """Who shows this token. Raises Unauthorized."""
        number, secret = access.split(text) or ("", "")
        return access.identify(secret, self._grants.get(number), self._clock())

    def existing(self, token: str) -> Caller:
        """Who holds the token of this id, if it is still valid: for what was given to them. Raises Unauthorized."""
        return access.holder(self._grants.get(token), self._clock())

    def expiry(self, token: str) -> float | None:
        """When the token of this id ends, seconds since the epoch; None: when it is revoked."""
        grant = self._grants.get(token)
        return None if grant is None else grant.expires_at

    def caller(self, request: web.Request) -> Caller:
        """Who calls: by a token, else by the socket that only the server's own user can open. Raises Unauthorized."""
        token = access.bearer(request.headers.get("Authorization"))
        if token is not None:
            return self.identify(token)
        return access.LOCAL if is_local(request) else access.NOBODY

    @contextlib.contextmanager
    def watched(self, caller: Caller, request: web.Request) -> Iterator[None]:
        """A call is under way: its connection is closed soon after the token of its caller has ceased to be valid."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None = None

        def check() -> None:
            nonlocal timer
            try:
                self.existing(caller.token)
            except Unauthorized:
                if request.transport is not None:
                    request.transport.abort()
                return
            timer = loop.call_later(POLL_INTERVAL, check)

        if caller.token:
            timer = loop.call_later(POLL_INTERVAL, check)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()

    def _write(self, grants: dict[str, Grant]) -> None:
        """Under the lock: of two writers the later one has the later list."""
        durable.publish(self._path, msgspec.json.encode(TokenFile([*grants.values()])), mode=0o600)


def is_local(request: web.Request) -> bool:
    """Whether it came over the daemon's own socket."""
    connection = None if request.transport is None else request.transport.get_extra_info("socket")
    return connection is not None and connection.family == socket.AF_UNIX


def _pruned(grants: dict[str, Grant]) -> dict[str, Grant]:
    """Without the oldest of too many revoked ones."""
    dead = sorted(
        (grant for grant in grants.values() if grant.revoked_at is not None), key=lambda item: item.created_at
    )
    forgotten = {grant.id for grant in dead[: max(0, len(dead) - RETAINED_REVOKED)]}
    return {number: grant for number, grant in grants.items() if number not in forgotten}
