"""Options of sockets that CRIU does not carry: which there are, reading them, setting them again.

Guarantee: `differing` returns what a program has set to something else than a fresh socket has; `put_back` gives a
socket these values. Both act on one socket alone.

Left out, with the reason: what CRIU carries; what the kernel changes by itself while a connection lives (window clamp,
quick acknowledgements, the segment size of a connection, the processor of the last packet); what cannot be read.
"""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Iterator

CAPACITY = 64  # bytes of a value
Options = dict[str, bytes]

_SOL_UDP, _SOL_UDP_LITE, _SOL_NETLINK = 17, 136, 270
_AF_NETLINK = 16
_TCP_LISTEN = 10

# (name, number), by level. The order is the one in which they are set: SO_LOCK_FILTER comes after filters.
_SOCKET = (
    ("SO_PASSPIDFD", 76), ("SO_PASSRIGHTS", 83), ("SO_PEEK_OFF", 42), ("SO_TIMESTAMPNS", 35), ("SO_TIMESTAMP", 29),
    ("SO_TIMESTAMPNS_NEW", 64), ("SO_TIMESTAMP_NEW", 63), ("SO_TIMESTAMPING", 37),
    ("SO_TIMESTAMPING_NEW", 65), ("SO_RXQ_OVFL", 40),
    ("SO_BUSY_POLL", 46), ("SO_MAX_PACING_RATE", 47), ("SO_ZEROCOPY", 60), ("SO_TXTIME", 61), ("SO_TXREHASH", 74),
    ("SO_RCVMARK", 75), ("SO_RCVPRIORITY", 82), ("SO_SELECT_ERR_QUEUE", 45), ("SO_WIFI_STATUS", 41),
    ("SO_NOFCS", 43), ("SO_LOCK_FILTER", 44),
)  # fmt: skip
_ELSEWHERE = (("SO_REUSEADDR", 2),)  # of all families but IPv4 and IPv6, for which CRIU has it
_IP = (
    ("IP_RECVOPTS", 6), ("IP_RETOPTS", 7), ("IP_OPTIONS", 4), ("IP_MTU_DISCOVER", 10), ("IP_RECVERR", 11),
    ("IP_RECVERR_RFC4884", 26), ("IP_RECVTTL", 12), ("IP_RECVTOS", 13), ("IP_RECVORIGDSTADDR", 20), ("IP_MINTTL", 21),
    ("IP_CHECKSUM", 23), ("IP_BIND_ADDRESS_NO_PORT", 24), ("IP_RECVFRAGSIZE", 25), ("IP_MULTICAST_IF", 32),
    ("IP_MULTICAST_TTL", 33), ("IP_MULTICAST_LOOP", 34), ("IP_MULTICAST_ALL", 49), ("IP_UNICAST_IF", 50),
    ("IP_LOCAL_PORT_RANGE", 51), ("IP_PASSSEC", 18),
)  # fmt: skip
_IP_IN_IPV6 = (("IP_TOS", 1), ("IP_TTL", 2), ("IP_PKTINFO", 8), ("IP_FREEBIND", 15))  # CRIU has them for IPv4 alone
_IPV6 = (
    ("IPV6_UNICAST_HOPS", 16), ("IPV6_MULTICAST_IF", 17), ("IPV6_MULTICAST_HOPS", 18), ("IPV6_MULTICAST_LOOP", 19),
    ("IPV6_MULTICAST_ALL", 29), ("IPV6_MTU_DISCOVER", 23), ("IPV6_RECVERR", 25), ("IPV6_FLOWINFO", 11),
    ("IPV6_FLOWINFO_SEND", 33), ("IPV6_RECVHOPLIMIT", 51), ("IPV6_RECVHOPOPTS", 53), ("IPV6_RECVRTHDR", 56),
    ("IPV6_RECVDSTOPTS", 58), ("IPV6_RECVPATHMTU", 60), ("IPV6_DONTFRAG", 62), ("IPV6_RECVTCLASS", 66),
    ("IPV6_TCLASS", 67), ("IPV6_AUTOFLOWLABEL", 70), ("IPV6_ADDR_PREFERENCES", 72), ("IPV6_MINHOPCOUNT", 73),
    ("IPV6_2292PKTINFO", 2), ("IPV6_2292HOPOPTS", 3), ("IPV6_2292DSTOPTS", 4), ("IPV6_2292RTHDR", 5),
    ("IPV6_2292HOPLIMIT", 8), ("IPV6_ROUTER_ALERT_ISOLATE", 30), ("IPV6_RECVORIGDSTADDR", 74),
    ("IPV6_UNICAST_IF", 76), ("IPV6_RECVFRAGSIZE", 77), ("IPV6_RECVERR_RFC4884", 31),
)  # fmt: skip
_TCP = (
    ("TCP_CONGESTION", 13), ("TCP_SYNCNT", 7), ("TCP_LINGER2", 8), ("TCP_DEFER_ACCEPT", 9),
    ("TCP_THIN_LINEAR_TIMEOUTS", 16), ("TCP_USER_TIMEOUT", 18), ("TCP_FASTOPEN", 23), ("TCP_NOTSENT_LOWAT", 25),
    ("TCP_FASTOPEN_KEY", 33), ("TCP_SAVE_SYN", 27), ("TCP_FASTOPEN_CONNECT", 30), ("TCP_FASTOPEN_NO_COOKIE", 34),
    ("TCP_INQ", 36), ("TCP_TX_DELAY", 37), ("TCP_RTO_MAX_MS", 44), ("TCP_RTO_MIN_US", 45), ("TCP_DELACK_MAX_US", 46),
)  # fmt: skip
_LISTENING = (("TCP_MAXSEG", 2),)  # elsewhere it is what a connection has, or had
_UDP = (
    ("UDP_ENCAP", 100), ("UDP_NO_CHECK6_TX", 101), ("UDP_NO_CHECK6_RX", 102), ("UDP_SEGMENT", 103), ("UDP_GRO", 104),
)  # fmt: skip
_UDP_LITE = (("UDPLITE_SEND_CSCOV", 10), ("UDPLITE_RECV_CSCOV", 11))
_NETLINK = (
    ("NETLINK_PKTINFO", 3), ("NETLINK_BROADCAST_ERROR", 4), ("NETLINK_NO_ENOBUFS", 5), ("NETLINK_CAP_ACK", 10),
    ("NETLINK_EXT_ACK", 11), ("NETLINK_GET_STRICT_CHK", 12),
)  # fmt: skip

