"""Commands of E2B's clients in one sandbox: long-lived programs that are known by their pid inside.

Guarantee: a command ends exactly one turn: with its end, or when its client's stream is lost, whichever is first. Until
then nothing that it prints is dropped: it waits for a slow client. It continues when the client leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from weakref import WeakKeyDictionary

from daemon.catalogue import ProgramRow
from daemon.turns.turns import LiveSandbox
from sandbox.container.supervisor import Supervisor
from sandbox.errors import NotFound, PagurusError, Timeout
from sandbox.messages import ProgramKind

END_RETAINED = 30.0  # seconds for which the end of a command is reported to callers
MAX_ENDS = 256  # of one sandbox
WAIT = 600.0  # seconds of one look
_STREAMS = ("stdout", "stderr")
Put = Callable[[str, bytes], Awaitable[None]]
_NAMES = {
    signal.SIGHUP: "hangup",
    signal.SIGINT: "interrupt",
    signal.SIGQUIT: "quit",
    signal.SIGABRT: "aborted",
    signal.SIGKILL: "killed",
    signal.SIGSEGV: "segmentation fault",
    signal.SIGPIPE: "broken pipe",
    signal.SIGALRM: "alarm clock",
    signal.SIGTERM: "terminated",
}


class Command:
    """One command that runs, or has ended a moment ago."""

    def __init__(self, live: LiveSandbox, row: ProgramRow) -> None:
        self.live = live
        self.row = row
        self.owes_turn = False  # nothing has ended its turn yet
        self.timed_out = False
        self.exited: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.status: int | None = None  # wait status, once it has exited; None then: it was lost
        self.over = asyncio.Event()  # and its turn has ended
        self.readers = 0
        self._ended: set[tuple[Supervisor, int]] = set()  # outputs whose end was read
        self._idle = asyncio.Event()  # no reader
        self._idle.set()

    @property
    def terminal(self) -> bool:
        return self.row.kind is ProgramKind.TERMINAL

    # ----------------------------------------------------------------- its life

    async def attend(self, deadline: float | None) -> None:
        """From its start to its end."""
        programs = self.live.programs
        try:
            try:
                async with asyncio.timeout(deadline):
                    await self._wait()
            except TimeoutError:
                self.timed_out = True
                with contextlib.suppress(PagurusError):
                    await programs.signal(self.row.id, signal.SIGKILL, group=True)
                await self._wait()
        except PagurusError:  # it is no part of the present state, or the sandbox is dead
            pass
        finally:
            self.note_exit()
        await self._idle.wait()
        if self.status is not None:
            with contextlib.suppress(PagurusError):
                await self._forget()
        await self.end_turn()
        self.over.set()

    def note_exit(self) -> None:
        """It has exited, or is lost. Idempotent."""
        if not self.exited.done():
            self.exited.set_result(None)

    async def _wait(self) -> None:
        while self.status is None:
            info = await self.live.programs.wait(self.row.id, WAIT)
            self.status = self.live.programs.row(self.row.id).exit_status
            if self.status is None and info.state != "running":
                raise NotFound("it was lost", hint="restore the sandbox, or run the command again")

    async def _forget(self) -> None:
        """Its attendant, too, unless something that it started still writes to the same pipes."""
        connection = await self.live.programs.supervisor(self.row.id)
        closed = self.terminal or {(connection, number) for number in range(len(_STREAMS))} <= self._ended
        if closed or all(output.ended for output in (await connection.state()).outputs):
            await self.live.programs.release(self.row.id)

    async def end_turn(self) -> None:
        """What it did is judged, and captured if need be."""
        if self.owes_turn and self.live.group is None:
            self.owes_turn = False
            with contextlib.suppress(PagurusError):  # it died since
                self.live.need_alive()
                await self.live.end_turn_by_request(self.row.command)

    # ----------------------------------------------------------------- its output

    async def read(self, put: Put, reading: contextlib.ExitStack, *, from_start: bool) -> None:
        """Put its outputs as they come, until it has ended and its turn is over. Raises Timeout after its deadline.

        `reading`: holds a :meth:`reading` of this command, and is closed once the outputs are read.
        """
        with reading:
            with contextlib.suppress(PagurusError):
                streams = ("pty",) if self.terminal else _STREAMS
                starts = (0, 0) if from_start else await self._ends()
                async with asyncio.TaskGroup() as both:
                    for number, name in enumerate(streams):
                        both.create_task(self._pump(number, name, starts[number], put))
            await asyncio.shield(self.exited)
        await self.over.wait()
        if self.status is None:
            self.live.need_alive()  # else not it alone was lost
        if self.timed_out:
            raise Timeout(
                "the command ran longer than its timeout", sandbox=self.live.row.id, hint="raise timeout, or 0 for none"
            )

    async def _ends(self) -> tuple[int, ...]:
        """Where its outputs end now. It waits for us from here on if it was left, and no client waits for it."""
        connection = await self.live.programs.supervisor(self.row.id)
        state = await (connection.hold(True) if self.readers == 1 else connection.state())
        return tuple(output.end for output in state.outputs)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """A client reads it, or is about to: until then its output is not forgotten."""
        self.readers += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.readers -= 1
            if not self.readers:
                self._idle.set()

    async def _pump(self, number: int, name: str, at: int, put: Put) -> None:
        """One output, up to its end, or to what it was when the command ended."""
        with contextlib.suppress(PagurusError):  # it is gone: a restore, a removal, a death
            while True:
                over = self.exited.done()  # what it printed is there by now
                connection = await self.live.programs.supervisor(self.row.id)
                if over:
                    data = await connection.read(number, at, wait=False)
                else:
                    reading = await connection.reading(number, at)
                    await asyncio.wait((reading, self.exited), return_when=asyncio.FIRST_COMPLETED)
                    if not reading.done():
                        continue
                    data = connection.answered(reading.result())
                at = data.end
                if data.data:
                    await put(name, data.data)
                if data.ended:
                    self._ended.add((connection, number))
                if data.ended or (over and not data.data):
                    return

    async def left(self) -> None:
        """A client's stream was lost: it continues without a reader."""
        if not self.readers and not self.exited.done():
            with contextlib.suppress(PagurusError):
                await (await self.live.programs.supervisor(self.row.id)).hold(False)
        await self.end_turn()

    def end(self) -> dict[str, object]:
        """How it ended, as E2B says it."""
        if self.status is None:
            return {"exitCode": -1, "exited": False, "status": "lost", "error": "the process is gone"}
        if os.WIFSIGNALED(self.status):
            number = os.WTERMSIG(self.status)
            said = f"signal: {_NAMES.get(signal.Signals(number), f'signal {number}')}" if number < 32 else "signal"
            return {"exitCode": -1, "exited": False, "status": said, "error": said}
        code = os.WEXITSTATUS(self.status)
        reported: dict[str, object] = {"exitCode": code, "exited": True, "status": f"exit status {code}"}
        return reported if code == 0 else {**reported, "error": f"exit status {code}"}


