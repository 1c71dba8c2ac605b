"""Programs of the fake host that outlive a call: background processes and sessions. Nothing runs.

Owns: which there are in one fake sandbox, their scripted outputs and ends, what of them a checkpoint holds. Does not
own: scripts and turns (:mod:`sandbox.testing.host`). A process writes its outputs when it starts and ends after the
`delay` of its script; a signal that would end a program ends it.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from dataclasses import dataclass, field, replace

import msgspec

from sandbox.errors import Conflict, NotFound
from sandbox.messages import ExecResult, LogChunk, Logs, ProcessInfo, ProgramKind, ProgramState

COMMAND_KEPT = 200  # characters, as the daemon keeps
HARMLESS = frozenset({17, 18, 19, 20, 21, 22, 23, 28})  # signals that end nothing: children, stops, windows


@dataclass
class Program:
    """One of them."""

    info: ProcessInfo
    delay: float = math.inf  # seconds until it ends by itself
    exit_code: int = 0  # then
    stdout: bytes = b""
    stderr: bytes = b""
    answer: tuple[str, ExecResult] | None = None  # of a session: the last key and what was answered to it
    answered: tuple[str, ...] = ()  # keys before that
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    timer: asyncio.TimerHandle | None = None

    def run(self) -> None:
        """From now on its time passes."""
        if self.info.state is ProgramState.RUNNING and self.delay < math.inf:
            self.timer = asyncio.get_running_loop().call_later(self.delay, self.end, self.exit_code)

    def end(self, code: int) -> None:
        self.rest()
        self.info = msgspec.structs.replace(self.info, state=ProgramState.EXITED, exit_code=code)
        self.ended.set()

    def rest(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class FakePrograms:
    """The programs of one fake sandbox."""

    def __init__(self) -> None:
        self._programs: dict[str, Program] = {}
        self._pid = 1

    def start(
        self,
        kind: ProgramKind,
        command: str,
        *,
        result: ExecResult | None = None,
        delay: float = math.inf,
        excluded: bool = False,
    ) -> Program:
        """A new one; `result` is what it writes now, and its exit code in the end."""
        self._pid += 1
        info = ProcessInfo(
            id=f"p-{secrets.token_hex(6)}",
            kind=kind,
            command=command[:COMMAND_KEPT],
            state=ProgramState.RUNNING,
            pid=self._pid,
            started_at=time.time(),
            excluded=excluded,
        )
        made = self._programs[info.id] = Program(info, delay)
        if result is not None:
            made.exit_code, made.stdout, made.stderr = result.exit_code, result.stdout, result.stderr
        made.run()
        return made

    def find(self, name: str, kind: ProgramKind | None = None) -> Program:
        found = self._programs.get(name)
        if found is None or kind not in (None, found.info.kind):
            raise NotFound(f"no such program in its present state: {name}", remedy="list those there are")
        return found

    def remove(self, name: str) -> None:
        self.find(name).rest()
        del self._programs[name]

    def infos(self, *, alive: bool) -> list[ProcessInfo]:
        return [told(each, alive=alive) for each in self._programs.values()]

    def stop(self) -> None:
        """The sandbox is dead: nothing goes on."""
        for each in self._programs.values():
            each.rest()
            each.ended.set()

    # ----------------------------------------------------------------- states

    def print(self) -> dict[str, str]:
        """What a verdict compares."""
        return {name: each.info.state for name, each in self._programs.items() if not each.info.excluded}

    def saved(self) -> list[Program]:
        """What a checkpoint holds."""
        return [_copy(each) for each in self._programs.values() if not each.info.excluded]

    def back(self, saved: list[Program]) -> None:
        """These again, as they were."""
        self.stop()
        self._programs = {each.info.id: _copy(each) for each in saved}
        self._pid = max([self._pid, *(each.info.pid for each in saved)])
        for each in self._programs.values():
            each.run()


def _copy(program: Program) -> Program:
    ended = asyncio.Event()
    if program.info.state is not ProgramState.RUNNING:
        ended.set()
    return replace(program, ended=ended, timer=None)


def told(program: Program, *, alive: bool) -> ProcessInfo:
    """What the daemon says of it; in a dead sandbox what ran is lost."""
    if alive or program.info.state is not ProgramState.RUNNING:
        return program.info
    return msgspec.structs.replace(program.info, state=ProgramState.LOST)


def signalled(program: Program, number: int) -> None:
    if program.info.state is not ProgramState.RUNNING:
        raise Conflict("it has ended already")
    if number not in HARMLESS:
        program.end(128 + number)


def logs(program: Program, out: int, errors: int) -> Logs:
    return Logs(
        stdout=program.stdout[out:],
        stderr=program.stderr[errors:],
        stdout_start=min(out, len(program.stdout)),
        stderr_start=min(errors, len(program.stderr)),
        ended=program.info.state is ProgramState.EXITED,
    )


def chunks(program: Program, out: int, errors: int) -> list[LogChunk]:
    """All of its outputs from these offsets on."""
    found = logs(program, out, errors)
    parts = (("stdout", found.stdout_start, found.stdout), ("stderr", found.stderr_start, found.stderr))
    return [LogChunk(stream=name, start=start, data=data) for name, start, data in parts if data]  # type: ignore[arg-type]
