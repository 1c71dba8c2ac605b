"""What systemd hears of a process: that it is ready, lives, ends."""

from __future__ import annotations

import contextlib
import os
import socket


def notify(state: str) -> None:
    """Notify systemd, where it listens (``NOTIFY_SOCKET``)."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with (
            contextlib.suppress(OSError),  # the listener is gone: nothing to notify
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel,
        ):
            channel.connect("\0" + address[1:] if address.startswith("@") else address)
            channel.sendall(state.encode())
