"""What a network policy means: names, addresses and ports that are allowed, as data.

Pure: no I/O, no clock.

Guarantee: :func:`compile_policy` accepts a policy only if each of its entries means something that can be enforced;
two segments of one policy never hold the same address, protocol and port.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv4Network, NetmaskValueError, collapse_addresses
from itertools import pairwise
from typing import NamedTuple

from sandbox.criu.tcp import POOL
from sandbox.errors import Invalid
from sandbox.messages.network import Network

TCP, UDP = 6, 17
PROTOCOLS = {"tcp": TCP, "udp": UDP}
MAX_SEGMENTS = 4096
PORTS_OF_A_NAME = 16  # each answered address takes an element for each


#: Never reachable, whatever a policy says: this host, sandboxes, link-local with the metadata services,
#: multicast, reserved, broadcast.
NEVER = tuple(
    IPv4Network(text)
    for text in ("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", str(POOL), "192.0.0.0/24", "224.0.0.0/3")
)
#: Alibaba's, Oracle's and Azure's metadata services lie in address ranges that are otherwise private, or public.
METADATA = tuple(IPv4Network(text) for text in ("100.100.100.200/32", "192.0.0.192/32", "168.63.129.16/32"))
#: Private networks: reached only where a policy names them.
PRIVATE = tuple(IPv4Network(text) for text in ("10.0.0.0/8", "100.64.0.0/10", "172.16.0.0/12", "192.168.0.0/16"))

_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")


class PortRange(NamedTuple):
    """Ports of one protocol, both ends included. Example: ``PortRange(6, 443, 443)``."""

    protocol: int
    first: int
    last: int


@dataclass(frozen=True)
class NameRule:
    """A host name, or all below one. Without ports, every protocol and port."""

    name: str  # lower case, ASCII, no final dot; "" with `below` is every name
    below: bool
    ports: tuple[PortRange, ...] = ()

    def covers(self, name: str) -> bool:
        return name.endswith(f".{self.name}") if self.below and self.name else self.below or name == self.name


class AllowedRange(NamedTuple):
    """Addresses, and of which protocol and ports. `ports` None: all of every protocol."""

    network: IPv4Network
    ports: PortRange | None


@dataclass(frozen=True)
class Policy:
    """A policy in its enforceable form."""

    mode: str = "none"
    segments: tuple[AllowedRange, ...] = ()
    names: tuple[NameRule, ...] = ()


@dataclass(frozen=True)
class NameVerdict:
    """May this name be resolved, and for which ports do its addresses then open? Empty: for all."""

    allowed: bool
    ports: tuple[tuple[int, int], ...] = ()  # (protocol, port)


def compile_policy(network: Network) -> Policy:
    """The enforceable form of a policy. Raises Invalid, naming the entry and what is wrong with it."""
    if network.mode == "none" and (network.cidrs or network.names or network.credentials):
        raise Invalid("a network of mode none allows nothing", hint='use mode "allow"')
    if network.mode == "open" and network.names:
        raise Invalid("an open network knows every name", hint='leave names away, or use mode "allow"')
    return Policy(
        mode=network.mode,
        segments=tuple(disjoint([rule for text in network.cidrs for rule in _cidr(text)])),
        names=tuple(name_rule(text) for text in network.names),
    )


def judge_name(policy: Policy, name: str) -> NameVerdict:
    """Whether a name (lower case, no final dot) may be resolved."""
    if policy.mode == "open":
        return NameVerdict(True)
    result = [rule for rule in policy.names if rule.covers(name)]
    if policy.mode != "allow" or not result:
        return NameVerdict(False)
    if any(not rule.ports for rule in result):
        return NameVerdict(True)
    return NameVerdict(True, tuple(sorted({(p.protocol, p.first) for rule in result for p in rule.ports})))


def judge_answer(policy: Policy, address: IPv4Address) -> str:
    """Why an address that an allowed name resolved to must not be given out; "" when it may.

    A name's owner decides where it points: an answer never opens what only an entry of `cidrs` can.
    """
    if any(address in item for item in (*NEVER, *METADATA)):
        return "it points to an address that no sandbox may reach"
    if any(address in item for item in PRIVATE) and not any(address in item.network for item in policy.segments):
        return "it points to a private address that the policy does not name"
    return ""


def is_private(address: IPv4Address) -> bool:
    """Whether only `cidrs` opens it, with the ports that they say: a name for it opens nothing."""
    return any(address in item for item in PRIVATE)


def why_refused(policy: Policy, address: IPv4Address) -> str:
    """Explains a packet that was refused, for people."""
    if address in POOL:
        return "another sandbox, or the host's end of the link"
    if any(address in item for item in METADATA) or address in IPv4Network("169.254.0.0/16"):
        return "link-local, where metadata services live"
    if any(address in item for item in NEVER):
        return "multicast, reserved or the host's own"
    if policy.mode == "open":
        private = any(address in item for item in PRIVATE)
        return "a private address that cidrs does not name" if private else "the host's own, or too many connections"
    return "not on the allow list, or only for other ports"


# ------------------------------------------------------------------ grammar


def _cidr(text: str) -> list[AllowedRange]:
    host, _, tail = text.strip().partition(":")
    if ":" in tail:
        raise Invalid(f"{text!r}: sandboxes have no IPv6", hint="name IPv4 networks")
    try:
        network = IPv4Network(host, strict=False)
    except (AddressValueError, NetmaskValueError, ValueError):
        raise Invalid(f"{text!r} is not an IPv4 address or network", hint='write "10.0.0.0/8:tcp/443"') from None
    forbidden = next((item for item in (*NEVER, *METADATA) if network.subnet_of(item)), None)
    if forbidden is not None:
        raise Invalid(f"{text!r} lies in {forbidden}, which no sandbox may reach", hint="take it off the list")
    ports = _ports(tail, text) if tail else ()
    return [AllowedRange(network, item) for item in ports] or [AllowedRange(network, None)]


def name_rule(text: str) -> NameRule:
    """An entry of `names`. Raises Invalid."""
    host, _, tail = text.strip().partition(":")
    below = host == "*" or host.startswith("*.")
    bare = canonical(host[2:] if below else host)
    if bare is None or (not bare and host != "*"):
        raise Invalid(f"{text!r} is not a host name", hint='write "pypi.org", "*.pypi.org" or "pypi.org:443"')
    if not below and re.fullmatch(r"[0-9.]+", bare):
        raise Invalid(f"{text!r} is an address", hint="put it into cidrs")
    ports = _ports(tail, text) if tail else ()
    if any(item.first != item.last for item in ports) or len(ports) > PORTS_OF_A_NAME:
        raise Invalid(f"{text!r}: a name takes at most {PORTS_OF_A_NAME} single ports", hint="leave the ports away")
    return NameRule(bare, below, ports)


def canonical(name: str) -> str | None:
    """Lower case ASCII without the final dot; None when it is no host name."""
    name = name.rstrip(".").lower()
    if not name.isascii():
        try:
            name = name.encode("idna").decode()
        except UnicodeError:
            return None
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in name.split(".") if name):
        return None
    return name


def _ports(tail: str, text: str) -> tuple[PortRange, ...]:
    """``443``, ``tcp/443``, ``udp/53``, ``8000-8100``, several with commas. Without a protocol, TCP."""
    result = []
    for part in tail.split(","):
        match = re.fullmatch(r"\s*(?:(tcp|udp)/)?([0-9]{1,5})(?:-([0-9]{1,5}))?\s*", part)
        first, last = (int(match[2]), int(match[3] or match[2])) if match else (0, 0)
        if match is None or not 1 <= first <= last <= 65_535:
            raise Invalid(f"{text!r}: {part!r} is no port", hint='write "443", "udp/53" or "tcp/8000-8100"')
        result.append(PortRange(PROTOCOLS[match[1] or "tcp"], first, last))
    return tuple(result)


# ------------------------------------------------------------------ segments


def disjoint(rules: Sequence[AllowedRange]) -> list[AllowedRange]:
    """Segments of the same meaning. Those with ports do not overlap, nor do those without: the kernel's interval
    sets refuse such. Raises Invalid when there are too many."""
    result = [
        AllowedRange(network, None) for network in collapse_addresses(r.network for r in rules if r.ports is None)
    ]
    for protocol in (TCP, UDP):
        named = [(rule.network, rule.ports) for rule in rules if rule.ports and rule.ports.protocol == protocol]
        edges = sorted({edge for _, ports in named for edge in (ports.first, ports.last + 1)})
        runs: list[tuple[int, int, tuple[IPv4Network, ...]]] = []
        for first, following in pairwise(edges):
            inside = (network for network, ports in named if ports.first <= first and following - 1 <= ports.last)
            merged = tuple(collapse_addresses(inside))
            if runs and runs[-1][1] == first - 1 and runs[-1][2] == merged:
                runs[-1] = (runs[-1][0], following - 1, merged)
            elif merged:
                runs.append((first, following - 1, merged))
        result += [
            AllowedRange(network, PortRange(protocol, first, last))
            for first, last, networks in runs
            for network in networks
        ]
    if len(result) > MAX_SEGMENTS:
        raise Invalid(f"the list of networks and ports takes {len(result)} rules", hint=f"stay below {MAX_SEGMENTS}")
    return result
