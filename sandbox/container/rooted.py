"""The processes of a sandbox that run in the root of one of its services. All of it blocks."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Collection, Iterator

from sandbox.container import services
from sandbox.descriptors import closing
from sandbox.errors import PagurusError
from sandbox.procfs import inner_pid
from sandbox.tree.safe_path import root_of


def below(pids: Collection[int], name: str) -> Iterator[int]:
    """Those of these host pids whose root is that of a service or below."""
    for pid in pids:
        with contextlib.suppress(OSError, PagurusError), root_of(pid) as root:
            if services.owner(os.readlink(f"/proc/self/fd/{root}") + "/") == name:
                yield pid


def inner_pids(pids: Collection[int], name: str) -> set[str]:
    """The numbers of these in the sandbox, as its own ps writes them."""
    return {str(number) for pid in below(pids, name) if (number := inner_pid(pid)) is not None}


def kill(tasks: Callable[[], list[int]], name: str) -> None:
    """SIGKILL to all of them."""
    with contextlib.ExitStack() as stack:
        held = {}
        for pid in tasks():
            with contextlib.suppress(OSError):
                held[pid] = stack.enter_context(closing(os.pidfd_open(pid)))
        for pid in below(set(tasks()) & held.keys(), name):
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(held[pid], signal.SIGKILL)
