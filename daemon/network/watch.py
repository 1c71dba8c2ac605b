"""Notices when another program removes this daemon's table.

``nft flush ruleset``, which the firewall services of distributions run at every reload, removes all tables that have no
owner, before Linux 6.9 ours too (:mod:`daemon.network.table`); a sandbox's link without its table would lead to the
host.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Iterator

from daemon.network.refusals import attribute, messages

log = logging.getLogger("pagurus.network")

SUBSYSTEM = 10  # nf_tables
DELTABLE = 2
GROUP = 7  # NFNLGRP_NFTABLES
TABLE_NAME = 1


def removed(data: bytes) -> Iterator[str]:
    """The names of the tables whose removal is announced in what was received."""
    for message in messages(data, SUBSYSTEM << 8 | DELTABLE):
        if (name := attribute(message, TABLE_NAME)) is not None:
            yield name.rstrip(b"\0").decode(errors="replace")


class TableWatch:
    """Calls `gone` on the event loop when the table by this name was removed, or may have been."""

    def __init__(self, table: str, gone: Callable[[], None]) -> None:
        self._table = table
        self._gone = gone
        self._socket: socket.socket | None = None

    def start(self) -> None:
        """Idempotent."""
        if self._socket is not None:
            return
        made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, 12)
        try:
            made.setsockopt(socket.SOL_SOCKET, 33, 4 << 20)  # SO_RCVBUFFORCE: our own changes are announced as well
            made.bind((0, 0))
            made.setsockopt(270, 1, GROUP)  # SOL_NETLINK, NETLINK_ADD_MEMBERSHIP
        except OSError:
            made.close()
            raise
        self._socket = made
        asyncio.get_running_loop().add_reader(made.fileno(), self._readable)

    def _readable(self) -> None:
        assert self._socket is not None
        try:
            while data := self._socket.recv(1 << 18):
                if self._table in removed(data):
                    self._gone()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise
            self._gone()  # some announcements were lost: look

    def close(self) -> None:
        """Idempotent."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
