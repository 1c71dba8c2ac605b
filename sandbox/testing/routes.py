"""Routes of the fake host for what outlives a call, labels, turns of several acts and metrics.

Owns: these handlers, in the order in which the daemon has them. Does not own: sandboxes, scripts and turns, which
:class:`sandbox.testing.host.FakeHost` supplies.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import WSMsgType, web

from sandbox.errors import Conflict, Unsupported
from sandbox.messages import (
    ExecRequest,
    ExecResult,
    LabelsRequest,
    LogChunk,
    Metrics,
    ProcessRequest,
    ProgramKind,
    SandboxState,
    SessionExecRequest,
    SessionRequest,
    SignalRequest,
)
from sandbox.testing import programs
from sandbox.testing.programs import Program
from sandbox.testing.wire import begun, body, frame, reply, streamed

INTERRUPTED = 130  # exit code of a session's command that reached its time limit


class LongLived:
    """Part of :class:`FakeHost`."""

    _find: Callable[[str], Any]
    _alive: Callable[[web.Request], Any]
    _run: Callable[..., Any]
    _act: Callable[..., Any]
    _end_turn: Callable[..., None]

    def _long_lived(self) -> dict[tuple[str, str], Any]:
        one = "/v1/sandboxes/{id}"
        return {
            ("POST", f"{one}/processes"): self._start,
            ("GET", f"{one}/processes"): self._programs,
            ("GET", f"{one}/processes/{{process}}"): self._program,
            ("DELETE", f"{one}/processes/{{process}}"): self._remove_program,
            ("GET", f"{one}/processes/{{process}}/wait"): self._wait_program,
            ("GET", f"{one}/processes/{{process}}/logs"): self._logs,
            ("GET", f"{one}/processes/{{process}}/follow"): self._follow,
            ("POST", f"{one}/processes/{{process}}/signal"): self._signal_program,
            ("POST", f"{one}/sessions"): self._open_session,
            ("DELETE", f"{one}/sessions/{{process}}"): self._close_session,
            ("POST", f"{one}/sessions/{{process}}/exec"): self._session_exec,
            ("POST", f"{one}/sessions/{{process}}/stream"): self._session_stream,
            ("GET", f"{one}/turn"): self._turn,
            ("PATCH", f"{one}/labels"): self._set_labels,
            ("GET", f"{one}/metrics"): self._metrics,
        }

    # ----------------------------------------------------------------- processes

    def _known(self, request: web.Request, kind: ProgramKind | None = None) -> Program:
        found: Program = self._find(request.match_info["id"]).programs.find(request.match_info["process"], kind)
        return found

    def _told(self, request: web.Request) -> web.Response:
        alive = self._find(request.match_info["id"]).info.state is SandboxState.RUNNING
        return reply(programs.told(self._known(request), alive=alive))

    async def _start(self, request: web.Request) -> web.Response:
        sandbox, wanted = self._alive(request), await body(request, ProcessRequest)
        if wanted.stdin:
            raise Unsupported("the fake host gives no stdin to a background process", remedy="use a real daemon")
        command = wanted.command if isinstance(wanted.command, str) else " ".join(wanted.command)
        result = ExecResult(exit_code=127, stdout=b"", stderr=b"", duration=0.0)
        delay = self._act(sandbox, command, result)
        made = sandbox.programs.start(
            ProgramKind.PROCESS, command, result=result, delay=delay, excluded=wanted.excluded
        )
        ended = ExecResult(exit_code=0, stdout=b"", stderr=b"", duration=0.0)
        if wanted.ends_turn:
            self._end_turn(sandbox, f"start {command}", ended)
        info = msgspec.structs.replace(made.info, turn=ended.turn, verdict=ended.verdict, checkpoint=ended.checkpoint)
        return reply(info, 201)

    async def _programs(self, request: web.Request) -> web.Response:
        sandbox = self._find(request.match_info["id"])
        return reply(sandbox.programs.infos(alive=sandbox.info.state is SandboxState.RUNNING))

    async def _program(self, request: web.Request) -> web.Response:
        return self._told(request)

    async def _remove_program(self, request: web.Request) -> web.Response:
        self._alive(request).programs.remove(request.match_info["process"])
        return reply({})

    async def _wait_program(self, request: web.Request) -> web.Response:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(float(request.query.get("timeout", "60"))):
                await self._known(request).ended.wait()
        if self._known(request).info.exit_code is None:
            self._alive(request)
        return self._told(request)

    async def _logs(self, request: web.Request) -> web.Response:
        self._alive(request)
        return reply(programs.logs(self._known(request), *_since(request)))

    async def _follow(self, request: web.Request) -> web.StreamResponse:
        program = self._known(request)
        response = await begun(request)
        for chunk in programs.chunks(program, *_since(request)):
            await response.write(frame(chunk))
        await program.ended.wait()
        await response.write(frame(LogChunk(ended=True)))
        await response.write_eof()
        return response

    async def _signal_program(self, request: web.Request) -> web.Response:
        self._alive(request)
        programs.signalled(self._known(request), (await body(request, SignalRequest)).signal)
        return self._told(request)

    # ----------------------------------------------------------------- sessions

    async def _open_session(self, request: web.Request) -> web.Response:
        sandbox, wanted = self._alive(request), await body(request, SessionRequest)
        return reply(sandbox.programs.start(ProgramKind.SESSION, wanted.shell or "/bin/sh").info, 201)

    async def _close_session(self, request: web.Request) -> web.Response:
        self._known(request, ProgramKind.SESSION)
        return await self._remove_program(request)

    async def _session_exec(self, request: web.Request) -> web.Response:
        return reply(await self._in_session(request))

    async def _session_stream(self, request: web.Request) -> web.StreamResponse:
        return await streamed(request, await self._in_session(request))

    async def _in_session(self, request: web.Request) -> ExecResult:
        sandbox, session = self._alive(request), self._known(request, ProgramKind.SESSION)
        wanted = await body(request, SessionExecRequest)
        if session.answer is not None and session.answer[0] == wanted.key:
            return session.answer[1]
        if wanted.key in session.answered:
            raise Conflict("this command was answered and acknowledged", remedy="use a new key for a new command")
        command = ExecRequest(
            command=wanted.command,
            timeout=wanted.timeout,
            output_limit=wanted.output_limit,
            ends_turn=wanted.ends_turn,
        )
        result: ExecResult = await self._run(sandbox, command, late=INTERRUPTED)
        if session.answer is not None:
            session.answered = (*session.answered, session.answer[0])
        session.answer = (wanted.key, msgspec.structs.replace(result))
        return result

    async def _turn(self, request: web.Request) -> web.StreamResponse:
        sandbox = self._alive(request)
        if sandbox.grouped:
            raise Conflict("a turn of several acts is open already", remedy="end it first", sandbox=sandbox.info.id)
        socket, ended = web.WebSocketResponse(), ExecResult(exit_code=0, stdout=b"", stderr=b"", duration=0.0)
        sandbox.grouped = True
        try:
            await socket.prepare(request)
            asked = await socket.receive()
        finally:
            sandbox.grouped = False
            self._end_turn(sandbox, "(several acts)", ended)
        if asked.type is WSMsgType.TEXT:
            await socket.send_bytes(msgspec.msgpack.encode(ended))
        await socket.close()
        return socket

    # ----------------------------------------------------------------- labels, use

    async def _set_labels(self, request: web.Request) -> web.Response:
        sandbox = self._find(request.match_info["id"])
        merged = {**sandbox.info.labels, **(await body(request, LabelsRequest)).labels}
        sandbox.info.labels = {name: value for name, value in merged.items() if value is not None}
        return reply(sandbox.info)

    async def _metrics(self, request: web.Request) -> web.Response:
        sandbox = self._alive(request)
        running = [each for each in sandbox.programs.infos(alive=True) if each.exit_code is None]
        return reply(Metrics(cpu_seconds=0.0, processes=1 + len(running), disk_bytes=sandbox.files.size()))


def _since(request: web.Request) -> tuple[int, int]:
    return int(request.query.get("stdout", "0")), int(request.query.get("stderr", "0"))
