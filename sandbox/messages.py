"""Every struct that crosses a process boundary of a sandbox host, headed "A -> B".

Owns: the wire. Fields are append-only with defaults (msgspec's schema evolution rules).
Does not own: behaviour. The wire is MessagePack between SDK and daemon, JSON for everybody else;
bytes travel as they are in MessagePack and as base64 in JSON.
"""

from __future__ import annotations

import enum
from typing import Literal

import msgspec


class Verdict(enum.StrEnum):
    """The judged class of a turn: what must be captured so that nothing is lost."""

    NONE = "none"
    FILES = "files"
    PROCESSES = "processes"
    BOTH = "both"

    @property
    def files(self) -> bool:
        return self in (Verdict.FILES, Verdict.BOTH)

    @property
    def processes(self) -> bool:
        return self in (Verdict.PROCESSES, Verdict.BOTH)

    @classmethod
    def of(cls, *, files: bool, processes: bool) -> Verdict:
        return {
            (False, False): cls.NONE,
            (True, False): cls.FILES,
            (False, True): cls.PROCESSES,
            (True, True): cls.BOTH,
        }[files, processes]


# --------------------------------------------------------------------------- SDK -> daemon: sandboxes


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Resource limits of a sandbox. Example: ``Limits(cpus=1, memory="1GiB")``."""

    cpus: float | None = None  # cores; 0.5 is half of one
    memory: str | int | None = "1GiB"  # bytes, or a string with KiB/MiB/GiB
    processes: int | None = 256  # tasks, threads included
    open_files: int = 4096  # RLIMIT_NOFILE of each process
    disk: str | int | None = "4GiB"  # bytes written since the last restore, as far as it or a checkpoint holds them


class Network(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Network policy. Only ``none`` (loopback alone) so far."""

    mode: Literal["none"] = "none"

    @classmethod
    def none(cls) -> Network:
        return cls(mode="none")


class CreateRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """SDK -> daemon: POST /v1/sandboxes"""

    image: str
    name: str | None = None
    limits: Limits = Limits()
    network: Network = Network()
    env: dict[str, str] = {}
    workdir: str = "/"
    labels: dict[str, str] = {}
    durable_answers: bool = False  # hold answers until durable instead of until captured


class SandboxState(enum.StrEnum):
    CREATING = "creating"
    RUNNING = "running"
    RESTORING = "restoring"
    DEAD = "dead"  # pid 1 is gone; restore() brings it back
    REMOVED = "removed"


class SandboxInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """daemon -> SDK: a sandbox, as listed."""

    id: str
    image: str
    state: SandboxState
    created_at: float  # seconds since the epoch
    name: str | None = None
    turn: int = 0  # turns ended so far
    head: str | None = None  # checkpoint that its current state descends from
    labels: dict[str, str] = {}
    limits: Limits = Limits()


# --------------------------------------------------------------------------- SDK -> daemon: commands


class ExecRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """SDK -> daemon: POST /v1/sandboxes/{id}/exec

    `command` is a string for ``/bin/sh -c`` or an argument vector.
    """

    command: str | list[str]
    timeout: float | None = 60.0  # seconds; None waits for ever
    stdin: bytes = b""
    cwd: str | None = None
    env: dict[str, str] = {}
    user: int = 0  # uid inside the sandbox
    output_limit: int = 1 << 20  # bytes kept of each stream; the rest is counted and dropped
    ends_turn: bool = True  # judge and checkpoint when the command has ended


class Effects(msgspec.Struct, kw_only=True, omit_defaults=True):
    """inspector -> judge: what a sandbox did since its mark. Counts saturate, never wrap.

    `overflow` or `unknown` true means that the counts are a lower bound: judge the safest verdict.
    """

    data_writes: int = 0  # inodes whose content was dirtied in the persistent tree
    name_changes: int = 0  # create, unlink, rename, link, mkdir, symlink, mknod
    metadata_changes: int = 0  # chmod, chown, utimes, xattr, truncate
    mounts: int = 0
    forks: int = 0
    execs: int = 0
    exits: int = 0
    ipc_changes: int = 0  # System V and POSIX shared memory, queues, semaphores
    listens: int = 0
    foreign_writes: int = 0  # memory of another process written
    signals: int = 0  # signals sent to tasks that survive the turn
    survivors: int = 0  # tasks alive at the read, pid 1 excluded
    survivors_new: int = 0  # of these, started since the mark
    survivors_ran: int = 0  # of these, older than the mark and made progress since
    survivors_gone: int = 0  # alive at the mark, gone now
    temporary: int = 0  # files created and removed again since the mark
    overflow: bool = False
    unknown: bool = False
    lost_events: int = 0  # explanations that did not fit the ring buffer
    reasons: list[str] = []  # explanations, newest last, at most 16
    channels: int = 0  # FIFOs opened, sockets connected to or written: a survivor may hold the other end
    tmpfs_writes: int = 0  # files of a tmpfs changed: they live in the process dump
    uring_requests: int = 0  # io_uring requests that may change something
    must_files: str = ""  # why the owner wants the file half captured whatever was seen
    must_processes: str = ""  # the same for the process half


