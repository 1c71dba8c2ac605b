"""The long-lived programs of one sandbox: background processes, shells of sessions, terminals.

Guarantee: a program's id names the program of the sandbox's present state. After a restore it is the one that the
checkpoint holds, with the log it had then; a new daemon finds it by its row. What holds the program lives in the
sandbox, so neither the daemon's death nor a dump loses a byte of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from daemon.catalogue import ProgramRow, put_sandbox
from daemon.turns import excluded
from daemon.turns.place import place
from sandbox.container import supervisor
from sandbox.container.process import exit_code, kill_started, readable
from sandbox.container.spawn import PATH
from sandbox.container.supervisor import Data, Mode, Program, StartedSupervisor, Supervisor, SupervisorGone, Until
from sandbox.container.users import User
from sandbox.descriptors import closing
from sandbox.errors import Closed, Conflict, NotFound, PagurusError
from sandbox.messages import (
    ExecResult,
    LogChunk,
    Logs,
    ProcessInfo,
    ProcessRequest,
    ProgramKind,
    ProgramState,
    SandboxState,
    SessionRequest,
    TerminalRequest,
)
from sandbox.procfs import host_pid
from sandbox.tree.safe_path import SandboxRoot

if TYPE_CHECKING:
    from daemon.turns.turns import LiveSandbox

log = logging.getLogger("pagurus.processes")

MAX_PROGRAMS = 64  # that run at once in one sandbox
ENDED_RETAINED = 16  # that have ended, with their logs
COMMAND_RETAINED = 200  # characters
ARGUMENT_RETAINED = 4096  # characters of each argument, where they are listed
END_TIMEOUT = 2.0  # seconds for an attendant that was to end
MAX_LOG_ANSWER = 32 << 20  # bytes of one answer with logs


class Programs:
    """The programs of one sandbox."""

    def __init__(self, live: LiveSandbox) -> None:
        self._live = live
        self._supervisors: dict[str, Supervisor] = {}
        self._inside: dict[str, SandboxRoot] = {}  # the state that a connection belongs to
        self._connecting = asyncio.Lock()
        self.attached: set[str] = set()  # terminals in use
        self._attendants: dict[str, int] = {}  # their pids on the host, of programs that this daemon started
        self.read: set[str] = set()  # those whose output is read, also after their end

    # ----------------------------------------------------------------- rows

    def row(self, program: str, kind: ProgramKind | None = None) -> ProgramRow:
        result = self._live.row.programs.get(program)
        if result is None or (kind is not None and result.kind is not kind):
            what = "program" if kind is None else kind.value
            raise NotFound(
                f"{what} {program[:64]} is not in its present state: it was started after the checkpoint that was "
                "restored, or removed, or never there",
                hint="list those there are, or start it again",
                sandbox=self._live.row.id,
            )
        return result

    def command(self, program: str) -> str:
        """What a program is, for lists; also of one that is gone."""
        result = self._live.row.programs.get(program)
        return program if result is None else result.command

    def put(self, row: ProgramRow) -> None:
        """Replace a row. The caller publishes."""
        self._live.row.programs = {**self._live.row.programs, row.id: row}

    def _drop(self, program: str) -> None:
        self._live.row.programs = {k: v for k, v in self._live.row.programs.items() if k != program}
        self._attendants.pop(program, None)
        if (connection := self._supervisors.pop(program, None)) is not None:
            connection.close()

    async def publish(self) -> None:
        await self._live.services.catalogue.write([put_sandbox(self._live.row)])

    # ----------------------------------------------------------------- connections

    async def supervisor(self, program: str) -> Supervisor:
        """The connection to a program's attendant in the sandbox's present state. Raises Gone."""
        self.row(program)
        self._live.need_usable()
        if (result := self._connected(program)) is not None:
            return result
        self._live.need_alive()
        inside = self._live.container.inside
        async with self._connecting:
            if (result := self._connected(program)) is not None:
                return result
            if (former := self._supervisors.get(program)) is not None:
                former.close()
            made, _ = await Supervisor.connect(inside, program)
            self._supervisors[program], self._inside[program] = made, inside
            return made

    def _connected(self, program: str) -> Supervisor | None:
        """The connection that there is, to the state that runs now. Death closes it."""
        result = self._supervisors.get(program)
        if result is None or result.closed or self._inside[program] is not self._live.container.held_root:
            return None
        return result

    async def finalized(self) -> None:
        """Returns when no restore or removal is under way."""
        async with self._live.exclusive:
            pass

    def forget(self) -> None:
        """Let go of all of them; they live on."""
        for connection in self._supervisors.values():
            connection.close()
        self._supervisors.clear()

    async def adopt(self) -> None:
        """A new daemon: attach to all that run, which releases a terminal whose client's daemon died."""
        for program, row in list(self._live.row.programs.items()):
            if row.exit_status is not None:
                continue
            try:
                self._note(program, (await (await self.supervisor(program)).state()).exit_status)
            except PagurusError as error:  # it is lost, and says so when it is used
                log.info("%s: %s", program, error, extra={"sandbox": self._live.row.id})

    # ----------------------------------------------------------------- starting

    async def start(self, request: ProcessRequest) -> ProcessInfo:
        """Start a background process. Unless it is one of several acts, that is a turn."""
        argv = request.command if isinstance(request.command, list) else ["/bin/sh", "-c", request.command]
        async with self._live.act(f"start {shown(request.command)}", ends_turn=request.ends_turn) as act:
            made = await self.launch(
                ProgramKind.PROCESS,
                argv,
                request,
                excluded=request.excluded,
                stdin=request.stdin,
                log_limit=request.log_limit,
            )
            act.result = ExecResult(exit_code=0, stdout=b"", stderr=b"", duration=0.0)
        info = await self.info(made.id)
        info.turn, info.verdict, info.checkpoint = act.result.turn, act.result.verdict, act.result.checkpoint
        return info

    async def open_terminal(self, request: TerminalRequest) -> ProcessInfo:
        """Start a program at a terminal. Its turn ends when its client leaves."""
        command = request.command
        argv = command if isinstance(command, list) else ["/bin/sh", "-c", command] if command else LOGIN
        async with self._live.using():
            row = await self.launch(
                ProgramKind.TERMINAL, argv, request, rows=request.rows, columns=request.columns, log_limit=1 << 18
            )
        return await self.info(row.id)

    async def launch(
        self,
        kind: ProgramKind,
        argv: list[str],
        request: ProcessRequest | TerminalRequest | SessionRequest,
        *,
        excluded: bool = False,
        tag: str | None = None,
        user: Awaitable[User] | None = None,
        cwd: Callable[[User], str] | None = None,
        stdin: bool = True,
        service: Mapping[str, Any] | None = None,
        terminal: bool = False,
        **more: Any,
    ) -> ProgramRow:
        """Start a program with its supervisor, and have a row for it. Behind the gate.

        `tag`: not None where its arguments are listed, too. `user`: that of the request, where it is looked up by now.
        `cwd`: where it starts, where that depends on the user. `stdin`: whether it gets any.
        `service`: what the row of a service says in addition. `terminal`: its streams are one, whatever its kind.
        """
        live = self._live
        live.need_alive()
        at = place(live.row, request.service)
        await self._make_room()
        row = ProgramRow(
            id=f"p-{secrets.token_hex(6)}",
            kind=kind,
            command=shown(getattr(request, "command", None) or argv),
            started_at=time.time(),
            argv=[] if tag is None else [word[:ARGUMENT_RETAINED] for word in argv[:16]],
            tag=tag or "",
            service=at.service,
            **(service or {}),
        )
        self.put(row)
        await self.publish()  # before it runs: what has no row could not be found again
        try:
            who = await (live.user(request.user, at) if user is None else user)
            where = request.cwd or (at.workdir if cwd is None else cwd(who))
            program = _program(
                kind, argv, {**at.env, **request.env}, where, who, root=at.root, terminal=terminal, **more
            )
            started = await supervisor.start(live.container, row.id, program)
            identities = await self._keep_excluded(started) if excluded else []
        except BaseException:  # also when cancelled: a row without a program would be waited for
            self._drop(row.id)
            live.services.catalogue.later([put_sandbox(live.row)])
            raise
        self._attendants[row.id] = started.host_pid
        row = msgspec.structs.replace(row, pid=started.program, excluded=identities)
        self.put(row)
        writing = asyncio.ensure_future(self.publish())
        if not stdin:
            with contextlib.suppress(SupervisorGone):  # it has been killed already
                await (await self.supervisor(row.id)).close_stdin()
        await writing
        return row

    async def _keep_excluded(self, started: StartedSupervisor) -> list[excluded.Identity]:
        container = self._live.container
        try:
            return await asyncio.to_thread(excluded.first, container, self._live.services.inspector, started)
        except BaseException:
            await asyncio.to_thread(kill_started, started.host_pid, container.tasks)
            raise

    async def _make_room(self) -> None:
        rows = list(self._live.row.programs.values())
        # A service that has ended is known by its last program, which its next start removes.
        ended = [
            row
            for row in rows
            if row.exit_status is not None and row.id not in self.read and row.kind is not ProgramKind.SERVICE
        ]
        for row in ended[: max(0, len(ended) - ENDED_RETAINED + 1)]:
            await self.remove(row.id)
        running = [row for row in rows if row.exit_status is None or row.id in self.read]
        if len(running) >= MAX_PROGRAMS:
            raise Conflict(
                f"{MAX_PROGRAMS} long-lived programs run already", hint="end some", sandbox=self._live.row.id
            )

    # ----------------------------------------------------------------- looking

    async def info(self, program: str) -> ProcessInfo:
        row = self.row(program)
        written = 0
        if row.exit_status is None and self._live.row.state is SandboxState.RUNNING:
            with contextlib.suppress(SupervisorGone):
                state = await (await self.supervisor(program)).state()
                written = state.written
                row = self._note(program, state.exit_status)
                return self._info(
                    row, ProgramState.RUNNING if row.exit_status is None else ProgramState.EXITED, written
                )
        existing = ProgramState.LOST if row.exit_status is None else ProgramState.EXITED
        return self._info(row, existing, written)

    async def list(self, kind: ProgramKind | None = None) -> list[ProcessInfo]:
        rows = [row for row in self._live.row.programs.values() if kind in (None, row.kind)]
        return list(await asyncio.gather(*(self.info(row.id) for row in rows)))

    def _note(self, program: str, status: int | None) -> ProgramRow:
        """Remember how a program ended."""
        row = self.row(program)
        if status is not None and row.exit_status is None:
            row = msgspec.structs.replace(row, exit_status=status)
            self.put(row)
            self._live.services.catalogue.later([put_sandbox(self._live.row)])
        return row

    @staticmethod
    def _info(row: ProgramRow, state: ProgramState, written: int) -> ProcessInfo:
        return ProcessInfo(
            id=row.id,
            kind=row.kind,
            command=row.command,
            state=state,
            pid=row.pid,
            started_at=row.started_at,
            exit_code=None if row.exit_status is None else exit_code(row.exit_status),
            written=written,
            excluded=bool(row.excluded),
            service=row.service,
        )

    async def wait(self, program: str, timeout: float) -> ProcessInfo:
        """The program once it has ended, or as it is after `timeout` seconds. Continues through a restore."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self.row(program).exit_status is None:
                    try:
                        state = await (await self.supervisor(program)).wait(Until.EXIT)
                    except SupervisorGone:
                        if not await self._comes_back():
                            break
                        continue
                    self._note(program, state.exit_status)
        result = await self.info(program)
        if result.state is ProgramState.LOST:
            self._live.need_alive()  # else not it alone was lost
        return result

    async def _comes_back(self) -> bool:
        """Whether an attendant that was lost may be there again, since the sandbox was being restored."""
        before = self._live.container.held_root if self._live.container_or_none is not None else None
        restoring = self._live.row.state is SandboxState.RESTORING or self._live.exclusive.locked()
        await self.finalized()
        after = self._live.container.held_root if self._live.container_or_none is not None else None
        return restoring or before is not after

    # ----------------------------------------------------------------- logs

    async def logs(self, program: str, since: tuple[int, int]) -> Logs:
        """What is kept of its outputs from these offsets on."""
        connection = await self.supervisor(program)
        parts = []
        for stream in (0, 1):
            parts.append(await read_all(connection, stream, since[stream], MAX_LOG_ANSWER))
        out, errors = parts
        return Logs(
            stdout=out.data,
            stderr=errors.data,
            stdout_start=out.start,
            stderr_start=errors.start,
            ended=out.ended and errors.ended,
        )

    async def follow(self, program: str, since: tuple[int, int], put: Callable[[LogChunk], Any]) -> None:
        """Pass every chunk of its outputs as it comes, up to the end of both. `put` may be slow: then we wait."""

        async def one(stream: int) -> None:
            at = since[stream]
            while True:
                data = await (await self.supervisor(program)).read(stream, at, wait=True)
                at = data.end
                if data.data:
                    await put(LogChunk(stream="stderr" if stream else "stdout", start=data.start, data=data.data))
                if data.ended:
                    return

        async with asyncio.TaskGroup() as both:
            for stream in (0, 1):
                both.create_task(one(stream))

    # ----------------------------------------------------------------- acting

    async def write(self, program: str, data: bytes, offset: int | None) -> int:
        """Give it stdin, from byte `offset` of all it ever gets (None: behind the last). Returns the next offset."""
        async with self._live.using():
            connection = await self.supervisor(program)
            at = (await connection.state()).written if offset is None else offset
            end = at + len(data)
            while at < end:
                state = await connection.write(data[at - end :], at)
                if (state.error and state.written < at) or state.written > end:
                    raise Conflict(
                        f"its stdin has got {state.written} bytes in its present state, not {at}: the sandbox was "
                        "restored since, or another client wrote",
                        hint="refresh() the process, then write what follows",
                        sandbox=self._live.row.id,
                    )
                if state.error or state.exit_status is not None:
                    raise Closed(
                        "its stdin is closed, or it has ended",
                        sandbox=self._live.row.id,
                        hint='start it again, with stdin="pipe"',
                    )
                if state.written == at:
                    await connection.wait(Until.CAPACITY)
                at = min(end, state.written)
            return at

    async def close_stdin(self, program: str) -> None:
        async with self._live.using():
            await (await self.supervisor(program)).close_stdin()

    async def signal(self, program: str, number: int, *, group: bool) -> ProcessInfo:
        """Send a signal to it. That belongs to the next turn's effects."""
        async with self._live.using():
            state = await (await self.supervisor(program)).signal(number, group=group)
        if state.error:
            self._note(program, state.exit_status)
            raise Conflict("it has ended already", sandbox=self._live.row.id, hint="start it again")
        return await self.info(program)

    async def remove(self, program: str) -> None:
        """End it with all that it started, and forget its log."""
        row = self.row(program)
        if self._live.row.state is SandboxState.RUNNING:
            with contextlib.suppress(SupervisorGone):
                connection = await self.supervisor(program)
                if row.exit_status is None:
                    await asyncio.to_thread(self._kill_tree, row.pid)
                await connection.finish()
        self._drop(program)
        await self.publish()

    async def remove_service(self, name: str) -> None:
        """Likewise all that have run as this service, or in it."""
        for row in list(self._live.row.programs.values()):
            if row.service == name:
                await self.remove(row.id)

    async def release(self, program: str) -> None:
        """Forget one that has ended, and its log; what it started runs on."""
        with contextlib.suppress(SupervisorGone), contextlib.ExitStack() as opened:
            connection, attendant = await self.supervisor(program), -1
            if (pid := self._attendants.get(program, 0)) in self._live.container.tasks():
                with contextlib.suppress(ProcessLookupError):
                    attendant = opened.enter_context(closing(os.pidfd_open(pid)))
            await connection.finish()
            if attendant >= 0:  # else it would count as one that lives on in the turn that it ends
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(END_TIMEOUT):
                        await readable(attendant)
        self._drop(program)
        self._live.services.catalogue.later([put_sandbox(self._live.row)])

    def _kill_tree(self, inner: int) -> None:
        container = self._live.container
        if (pid := host_pid(inner, container.tasks())) is not None:
            kill_started(pid, container.tasks)


