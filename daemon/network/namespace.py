"""Work in the network namespace of a sandbox: a thread that enters it, and ends with the work.

Guarantee: no other thread of the daemon ever changes its namespace; a descriptor made inside (a socket) stays in that
namespace wherever it is used.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from sandbox.container.namespaces import IDS, inside

CLONE_NEWNET = IDS["net"]
NETNS_COOKIE = 71  # SO_NETNS_COOKIE, Linux 5.14
T = TypeVar("T")


def within(namespace: Path, work: Callable[[], T]) -> T:
    """What `work` returns or raises, run inside the namespace at this path. Blocks."""
    with open(namespace, "rb") as file:
        return inside(file.fileno(), CLONE_NEWNET, work)


def is_here(one: socket.socket) -> bool:
    """Whether a socket is of the namespace of this thread."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        mine, its = (item.getsockopt(socket.SOL_SOCKET, NETNS_COOKIE, 8) for item in (probe, one))
    return mine == its
