"""A server that has loaded its code and waits to get its arguments: what a restart costs without it is the loading.

Guarantee: a spare that is not taken ends with the process that made it, however that ends: it reads from a pipe.

::

    prepare ─▶ python -m SERVER --wait: imports, then reads one line ─▶ take: the arguments ─▶ serves like any other
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import msgspec

from rollout.engine.launch import Launch, LaunchCommand


class Standby:
    """``await spare.prepare()`` while all is well, ``await spare.take(command)`` when a server is needed at once."""

    def __init__(self, launch: Launch, log: Path):
        self._command, self._log = launch.standby, log
        self._process: asyncio.subprocess.Process | None = None

    async def prepare(self) -> None:
        """Have one, if this kind of server can wait. Returns while it still loads its code."""
        if self._command is None or (self._process is not None and self._process.returncode is None):
            return
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as out:
            self._process = await asyncio.create_subprocess_exec(
                *self._command.argv,
                env={**os.environ, **self._command.env},
                stdin=asyncio.subprocess.PIPE,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    async def take(self, command: LaunchCommand) -> asyncio.subprocess.Process | None:
        """The standby, turned into what `command` would start; None when there is none."""
        process, self._process = self._process, None
        if self._command is None or process is None or process.returncode is not None:
            return None
        own = len(self._command.argv) - 1  # `--wait` stands where the arguments begin
        assert command.argv[:own] == self._command.argv[:own], "a spare of another program"
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(command.argv[own:]) + b"\n")
            await process.stdin.drain()
        except ConnectionError:  # it died since
            return None
        finally:
            process.stdin.close()
        return process

    async def close(self) -> None:
        """End it. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def reported(arguments: list[str]) -> list[str] | None:
    """In the server, its code loaded: the arguments, which may have to be waited for; None when it is not needed."""
    if arguments != ["--wait"]:
        return arguments
    line = sys.stdin.buffer.readline()
    return msgspec.json.decode(line, type=list[str]) if line else None