_OF_PROTOCOL: dict[int, list[tuple[tuple[str, int], ...]]] = {
    socket.IPPROTO_TCP: [_TCP],
    socket.IPPROTO_UDP: [_UDP],
    socket.IPPROTO_UDPLITE: [_UDP, _UDP_LITE],
}

# An accepted connection says there what its first packet had; it cannot be set.
_OF_FIRST_PACKET = ("IP_MULTICAST_IF", "IP_MULTICAST_TTL", "IPV6_MULTICAST_IF", "IPV6_MULTICAST_HOPS")

_NUMBERS = {
    name: (level, number)
    for level, names in (
        (socket.SOL_SOCKET, _ELSEWHERE + _SOCKET), (socket.IPPROTO_IP, _IP + _IP_IN_IPV6), (socket.IPPROTO_IPV6, _IPV6),
        (socket.IPPROTO_TCP, _TCP + _LISTENING), (_SOL_UDP, _UDP), (_SOL_UDP_LITE, _UDP_LITE),
        (_SOL_NETLINK, _NETLINK),
    )
    for name, number in names
}  # fmt: skip


def differing(one: socket.socket) -> Options:
    """The options of this socket that are not those of a fresh one of its kind, by name."""
    fresh = _fresh(one.family, one.type, one.proto)
    return {name: value for name, value in _values(one) if fresh.get(name) != value}


def put_back(one: socket.socket, options: Options) -> list[str]:
    """Set these options where the socket has others; returns the names of those that it does not take.

    Unknown names are none of ours: what comes from another host sets nothing else.
    """
    failed = []
    for name in _NUMBERS:  # in our order
        if name not in options:
            continue
        level, number = _NUMBERS[name]
        with contextlib.suppress(OSError):
            if one.getsockopt(level, number, CAPACITY) == options[name]:
                continue
        try:
            one.setsockopt(level, number, options[name])
        except OSError:
            failed.append(name)
    return failed


def _values(one: socket.socket) -> Iterator[tuple[str, bytes]]:
    for name in _names(one):
        level, number = _NUMBERS[name]
        with contextlib.suppress(OSError):  # an older kernel, or another kind of socket
            yield name, one.getsockopt(level, number, CAPACITY)


def _names(one: socket.socket) -> tuple[str, ...]:
    names = _by_kind(one.family, one.type, one.proto)
    if one.proto == socket.IPPROTO_TCP and _listens(one):
        names += tuple(name for name, _ in _LISTENING)
    return names


@functools.cache
def _by_kind(family: int, kind: int, protocol: int) -> tuple[str, ...]:
    levels: list[tuple[tuple[str, int], ...]] = [_SOCKET]
    if family in (socket.AF_INET, socket.AF_INET6):
        levels += [_IP] if family == socket.AF_INET else [_IPV6, _IP, _IP_IN_IPV6]
        levels += _OF_PROTOCOL.get(protocol, [])
    else:
        levels.append(_ELSEWHERE)
    if family == _AF_NETLINK:
        levels.append(_NETLINK)
    left_out = _OF_FIRST_PACKET if kind == socket.SOCK_STREAM else ()
    return tuple(name for names in levels for name, _ in names if name not in left_out)


@functools.cache
def _fresh(family: int, kind: int, protocol: int) -> Options:
    """The options of a socket with default options; none where such a one cannot be made here."""
    with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as one:
        return dict(_values(one))
    return {}


def _listens(one: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        return one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_LISTEN
    return False
