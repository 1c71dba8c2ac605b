"""Who a client of E2B is: the owner of an API key, or the holder of the token of one sandbox.

Guarantee: a token of a sandbox is good for that sandbox only, reaches no further than the API key that it was given
for, and ends with it; none is stored: it is computed from a secret of this host.

    s-<id>  ▸  es_<id>_<token id>_<HMAC of both>  for all of the sandbox, and et_... for its ports alone
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import time
from collections.abc import Iterable

import msgspec
from aiohttp import web

from daemon.auth import access
from daemon.auth.access import Caller
from daemon.auth.tokens import TokenStore
from daemon.auth.visibility import dashed
from sandbox.errors import Forbidden, Unauthorized

LOCAL = "local"  # in place of a token's id: the host's own user, over its socket
_FORM = re.compile(r"e[st]_([0-9a-f]{10})_([0-9a-f]{12}|local)_([0-9a-f]{64})", re.ASCII)
_SIGNATURE = re.compile(r"v1_([A-Za-z0-9+/]{43})", re.ASCII)
_TICKET = re.compile(r"([0-9]{1,12})\.([0-9a-f]{12}|local)\.[0-9a-f]{64}", re.ASCII)
TICKET_LIFETIME = 60  # seconds
MAX_CANDIDATES = 100_000  # tokens that one signature is compared with


def sandbox_of(token: str) -> str | None:
    """The sandbox that a token is for, by its own word."""
    form = _FORM.fullmatch(token)
    return None if form is None else f"s-{form[1]}"


class Keys:
    """The keys of one host. `secret` never leaves it."""

    def __init__(self, secret: bytes, tokens: TokenStore) -> None:
        self._secret = secret
        self._tokens = tokens

    def owner(self, key: str | None, request: web.Request) -> Caller:
        """Who shows this API key; without one, who opened the connection. Raises Unauthorized."""
        return self._tokens.identify(key) if key is not None else self._tokens.caller(request)

    def token(self, sandbox: str, caller: Caller) -> str:
        """The token of a sandbox, for a caller with `caller`'s key."""
        return self._token(sandbox.removeprefix("s-"), caller.token or LOCAL)

    def traffic_token(self, sandbox: str, caller: Caller) -> str:
        """Likewise one that opens the ports of the sandbox and nothing else."""
        return self._traffic(sandbox.removeprefix("s-"), caller.token or LOCAL)

    def ticket(self, sandbox: str, port: int, caller: Caller) -> str:
        """What lets a browser in to a port of the sandbox for the next minute, with `caller`'s rights."""
        return self._ticket(sandbox.removeprefix("s-"), port, caller.token or LOCAL, int(time.time()) + TICKET_LIFETIME)

    def admitted(self, ticket: str, sandbox: str, port: int) -> str:
        """The token that the holder of a ticket gets, which opens the ports of the sandbox. Raises Unauthorized."""
        number, form = dashed(sandbox).removeprefix("s-"), _TICKET.fullmatch(ticket)
        if form is None or not hmac.compare_digest(self._ticket(number, port, form[2], int(form[1])), ticket):
            raise Unauthorized("this address lets nobody in", hint="follow the link of the port on the page")
        if int(form[1]) < time.time():
            raise Unauthorized("this address was good for a minute", hint="follow the link of the port again")
        self._narrowed(form[2])
        return self._traffic(number, form[2])

    def _ticket(self, number: str, port: int, grant: str, until: int) -> str:
        mac = hmac.new(self._secret, f"ticket {number} {port} {grant} {until}".encode(), hashlib.sha256).hexdigest()
        return f"{until}.{grant}.{mac}"

    def _token(self, number: str, grant: str) -> str:
        mac = hmac.new(self._secret, f"sandbox {number} {grant}".encode(), hashlib.sha256).hexdigest()
        return f"es_{number}_{grant}_{mac}"

    def _traffic(self, number: str, grant: str) -> str:
        mac = hmac.new(self._secret, f"traffic {number} {grant}".encode(), hashlib.sha256).hexdigest()
        return f"et_{number}_{grant}_{mac}"

    def visitor(self, token: str | None, sandbox: str, *, traffic: bool = False) -> Caller:
        """Who shows `token` for this sandbox; `traffic`: for its ports. Raises Unauthorized."""
        form = _FORM.fullmatch(token or "")
        right = form is not None and (
            hmac.compare_digest(form[0], self._token(form[1], form[2]))
            or (traffic and hmac.compare_digest(form[0], self._traffic(form[1], form[2])))
        )
        if form is None or not right:
            raise Unauthorized("the access token of the sandbox is missing or wrong", hint="X-Access-Token: TOKEN")
        if f"s-{form[1]}" != dashed(sandbox):
            raise Forbidden(
                "this access token is another sandbox's", hint="connect to this sandbox again (`Sandbox.connect`)"
            )
        return self._narrowed(form[2])

    def _narrowed(self, grant: str) -> Caller:
        """The caller of an API key, who may not do more than use a sandbox."""
        caller = access.LOCAL if grant == LOCAL else self._tokens.existing(grant)
        return caller if caller.scope != "admin" else msgspec.structs.replace(caller, scope="exec")

    # ----------------------------------------------------------------- signed addresses

    def bearer_of_signature(self, request: web.Request) -> Caller:
        """Who gave away a signed address that names its sandbox. Raises Unauthorized."""
        result = self.signer(request, [dashed(request.match_info["id"])])
        if result is None:
            raise Unauthorized("the signature is wrong, or has expired", hint="request a new address")
        return self._narrowed(result[1])

    def signer(self, request: web.Request, sandboxes: Iterable[str]) -> tuple[str, str] | None:
        """The sandbox, of these, and the key whose token signed an address. Takes microseconds for each pair."""
        query, operation = request.query, "read" if request.method == "GET" else "write"
        form = _SIGNATURE.fullmatch(query.get("signature", ""))
        expiration = query.get("signature_expiration")
        if form is None or (expiration is not None and not _in_future(expiration)):
            return None
        target = base64.b64decode(form[1] + "=")
        before = f"{query.get('path', '')}:{operation}:{query.get('username', '')}:"
        after = "" if expiration is None else f":{expiration}"
        grants = [LOCAL, *(grant.id for grant in self._tokens.list() if grant.revoked_at is None)]
        left = MAX_CANDIDATES
        for sandbox in sandboxes:
            for grant in grants:
                said = f"{before}{self._token(sandbox.removeprefix('s-'), grant)}{after}"
                if hmac.compare_digest(hashlib.sha256(said.encode()).digest(), target):
                    return sandbox, grant
                left -= 1
            if left <= 0:
                return None
        return None


def _in_future(expiration: str) -> bool:
    return expiration.isascii() and expiration.isdigit() and len(expiration) < 13 and int(expiration) > time.time()
