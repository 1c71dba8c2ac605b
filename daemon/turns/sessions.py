"""Shells that keep their state from command to command.

How a command runs: the shell is interactive, but has no terminal. It reads from its attendant

    { eval 'THE COMMAND'; } </dev/null >&OUTPUT 2>&ERRORS        (descriptors that the command does not inherit)

and its next prompt, on a pipe that nothing of the command has, reports the exit code and which command it was. So
whatever the command prints cannot pass for its end; ``cd``, variables, functions, jobs and ``$?`` stay; SIGINT takes
the shell back to its prompt as Ctrl-C does.

Guarantee: a key is executed once. The attendant keeps the result until the next command, the row keeps the verdict,
and both are part of the sandbox's state; so a daemon that dies in between does not lose the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from typing import TYPE_CHECKING

import msgspec

from daemon.catalogue import AnswerRow
from daemon.turns.programs import Programs, read_all
from sandbox.container.outlet import Outlet
from sandbox.container.process import exit_code, interrupt, started_by
from sandbox.container.supervisor import MAX_OUTPUT, Supervisor, SupervisorGone, SupervisorState, Until
from sandbox.errors import Closed, Conflict, Invalid, NotFound, PagurusError
from sandbox.messages import (
    ExecResult,
    ProcessInfo,
    ProgramKind,
    SessionExecRequest,
    SessionRequest,
)
from sandbox.procfs import ProcessIdentity, host_pid
from sandbox.tree.safe_path import SandboxRoot, opened

if TYPE_CHECKING:
    from daemon.turns.turns import LiveSandbox

OPEN_TIMEOUT = 15.0  # seconds for a shell to say its first prompt
STEP = 2.0  # seconds between two steps of an interruption
KEYS_RETAINED = 32
WIDE = ("bash", "zsh", "ksh", "mksh")  # shells whose redirections take descriptors above 9
OPENING = bytes(16)
BASH = ["--noediting", "--norc", "--noprofile", "-i"]
_ANSWERED = [name for name in AnswerRow.__struct_fields__ if name != "key"]  # what is kept of a result


class ShellSessions:
    """The sessions of one sandbox."""

    def __init__(self, live: LiveSandbox, programs: Programs) -> None:
        self._live = live
        self._programs = programs
        self._busy: dict[str, asyncio.Lock] = {}
        self._signalling: dict[str, asyncio.Lock] = {}
        self._jobs: dict[
            str, frozenset[ProcessIdentity]
        ] = {}  # of sessions with a command under way: what was there before it

    # ----------------------------------------------------------------- life

    async def open(self, request: SessionRequest) -> ProcessInfo:
        """Start a shell and wait for its first prompt."""
        async with self._live.using():
            argv = _shell(request.shell or await self._default_shell(request.service))
            row = await self._programs.launch(ProgramKind.SESSION, argv, request, first=_descriptors(argv[0]))
            connection = await self._programs.supervisor(row.id)
            try:
                async with asyncio.timeout(OPEN_TIMEOUT):
                    await connection.execute(OPENING, _greeting(argv[0]), 0)
                    state = await connection.wait(Until.DONE)
            except (TimeoutError, Conflict, SupervisorGone):  # it reads nothing, or has ended already
                state = None
            if state is None or not state.done:
                await self._programs.remove(row.id)
                raise Invalid(
                    f"{argv[0]} does not behave like a shell",
                    hint="use bash, dash, busybox sh or another POSIX shell",
                )
            await connection.acknowledge(OPENING)
        return await self._programs.info(row.id)

    async def _default_shell(self, service: str | None) -> str:
        inside, path = self._live.located(service, "/bin/bash")
        return "/bin/bash" if await asyncio.to_thread(_is_there, inside, path) else "/bin/sh"

    async def close(self, session: str) -> None:
        """End the shell with all that it started."""
        self._programs.row(session, ProgramKind.SESSION)
        async with self._live.using():
            await self._programs.remove(session)
        self._busy.pop(session, None)
        self._signalling.pop(session, None)

    # ----------------------------------------------------------------- commands

    async def exec(self, session: str, request: SessionExecRequest, outlet: Outlet | None = None) -> ExecResult:
        """Run a command in the shell, or return its answer again. An `outlet` gets its output."""
        self._programs.row(session, ProgramKind.SESSION)
        async with self._busy.setdefault(session, asyncio.Lock()):
            row = self._programs.row(session, ProgramKind.SESSION)
            if request.key in row.answered:
                raise Conflict("this command was answered and acknowledged", hint="use a new key for a new command")
            if row.answer is not None and row.answer.key == request.key:
                return await self._again(session, row.answer)

            def finalize(result: ExecResult) -> None:
                self._answered(session, request.key, result)

            async with self._live.act(request.command, ends_turn=request.ends_turn, finalize=finalize) as act:
                act.result = await self._run(session, request, outlet)
            return act.result

    async def _run(self, session: str, request: SessionExecRequest, outlet: Outlet | None) -> ExecResult:
        if outlet is not None:
            outlet.need_reader()
        connection, state = await self._connection(session)
        key, began = bytes.fromhex(request.key), time.monotonic()
        kills = self._live.container.cgroup.oom_kills()
        limit = MAX_OUTPUT if outlet is not None else request.output_limit
        script = _script(request.command, key, await self._first(session))
        pid = await self._shell_pid(session)
        # A former daemon may have begun it: then what lives below the shell are not only jobs of earlier ones.
        goes_on = state.busy and state.key == key
        jobs = frozenset() if goes_on else await asyncio.to_thread(self._running, pid)
        timed_out = False
        pumps: list[asyncio.Task[None]] = []
        try:
            async with self._signals(session):  # one that is on its way was meant for the command before
                await connection.execute(key, script, limit)
            self._jobs[session] = jobs
            if outlet is not None:
                pumps = [asyncio.ensure_future(_pump(connection, stream, outlet)) for stream in (0, 1)]
            try:
                async with asyncio.timeout(request.timeout) as deadline:
                    with outlet.ending(deadline) if outlet is not None else contextlib.nullcontext():
                        state = await connection.wait(Until.DONE)
            except TimeoutError:
                timed_out = True
                state = await self._interrupt(connection, pid, jobs)
            if outlet is not None:
                outlet.open()  # what is left is what the attendant keeps: the turn does not wait for the reader
            await asyncio.gather(*pumps)
            outputs = [b"", b""] if outlet is not None else await _outputs(connection)
        except SupervisorGone as error:
            raise Closed("the session ended while the command ran", hint="open another one") from error
        finally:
            self._jobs.pop(session, None)
            for pump in pumps:
                pump.cancel()
        code = state.done_status if state.done else exit_code(state.exit_status or 0)
        if state.exit_status is not None:
            self._programs._note(session, state.exit_status)
            code, outputs[1] = _without_prompt(code, outputs[1], key)
        return ExecResult(
            exit_code=code,
            stdout=outputs[0],
            stderr=outputs[1],
            duration=time.monotonic() - began,
            timed_out=timed_out,
            stdout_dropped=state.outputs[0].dropped,
            stderr_dropped=state.outputs[1].dropped,
            oom_killed=self._live.container.cgroup.oom_kills() > kills,
        )

    async def signal(self, session: str, number: int) -> None:
        """Send a signal to what the command under way has in front; SIGINT also to the shell, as Ctrl-C would.

        Raises NotFound unless one runs.
        """
        self._programs.row(session, ProgramKind.SESSION)
        async with self._live.using(), self._signals(session):
            jobs, shell = self._jobs.get(session), await self._shell_pid(session)
            if jobs is None or shell is None or not await asyncio.to_thread(_in_command, shell):
                raise NotFound("no command runs in this session", hint="it has ended, or not begun")
            await asyncio.to_thread(
                interrupt,
                shell,
                self._live.container.tasks,
                number,
                spared=jobs,
                jobs=False,
                shell=number == signal.SIGINT,
            )

    def _signals(self, session: str) -> asyncio.Lock:
        return self._signalling.setdefault(session, asyncio.Lock())

    async def _shell_pid(self, session: str) -> int | None:
        return await asyncio.to_thread(host_pid, self._programs.row(session).pid, self._live.container.tasks())

    async def _connection(self, session: str) -> tuple[Supervisor, SupervisorState]:
        row = self._programs.row(session)
        try:
            connection = await self._programs.supervisor(session)
            state = await connection.state()
        except SupervisorGone as error:
            raise Closed("the session is gone: its shell was killed", hint="open another one") from error
        if state.exit_status is not None or row.exit_status is not None:
            self._programs._note(session, state.exit_status)
            raise Closed(f"the shell has ended with code {exit_code(state.exit_status or 0)}", hint="open another one")
        return connection, state

    async def _first(self, session: str) -> int:
        return _descriptors(self._programs.row(session).command.split()[0])

    def _answered(self, session: str, key: str, result: ExecResult) -> None:
        row = self._programs.row(session)
        before = [row.answer.key] if row.answer is not None else []
        answer = AnswerRow(key=key, **{name: getattr(result, name) for name in _ANSWERED})
        answered = [*row.answered, *before][-KEYS_RETAINED:]
        self._programs.put(msgspec.structs.replace(row, answer=answer, answered=answered))

    async def _again(self, session: str, answer: AnswerRow) -> ExecResult:
        """The answer that was made before, with the outputs that the attendant still has."""
        try:
            connection = await self._programs.supervisor(session)
            state = await connection.state()
            if state.key != bytes.fromhex(answer.key):
                raise Conflict("what this command printed has gone: another one followed", hint="use a new key")
            outputs = await _outputs(connection)
        except SupervisorGone as error:
            raise Closed(
                "the session is gone, and with it what the command printed", hint="open another session"
            ) from error
        return ExecResult(
            **{name: getattr(answer, name) for name in _ANSWERED},
            stdout=outputs[0],
            stderr=outputs[1],
            stdout_dropped=state.outputs[0].dropped,
            stderr_dropped=state.outputs[1].dropped,
        )

    # ----------------------------------------------------------------- deadlines

    def _running(self, shell: int | None) -> frozenset[ProcessIdentity]:
        """What lives below the shell now: jobs of earlier commands."""
        return frozenset() if shell is None else frozenset(started_by(shell, self._live.container.tasks()))

    async def _interrupt(
        self, connection: Supervisor, shell: int | None, spared: frozenset[ProcessIdentity]
    ) -> SupervisorState:
        """Stop what runs in front: as Ctrl-C would, then harder; at last with the shell itself."""
        steps = (
            (signal.SIGINT, False, True),
            (signal.SIGTERM, False, False),
            (signal.SIGKILL, False, True),
            (signal.SIGKILL, True, True),
        )
        tasks = self._live.container.tasks
        for number, jobs, root in steps:
            if shell is not None:
                await asyncio.to_thread(interrupt, shell, tasks, number, spared=spared, jobs=jobs, shell=root)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STEP):
                    return await connection.wait(Until.DONE)
        await connection.signal(signal.SIGKILL)
        return await connection.wait(Until.EXIT)


async def _outputs(connection: Supervisor) -> list[bytes]:
    return [(await read_all(connection, stream, 0, MAX_OUTPUT)).data for stream in (0, 1)]


async def _pump(connection: Supervisor, stream: int, outlet: Outlet) -> None:
    at = 0
    while True:
        await outlet.capacity()
        data = await connection.read(stream, at, wait=True)
        at = data.end
        if data.data:
            outlet.put("stderr" if stream else "stdout", data.data)
        if data.ended:
            return


# --------------------------------------------------------------------------- the shell's language


def _in_command(shell: int) -> bool:
    """Whether the shell is within a script of :func:`_script`, whose stdin is not where the shell reads scripts from.

    Before that a SIGINT would have it forget what it has read of the script.
    """
    try:
        return os.readlink(f"/proc/{shell}/fd/0") == "/dev/null"
    except OSError:
        return False


def _shell(program: str) -> list[str]:
    return [program, *(BASH if os.path.basename(program) == "bash" else ["-i"])]


def _descriptors(program: str) -> int:
    """The first of the two descriptors for outputs: beyond those that scripts use, where the shell can say so."""
    return 200 if os.path.basename(program) in WIDE else 7


def _serial(key: bytes) -> int:
    """By this a prompt says which command has ended; the attendant makes it from the key likewise."""
    return int.from_bytes(key[:4], "little") & 0x7FFFFFFF


def _greeting(program: str) -> bytes:
    """Makes prompts say ``RS exit code . serial US``, and an interactive shell keep no history."""
    prompt = "\x1e$?.$__pagurus\x1f"
    lines = [f"__pagurus=0; PS2=; PS1='{prompt}'"]
    if os.path.basename(program) == "bash":
        # Scripts that prepare an environment may set a prompt of their own: put ours back.
        again = f"case $PS1 in *\x1f*) ;; *) PS1='\\''{prompt}'\\'' ;; esac"
        lines = [f"unset HISTFILE MAILCHECK; set +o history; PROMPT_COMMAND='{again}'; {lines[0]}"]
    return "".join(f"{line}\n" for line in lines).encode()


def _script(command: str, key: bytes, first: int) -> bytes:
    """What the shell reads to run one command. Example: ``{ eval 'pwd'; } </dev/null >&7 2>&8 7>&- 8>&-``."""
    if "\0" in command:
        raise Invalid("a command holds a NUL byte", hint="leave the byte out")
    quoted = command.replace("'", "'\\''")
    serial = f"$(((__pagurus={_serial(key)})*0+{first}))"  # set without touching $?
    redirections = f"</dev/null >&{serial} 2>&{first + 1} {first}>&- {first + 1}>&-"
    # The empty line makes bash prompt properly after a quote that the command left open.
    return f"{{ eval '{quoted}'; }} {redirections}\n\n".encode("utf-8", "surrogateescape")


def _without_prompt(code: int, errors: bytes, key: bytes) -> tuple[int, bytes]:
    """Exit code and errors of a command with which the shell ended.

    If it closed the shell's own descriptors, prompts are among its errors. They say how the command itself ended.
    """
    prompts = re.compile(rb"\x1e(\d{1,3})\.%d\x1f(?:exit\n)?" % _serial(key))
    first = prompts.search(errors)
    return (int(first[1]), prompts.sub(b"", errors)) if first else (code, errors)


def _is_there(inside: SandboxRoot, path: str) -> bool:
    with contextlib.suppress(PagurusError), inside.opened() as root, opened(root, path, os.O_PATH) as result:
        return bool(os.fstat(result).st_mode & 0o111)
    return False
