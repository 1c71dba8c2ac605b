"""Images that are pulled from registries, each by a process of its own (:mod:`sandbox.image.pull`).

Guarantee: cancelled, a pull ends at once, with all that it started; what it left half made is collected with other
half-made images.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable

import msgspec

from sandbox.errors import PagurusError, from_body
from sandbox.image.pull import ImagePullProgress
from sandbox.image.store import ImageStore

AT_ONCE = 2
_slots = asyncio.Semaphore(AT_ONCE)


async def _nobody(done: int, total: int) -> None:
    pass


async def pull(
    images: ImageStore, reference: str, name: str | None, report: Callable[[int, int], Awaitable[None]] = _nobody
) -> str:
    """The name of the image; `report` is given the bytes that are here, and of how many. Raises what the process
    says."""
    async with _slots:
        argv = [sys.executable, "-m", "sandbox.image.pull", str(images.directory), reference, *([name] if name else [])]
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, start_new_session=True
        )
        assert process.stdout is not None
        try:
            said = ImagePullProgress()
            async for text in process.stdout:
                said = msgspec.json.decode(text, type=ImagePullProgress)
                if said.total:
                    await report(said.done, said.total)
            await process.wait()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
    if said.error is not None:
        raise from_body(said.error)
    if not said.name:
        raise PagurusError(f"the process that pulled {reference} was killed", hint="try again; see the daemon's log")
    return said.name
