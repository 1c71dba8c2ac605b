"""How commands end where pidfds do not report it (before Linux 6.15): pid 1, whose children they are, notes it.

Guarantee: nothing that is read there is taken for more than a wait status; a sandbox that changes its pid 1's memory
falsifies the results of its own commands only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import struct
import time
from collections.abc import Callable

from sandbox.container.process import REAP_TIMEOUT, readable, unreaped_status
from sandbox.descriptors import closing
from sandbox.errors import Conflict

ADDRESS = 0x500000  # native/build.sh
MAX_ENDINGS = 511
_COUNT = struct.Struct("=I4x")
_ENDING = struct.Struct("=ii")
_MAX_PAUSE = 0.05  # seconds between looks at a dead command that pid 1 has not reaped yet


def noted(init_pid: int, init_pidfd: int, inner: int) -> int | None:
    """Wait status of the last session leader that had the number `inner` in the sandbox; None without a note.

    A sandbox whose pid 1 has ended took its commands with it: SIGKILL.
    """
    try:
        with closing(os.open(f"/proc/{init_pid}/mem", os.O_RDONLY | os.O_CLOEXEC)) as memory:
            data = os.pread(memory, _COUNT.size + MAX_ENDINGS * _ENDING.size, ADDRESS)
    except (FileNotFoundError, ProcessLookupError):
        data = b""
    except OSError:  # it has unmapped its notes
        return None
    if not data:  # a process gives its memory up before the kernel ends those of its namespace
        return signal.SIGKILL
    try:
        signal.pidfd_send_signal(init_pidfd, 0)  # its number was not reused, then
    except ProcessLookupError:
        return signal.SIGKILL
    return find(data, inner)


def find(data: bytes, inner: int) -> int | None:
    """The newest note of `inner` in this memory. Pure.

    >>> find(_COUNT.pack(2) + _ENDING.pack(7, 256) + _ENDING.pack(7, 9), 7)
    9
    """
    if len(data) < _COUNT.size:
        return None
    (count,) = _COUNT.unpack_from(data)
    for number in range(count - 1, max(-1, count - 1 - MAX_ENDINGS), -1):
        at = _COUNT.size + number % MAX_ENDINGS * _ENDING.size
        if at + _ENDING.size <= len(data):
            pid, status = _ENDING.unpack_from(data, at)
            if pid == inner:
                return int(status) & 0xFFFF
    return None


async def ended(pid: int, pidfd: int, note: Callable[[], int | None]) -> int:
    """Wait status of a command, when pid 1 has reaped it, or a tracer keeps it from that. `note`: what pid 1 says.

    Raises Conflict when there is no note any more: the sandbox ended hundreds of sessions in that moment.
    """
    await readable(pidfd)
    since, pause = time.monotonic(), 0.001
    while not _reaped(pidfd):
        if time.monotonic() - since > REAP_TIMEOUT and (status := unreaped_status(pid, pidfd)) is not None:
            return status
        await asyncio.sleep(pause)
        pause = min(2 * pause, _MAX_PAUSE)
    if (status := note()) is None:
        raise Conflict("the command has ended, and its exit code is lost", hint="run it again if that does no harm")
    return status


def _reaped(pidfd: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, 0)
        return False
    return True
