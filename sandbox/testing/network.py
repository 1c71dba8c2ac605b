"""The network of sandboxes of the fake host: policies, addresses, what a test says was refused. Nothing connects.

Owns: which policies a daemon would refuse, as far as their words go; one address for each sandbox that has a network.
Does not own: the rule itself (``daemon/network/policy.py``), to which the contract tests hold it.
"""

from __future__ import annotations

import re
import time
from ipaddress import IPv4Network

import msgspec

from sandbox.criu.tcp import POOL
from sandbox.errors import Invalid
from sandbox.messages import Network, NetworkCounters, NetworkStatistics, NetworkStatus, Refusal

_NEVER = ("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "192.0.0.0/24", "224.0.0.0/3", "100.100.100.200/32")
NEVER = (*map(IPv4Network, _NEVER), POOL)
_PORT = r"(?:(?:tcp|udp)/)?([0-9]{1,5})(?:-([0-9]{1,5}))?"
_LABEL = r"(?!-)[a-z0-9_-]{1,63}(?<!-)"
_NAME = re.compile(rf"\*|(?:\*\.)?{_LABEL}(?:\.{_LABEL})*\.?", re.IGNORECASE)
REFUSALS_KEPT = 64


def check(network: Network) -> None:
    """Raise Invalid for a policy that a daemon would not take.

    >>> check(Network.allow(names=["*.example.org:443"], cidrs=["10.0.0.0/8:tcp/80,udp/53"]))
    """
    if network.mode == "none" and (network.cidrs or network.names):
        raise Invalid("a network of mode none allows nothing", remedy='use mode "allow"')
    if network.mode == "open" and network.names:
        raise Invalid("an open network knows every name", remedy='leave names away, or use mode "allow"')
    for text in network.cidrs:
        address = _split(text)
        try:
            found = IPv4Network(address, strict=False)
        except ValueError:
            raise Invalid(f"{text!r} is not an IPv4 address or network", remedy='write "10.0.0.0/8:tcp/443"') from None
        if any(found.subnet_of(each) for each in NEVER):
            raise Invalid(f"no sandbox may reach {text!r}", remedy="take it off the list")
    for text in network.names:
        name = _split(text)
        if _NAME.fullmatch(name) is None or re.fullmatch(r"[0-9.]+", name):
            raise Invalid(f"{text!r} is not a host name", remedy='write "pypi.org", "*.pypi.org" or "pypi.org:443"')


def _split(text: str) -> str:
    """What stands before the ports, which are checked."""
    host, colon, ports = text.strip().partition(":")
    for part in ports.split(",") if colon else ():
        match = re.fullmatch(_PORT, part.strip())
        if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]) <= 65_535:
            raise Invalid(f"{text!r}: {part!r} is no port", remedy='write "443", "udp/53" or "tcp/8000-8100"')
    return host


class FakeNetworks:
    """The networks of all sandboxes of a fake host."""

    def __init__(self) -> None:
        self._addresses: dict[str, str] = {}
        self._refusals: dict[str, list[Refusal]] = {}
        self._given = 0

    def follow(self, sandbox: str, network: Network) -> None:
        """A sandbox has this policy from now on. One without a network has no address."""
        check(network)
        if network.mode == "none":
            self.forget(sandbox)
        elif sandbox not in self._addresses:
            self._given += 1
            self._addresses[sandbox] = str(POOL[2 * self._given])

    def forget(self, sandbox: str) -> None:
        """It is gone, or without a network."""
        self._addresses.pop(sandbox, None)
        self._refusals.pop(sandbox, None)

    def refuse(self, sandbox: str, what: str, why: str) -> None:
        """Say that a sandbox tried something that it may not."""
        if sandbox not in self._addresses:
            raise Invalid("a sandbox without a network tries nothing", remedy="give it one")
        known = self._refusals.setdefault(sandbox, [])
        if known and (known[-1].what, known[-1].why) == (what, why):
            known[-1] = msgspec.structs.replace(known[-1], count=known[-1].count + 1, at=time.time())
        else:
            known.append(Refusal(at=time.time(), what=what, why=why))
            del known[:-REFUSALS_KEPT]

    def status(self, sandbox: str, network: Network) -> NetworkStatus:
        refusals = self._refusals.get(sandbox, [])
        names = sum(each.count for each in refusals if each.what.startswith("name "))
        packets = sum(each.count for each in refusals) - names
        return NetworkStatus(
            network=network,
            address=self._addresses.get(sandbox),
            counters=NetworkCounters(packets_out=packets, packets_refused=packets, names_refused=names),
            refusals=list(refusals),
        )

    def statistics(self) -> NetworkStatistics:
        counters = [self.status(sandbox, Network()).counters for sandbox in self._addresses]
        total = {name: sum(getattr(each, name) for each in counters) for name in NetworkCounters.__struct_fields__}
        return NetworkStatistics(attached=len(counters), **total)
