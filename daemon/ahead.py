"""The inspector, begun before the rest of the daemon is loaded: the kernel checks its programs for half a second, for
which it does not need the interpreter.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor

from ebpf.inspector import Inspector

_begun: list[Future[Inspector]] = []


def begin() -> None:
    """Load it in a thread of its own."""
    _begun.append(ThreadPoolExecutor(1, "inspector").submit(Inspector.load))


async def inspector() -> Inspector:
    """The one that was begun, else one that is begun now. Raises Unsupported where the kernel refuses it."""
    if not _begun:
        begin()
    return await asyncio.wrap_future(_begun.pop())
