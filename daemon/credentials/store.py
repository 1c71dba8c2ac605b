"""The credentials of this host: values, and the hosts that each is for.

Guarantee: a value is in this file and in the daemon's memory, and nowhere else: no row, no checkpoint, no log line and
no answer of the API has it.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec

from daemon.network.policy import TCP, NameRule, name_rule
from sandbox import durable
from sandbox.errors import Conflict, Invalid, NotFound, PagurusError
from sandbox.messages.network import Credential, CredentialInfo

HTTPS = 443
MAX_OF_OWNER = 1000
#: Headers that belong to the connection or to the body: with them a request would be another one.
_NOT_THESE = {
    "host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer", "expect", "keep-alive",
}  # fmt: skip


class CredentialRow(msgspec.Struct, frozen=True, kw_only=True):
    owner: str
    name: str
    credential: Credential
    changed_at: float


class CredentialFile(msgspec.Struct):
    credentials: list[CredentialRow]


@dataclass(frozen=True)
class HostRule:
    """A host, or all below one, at one port."""

    rule: NameRule
    port: int


@lru_cache(4096)
def host_rule(text: str) -> HostRule:
    """An entry of a credential's `hosts`. Raises Invalid.

    >>> host_rule("git.example.org:8443").port, host_rule("*.example.org").rule.below
    (8443, True)
    """
    rule = name_rule(text)
    if not rule.name:
        raise Invalid("a credential for every host would go to every host", hint="name the hosts that it is for")
    if len(rule.ports) > 1 or any(item.protocol != TCP for item in rule.ports):
        raise Invalid(f"{text!r}: a credential is for one TCP port of a host", hint="write it twice for two")
    return HostRule(rule, rule.ports[0].first if rule.ports else HTTPS)


class CredentialStore:
    """The credentials in the file `path`. One daemon owns it. Used from the event loop."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._requests: dict[tuple[str, str], int] = {}
        self._changing = asyncio.Lock()
        try:
            rows = msgspec.json.decode(path.read_bytes(), type=CredentialFile).credentials
        except FileNotFoundError:
            rows = []
        except (msgspec.MsgspecError, UnicodeError):  # whose text would quote what it holds
            raise PagurusError(f"{path} cannot be read", hint="move it away; its credentials are lost") from None
        self._rows = {(row.owner, row.name): row for row in rows}

    def get(self, owner: str, name: str) -> Credential | None:
        row = self._rows.get((owner, name))
        return None if row is None else row.credential

    def infos(self, owner: str | None) -> list[CredentialInfo]:
        """Those of an owner; None: all."""
        rows = sorted(self._rows.values(), key=lambda row: (row.owner, row.name))
        return [self.info(row.owner, row.name) for row in rows if owner in (None, row.owner)]

    def info(self, owner: str, name: str) -> CredentialInfo:
        row = self._rows[owner, name]
        return CredentialInfo(
            name=row.name,
            hosts=row.credential.hosts,
            header=row.credential.header,
            changed_at=row.changed_at,
            requests=self._requests.get((owner, name), 0),
        )

    async def put(self, owner: str, name: str, credential: Credential) -> CredentialInfo:
        """Make or change one: the next request has it. Raises Invalid."""
        for host in credential.hosts:
            host_rule(host)
        if credential.header.lower() in _NOT_THESE:
            raise Invalid(f"the header {credential.header} is not a credential's", hint="Authorization is, for one")
        if credential.value != credential.value.strip():
            raise Invalid("the value of a credential begins or ends with a space", hint="leave it out")
        if credential.ca:
            try:
                await asyncio.to_thread(client_context, credential.ca)
            except (ssl.SSLError, ValueError):
                raise Invalid(
                    "`ca` holds no certificates in PEM",
                    hint="give the text of one or more certificates, BEGIN CERTIFICATE included",
                ) from None
        async with self._changing:
            others = [row for key, row in self._rows.items() if key != (owner, name)]
            if sum(row.owner == owner for row in others) >= MAX_OF_OWNER:
                raise Conflict(f"there are {MAX_OF_OWNER} credentials already", hint="remove some")
            row = CredentialRow(owner=owner, name=name, credential=credential, changed_at=time.time())
            await self._write({**self._rows, (owner, name): row})
        return self.info(owner, name)

    async def drop(self, owner: str, name: str) -> None:
        """From now on no request gets it. Raises NotFound."""
        async with self._changing:
            if (owner, name) not in self._rows:
                raise unknown(name)
            await self._write({key: row for key, row in self._rows.items() if key != (owner, name)})
            self._requests.pop((owner, name), None)

    async def _write(self, rows: dict[tuple[str, str], CredentialRow]) -> None:
        data = msgspec.json.encode(CredentialFile(list(rows.values())))
        await asyncio.to_thread(durable.publish, self._path, data, mode=0o600)
        self._rows = rows

    def count(self, owner: str, name: str) -> None:
        """A request has it."""
        self._requests[owner, name] = self._requests.get((owner, name), 0) + 1


def unknown(name: str) -> NotFound:
    return NotFound(f"no such credential: {name}", hint="list those there are with `pagurus credential ls`")


@lru_cache(256)
def client_context(ca: str) -> ssl.SSLContext:
    """What the daemon speaks with to a host whose certificate is signed by one of these, or known to this system."""
    made = ssl.create_default_context()
    made.set_alpn_protocols(["http/1.1"])
    if ca:
        made.load_verify_locations(cadata=ca)
    return made
