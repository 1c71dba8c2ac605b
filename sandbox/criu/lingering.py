"""TCP connections that the kernel still keeps when the processes that had them are gone.

Guarantee: a socket that is open anywhere, also one of the daemon in the sandbox's network, is left alone.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Collection, Iterator

from sandbox.container import namespaces
from sandbox.descriptors import closing

# linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h
_NETLINK_SOCK_DIAG = 4
_BY_FAMILY, _DESTROY, _ERROR, _DONE = 20, 21, 2, 3
_REQUEST, _ACK, _ALL = 0x1, 0x4, 0x300
_HEAD = struct.Struct("=IHHII")
_REQUESTED = struct.Struct("=BBBxI")  # family, protocol, extensions, states; an id follows
_RESULT = struct.Struct("=4B48s5I")  # family, state, timer, retransmissions, id, ..., inode
_ID = 48  # bytes; it begins with both ports, in network order
_ANY_STATE = 0xFFFFFFFF
_REPLY = 1 << 16


def end(netns: str | os.PathLike[str], ports: Collection[int]) -> None:
    """End what lingers on these local ports of a network namespace. Blocks, some milliseconds.

    Where the kernel cannot end connections (INET_DIAG_DESTROY), they stay: the restore then says what is taken.
    """
    with closing(os.open(netns, os.O_RDONLY | os.O_CLOEXEC)) as fd:
        namespaces.inside(fd, namespaces.IDS["net"], lambda: _end(ports))


def _end(ports: Collection[int]) -> None:
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
    with socket.socket(socket.AF_NETLINK, kind, _NETLINK_SOCK_DIAG) as requested:
        for family in (socket.AF_INET, socket.AF_INET6):
            for result in [one for one in _nobodys(requested, family) if struct.unpack_from("!H", one)[0] in ports]:
                _send(requested, _DESTROY, _REQUEST | _ACK, family, result)
                requested.recv(_REPLY)  # it has ended by itself or cannot be ended


def _nobodys(requested: socket.socket, family: int) -> Iterator[bytes]:
    """The ids of the TCP sockets that no file stands for any more."""
    _send(requested, _BY_FAMILY, _REQUEST | _ALL, family, bytes(_ID))
    while True:
        reply, at = requested.recv(_REPLY), 0
        while at < len(reply):
            size, kind, _flags, _number, _port = _HEAD.unpack_from(reply, at)
            if kind in (_DONE, _ERROR):
                return
            _family, _state, _timer, _again, result, *_rest, inode = _RESULT.unpack_from(reply, at + _HEAD.size)
            if inode == 0:
                yield result
            at += size + 3 & ~3


def _send(requested: socket.socket, kind: int, flags: int, family: int, of: bytes) -> None:
    target = _REQUESTED.pack(family, socket.IPPROTO_TCP, 0, _ANY_STATE) + of
    requested.send(_HEAD.pack(_HEAD.size + len(target), kind, flags, 0, 0) + target)
