"""What the coordinator must still know after its death: hosts, where sandboxes are, which call went where.

Guarantee: a change that was awaited survives the death of the coordinator. The file holds the tokens of all hosts
and is its owner's alone.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from coordinator.decide.replicate import STORE
from sandbox import private
from sandbox.database import WriterThread, connect
from sandbox.errors import NoSpace, PagurusError
from sandbox.messages.cluster import ConversationExport, HostedSandbox, HostRequest

T = TypeVar("T")
VERSION = 2
SCHEMA = """
CREATE TABLE hosts (name TEXT PRIMARY KEY, row BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE calls (id TEXT PRIMARY KEY, host TEXT NOT NULL, at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE tokens (caller TEXT, host TEXT, id TEXT NOT NULL, text TEXT NOT NULL, PRIMARY KEY (caller, host))
    WITHOUT ROWID;
CREATE TABLE copies (sandbox TEXT PRIMARY KEY, row BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE homes (sandbox TEXT PRIMARY KEY, host TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE answers (id TEXT PRIMARY KEY, sandbox TEXT NOT NULL, at REAL NOT NULL, row BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE decisions (number INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, row BLOB NOT NULL);
"""
ADDED = """
CREATE TABLE IF NOT EXISTS seconds (sandbox TEXT PRIMARY KEY, row BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS stored (sandbox TEXT PRIMARY KEY, row BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS moves (sandbox TEXT PRIMARY KEY, row BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS seats (job TEXT PRIMARY KEY, row BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS phases (job TEXT, phase INTEGER, requested REAL NOT NULL, begun REAL NOT NULL, ended REAL,
    PRIMARY KEY (job, phase)) WITHOUT ROWID;
"""  # of second copies, copies in the store, moves and jobs that take turns, also in files that were made before
# Of each caller, the word that a call's id begins with, the oldest.
FORGET = """DELETE FROM {table} WHERE at < ? OR id IN (SELECT id FROM (SELECT id, sum({item}) OVER
    (PARTITION BY substr(id, 1, instr(id, ' ')) ORDER BY at DESC) AS newer FROM {table}) WHERE newer > ?)
    RETURNING id"""
FORGET_CALLS = FORGET.format(table="calls", item="1")
FORGET_ANSWERS = FORGET.format(table="answers", item="length(row) + 1024")
PHASES_ADDED = {"party": "INTEGER", "machines": "TEXT", "silent": "REAL NOT NULL DEFAULT 0"}  # group, machines as JSON
FORGET_DECISIONS = "DELETE FROM decisions WHERE number <= (SELECT max(number) FROM decisions) - ?"
CALL_AGE = 86_400.0  # seconds for which a repeated call goes where it went before
PHASE_AGE = 30 * CALL_AGE  # seconds for which it is known when a phase began and ended
CALLS = 50_000  # of one caller of which it is known where they went, at most a tenth more
ANSWERS = 64 << 20  # bytes of the answers to one caller that are kept, at most an eighth more and one answer
COPIES = ("copies", "seconds", "stored")  # tables: of two hosts, and the store
DECISIONS = 10_000  # kept, at most a tenth more


class HostRow(HostRequest, kw_only=True):
    """A registered host."""

    draining: bool = False


class CopyRow(msgspec.Struct, kw_only=True):
    """The newest state of a sandbox that another host, or the store, holds."""

    checkpoint: str
    host: str  # that holds it, or STORE
    source: str  # where the sandbox runs
    sandbox: HostedSandbox
    programs: dict[str, Any] = {}  # sessions and processes, as its host reported them
    conversation: ConversationExport = msgspec.field(default_factory=ConversationExport)  # with its model
    number: int = 0  # newer ones have larger ones
    old: bool = False  # older than what was reported since: nothing but the next copy builds upon it


class MoveRow(msgspec.Struct, kw_only=True):
    """A sandbox between two hosts."""

    source: str
    target: str
    sandbox: HostedSandbox


@contextlib.contextmanager
def _existing(rows: dict[str, T], key: str, row: T | None) -> Iterator[None]:
    """It is known as soon as it is being written down; what is not written down, for the disk is full, is not."""
    before = rows.get(key)
    _put(rows, key, row)
    try:
        yield
    except PagurusError:
        if rows.get(key) is row:
            _put(rows, key, before)
        raise


def _put(rows: dict[str, T], key: str, row: T | None) -> None:
    if row is None:
        rows.pop(key, None)
    else:
        rows[key] = row


class CoordinatorState:
    """The file at `path`. Reads at the start; one coordinator owns it."""

    def __init__(self, path: Path) -> None:
        private.directory(path.parent, ours=(path.name,))
        private.file(path)
        database = connect(path, SCHEMA, version=VERSION)
        database.executescript(ADDED)
        there = {name for _, name, *_ in database.execute("PRAGMA table_info(phases)").fetchall()}
        for name in PHASES_ADDED.keys() - there:
            database.execute(f"ALTER TABLE phases ADD COLUMN {name} {PHASES_ADDED[name]}")
        self._forget_old(database)
        rows = database.execute("SELECT name, row FROM hosts").fetchall()
        self.hosts = {name: msgspec.msgpack.decode(row, type=HostRow) for name, row in rows}
        self.calls: dict[str, str] = dict(database.execute("SELECT id, host FROM calls").fetchall())
        result = database.execute("SELECT caller, host, id, text FROM tokens").fetchall()
        self.tokens = {(caller, host): (number, text) for caller, host, number, text in result}
        self.copies: dict[str, dict[str, CopyRow]] = {}  # of a sandbox, by table: two at hosts, one in the store
        for table in COPIES:
            for name, row in database.execute(f"SELECT sandbox, row FROM {table}").fetchall():
                self.copies.setdefault(name, {})[table] = msgspec.msgpack.decode(row, type=CopyRow)
        self.slots: dict[str, bytes] = dict(database.execute("SELECT job, row FROM seats").fetchall())
        rows = database.execute("SELECT sandbox, row FROM moves").fetchall()
        self.moves = {name: msgspec.msgpack.decode(row, type=MoveRow) for name, row in rows}
        self.homes: dict[str, str] = dict(database.execute("SELECT sandbox, host FROM homes").fetchall())
        self._until_pruned = self._calls_since = self._answers_since = 0
        self._writer = WriterThread(database, "the coordinator's state")

    @staticmethod
    def _forget_old(database: sqlite3.Connection) -> None:
        database.execute("DELETE FROM calls WHERE at < ?", (time.time() - CALL_AGE,))
        database.execute("DELETE FROM phases WHERE ended < ?", (time.time() - PHASE_AGE,))
        database.execute("DELETE FROM answers WHERE at < ?", (time.time() - CALL_AGE,))

    async def put_host(self, name: str, row: HostRow) -> None:
        self.hosts[name] = row
        packed = msgspec.msgpack.encode(row)
        await self._do("INSERT OR REPLACE INTO hosts VALUES (?, ?)", (name, packed), durable=True)

    async def drop_host(self, name: str) -> None:
        self.hosts.pop(name, None)
        for key in [key for key in self.tokens if key[1] == name]:
            del self.tokens[key]
        await self._do("DELETE FROM tokens WHERE host = ?", (name,))
        await self._do("DELETE FROM hosts WHERE name = ?", (name,), durable=True)

    async def put_call(self, call: str, host: str) -> None:
        """Before the call goes out: a repeated call reaches the same host, also by the next coordinator."""
        self.calls[call] = host
        await self._do("INSERT OR REPLACE INTO calls VALUES (?, ?, ?)", (call, host, time.time()))
        self._calls_since += 1
        if self._calls_since >= CALLS // 10:
            self._calls_since = 0
            for (id,) in await self._forget(FORGET_CALLS, CALLS):
                self.calls.pop(id, None)

    async def put_token(self, caller: str, host: str, number: str, text: str) -> None:
        """The token by which calls of `caller` (its token here) act on `host`."""
        self.tokens[caller, host] = number, text
        await self._do("INSERT OR REPLACE INTO tokens VALUES (?, ?, ?, ?)", (caller, host, number, text))

    async def drop_token(self, caller: str, host: str) -> None:
        self.tokens.pop((caller, host), None)
        await self._do("DELETE FROM tokens WHERE caller = ? AND host = ?", (caller, host))

    async def put_copy(self, sandbox: str, row: CopyRow) -> CopyRow | None:
        """The one that it replaces: the former one of this holder, or the older one of two hosts."""
        rows = self.copies.setdefault(sandbox, {})
        table = "stored" if row.host == STORE else self._table(rows, row.host)
        former = rows.get(table)
        packed = msgspec.msgpack.encode(row)
        with _existing(rows, table, row):
            await self._do(f"INSERT OR REPLACE INTO {table} VALUES (?, ?)", (sandbox, packed), durable=True)
        return former

    @staticmethod
    def _table(rows: dict[str, CopyRow], host: str) -> str:
        tables = COPIES[:2]
        same = next((table for table in tables if table in rows and rows[table].host == host), None)
        free = next((table for table in tables if table not in rows), None)
        return same or free or min(tables, key=lambda table: rows[table].number)

    async def went_on(self, sandbox: str, host: str, checkpoint: str = "") -> None:
        """A sandbox went on at another host: its copy there is its own, and others but of `checkpoint` are old."""
        for table, row in list(self.copies.get(sandbox, {}).items()):
            if row.host == host or (row.host == STORE and row.checkpoint != checkpoint):
                del self.copies[sandbox][table]
                await self._do(f"DELETE FROM {table} WHERE sandbox = ?", (sandbox,))
            elif row.checkpoint != checkpoint and not row.old:
                self.copies[sandbox][table] = old = msgspec.structs.replace(row, old=True)
                packed = msgspec.msgpack.encode(old)
                await self._do(f"INSERT OR REPLACE INTO {table} VALUES (?, ?)", (sandbox, packed), durable=True)

    async def drop_copies(self, sandbox: str) -> None:
        self.copies.pop(sandbox, None)
        for table in COPIES:
            await self._do(f"DELETE FROM {table} WHERE sandbox = ?", (sandbox,))

    async def put_move(self, sandbox: str, row: MoveRow) -> None:
        """Before a sandbox is held: the next coordinator brings the move to an end."""
        packed = msgspec.msgpack.encode(row)
        with _existing(self.moves, sandbox, row):
            await self._do("INSERT OR REPLACE INTO moves VALUES (?, ?)", (sandbox, packed), durable=True)

    async def drop_move(self, sandbox: str) -> None:
        with _existing(self.moves, sandbox, None):
            await self._do("DELETE FROM moves WHERE sandbox = ?", (sandbox,))

    async def put_home(self, sandbox: str, host: str) -> None:
        """A sandbox that has left its host belongs there from now on, and nowhere else."""
        with _existing(self.homes, sandbox, host):
            await self._do("INSERT OR REPLACE INTO homes VALUES (?, ?)", (sandbox, host), durable=True)

    async def drop_home(self, sandbox: str) -> None:
        if sandbox in self.homes:
            with _existing(self.homes, sandbox, None):
                await self._do("DELETE FROM homes WHERE sandbox = ?", (sandbox,))
            await self._do("DELETE FROM answers WHERE sandbox = ?", (sandbox,))

    async def put_answer(self, call: str, sandbox: str, row: bytes) -> None:
        """What a call was answered whose state another host holds: repeated there, it is not carried out again."""
        statement = "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)"
        await self._do(statement, (call, sandbox, time.time(), row), durable=True)
        self._answers_since += len(row) + 1024
        if self._answers_since >= ANSWERS // 8:
            self._answers_since = 0
            await self._forget(FORGET_ANSWERS, ANSWERS)

    async def _forget(self, statement: str, limit: int) -> list[tuple[str]]:
        values = time.time() - CALL_AGE, limit
        return await self._writer.do(lambda database: database.execute(statement, values).fetchall())

    async def answer(self, call: str) -> bytes | None:
        query = "SELECT row FROM answers WHERE id = ?"
        result = await self._writer.do(lambda database: database.execute(query, (call,)).fetchone())
        return None if result is None else result[0]

    async def decided(self, kind: str, view: object, action: object) -> None:
        """Log a decision with all that it was made from, so that it can be made again. On a full disk it is not."""
        row = msgspec.json.encode({"view": view, "action": action})
        self._until_pruned -= 1
        with contextlib.suppress(NoSpace):
            if self._until_pruned <= 0:
                self._until_pruned = DECISIONS // 10
                await self._do(FORGET_DECISIONS, (DECISIONS,))
            await self._do("INSERT INTO decisions (at, kind, row) VALUES (?, ?, ?)", (time.time(), kind, row))

    async def all_or_none(self, changes: Sequence[tuple[str, tuple[object, ...]]]) -> None:
        """These statements, in one durable transaction."""

        def work(database: sqlite3.Connection) -> None:
            for statement, values in changes:
                database.execute(statement, values)

        await self._writer.do(work, durable=True)

    async def read(self, query: str, values: tuple[object, ...] = ()) -> list[Any]:
        """The rows that a query finds."""
        return await self._writer.do(lambda database: database.execute(query, values).fetchall())

    async def _do(self, statement: str, values: tuple[object, ...], *, durable: bool = False) -> None:
        await self._writer.do(lambda database: database.execute(statement, values).rowcount, durable=durable)

    async def close(self) -> None:
        await self._writer.close()
