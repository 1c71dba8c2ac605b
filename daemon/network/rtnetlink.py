"""What a link needs of the kernel's routing socket: a pair of interfaces, addresses, routes and neighbours.

Everything here blocks, and acts in the network namespace of its thread.

pyroute2 has all of it, but its objects take 15 ms of this process's time for one link, and a fork of eight makes eight
links: by these messages each takes one.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from ipaddress import IPv4Address

NEWLINK, DELLINK, NEWADDR, NEWROUTE, NEWNEIGH = 16, 17, 20, 24, 28  # kinds of messages
IFF_UP, IFF_NOARP = 0x1, 0x80
REQUEST, ACK, REPLACE, EXCLUSIVE, CREATE = 0x1, 0x4, 0x100, 0x200, 0x400  # flags of a message
ERROR = 2  # the kind of an answer, also of one without an error
PERMANENT = 0x80  # state of a neighbour
MAIN, STATIC, UNIVERSE, LINK, UNICAST, ONLINK = 254, 4, 0, 253, 1, 4  # of a route
TIMEOUT = 10.0  # seconds for the kernel's answer
Message = tuple[int, int, bytes]  # kind, flags, body


class Refused(OSError):
    """The kernel's answer to a message."""


def exchange(messages: Sequence[Message]) -> None:
    """Send them in order; returns when all have been carried out. Raises Refused with the first one's error."""
    parts = []
    for number, (kind, flags, body) in enumerate(messages, 1):
        parts.append(struct.pack("=IHHII", 16 + len(body), kind, flags | REQUEST | ACK, number, 0) + body)
    failed, answered = 0, 0
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0) as kernel:
        kernel.settimeout(TIMEOUT)
        kernel.bind((0, 0))
        kernel.send(b"".join(parts))
        while answered < len(messages):
            data = kernel.recv(1 << 16)
            while len(data) >= 20:
                length, kind, _, _, _, code = struct.unpack_from("=IHHIIi", data)
                if kind == ERROR:
                    answered, failed = answered + 1, failed or -code
                data = data[max(16, length + 3 & ~3) :]
    if failed:
        raise Refused(failed, os.strerror(failed))


def veth(name: str, mac: str, peer: str, peer_mac: str, namespace: int, mtu: int) -> Message:
    """Make a pair; the peer in the namespace of this descriptor."""
    other = [
        _text(3, peer),
        _attribute(1, _mac(peer_mac)),
        _attribute(4, struct.pack("=I", mtu)),
        _attribute(28, struct.pack("=I", namespace)),
    ]
    data = _attribute(1, _interface(0) + b"".join(other))
    info = _attribute(1, b"veth") + _attribute(2, data)
    own = [_text(3, name), _attribute(1, _mac(mac)), _attribute(4, struct.pack("=I", mtu)), _attribute(18, info)]
    return NEWLINK, CREATE | EXCLUSIVE, _interface(0) + b"".join(own)


def up(index: int, alias: str = "") -> Message:
    """Switch it on, without ARP."""
    flags = IFF_UP | IFF_NOARP
    return NEWLINK, 0, _interface(index, flags, flags) + (_text(20, alias) if alias else b"")


def gone(name: str) -> Message:
    return DELLINK, 0, _interface(0) + _text(3, name)


def address(index: int, address: IPv4Address) -> Message:
    """Its own one, of a network of its own."""
    body = struct.pack("=BBBBI", socket.AF_INET, 32, 0, 0, index)
    return NEWADDR, CREATE | EXCLUSIVE, body + _attribute(2, address.packed) + _attribute(1, address.packed)


def route(index: int, target: IPv4Address) -> Message:
    """One address lies behind this interface."""
    body = struct.pack("=BBBBBBBBI", socket.AF_INET, 32, 0, 0, MAIN, STATIC, LINK, UNICAST, 0)
    return NEWROUTE, CREATE | EXCLUSIVE, body + _attribute(1, target.packed) + _attribute(4, struct.pack("=I", index))


def default_route(index: int, gateway: IPv4Address) -> Message:
    """All others lie behind a router at its other end."""
    body = struct.pack("=BBBBBBBBI", socket.AF_INET, 0, 0, 0, MAIN, STATIC, UNIVERSE, UNICAST, ONLINK)
    there = _attribute(5, gateway.packed) + _attribute(4, struct.pack("=I", index))
    return NEWROUTE, CREATE | EXCLUSIVE, body + there


def neighbour(index: int, address: IPv4Address, mac: str) -> Message:
    """Who has this address there, for good."""
    body = struct.pack("=BBHIHBB", socket.AF_INET, 0, 0, index, PERMANENT, 0, 0)
    return NEWNEIGH, CREATE | REPLACE, body + _attribute(1, address.packed) + _attribute(2, _mac(mac))


def _interface(index: int, flags: int = 0, change: int = 0) -> bytes:
    return struct.pack("=BBHiII", socket.AF_UNSPEC, 0, 0, index, flags, change)


def _attribute(kind: int, data: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(data), kind) + data + b"\0" * (-len(data) % 4)


def _text(kind: int, text: str) -> bytes:
    return _attribute(kind, text.encode() + b"\0")


def _mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))