LOGIN = ["/bin/sh", "-c", "if [ -x /bin/bash ]; then exec /bin/bash -i; fi; exec /bin/sh -i"]


def _program(
    kind: ProgramKind, argv: list[str], env: Mapping[str, str], cwd: str, user: User, *, terminal: bool, **more: Any
) -> Program:
    mode = Mode.PROCESS if kind is ProgramKind.SERVICE else Mode(kind.value)
    mode = Mode.TERMINAL if terminal else mode
    term = {"TERM": "xterm-256color"} if mode is Mode.TERMINAL else {}
    return Program(
        mode=mode,
        argv=argv,
        env={"PATH": PATH, "HOME": user.home, **term, **env},
        cwd=cwd,
        uid=user.uid,
        gid=user.gid,
        groups=user.groups,
        **more,
    )


def shown(command: str | list[str]) -> str:
    """The beginning of a command, for lists."""
    return (command if isinstance(command, str) else " ".join(command))[:COMMAND_RETAINED]


async def read_all(connection: Supervisor, stream: int, start: int, limit: int) -> Data:
    """What is kept of an output from `start`, at most `limit` bytes."""
    parts: list[bytes] = []
    first: int | None = None
    at, size, ended = start, 0, False
    while size < limit:
        data = await connection.read(stream, at, wait=False)
        if first is None or data.start != at:  # the ring went past us: what we have is no longer the whole
            first, parts, size = data.start, [], 0
        parts.append(data.data)
        size += len(data.data)
        at, ended = data.end, data.ended
        if not data.data or data.ended:
            break
    return Data(stream, first or 0, ended, b"".join(parts))
