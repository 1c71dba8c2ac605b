"""The single truth about the sandboxes, turns and checkpoints of a host: one SQLite file.

Guarantee (I3): a change is one transaction, so a crash at any instant leaves the old catalogue or
the new one. A change survives the death of the daemon when :meth:`Catalogue.write` has returned,
and the loss of power when it was requested to be `durable`.

The thread that writes is :mod:`sandbox.database`'s, so nothing here blocks the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sandbox import private
from sandbox.criu.open_files import OpenFiles
from sandbox.database import QueuedWrite, WriterThread, connect
from sandbox.errors import Invalid
from sandbox.messages import (
    CheckpointInfo,
    Composition,
    ProgramKind,
    SandboxInfo,
    SandboxState,
    TurnInfo,
    Verdict,
)
from sandbox.messages.sandboxes import Settings
from sandbox.messages.services import ServiceHealth

SCHEMA_VERSION = 2
MAX_PROGRAM_BYTES = 1 << 20  # of all rows of a state's programs that come from another host
SCHEMA = """
CREATE TABLE sandboxes (id TEXT PRIMARY KEY, created_at REAL NOT NULL, state TEXT NOT NULL, row BLOB NOT NULL)
    WITHOUT ROWID;
CREATE TABLE checkpoints (id TEXT PRIMARY KEY, sandbox TEXT NOT NULL, number INTEGER NOT NULL, row BLOB NOT NULL)
    WITHOUT ROWID;
CREATE INDEX checkpoints_of ON checkpoints (sandbox, number);
CREATE TABLE turns (sandbox TEXT NOT NULL, turn INTEGER NOT NULL, row BLOB NOT NULL, PRIMARY KEY (sandbox, turn))
    WITHOUT ROWID;
"""

Statement = tuple[str, Sequence[Any]]


class AnswerRow(msgspec.Struct, kw_only=True):
    """The last answer of a session: returned again, not made again, when its key comes again."""

    key: str
    exit_code: int
    duration: float
    timed_out: bool = False
    oom_killed: bool = False
    turn: int | None = None
    verdict: Verdict | None = None
    reason: str | None = None
    checkpoint: str | None = None


class ProgramRow(msgspec.Struct, kw_only=True):
    """A program with an attendant in the sandbox. Part of the sandbox's state: a checkpoint has its own list."""

    id: str
    kind: ProgramKind
    command: str  # its beginning
    started_at: float
    pid: int = 0  # inside the sandbox; 0: being started
    exit_status: int | None = None  # wait status, once seen
    ended_at: float = 0.0  # of a service: when that was seen
    argv: list[str] = []  # started by a client of E2B, which lists it with its arguments
    tag: str = ""  # the name that such a client gave it
    service: str = ""  # of a composition, where it runs
    # Of a service:
    restarts: int = 0  # times that it was started again by its policy
    stopped: bool = False  # by a client: it is not started again
    oom_killed: bool = False  # while it ran, something in the service met a limit of memory that is the service's own
    health: ServiceHealth = ServiceHealth.NONE
    error: str = ""  # the last answer of an unhealthy one
    excluded: list[tuple[int, int]] = []  # its processes, if they are no part of checkpoints: see daemon.apart
    answer: AnswerRow | None = None  # session: the last one given
    answered: list[str] = []  # session: keys before it


def programs_from(reported: Mapping[str, Any]) -> dict[str, ProgramRow]:
    """The programs of a state that another host had, as it reported them. Raises Invalid."""
    hint = "install the same version of Pagurus on both hosts"
    try:
        rows = msgspec.convert(reported, dict[str, ProgramRow])
    except msgspec.ValidationError as error:
        raise Invalid(f"the programs cannot be taken over: {error}", hint=hint) from None
    if any(name != row.id or re.fullmatch("p-[0-9a-f]{12}", name) is None for name, row in rows.items()):
        raise Invalid("the programs cannot be taken over: one has another id than it can have", hint=hint)
    if len(msgspec.msgpack.encode(rows)) > MAX_PROGRAM_BYTES:
        raise Invalid(f"the programs cannot be taken over: they are more than {MAX_PROGRAM_BYTES} bytes", hint=hint)
    return rows