class ExecResult(msgspec.Struct, kw_only=True, omit_defaults=True):
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


# --------------------------------------------------------------------------- SDK -> daemon: checkpoints


class CheckpointState(enum.StrEnum):
    PENDING = "pending"  # queued or being taken; not restorable yet
    CAPTURED = "captured"  # restorable on this host until it loses power
    DURABLE = "durable"  # survives power loss
    FAILED = "failed"


class CheckpointInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """daemon -> SDK: an immutable, restorable state of a sandbox."""

    id: str
    sandbox: str
    state: CheckpointState
    verdict: Verdict  # what this checkpoint newly captured
    parent: str | None = None
    label: str | None = None
    turn: int = 0
    created_at: float = 0.0
    started_at: float | None = None  # when the engine began, seconds since the epoch
    captured_at: float | None = None
    durable_at: float | None = None
    frozen_ms: float = 0.0
    total_ms: float = 0.0  # from start to captured
    stored_bytes: int = 0  # bytes that this checkpoint added to the disk
    full_bytes: int = 0  # bytes that a full dump at this turn would have added
    error: str | None = None


class CheckpointRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """SDK -> daemon: POST /v1/sandboxes/{id}/checkpoints"""

    label: str | None = None
    wait: Literal["captured", "durable"] = "captured"


class RestoreRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """SDK -> daemon: POST /v1/sandboxes/{id}/restore. None restores the latest checkpoint."""

    checkpoint: str | None = None
    verify: bool = False  # compare the restored state with the checkpoint before it runs


class RestoreResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """daemon -> SDK"""

    sandbox: str
    checkpoint: str
    total_ms: float
    verified: bool = False
    differences: list[str] = []  # empty when equal


class ForkRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """SDK -> daemon: POST /v1/checkpoints/{id}/fork"""

    count: int = 1


class ForkEntry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """daemon -> SDK: one child of a fork; each succeeds or fails alone."""

    sandbox: SandboxInfo | None = None
    error: str | None = None


class FileInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """daemon -> SDK: one entry of a directory."""

    name: str
    kind: Literal["file", "directory", "symlink", "other"]
    size: int = 0  # bytes
    mode: int = 0  # permission bits
    modified_at: float = 0.0  # seconds since the epoch


class Chunk(msgspec.Struct, kw_only=True, omit_defaults=True):
    """daemon -> SDK: a part of a running command's output; the last one carries the result instead."""

    stream: Literal["stdout", "stderr", "result"]
    data: bytes = b""
    result: ExecResult | None = None  # its stdout and stderr are empty: they were streamed


class TurnInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """daemon -> SDK: what one turn did."""

    sandbox: str
    turn: int
    command: str  # its beginning
    started_at: float
    duration: float
    exit_code: int
    verdict: Verdict
    reason: str
    checkpoint: str | None = None
    effects: Effects | None = None


class Change(msgspec.Struct, kw_only=True, omit_defaults=True):
    """daemon -> SDK: one difference of the file tree."""

    path: str
    kind: Literal["added", "modified", "removed"]


class Statistics(msgspec.Struct, kw_only=True, omit_defaults=True):
    """daemon -> SDK: GET /v1/statistics"""

    sandboxes: int = 0
    turns: int = 0
    verdicts: dict[str, int] = {}
    checkpoints: dict[str, int] = {}  # by what they captured: files, processes, both
    checkpoints_failed: int = 0
    in_flight: int = 0  # being taken now
    queued: int = 0
    stored_bytes: int = 0
    full_bytes: int = 0
    restores: int = 0
    inspector_tier: str = ""
