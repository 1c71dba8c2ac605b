"""What a person sees who prints an object of the SDK: a screenful at most, and something useful."""

from __future__ import annotations

import inspect
from pathlib import Path

import msgspec
import pytest

import sandbox
from sandbox.messages import (
    CheckpointInfo,
    CheckpointState,
    CreateRequest,
    Effects,
    ExecRequest,
    ExecResult,
    ProcessInfo,
    ProgramKind,
    ProgramState,
    SandboxInfo,
    SandboxState,
    Verdict,
)
from sandbox.sdk import handle, processes, sessions

SCREEN = 80 * 24


def objects() -> list[object]:
    host = sandbox.Client(Path("/run/pagurus/pagurus.sock"))
    info = SandboxInfo(id="s-1", image="debian", state=SandboxState.RUNNING, created_at=1.0, name="web")
    program = ProcessInfo(
        id="p-1", pid=7, kind=ProgramKind.PROCESS, state=ProgramState.RUNNING, command="top", started_at=0.0
    )
    one = handle.Sandbox(host, info)
    running = handle.CommandStream(host, "/v1/sandboxes/s-1", ExecRequest(command="yes " * 1000))
    made = [handle.Creation(host, CreateRequest(image="debian")), handle.Fork(one, None), handle.Fork(None, "no room")]
    facets = [one.files, one.gateway, one.network, one.processes, one.sessions, one.terminals, one.ports, one.turn()]
    programs = [kind(host, "/v1/sandboxes/s-1", program) for kind in (processes.Process, processes.Terminal)]
    return [
        host, host.images, host.store, host.gateway, one, running, *made, *facets, *programs,
        sessions.Session(host, "/v1/sandboxes/s-1", program),
    ]  # fmt: skip


@pytest.mark.parametrize("one", objects(), ids=lambda one: type(one).__name__)
def test_every_object_says_what_it_is(one: object) -> None:
    reported = repr(one)
    assert type(one).__name__ in reported or "sandbox of debian" in reported
    assert any(word in reported for word in ("s-1", "p-1", "pagurus.sock", "debian", "no room", "yes")), reported
    assert len(reported) < SCREEN and " object at 0x" not in reported


def test_each_public_class_is_among_them_or_a_struct_or_an_error() -> None:
    shown = {type(one) for one in objects()}
    for name in sandbox.__all__:
        kind = getattr(sandbox, name)
        plain = inspect.isclass(kind) and (issubclass(kind, msgspec.Struct | Exception | str))
        assert plain or kind in shown, name


def test_a_result_fits_on_a_screen() -> None:
    result = ExecResult(
        exit_code=0,
        stdout=b"x" * 3_000_000,
        stderr=b"",
        duration=0.5,
        verdict=Verdict.FILES,
        effects=Effects(reasons=[f"openat /a/long/path/{number} by sh[{number}]" for number in range(64)]),
        reason="because " * 200,
    )
    reported = repr(result)
    assert (
        len(reported) < SCREEN
        and "exit_code=0" in reported
        and "(3000000 bytes)" in reported
        and "timed_out" not in reported
    )
    info = CheckpointInfo(id="c-1", sandbox="s-1", state=CheckpointState.DURABLE, verdict=Verdict.BOTH)
    assert repr(info) == "CheckpointInfo(id='c-1', sandbox='s-1', state='durable', verdict='both')"
