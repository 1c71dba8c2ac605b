"""Whether a process of the host lives, by its pid or its pidfd."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal

from sandbox.container.process import readable


async def ended(pid: int) -> None:
    """Returns when a shim that is to exit is gone; kills it if it does not go."""
    if not pid:
        return
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        async with asyncio.timeout(2):
            await readable(pidfd)
    except TimeoutError:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        await readable(pidfd)
    finally:
        os.close(pidfd)
    with contextlib.suppress(ChildProcessError):  # adopted: not our child
        os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222 - does not block


def is_readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
