"""SDK <-> daemon: programs that outlive the call that started them, and what a sandbox uses."""

from __future__ import annotations

import enum
from typing import Annotated, Literal

import msgspec

from sandbox.messages.brief import Brief
from sandbox.messages.verdict import Verdict

# "name", uid, "name:group", "uid:gid", by the sandbox's own /etc/passwd and /etc/group
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=130, pattern=r"^[^\0]*$")]
User = Annotated[int, msgspec.Meta(ge=0, le=65_535)] | _Name
LogLimit = Annotated[int, msgspec.Meta(ge=4096, le=16 << 20)]
OutputLimit = Annotated[int, msgspec.Meta(ge=0, le=16 << 20)]  # larger output is streamed, or goes to a file
#: Also the name of a directory and a host name.
ServiceName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
Deadline = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # seconds
Cells = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
Offset = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]


class ProgramKind(enum.StrEnum):
    PROCESS = "process"
    SESSION = "session"  # a shell that keeps its state from command to command
    SERVICE = "service"  # of a composition
    TERMINAL = "terminal"


class ProgramState(enum.StrEnum):
    RUNNING = "running"
    EXITED = "exited"
    LOST = "lost"  # killed from outside together with what held its output, or the sandbox is dead


class ProcessRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """SDK -> daemon: POST /v1/sandboxes/{id}/processes

    `command` is a string for ``/bin/sh -c`` or an argument vector.
    """

    command: str | list[str]
    env: dict[str, str] = {}
    cwd: str | None = None
    user: User | None = None  # None: the sandbox's default
    service: ServiceName | None = None  # of a composition, where it runs; None: its main one
    stdin: bool = False  # a pipe to write to; else its stdin is empty
    log_limit: LogLimit = 1 << 20  # bytes kept of each output, the newest
    ends_turn: bool = True  # judge and checkpoint once it has started
    excluded: bool = False  # it is no part of checkpoints: after a restore, and in a fork, it is not there


class TerminalRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """SDK -> daemon: POST /v1/sandboxes/{id}/terminals"""

    command: str | list[str] | None = None  # None: the best shell there is
    env: dict[str, str] = {}
    cwd: str | None = None
    user: User | None = None
    service: ServiceName | None = None  # as of a process
    rows: Cells = 24
    columns: Cells = 80


class ProcessInfo(Brief, kw_only=True, omit_defaults=True):
    """daemon -> SDK: a program, as it is in the sandbox's present state."""

    id: str
    kind: ProgramKind
    command: str  # its beginning
    state: ProgramState
    pid: int  # inside the sandbox
    started_at: float  # seconds since the epoch
    exit_code: int | None = None  # 128 + signal number when killed by one
    written: int = 0  # bytes of stdin that it was given
    excluded: bool = False  # it is no part of checkpoints
    service: str = ""  # of a composition, where it runs
    turn: int | None = None  # the turn that its start ended
    verdict: Verdict | None = None
    checkpoint: str | None = None


SignalNumber = Annotated[int, msgspec.Meta(ge=1, le=64)]


class SignalRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """SDK -> daemon: POST /v1/sandboxes/{id}/processes/{process}/signal and .../exec/{command}/signal"""

    signal: SignalNumber = 15
    group: bool = True  # its process group (of a command: all in its session and below), or it alone


class Logs(Brief, kw_only=True, omit_defaults=True):
    """daemon -> SDK: what is kept of the outputs. Ask for what follows with `stdout_end` and `stderr_end`."""

    stdout: bytes = b""
    stderr: bytes = b""
    stdout_start: int = 0  # offset of its first byte in all that the program ever wrote
    stderr_start: int = 0
    ended: bool = False  # nothing follows

    @property
    def stdout_end(self) -> int:
        return self.stdout_start + len(self.stdout)

    @property
    def stderr_end(self) -> int:
        return self.stderr_start + len(self.stderr)


class LogChunk(Brief, kw_only=True, omit_defaults=True):
    """daemon -> SDK: a part of an output as it comes; the last one is empty and says `ended`."""

    stream: Literal["stdout", "stderr"] = "stdout"
    start: int = 0  # a jump says that older bytes were dropped
    data: bytes = b""
    ended: bool = False


class Metrics(Brief, kw_only=True, omit_defaults=True):
    """daemon -> SDK: what a sandbox uses, from its control groups. None: unknown on this host."""

    cpu_seconds: float
    processes: int
    memory_bytes: int | None = None
    memory_peak_bytes: int | None = None
    memory_limit_bytes: int | None = None
    read_bytes: int | None = None  # from disks
    written_bytes: int | None = None
    disk_bytes: int | None = None  # of its own file tree
    disk_limit_bytes: int | None = None
    oom_kills: int = 0


class SandboxUsage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """daemon -> page: what one of many sandboxes uses."""

    sandbox: str
    cpu_seconds: float
    memory_bytes: int | None = None  # None: not known on this host


class HostUsage(msgspec.Struct, kw_only=True):
    """daemon -> page: what the host has, and what of it is free."""

    cpus: int
    load: float  # tasks that run or want to, over the last minute
    memory_bytes: int
    memory_free: int
    disk_bytes: int  # of the file system that holds images and what checkpoints store
    disk_free: int
    pool_bytes: int  # of the pool of file trees
    pool_free: int
