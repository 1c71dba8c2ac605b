"""The commands of an agent outside its sandbox.

A restore undoes what commands did since the last request; the agent outside knows nothing of it. So, before anything
else of it happens, the commands of the turn under way are run again in the restored sandbox. An agent that starts over
gets the recorded results up to the place to which its sandbox has come.

Guarantee: in the state of the sandbox each command of the agent's path has taken effect exactly once, also across
restores, a kill of the daemon in the middle of a command, and a restart of the agent. What a command did outside the
sandbox (over a network that its policy allows) is beyond this.
"""

from __future__ import annotations

import asyncio
import logging

import blake3
import msgspec

from daemon.gateway.conversation import LiveConversation
from daemon.gateway.journal import AgentCommand
from daemon.gateway.replay import Act, act, undone
from sandbox.errors import Conflict, Invalid, PagurusError, SandboxDead
from sandbox.messages import ExecRequest, ExecResult, RestoreRequest

log = logging.getLogger("pagurus.gateway")

TRIES = 5  # times that a sandbox may die under one command


class Commands:
    """The commands of one sandbox's agent, one after another."""

    def __init__(self, line: LiveConversation) -> None:
        self._line = line
        self._turn = asyncio.Lock()

    async def run(self, request: ExecRequest, call: str = "") -> ExecResult:
        """The result of the agent's next command: of the record, or by running it now. It ends no turn.

        `call` names the call: one that is sent again, because its connection broke, gets the same result.
        """
        if self._line.settings.agent != "outside":
            raise Invalid("only an agent outside runs its commands this way", hint='create with agent="outside"')
        request.ends_turn = False
        encoded = msgspec.msgpack.encode(request)
        key = blake3.blake3(encoded).digest()
        async with self._turn:
            await self._line.living()
            await self._line.follow()
            self._line.need_space()
            place = self._line.place
            if call and call == place.call:
                return await self._last()
            place.call = call
            if place.cursor < len(self._line.path) - 1:
                return await self._recorded(key)
            return await self._now(request, encoded, key)

    async def _last(self) -> ExecResult:
        """The result of the command before: it was lost on its way."""
        line = self._line
        place, path = line.place, line.path
        before = path[place.cursor + 1].id if place.cursor < len(path) - 1 else None
        existing = await line.handler.journal.commands(line.live.row.id, before)
        result = existing[place.position - 1].result if 0 < place.position <= len(existing) else None
        if result is None:
            raise Conflict(
                "the command's turn has ended since",
                sandbox=line.live.row.id,
                hint="send the command again: it belongs to the next turn",
            )
        return result

    async def _recorded(self, key: bytes) -> ExecResult:
        """The agent started over and is not yet where its sandbox is."""
        line = self._line
        place, path = line.place, line.path
        existing = await line.handler.journal.commands(line.live.row.id, path[place.cursor + 1].id)
        if place.position >= len(existing) or existing[place.position].key != key:
            raise self._left()
        result = existing[place.position].result
        if result is None:
            raise self._left()
        place.position += 1
        await line.handler.journal.put_place(line.live.row.id, place)
        return result

    async def _now(self, request: ExecRequest, encoded: bytes, key: bytes) -> ExecResult:
        """At the end of the path: the command belongs to the turn under way."""
        line = self._line
        sandbox = line.live.row.id
        for _ in range(TRIES):
            existing = await line.handler.journal.commands(sandbox, None)
            match act(existing, line.place.position, key, line.place.tree):
                case Act.RECORD:
                    result = existing[line.place.position].result
                    assert result is not None
                    line.place.position += 1
                    await line.handler.journal.put_place(sandbox, line.place)
                    return result
                case Act.LEFT:
                    raise self._left()
                case Act.UNSURE:
                    log.info("takes the sandbox back: a command has no known end", extra={"sandbox": sandbox})
                    await line.handler.host.restore(sandbox, RestoreRequest())
                    await self._return()
                case Act.REDO:
                    await self._redo(existing[: line.place.position])
                case Act.RUN:
                    done = await self._run(request, encoded, key)
                    if done is not None:
                        return done
        raise SandboxDead(f"it died {TRIES} times under the same command", hint="see its log", sandbox=sandbox)

    async def finalize(self) -> None:
        """Before a request of an agent outside ends the turn: what a restore has undone is done again."""
        line = self._line
        async with self._turn:
            for _ in range(TRIES):
                await line.living()
                await line.follow()
                if line.place.cursor < len(line.path) - 1:
                    return
                existing = await line.handler.journal.commands(line.live.row.id, None)
                last_seen = existing[: line.place.position]
                if not undone(last_seen, line.place.tree):
                    return
                await self._redo(last_seen)

    async def _redo(self, commands: list[AgentCommand]) -> None:
        """Run again what the restore has undone, in order. The agent keeps the results that it got."""
        line = self._line
        for index in undone(commands, line.place.tree):
            command = commands[index]
            request = msgspec.msgpack.decode(command.request, type=ExecRequest)
            log.info("runs a command again that a restore undid", extra={"sandbox": line.live.row.id})
            reported = command.result
            await line.handler.journal.command_runs_again(command.id, line.place.tree)
            result = await self._alive(request)
            if result is None:
                return
            await line.handler.journal.command_ended(command.id, reported or result, line.live.row.id, line.place)

    async def _run(self, request: ExecRequest, encoded: bytes, key: bytes) -> ExecResult | None:
        """Run the command now. None: the sandbox was taken back under it, try again."""
        line = self._line
        sandbox, place = line.live.row.id, line.place
        number = await line.handler.journal.command_begins(sandbox, place.position, key, place.tree, encoded)
        try:
            result = await self._alive(request)
        except PagurusError:  # it never started: nothing of it is left to be returned again
            await line.handler.journal.command_dropped(number)
            raise
        if result is None:
            return None
        place.position += 1
        line.bytes += len(encoded) + await line.handler.journal.command_ended(number, result, sandbox, place)
        return result

    async def _alive(self, request: ExecRequest) -> ExecResult | None:
        """Run a command to its end in one life of the sandbox; None when that life ended first."""
        line = self._line
        tree = line.place.tree
        try:
            result = await line.live.exec(request)
        except SandboxDead:
            await self._return()
            return None
        if line.live.row.tree != tree:
            await self._return()
            return None
        return result

    async def _return(self) -> None:
        """Wait until the sandbox lives again; it must be at the same place of the path."""
        await self._line.living()
        if await self._line.follow():
            raise Conflict(
                "the sandbox was restored to another turn while the command ran",
                hint="start the agent over: it gets the record up to that turn",
                sandbox=self._line.live.row.id,
            )

    def _left(self) -> Conflict:
        line = self._line
        path, cursor = line.path, line.place.cursor
        to = path[cursor].checkpoint if 0 <= cursor < len(path) else "created"
        return Conflict(
            "the agent started over, and its command is not the one that it ran here before",
            hint=f"restore the sandbox to checkpoint {to}, then run it again",
            sandbox=line.live.row.id,
        )
