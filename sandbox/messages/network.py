"""SDK <-> daemon: the network of a sandbox."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec

from sandbox.messages.brief import Brief

Destination = Annotated[str, msgspec.Meta(min_length=1, max_length=300)]
MAX_DESTINATIONS = 512
MAX_CREDENTIALS = 64  # of one policy
CredentialName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")]


class Network(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a sandbox may reach. Example: ``Network.allow(names=["*.pypi.org:443"], cidrs=["10.2.0.0/16"])``.

    Replies come in; nothing else ever does. Other sandboxes, the host's own addresses, link-local and multicast
    addresses are out of reach in every mode; private addresses are unless `cidrs` names them.

    `credentials`: names of those whose hosts are reached by HTTPS with a header that the sandbox never sees, whether or
    not `names` has them (see :class:`Credential`).
    """

    mode: Literal["none", "allow", "open"] = "none"
    cidrs: Annotated[tuple[Destination, ...], msgspec.Meta(max_length=MAX_DESTINATIONS)] = ()
    names: Annotated[tuple[Destination, ...], msgspec.Meta(max_length=MAX_DESTINATIONS)] = ()
    credentials: Annotated[tuple[CredentialName, ...], msgspec.Meta(max_length=MAX_CREDENTIALS)] = ()

    @classmethod
    def none(cls) -> Network:
        """Loopback alone."""
        return cls(mode="none")

    @classmethod
    def allow(cls, *, names: Iterable[str] = (), cidrs: Iterable[str] = (), credentials: Iterable[str] = ()) -> Network:
        """Nothing but what is listed.

        `names`: host names, ``*.example.org`` for all below one. Their addresses open for as long as the answer of
        the resolver is good. `cidrs`: IPv4 addresses and networks. Either may end in ports:
        ``pypi.org:443``, ``10.0.0.0/8:tcp/80,udp/53,tcp/8000-8100``; without, every protocol and port is meant.
        """
        return cls(mode="allow", names=tuple(names), cidrs=tuple(cidrs), credentials=tuple(credentials))

    @classmethod
    def open(cls, *, cidrs: Iterable[str] = (), credentials: Iterable[str] = ()) -> Network:
        """All of the public internet, and the private networks in `cidrs`."""
        return cls(mode="open", cidrs=tuple(cidrs), credentials=tuple(credentials))


class Credential(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """SDK -> daemon: PUT /v1/credentials/{name}. A header that requests to some hosts get on their way out.

    Example: ``Credential.basic("x-access-token", token, hosts=["github.com"])``.
    """

    hosts: Annotated[tuple[Destination, ...], msgspec.Meta(min_length=1, max_length=MAX_CREDENTIALS)]
    value: Annotated[str, msgspec.Meta(min_length=1, max_length=16_384, pattern=r"^[\x20-\x7e]+\Z")]
    header: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}\Z")] = "Authorization"
    ca: Annotated[str, msgspec.Meta(max_length=65_536)] = ""  # certificates (PEM) that these hosts' may be signed by

    @classmethod
    def bearer(cls, token: str, *, hosts: Iterable[str], ca: str = "") -> Credential:
        """``Authorization: Bearer TOKEN``, as APIs take it."""
        return cls(hosts=tuple(hosts), value=f"Bearer {token}", ca=ca)

    @classmethod
    def basic(cls, user: str, password: str, *, hosts: Iterable[str], ca: str = "") -> Credential:
        """``Authorization: Basic ...``, as git servers and package registries take it."""
        encoded = base64.b64encode(f"{user}:{password}".encode()).decode()
        return cls(hosts=tuple(hosts), value=f"Basic {encoded}", ca=ca)

    def __repr__(self) -> str:
        """Without the value: it must be in no log."""
        return f"Credential(hosts={self.hosts!r}, header={self.header!r})"


class CredentialInfo(msgspec.Struct, frozen=True, kw_only=True):
    """daemon -> SDK: a credential, without its value."""

    name: str
    hosts: tuple[str, ...]
    header: str
    changed_at: float  # seconds since the epoch
    requests: int = 0  # that had it since the daemon's start


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """daemon -> SDK: something that a sandbox tried and may not. Equal ones in a row are one with a count."""

    at: float  # seconds since the epoch, of the last one
    what: str  # "tcp 10.0.0.1:80", "name evil.example"
    why: str
    count: int = 1


class NetworkCounters(msgspec.Struct, frozen=True, kw_only=True):
    """daemon -> SDK: since the sandbox got its network, or since the daemon's start for `names_*`."""

    packets_out: int = 0  # tried to leave the sandbox, what was refused included
    packets_in: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    packets_refused: int = 0
    names_allowed: int = 0  # questions to the resolver
    names_refused: int = 0


class NetworkStatus(Brief, kw_only=True):
    """daemon -> SDK: GET and PUT /v1/sandboxes/{id}/network"""

    network: Network = Network()
    address: str | None = None  # its own IPv4 address; None without a network
    counters: NetworkCounters = NetworkCounters()
    refusals: list[Refusal] = []  # the latest ones, oldest first


class NetworkStatistics(NetworkCounters, frozen=True, kw_only=True):
    """daemon -> SDK: all sandboxes of a host together."""

    attached: int = 0  # sandboxes with a network


class PortLink(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """daemon -> page: where a browser finds a port of a sandbox."""

    name: str  # of the port, below a domain whose names lead to the daemon: 8000-s4f1c00aa12
    domain: str = ""  # such a domain; "": the daemon knows none. To a browser, `localhost` is one of its own machine
    path: str = ""  # that lets one browser in, once it is there within a minute
