"""Shells that keep their state from command to command, as the SDK offers them."""

from __future__ import annotations

import contextlib
import signal as signals
from collections.abc import AsyncIterator
from typing import Any

from sandbox.messages import (
    Chunk,
    ExecResult,
    ProcessInfo,
    ProgramKind,
    SessionExecRequest,
    SessionRequest,
    SessionSignalRequest,
)
from sandbox.sdk.processes import signal_number
from sandbox.sdk.transport import Facet, Transport, fresh_key


class Sessions(Facet):
    """The sessions of a sandbox."""

    async def open(
        self,
        shell: str | None = None,
        *,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        user: int | str | None = None,
        service: str | None = None,
    ) -> Session:
        """Start a shell (None: bash, or else sh) that lives until it is closed; of a composition, in `service`."""
        request = SessionRequest(shell=shell, env=env or {}, cwd=cwd, user=user, service=service)
        info = await self._client.call("POST", f"{self._path}/sessions", ProcessInfo, request, keyed=True)
        return Session(self._client, self._path, info)

    async def list(self) -> list[Session]:
        """Those of the sandbox's present state."""
        infos = await self._client.call("GET", f"{self._path}/processes", list[ProcessInfo])
        return [Session(self._client, self._path, info) for info in infos if info.kind is ProgramKind.SESSION]

    async def get(self, session: str) -> Session:
        """The session with this id: also in a fork, where it continues from where the sandbox was forked."""
        info = await self._client.call("GET", f"{self._path}/processes/{session}", ProcessInfo)
        return Session(self._client, self._path, info)


class Session:
    """One shell. ``async with`` closes it at the end. After a restore it is the shell of that state."""

    def __init__(self, client: Transport, path: str, info: ProcessInfo) -> None:
        self._client = client
        self._path = f"{path}/sessions/{info.id}"
        self.info = info

    @property
    def id(self) -> str:
        return self.info.id

    def __repr__(self) -> str:
        return f"<Session {self.id}: {self.info.command}>"

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def exec(
        self,
        command: str,
        *,
        timeout: float | None = 60.0,
        output_limit: int = 1 << 20,
        ends_turn: bool = True,
        key: str | None = None,
    ) -> ExecResult:
        """Run a command in the shell: directory, variables, functions, jobs and ``$?`` stay for the next one.

        After `timeout` seconds it is interrupted as by Ctrl-C, then harder; the session lives on. The call survives
        the daemon: it is sent again under the same `key` (32 hexadecimal digits), which is executed once.
        """
        request = _request(command, timeout, output_limit, ends_turn, key)
        return await self._client.call("POST", f"{self._path}/exec", ExecResult, request, keyed=True)

    async def stream(
        self, command: str, *, timeout: float | None = None, ends_turn: bool = True, key: str | None = None
    ) -> AsyncIterator[Chunk]:
        """Run a command and yield its output as it comes (the first 16 MiB of each); the last chunk has the result.

        When the reader leaves (closes this iterator, or dies), the command is interrupted as after `timeout`.
        """
        request = _request(command, timeout, 1 << 20, ends_turn, key)
        async with contextlib.aclosing(self._client.frames("POST", f"{self._path}/stream", Chunk, request)) as chunks:
            async for chunk in chunks:
                yield chunk
                if chunk.stream == "result":
                    return

    async def signal(self, number: int | str = signals.SIGINT) -> None:
        """Send a signal (``"TERM"``, ``15``) to what the running command has in front; SIGINT is Ctrl-C.

        Jobs that the session put behind do not get it. Raises NotFound when no command runs, or it has not begun.
        """
        request = SessionSignalRequest(signal=signal_number(number))
        await self._client.call("POST", f"{self._path}/signal", dict[str, Any], request, keyed=True)

    async def close(self) -> None:
        """End the shell with all that it started."""
        await self._client.call("DELETE", self._path, dict[str, Any])


def _request(
    command: str, timeout: float | None, output_limit: int, ends_turn: bool, key: str | None
) -> SessionExecRequest:
    return SessionExecRequest(
        command=command,
        key=key or fresh_key(),
        timeout=timeout,
        output_limit=output_limit,
        ends_turn=ends_turn,
    )
