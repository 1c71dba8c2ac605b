"""Work in the network namespace of a sandbox: a thread that enters it, and ends with the work.

Owns: entering. Does not own: what is done there. Guarantee: no other thread of the daemon ever changes its
namespace; a descriptor made inside (a socket) goes on living in that namespace wherever it is used.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

CLONE_NEWNET = 0x40000000
NETNS_COOKIE = 71  # SO_NETNS_COOKIE, Linux 5.14
T = TypeVar("T")


def within(namespace: Path, work: Callable[[], T]) -> T:
    """What `work` returns or raises, run inside the namespace at this path. Blocks."""
    results: list[T] = []
    failures: list[BaseException] = []

    def enter() -> None:
        try:
            fd = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if ctypes.CDLL(None, use_errno=True).setns(fd, CLONE_NEWNET):
                    number = ctypes.get_errno()
                    raise OSError(number, f"cannot enter the network namespace: {os.strerror(number)}")
            finally:
                os.close(fd)
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - handed to the caller, whose call this is
            failures.append(error)

    thread = threading.Thread(target=enter, name="pagurus-netns")  # of its own: it never comes back to the host's
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


def is_here(one: socket.socket) -> bool:
    """Whether a socket is of the namespace of this thread."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        mine, its = (each.getsockopt(socket.SOL_SOCKET, NETNS_COOKIE, 8) for each in (probe, one))
    return mine == its