class Template(Settings, kw_only=True):
    """What forks inherit of the sandbox that a checkpoint belongs to. An imported checkpoint has it with it."""

    image_digest: str = ""  # the content that its name meant then; "": whatever the name means
    workdir: str = "/"
    user: str = ""  # who commands run as that do not say; "": root
    login: bool = False  # a user called "user" is made in it where its image has none
    layer: str = ""  # runtime layer that its processes were started from; "": the current one

    @classmethod
    def of(cls, row: Template) -> Template:
        return cls(**row.inherited_by_forks())

    def inherited_by_forks(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in Template.__struct_fields__}


class SandboxRow(Template, kw_only=True):
    """All that must be known of a sandbox to adopt it or to bring it back."""

    id: str
    state: SandboxState
    created_at: float
    uid_base: int
    hostname: str
    tree: str | None  # name of its subvolume in the pool; None: none yet
    head: str  # checkpoint that its current state descends from
    origin: str  # checkpoint that it was made from: its own first one, or another's for a fork
    name: str | None = None
    turn: int = 0
    ipc: bool = False  # System V or POSIX objects may exist without any process
    owner: str = ""  # whose it is; "": the host's own
    made_by: str = ""  # the idempotency key of the call that made it
    programs: dict[str, ProgramRow] = {}  # replaced, never changed in place: checkpoints share it
    inherited: int = 0  # bytes of files that a fork is based on and another sandbox wrote

    def info(self) -> SandboxInfo:
        return SandboxInfo(**{name: getattr(self, name) for name in SandboxInfo.__struct_fields__})


class RetainedStep(msgspec.Struct, kw_only=True):
    """Of a checkpoint that is kept as the outcome of a step of an image build."""

    key: str
    title: str = ""
    size: int = 0  # bytes that the step added
    used_at: float = 0.0


class CheckpointRow(CheckpointInfo, kw_only=True, omit_defaults=True):
    """A checkpoint, and what is not shown of it. `files` and `dump` name the checkpoints whose content it uses, so that
    one that captured only half of the state shares the other half with an ancestor."""

    number: int  # order of creation on this host
    files: str | None = None  # None: the empty tree, as created
    dump: str | None = None  # None: fresh, a new init is all it takes
    ipc: bool = False
    owner: str = ""  # whose it is; "": the host's own
    dump_bytes: int = 0  # size of the full process images that `dump` names
    images_bytes: int = 0  # what its own process images added to the disk
    files_bytes: int = 0  # size of the whole upper tree that `files` names
    held: OpenFiles | None = None  # what the processes held in the file tree at the dump
    programs: dict[str, ProgramRow] = {}  # those of the state that it holds
    template: Template | None = None  # imported, or a step of a build: stays until it is removed
    step: RetainedStep | None = None
    image: str = ""  # content of the image that was made of its files
    composition: Composition | msgspec.UnsetType | None = msgspec.UNSET  # where programs may add services; else unset
    damaged: bool = False  # a verification found that the disk does not hold what was stored; `error` says what

    def composed(self, otherwise: Composition | None) -> Composition | None:
        """The services of the state that it holds; `otherwise`: those of its sandbox, where they never change."""
        return otherwise if isinstance(self.composition, msgspec.UnsetType) else self.composition

    def info(self) -> CheckpointInfo:
        return CheckpointInfo(**{name: getattr(self, name) for name in CheckpointInfo.__struct_fields__})


_encode = msgspec.msgpack.Encoder().encode
_sandbox = msgspec.msgpack.Decoder(SandboxRow).decode
_checkpoint = msgspec.msgpack.Decoder(CheckpointRow).decode
_turn = msgspec.msgpack.Decoder(TurnInfo).decode


