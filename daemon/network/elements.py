"""What is said of one sandbox in the nftables table: elements of sets and maps, as netlink and nft write them.

Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address

from daemon.network.policy import AllowedRange, Policy

#: Sets whose key begins with the address of the sandbox.
BY_ADDRESS = ("modes", "generations", "current", "cidrs", "cidr_ports", "names", "name_ports", "refused")
INTERVALS = ("cidrs", "cidr_ports")


@dataclass(frozen=True)
class Element:
    """One element of a set or map. `seconds`: how long the kernel keeps it; 0 is for ever."""

    set: str
    key: bytes
    end: bytes = b""  # of an interval
    chain: str = ""  # value in a verdict map
    mark: int = 0  # value in a map of marks
    seconds: int = field(default=0, compare=False)


@dataclass(frozen=True)
class ElementChange:
    """Add an element, or take it away."""

    element: Element
    add: bool = True


# ------------------------------------------------------------------ what a sandbox has in the table


def addressed(address: IPv4Address, link: str) -> list[Element]:
    """A sandbox's link and its one address."""
    return [Element("bound", link.encode().ljust(16, b"\0") + address.packed), Element("refused", address.packed)]


def permitted(address: IPv4Address, policy: Policy) -> list[Element]:
    """What a policy allows from the start."""
    segments = (_segment(address, segment) for segment in policy.segments)
    return [Element("modes", address.packed, chain=policy.mode), *segments]


def generation(address: IPv4Address, number: int) -> list[Element]:
    """Under which mark its connections are accepted from now on."""
    mark = struct.pack("=I", number)
    return [Element("generations", address.packed, mark=number), Element("current", address.packed + mark)]


def _segment(source: IPv4Address, segment: AllowedRange) -> Element:
    first, last = segment.network.network_address.packed, segment.network.broadcast_address.packed
    if segment.ports is None:
        return Element("cidrs", source.packed + first, source.packed + last)
    protocol, low, high = segment.ports
    return Element(
        "cidr_ports",
        source.packed + first + _service(protocol, low),
        source.packed + last + _service(protocol, high),
    )


def named(
    source: IPv4Address, address: IPv4Address, ports: Sequence[tuple[int, int]], seconds: int
) -> Iterator[Element]:
    """What an answer of the resolver opens, for some seconds."""
    if not ports:
        yield Element("names", source.packed + address.packed, seconds=seconds)
    for protocol, port in ports:
        key = source.packed + address.packed + _service(protocol, port)
        yield Element("name_ports", key, seconds=seconds)


def _service(protocol: int, port: int) -> bytes:
    return struct.pack("!BxxxHxx", protocol, port)  # each part of a key fills whole words


def service(key: bytes) -> tuple[int, int]:
    """Protocol and port in a key."""
    protocol, port = struct.unpack("!BxxxHxx", key)
    return protocol, port


# ------------------------------------------------------------------ in nft's language


def statements(table: str, elements: Iterable[Element]) -> str:
    """Adds all of them, in the language of the rules: with these in one transaction."""
    by_set: dict[str, list[str]] = {}
    for element in elements:
        by_set.setdefault(element.set, []).append(_spoken(element))
    return "".join(f"add element inet {table} {name} {{ {', '.join(spoken)} }}\n" for name, spoken in by_set.items())


def _spoken(element: Element) -> str:
    """Example: ``198.18.0.20 . 10.0.0.0-10.255.255.255 . 6 . 80-90``."""
    key, end = element.key, element.end or element.key
    if element.set == "bound":
        name = key[:16].rstrip(b"\0").decode()
        return f'"{name}" . {IPv4Address(key[16:20])}'
    parts = [str(IPv4Address(key[:4]))]
    if element.set == "current":
        parts.append(hex(struct.unpack("=I", key[4:8])[0]))
    elif len(key) > 4:
        parts.append(_span(str(IPv4Address(key[4:8])), str(IPv4Address(end[4:8]))))
    if len(key) > 8:
        (protocol, first), (_, last) = service(key[8:]), service(end[8:])
        parts += [str(protocol), _span(str(first), str(last))]
    spoken = " . ".join(parts)
    if element.seconds:
        spoken += f" timeout {element.seconds}s"
    if element.chain:
        spoken += f" : goto {element.chain}"
    return f"{spoken} : {element.mark:#x}" if element.mark else spoken


def _span(first: str, last: str) -> str:
    return first if first == last else f"{first}-{last}"
