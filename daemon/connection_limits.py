"""Who is let in where strangers connect: bounds for each listening socket, and for each address."""

from __future__ import annotations

import asyncio
import ipaddress
import time

FIRST = 10.0  # seconds in which the first whole request must come by TCP
ADDRESSES = 2  # one address has at most this part of the TCP connections
SILENCE = 1.0  # seconds after which a connection without a request gives way, where there are too many


class ConnectionLimiter:
    """Who is let in by one listening socket. Each has a bound of its own: one socket's clients never lock out
    another's.

    Guarantee: at most `limit` connections, and at most `item` from one address, are open. Before a new one is refused
    because there are `limit`, the oldest is closed in its favour that has sent no request for a while.
    """

    def __init__(self, limit: int, item: int | None = None) -> None:
        self.limit = limit
        self.item = item
        self._open: dict[asyncio.Transport, str] = {}  # and the address; closed ones stay until they are looked for
        self._silent: dict[asyncio.Transport, float] = {}  # those without a whole request, and since when; oldest first

    def admits(self, transport: asyncio.Transport) -> bool:
        """Whether a new connection may stay."""
        address = _address(transport)
        if len(self._open) >= self.limit:
            self._forget_closed()
        if len(self._open) >= self.limit and not self._evict():
            return False
        if self.item is not None and sum(existing == address for existing in self._open.values()) >= self.item:
            self._forget_closed()
            if sum(existing == address for existing in self._open.values()) >= self.item:
                return False
        self._open[transport] = address
        self._silent[transport] = time.monotonic()
        return True

    def requested(self, transport: asyncio.Transport) -> None:
        """A whole request came on this connection."""
        self._silent.pop(transport, None)

    def became(self, transport: asyncio.Transport, upgraded: asyncio.Transport) -> None:
        """The same connection is spoken to by another transport from now on."""
        self._open[upgraded] = self._open.pop(transport, "")
        self._silent[upgraded] = self._silent.pop(transport, time.monotonic())

    def close_silent(self, transport: asyncio.Transport) -> None:
        """Close it if no whole request has come."""
        if transport in self._silent:
            del self._silent[transport]
            transport.abort()

    def _evict(self) -> bool:
        oldest = next(iter(self._silent), None)
        if oldest is None or time.monotonic() - self._silent[oldest] < SILENCE:
            return False
        self.close_silent(oldest)
        self._open.pop(oldest, None)
        return True

    def _forget_closed(self) -> None:
        for transport in [item for item in self._open if item.is_closing()]:
            del self._open[transport]
            self._silent.pop(transport, None)


def _address(transport: asyncio.Transport) -> str:
    """Who connects; of IPv6 the network of 64 bits, which is one customer's."""
    peer = transport.get_extra_info("peername")
    if not isinstance(peer, tuple):
        return ""
    address = ipaddress.ip_address(peer[0].partition("%")[0])
    if address.version == 4:
        return str(address)
    mapped = address.ipv4_mapped
    return str(mapped or ipaddress.ip_network((address, 64), strict=False))
