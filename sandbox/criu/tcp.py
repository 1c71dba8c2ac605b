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

import base64
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from typing import Any

from blake3 import blake3

from sandbox.criu import Record

#: Addresses of sandboxes, from the block for benchmarks (RFC 2544). Each has one of its own.
POOL = IPv4Network("198.18.0.0/15")
LOOPBACK = IPv4Network("127.0.0.0/8")
ESTABLISHED, CLOSE, CLOSE_WAIT, LISTEN = 1, 7, 8, 10
_END_SENT, _END_RECEIVED = (
    (4, 5, 6, 9, 11),
    (6, 8, 9, 11),
)  # FIN_WAIT1, FIN_WAIT2, TIME_WAIT, CLOSE_WAIT, LAST_ACK, CLOSING
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


def ends(body: Mapping[str, Any]) -> tuple[Address, Address]:
    """Both ends of a connection, of the JSON of its record: its own, then the other."""
    return address(body["src_addr"], body["src_port"]), address(body["dst_addr"], body["dst_port"])


def by_ends(sockets: Iterable[Mapping[str, Any]]) -> dict[tuple[Address, Address], Mapping[str, Any]]:
    """The JSON of the records of TCP sockets, by their ends."""
    return {ends(one): one for one in sockets if one["proto"] == socket.IPPROTO_TCP}


def comparable(
    body: Mapping[str, Any],
    streams: Sequence[Mapping[str, Any]],
    others: Sequence[Mapping[str, Any]],
    other_state: int = CLOSE,
) -> tuple[set[str], dict[str, Any]]:
    """Of the JSON of a socket's record: fields that do not count when two states are compared, and what counts instead.

    `streams` and `others`: the images of its stream, and of that of the other end, which is in `other_state`.
    """
    unset, facts = set(), dict[str, Any]()
    if body.get("state") != LISTEN:
        unset.add("backlog")  # what the other end has not acknowledged yet
    if is_ipv6(body.get("src_addr", ())):
        unset.add("v6only")
    if body.get("state") in (CLOSE, CLOSE_WAIT) and body.get("dst_port"):
        facts["state"] = "ended by the other side"
    if body.get("state") not in (CLOSE, LISTEN) or body.get("dst_port"):
        facts["opts"] = {key: value for key, value in body["opts"].items() if key != "so_reuseport"}
        for name in ("so_rcvbuf", "so_sndbuf"):  # the kernel grows them to any size, and sets even ones
            facts["opts"][name] = facts["opts"].get(name, 0) & ~1
    for stream in streams:
        facts["stream"] = {key: stream.get(key) for key in ("opt_mask", "cork", "nodelay", "mss_clamp")}
        way = under_way(stream, next(iter(others), None), (body.get("state", CLOSE), other_state))
        facts["stream"]["queues"] = blake3(way.encode()).hexdigest()
    return unset, facts


def missing(stream: Mapping[str, Any], other: Mapping[str, Any], states: tuple[int, int]) -> int:
    """How many bytes the other end has sent that a socket has not received, by both images and both states.

    More than the other end's queue holds: the images are of two instants. The end of a stream (FIN) has a number, too.
    """
    end = states[1] in _END_SENT and states[0] not in _END_RECEIVED
    return int((other["outq_seq"] - stream["inq_seq"] - end) % (1 << 32))


def under_way(
    stream: Mapping[str, Any],
    other: Mapping[str, Any] | None = None,
    states: tuple[int, int] = (ESTABLISHED, ESTABLISHED),
) -> str:
    """The bytes on their way to a socket: unread ones, and those that its peer has sent and it has not got, in hex.

    Both are the JSON of CRIU's tcp-stream images. The kernel of a held sandbox delivers and acknowledges, which moves
    bytes from one queue to the other and changes nothing of what will be read. Without a peer in the images: both of
    its own queues, as they are.

    >>> one = {"inq_seq": 9, "extra": {"inq": "YQ==", "outq": ""}}
    >>> under_way(one, {"outq_seq": 10, "outq_len": 2, "extra": {"inq": "", "outq": "YmM="}}) == b"ac".hex()
    True
    """
    if other is not None:
        lacking = missing(stream, other, states)
        if lacking <= other.get("outq_len", 0):
            sent = _queue(other, "outq")
            return (_queue(stream, "inq") + sent[len(sent) - lacking :]).hex()
    return f"{_queue(stream, 'inq').hex()} {_queue(stream, 'outq').hex()}"


def _queue(stream: Mapping[str, Any], name: str) -> bytes:
    return base64.b64decode((stream.get("extra") or {}).get(name, ""))


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