def put_sandbox(row: SandboxRow) -> Statement:
    return "INSERT OR REPLACE INTO sandboxes VALUES (?, ?, ?, ?)", (row.id, row.created_at, row.state, _encode(row))


def put_checkpoint(row: CheckpointRow) -> Statement:
    return "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?)", (row.id, row.sandbox, row.number, _encode(row))


def put_turn(row: TurnInfo) -> Statement:
    return "INSERT OR REPLACE INTO turns VALUES (?, ?, ?)", (row.sandbox, row.turn, _encode(row))


def drop_sandbox(sandbox: str) -> list[Statement]:
    return [("DELETE FROM sandboxes WHERE id = ?", (sandbox,)), ("DELETE FROM turns WHERE sandbox = ?", (sandbox,))]


def drop_checkpoint(checkpoint: str) -> Statement:
    return "DELETE FROM checkpoints WHERE id = ?", (checkpoint,)


LAZY = 0.01  # seconds for which a change without a waiting caller waits for others


@dataclass
class Statements:
    """What one caller writes."""

    statements: list[Statement]

    def __call__(self, database: sqlite3.Connection) -> None:
        for statement, values in self.statements:
            database.execute(statement, values)


class Catalogue:
    """The catalogue at `path`, created when missing. Use from one event loop."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        private.file(path)  # its journal gets the same mode
        self._loop = asyncio.get_running_loop()
        self._writer = WriterThread(connect(path, SCHEMA, version=SCHEMA_VERSION), "the catalogue")
        self._lazy: list[QueuedWrite[None]] = []

    def load(self) -> tuple[list[SandboxRow], list[CheckpointRow]]:
        """All sandboxes and checkpoints, oldest first. Once, before the first write."""
        if self._writer.started:
            raise RuntimeError("load() comes before the first write")
        read = self._writer.connection.execute
        sandboxes = [_sandbox(row) for (row,) in read("SELECT row FROM sandboxes ORDER BY created_at")]
        checkpoints = [_checkpoint(row) for (row,) in read("SELECT row FROM checkpoints")]
        checkpoints.sort(key=lambda row: row.number)
        return sandboxes, checkpoints

    def later(self, statements: Iterable[Statement]) -> None:
        """Queue a change without a waiting caller. Order among all changes is kept.

        Several that come close together wake the writer once.
        """
        self._writer.need_open()
        if not self._lazy:
            self._loop.call_later(LAZY, self._flush)
        self._lazy.append(QueuedWrite(Statements(list(statements))))

    def _flush(self) -> None:
        changes, self._lazy = self._lazy, []
        if changes:
            self._writer.queue(changes)

    async def write(self, statements: Iterable[Statement], *, durable: bool = False) -> None:
        """Commit `statements` as one change. Raises NoSpace when the disk is full."""
        self._flush()
        await self._writer.do(Statements(list(statements)), durable=durable)

    async def turns(self, sandbox: str, limit: int = 1000) -> list[TurnInfo]:
        """The last `limit` turns of a sandbox, oldest first, those queued before the call among them."""
        if not self._writer.closed and (self._lazy or self._writer.started):
            await self.write([])  # also what left `_lazy` may still be with the writer
        return await asyncio.to_thread(_read_turns, self.path, sandbox, limit)

    async def close(self) -> None:
        """Commit what is queued, durably, and close. Idempotent."""
        if self._lazy or (self._writer.started and not self._writer.closed):
            await self.write([], durable=True)
            self._flush()  # what came in between
        await self._writer.close()


def _read_turns(path: Path, sandbox: str, limit: int) -> list[TurnInfo]:
    with contextlib.closing(sqlite3.connect(path)) as database:
        rows = database.execute(
            "SELECT row FROM turns WHERE sandbox = ? ORDER BY turn DESC LIMIT ?", (sandbox, limit)
        ).fetchall()
    return [_turn(row) for (row,) in reversed(rows)]
