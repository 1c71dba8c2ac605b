"""Names that the kernel gave to connected Unix sockets, which CRIU does not bind again.

Guarantee: a name that a program chose is not kept. An accepted socket has its listener's: bound to the accepted one, it
could not be bound by a server that starts again.
"""

from __future__ import annotations

import contextlib
import re
import socket

CONNECTED = (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)  # types of sockets with connections
_AUTOBOUND = re.compile(rb"\0[0-9a-f]{5}")  # unix(7)


def is_autobound(name: bytes) -> bool:
    """
    >>> is_autobound(b"\\x000a1b2"), is_autobound(b"\\0server")
    (True, False)
    """
    return _AUTOBOUND.fullmatch(name) is not None


def read(opened: socket.socket) -> bytes:
    """The name to keep; empty: none."""
    if opened.family == socket.AF_UNIX and opened.type in CONNECTED:
        with contextlib.suppress(OSError):  # not connected: CRIU binds it
            name = opened.getsockname()
            opened.getpeername()
            if isinstance(name, bytes) and is_autobound(name):
                return name
    return b""


def put_back(opened: socket.socket, name: bytes) -> list[str]:
    """Returns what failed, in words."""
    if name and opened.family == socket.AF_UNIX:
        try:
            opened.bind(name)
        except OSError:
            return ["the name"]
    return []