class Commands:
    """Those of one sandbox."""

    def __init__(self, live: LiveSandbox) -> None:
        self._live = live
        self._existing: dict[str, Command] = {}  # by the program's id
        self._ended: dict[int, tuple[Command, float]] = {}  # by pid, and when

    def begin(self, row: ProgramRow, deadline: float | None, *, owes_turn: bool) -> Command:
        """`row` runs. From now on its end is waited for."""
        command = self._existing[row.id] = Command(self._live, row)
        command.owes_turn = owes_turn
        self._live.programs.read.add(row.id)
        self._live.services.spawn(
            self._attend(command, deadline), f"command {row.pid} of {self._live.row.id}", lasting=True
        )
        return command

    async def _attend(self, command: Command, deadline: float | None) -> None:
        try:
            await command.attend(deadline)
        finally:
            command.note_exit()
            command.over.set()
            self._existing.pop(command.row.id, None)
            self._live.programs.read.discard(command.row.id)
            self._ended[command.row.pid] = command, time.monotonic()
            self._forget_old()

    def _forget_old(self) -> None:
        old = time.monotonic() - END_RETAINED
        for pid in [pid for pid, (_, at) in self._ended.items() if at < old] + [*self._ended][:-MAX_ENDS]:
            self._ended.pop(pid, None)

    def rows(self) -> list[ProgramRow]:
        """Those that run in the present state, from every caller."""
        return [row for row in self._live.row.programs.values() if row.exit_status is None and row.pid]

    def find(self, pid: int | None, tag: str | None) -> ProgramRow:
        """The one that runs with this pid or tag. Raises NotFound."""
        for row in reversed(self.rows()):
            if (pid is not None and row.pid == pid) or (pid is None and tag and row.tag == tag):
                return row
        which = f"pid {pid}" if pid is not None else f"tag {tag}"
        raise NotFound(f"process with {which} not found", sandbox=self._live.row.id)

    def watched(self, pid: int | None, tag: str | None) -> Command:
        """The same, to be read; also one that has ended a moment ago. Raises NotFound."""
        self._forget_old()
        try:
            row = self.find(pid, tag)
        except NotFound:
            for number, (command, _) in reversed(self._ended.items()):
                if number == pid or (pid is None and tag and command.row.tag == tag):
                    return command
            raise
        return self._existing.get(row.id) or self.begin(row, None, owes_turn=False)


class AllCommands:
    """Those of all sandboxes."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[LiveSandbox, Commands] = WeakKeyDictionary()

    def of(self, live: LiveSandbox) -> Commands:
        result = self._of.get(live)
        if result is None:
            result = self._of[live] = Commands(live)
        return result
