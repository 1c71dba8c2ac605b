"""Which TCP connections of a checkpoint can be restored, which are restored closed, and under which address sockets do.

No I/O.

::

    both ends in the checkpoint ─▶ KEEP   restored alive, with what is under way in both directions
    other end outside           ─▶ CLOSE  the host went on without the past: a reader sees the end of the stream, a
                                          writer EPIPE, a poller HUP; a client then reconnects
    other end gone, but what it sent is not read yet ─▶ KEEP, so that nothing already received is lost
    over (reset, refused, closed by both ends) ─▶ CLOSE, unless something is unread
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

from sandbox.criu import Record

#: Addresses of sandboxes, from the block for benchmarks (RFC 2544). Each has one of its own.
POOL = IPv4Network("198.18.0.0/15")
LOOPBACK = IPv4Network("127.0.0.0/8")
ESTABLISHED, CLOSE, CLOSE_WAIT, LISTEN = 1, 7, 8, 10
SHUT_READ = 1  # of CRIU; a closed socket cannot be written to anyway, and CRIU says no more of it
_MAPPED = 0xFFFF0000  # third word of ::ffff:a.b.c.d, as it lies in memory
Address = tuple[tuple[int, ...], int]  # words as in the image, port


@dataclass(frozen=True)
class Connection:
    """A TCP socket that CRIU would restore in repair mode: it has another end, or had one."""

    ino: int  # CRIU's number of the socket
    state: int
    local: Address
    remote: Address
    unread: int = 0  # bytes received and not yet read
    unsent: int = 0  # bytes written that the other end had no room for


def of(entries: Sequence[Record]) -> list[Record]:
    """The sockets among the records of files.img that CRIU restores in repair mode, whatever their state is.

    The kernel allows that mode only below the user namespace that owns the network namespace. A socket keeps the port
    of the other end when its connection is over.
    """
    result = (entry.isk for entry in entries if entry.HasField("isk"))
    return [isk for isk in result if isk.proto == socket.IPPROTO_TCP and isk.dst_port]


def ports(entries: Sequence[Record]) -> set[int]:
    """Local ports that TCP sockets among the records of files.img are bound to."""
    result = (entry.isk for entry in entries if entry.HasField("isk"))
    return {isk.src_port for isk in result if isk.proto == socket.IPPROTO_TCP and isk.src_port}


def address(words: Sequence[int], port: int) -> Address:
    """An address to compare with: an IPv4 address in an IPv6 socket is that IPv4 address.

    >>> address([0, 0, 0xFFFF0000, 0x0100007F], 80) == address([0x0100007F], 80)
    True
    """
    words = tuple(words)
    if len(words) == 4 and words[:3] == (0, 0, _MAPPED):
        words = words[3:]
    return words, port


def is_ipv6(words: Sequence[int]) -> bool:
    """Whether an address is one of IPv6, not all of them and not an IPv4 address in an IPv6 socket."""
    return len(words) == 4 and any(words) and len(address(words, 0)[0]) == 4


def to_close(connections: Sequence[Connection]) -> list[Connection]:
    """Those that nothing can travel over any more, or of which the other end lies outside the checkpoint."""
    alive = {(one.local, one.remote) for one in connections if one.state != CLOSE}
    return [
        one
        for one in connections
        if ((one.remote, one.local) not in alive or one.state == CLOSE)
        and not (one.state in (CLOSE, CLOSE_WAIT) and one.unread)
    ]


def close(isk: Record) -> None:
    """Make a socket's record one of a closed connection: unbound, unconnected, at its end."""
    isk.state, isk.src_port, isk.dst_port, isk.shutdown = CLOSE, 0, 0, SHUT_READ
    for words in (isk.src_addr, isk.dst_addr):
        words[:] = [0] * len(words)


def readdress(entries: Sequence[Record], present: str | None) -> bool:
    """Sockets of a sandbox that had another address get the present one; returns whether any did.

    Without a network now, what was bound to the former address is bound to loopback, and a UDP socket that was
    connected to somewhere outside is connected no more: neither could be brought back as it was.
    """
    changed = False
    own = _word(IPv4Address(present or "127.0.0.1"))
    for entry in entries:
        if not entry.HasField("isk"):
            continue
        isk = entry.isk
        for words in (isk.src_addr, isk.dst_addr):
            if (result := _ipv4(words)) is not None and result in POOL and words[-1] != own:
                words[-1] = own
                changed = True
        outside = isk.dst_port != 0 and not _stays(isk.dst_addr)
        if present is None and isk.proto == socket.IPPROTO_UDP and outside:
            isk.dst_port = 0
            isk.dst_addr[:] = [0] * len(isk.dst_addr)
            changed = True
    return changed


def keep_inside(isk: Record) -> bool:
    """Have a connection that was cut off lead to loopback if it led elsewhere; returns whether it did.

    Where there is no network now, the kernel has no route to the one who is gone, and would not connect.
    """
    if _ipv4(isk.dst_addr) is None or _stays(isk.dst_addr):
        return False
    for words in (isk.src_addr, isk.dst_addr):
        words[-1] = _word(IPv4Address("127.0.0.1"))
    return True


def _stays(words: Sequence[int]) -> bool:
    """Whether an address is one of the sandbox's loopback."""
    result = _ipv4(words)
    return result in LOOPBACK if result is not None else tuple(words) == (0, 0, 0, 0x01000000)


def _ipv4(words: Sequence[int]) -> IPv4Address | None:
    short, _ = address(words, 0)
    return IPv4Address(struct.pack("=I", short[0])) if len(short) == 1 else None


def _word(one: IPv4Address) -> int:
    return int(struct.unpack("=I", one.packed)[0])


def readable(one: Address) -> str:
    """``127.0.0.1:80`` or ``[::1]:80``."""
    words, port = one
    packed = struct.pack(f"={len(words)}I", *words)
    if len(words) == 1:
        return f"{socket.inet_ntop(socket.AF_INET, packed)}:{port}"
    return f"[{socket.inet_ntop(socket.AF_INET6, packed)}]:{port}"
