"""Multicast groups that sockets joined, and UDP datagrams that were not read yet: CRIU carries neither.

Guarantee: looking takes nothing out of a queue and leaves the socket as it was. A datagram is given back with its
content and its sender, in its order, inside the sandbox's own network: the address that it was sent to is then the one
that the socket is bound to, or that of the loopback. To an address that is not one of that network nothing is sent.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import os
import select
import socket
import struct
from typing import Any

import msgspec

from sandbox.container import namespaces
from sandbox.descriptors import closing
from sandbox.errors import CheckpointFailed

MAX_DATAGRAMS = 4096  # datagrams kept of one socket
_MCAST_JOIN_GROUP, _MCAST_MSFILTER = 42, 48
_FILTER = struct.Struct("=II128sII")  # group_filter: interface, padding, group, mode, number of sources
_REQUEST = struct.Struct("=II128s")  # group_req
_EXCLUDE = 0  # mode of a group that was joined as a whole
_SO_PEEK_OFF = 42
_EVERYBODY = {"224.0.0.1", "ff01::1", "ff02::1"}
_SOLICITED = ipaddress.IPv6Network("ff02::1:ff00:0/104")  # joined by the kernel, for each address
Group = tuple[int, str]  # number of the interface, address
Packet = tuple[str, bytes]  # address that it goes to, all of it
Levels = {socket.AF_INET: socket.IPPROTO_IP, socket.AF_INET6: socket.IPPROTO_IPV6}

_libc = ctypes.CDLL(None, use_errno=True)


class Datagram(msgspec.Struct, array_like=True):
    """One that waits to be read."""

    sender: str
    port: int
    content: bytes


# ---------------------------------------------------------------------------- groups


def groups_of(pid: int) -> list[Group]:
    """The multicast groups that a socket in the network of this process has joined. Blocks."""
    result: list[Group] = []
    with contextlib.suppress(OSError), open(f"/proc/{pid}/net/igmp") as file:
        index = 0
        for line in file.readlines()[1:]:
            words = line.split()
            if line[0].isdigit():
                index = int(words[0])
            else:
                result.append((index, socket.inet_ntoa(struct.pack("=I", int(words[0], 16)))))
    with contextlib.suppress(OSError), open(f"/proc/{pid}/net/igmp6") as file:
        for line in file:
            number, _, address = line.split()[:3]
            result.append((int(number), socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))))
    return [(index, name) for index, name in result if name not in _EVERYBODY and not _solicited(name)]


def _solicited(name: str) -> bool:
    address = ipaddress.ip_address(name)
    return address.version == 6 and address in _SOLICITED


def joined(one: socket.socket, groups: list[Group]) -> list[Group]:
    """Those of these groups that this socket has joined. Raises CheckpointFailed for one that it joined in part."""
    result = []
    for index, name in groups:
        family = socket.AF_INET6 if ":" in name else socket.AF_INET
        if family != one.family:
            continue
        requested = ctypes.create_string_buffer(_FILTER.pack(index, 0, _address(name), 0, 0), _FILTER.size)
        size = ctypes.c_uint32(_FILTER.size)
        if _libc.getsockopt(one.fileno(), Levels[family], _MCAST_MSFILTER, requested, ctypes.byref(size)) == 0:
            *_, mode, sources = _FILTER.unpack(requested.raw)
            if (mode, sources) != (_EXCLUDE, 0):
                raise CheckpointFailed(
                    f"a socket of the sandbox takes the multicast group {name} from some senders only",
                    hint="join the whole group (IP_ADD_MEMBERSHIP), or close it",
                )
            result.append((index, name))
    return result


def join(one: socket.socket, groups: list[Group]) -> list[str]:
    """Join these again; returns those that could not be."""
    failed = []
    for index, name in groups:
        try:
            one.setsockopt(Levels[one.family], _MCAST_JOIN_GROUP, _REQUEST.pack(index, 0, _address(name)))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                failed.append(f"group {name}")
    return failed


def _address(name: str) -> bytes:
    """As a sockaddr_storage."""
    if ":" in name:
        return struct.pack("=HHI16sI", socket.AF_INET6, 0, 0, socket.inet_pton(socket.AF_INET6, name), 0).ljust(
            128, b"\0"
        )
    return struct.pack("=HH4s", socket.AF_INET, 0, socket.inet_aton(name)).ljust(128, b"\0")


# ---------------------------------------------------------------------------- datagrams


def unread(one: socket.socket) -> list[Datagram]:
    """What waits in this UDP socket, the oldest first."""
    ready = select.poll()
    ready.register(one, select.POLLIN)
    events = ready.poll(0)
    if not events or events[0][1] & select.POLLERR or not events[0][1] & select.POLLIN:
        return []  # to look would take a pending error away
    return [Datagram(str(sender[0]), int(sender[1]), content) for content, sender in peeked(one)]


def peeked(one: socket.socket) -> list[tuple[bytes, Any]]:
    """(content, sender) of the datagrams that wait in a socket, the oldest first; none is taken out."""
    result: list[tuple[bytes, Any]] = []
    before = one.getsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF)
    one.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, 0)
    try:
        while len(result) < MAX_DATAGRAMS:
            result.append(one.recvfrom(1 << 16, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        pass
    finally:
        one.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, before)
    return result


def packets(one: socket.socket, datagrams: list[Datagram]) -> list[Packet]:
    """The datagrams as packets for this restored socket."""
    name, port = one.getsockname()[:2]
    made = []
    for datagram in datagrams[:MAX_DATAGRAMS]:
        sender, target = ipaddress.ip_address(datagram.sender), ipaddress.ip_address(name)
        sender = getattr(sender, "ipv4_mapped", None) or sender
        if target.version != sender.version or target.is_unspecified:
            target = ipaddress.ip_address("127.0.0.1" if sender.version == 4 else "::1")
        made.append((str(target), _packet(sender.packed, target.packed, datagram, port)))
    return made


def deliver(pid: int, made: list[Packet]) -> None:
    """Send them in the network of this process, to addresses of its own alone. Blocks."""
    with closing(os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)) as network:
        namespaces.inside(network, namespaces.IDS["net"], lambda: _send(made))


def _send(made: list[Packet]) -> None:
    with contextlib.ExitStack() as opened:
        raw = {
            ":" in name: opened.enter_context(socket.socket(family, socket.SOCK_RAW, socket.IPPROTO_RAW))
            for family, name in ((socket.AF_INET, "."), (socket.AF_INET6, ":"))
        }
        own = {target: _is_own(target) for target, _ in made}
        for target, packet in made:
            if own[target]:
                with contextlib.suppress(OSError):  # the network may lose one
                    raw[":" in target].sendto(packet, (target, 0))


def _is_own(address: str) -> bool:
    """Whether it is an address of this namespace."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as one:
        one.bind((address, 0))
        return not ipaddress.ip_address(address).is_multicast
    return False


def _packet(sender: bytes, target: bytes, datagram: Datagram, port: int) -> bytes:
    size = 8 + len(datagram.content)
    header = struct.pack("!HHHH", datagram.port, port, size, 0)
    pseudo = sender + target + struct.pack("!IHBB", size, 0, 0, socket.IPPROTO_UDP)
    checksum = _checksum(pseudo + header + datagram.content) or 0xFFFF
    body = header[:6] + struct.pack("!H", checksum) + datagram.content
    if len(sender) == 4:  # the kernel fills in length, number and checksum
        return struct.pack("!BBHHHBBH", 0x45, 0, 20 + size, 0, 0, 64, socket.IPPROTO_UDP, 0) + sender + target + body
    return struct.pack("!IHBB", 6 << 28, size, socket.IPPROTO_UDP, 64) + sender + target + body


def _checksum(data: bytes) -> int:
    data += b"\0" * (len(data) % 2)
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
