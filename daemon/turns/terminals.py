"""A client at a terminal of a sandbox: bytes both ways, until they leave or the program ends.

Guarantee: output is neither skipped nor repeated while the visitor sits (the program waits for a slow one); input
waits at the gate like any act (I2); the seat outlasts a restore of the sandbox, at the terminal of the restored state.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

from sandbox.container.process import exit_code
from sandbox.container.supervisor import Supervisor, SupervisorGone, Until
from sandbox.errors import Conflict

if TYPE_CHECKING:
    from daemon.turns.turns import LiveSandbox


class TerminalVisitor:
    """A visitor's place at one terminal."""

    def __init__(self, live: LiveSandbox, terminal: str, *, since: int | None) -> None:
        self._live = live
        self._terminal = terminal
        self._since = since

    @contextlib.asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Sit down; at the end what was done is a turn. Raises Conflict where another client is connected."""
        programs, seated = self._live.programs, False
        if self._terminal in programs.attached:
            raise Conflict("another client is connected to this terminal", hint="open another one")
        programs.attached.add(self._terminal)  # before anything is waited for
        try:
            connection = await self._connected()
            with self._live.attending():
                seated = True
                await connection.hold(True)
                yield
        finally:
            programs.attached.discard(self._terminal)
            with contextlib.suppress(SupervisorGone):
                connection = await self._connected()
                if self._terminal not in programs.attached:  # another client is connected already: theirs stays held
                    await connection.hold(False)
            if seated and self._live.group is None and self._live.alive():
                await self._live.end_turn_by_request(f"(terminal) {programs.command(self._terminal)}")

    async def _connected(self) -> Supervisor:
        return await self._live.programs.supervisor(self._terminal)

    async def output(self, send: Callable[[bytes], Awaitable[None]], say: Callable[[str], Awaitable[None]]) -> None:
        """Send what the program prints, until it ends."""
        connection = await self._connected()
        state = await connection.state()
        at = state.outputs[0].start if self._since is None else min(self._since, state.outputs[0].end)
        await say(json.dumps({"start": at, "written": state.written}))
        while True:
            try:
                data = await connection.read(0, at, wait=True)
                if data.data:
                    await send(data.data)
                at = data.end
                if data.ended:
                    state = await connection.wait(Until.EXIT)
                    await say(json.dumps({"exit": exit_code(state.exit_status or 0)}))
                    return
            except SupervisorGone:
                connection = await self._again(connection)
                await connection.hold(True)
                at = (await connection.state()).outputs[0].end  # what was before has been seen

    async def _again(self, lost: Supervisor) -> Supervisor:
        """The terminal after a restore. Raises Gone where it is no part of that state, or was killed."""
        await self._live.programs.finalized()
        return await self._connected()

    async def input(self, data: bytes) -> None:
        await self._live.programs.write(self._terminal, data, None)

    async def resize(self, rows: int, columns: int) -> None:
        with contextlib.suppress(SupervisorGone):
            await (await self._connected()).resize(rows, columns)
