"""SDK <-> daemon: commands and the turns that they end."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from sandbox.messages.brief import Brief
from sandbox.messages.processes import Deadline, OutputLimit, ServiceName, User
from sandbox.messages.verdict import Effects, Verdict


class ExecRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """SDK -> daemon: POST /v1/sandboxes/{id}/exec

    `command` is a string for ``/bin/sh -c`` or an argument vector.
    """

    command: str | list[str]
    timeout: Deadline | None = 60.0  # seconds; None waits for ever
    stdin: bytes = b""
    cwd: str | None = None
    env: dict[str, str] = {}
    user: User | None = None  # None: the sandbox's default, see CreateRequest
    service: ServiceName | None = None  # of a composition, where it runs; None: its main one
    output_limit: OutputLimit = 1 << 20  # bytes kept of each stream; the rest is counted and dropped
    ends_turn: bool = True  # judge and checkpoint when the command has ended
    key: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")] | None = None  # by it signals find it while it runs


class ExecResult(Brief, kw_only=True, omit_defaults=True):
    """daemon -> SDK: what a command did. A command that failed is a result, not an error."""

    exit_code: int  # 128 + signal number when killed by one
    stdout: bytes
    stderr: bytes
    duration: float  # seconds
    timed_out: bool = False
    stdout_dropped: int = 0  # bytes beyond output_limit
    stderr_dropped: int = 0
    turn: int | None = None
    verdict: Verdict | None = None
    effects: Effects | None = None
    checkpoint: str | None = None  # id of the checkpoint that holds the state after this turn
    verdict_ms: float | None = None
    oom_killed: bool = False
    checkpoint_error: str | None = None  # why the previous checkpoint failed; this turn's owes its content too
    reason: str | None = None  # why the verdict
    waited_ms: float = 0.0  # time for which the command waited for the previous checkpoint

    @property
    def text(self) -> str:
        """stdout, decoded; undecodable bytes become U+FFFD."""
        return self.stdout.decode("utf-8", "replace")


class Chunk(Brief, kw_only=True, omit_defaults=True):
    """daemon -> SDK: a part of a running command's output; the last one carries the result instead."""

    stream: Literal["stdout", "stderr", "result"]
    data: bytes = b""
    result: ExecResult | None = None  # its stdout and stderr are empty: they were streamed


class TurnInfo(Brief, kw_only=True, omit_defaults=True):
    """daemon -> SDK: what one turn did."""

    sandbox: str
    turn: int
    command: str  # its beginning
    started_at: Annotated[float, msgspec.Meta(ge=0, le=1e12)]
    duration: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    exit_code: int
    verdict: Verdict
    reason: str
    checkpoint: str | None = None
    effects: Effects | None = None
