"""The file of the gateway's journal, and the one thread that writes it.

Owns: the schema, transactions. Does not own: the rows (:mod:`daemon.gateway.journal`).

Guarantee: what a transaction has written when it returns survives the death of the daemon, and the loss of power when
it was asked to be `durable`. One thread owns the connection, so nothing here blocks the event loop.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from sandbox import private
from sandbox.errors import Closed, NoSpace, PagurusError

T = TypeVar("T")
VERSION = 1
SCHEMA = """
CREATE TABLE exchanges (
    id INTEGER PRIMARY KEY AUTOINCREMENT, sandbox TEXT NOT NULL, parent INTEGER, checkpoint TEXT, turn INTEGER NOT NULL,
    key BLOB NOT NULL, path TEXT NOT NULL, main INTEGER NOT NULL, state TEXT NOT NULL, started REAL NOT NULL,
    ended REAL, status INTEGER, asked INTEGER NOT NULL DEFAULT 0, answered INTEGER NOT NULL DEFAULT 0,
    recorded INTEGER NOT NULL DEFAULT 0, open BLOB NOT NULL, headers BLOB, envelope BLOB NOT NULL, response BLOB,
    request_bytes INTEGER NOT NULL DEFAULT 0, response_bytes INTEGER NOT NULL DEFAULT 0);
CREATE INDEX exchanges_of ON exchanges (sandbox, id);
CREATE TABLE parts (exchange INTEGER NOT NULL, position INTEGER NOT NULL, hash BLOB NOT NULL,
    PRIMARY KEY (exchange, position)) WITHOUT ROWID;
CREATE TABLE texts (hash BLOB PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE commands (id INTEGER PRIMARY KEY AUTOINCREMENT, sandbox TEXT NOT NULL, before INTEGER,
    position INTEGER NOT NULL, key BLOB NOT NULL, tree TEXT NOT NULL, request BLOB NOT NULL, result BLOB);
CREATE INDEX commands_of ON commands (sandbox, before, position);
CREATE TABLE lines (sandbox TEXT PRIMARY KEY, row BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE tokens (sandbox TEXT PRIMARY KEY, hash BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE upstreams (name TEXT PRIMARY KEY, row BLOB NOT NULL) WITHOUT ROWID;
"""


class Store:
    """The file at `path`, created when missing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._worker = ThreadPoolExecutor(1, "gateway-journal")
        self._database: sqlite3.Connection | None = None
        self._closed = False

    async def _do(self, function: Callable[[sqlite3.Connection], T], *, durable: bool = False) -> T:
        """Run `function` as one transaction in the journal's thread."""
        if self._closed:
            raise Closed("the daemon ends", remedy="ask again")
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._transact, function, durable)

    def _transact(self, function: Callable[[sqlite3.Connection], T], durable: bool) -> T:
        database = self._database
        if database is None:
            database = self._database = _open(self.path)
        try:
            database.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            database.execute("BEGIN IMMEDIATE")
            try:
                result = function(database)
            except BaseException:
                database.execute("ROLLBACK")
                raise
            database.execute("COMMIT")
        except sqlite3.Error as error:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise _refused(error) from error
        return result

    async def close(self) -> None:
        """Idempotent."""
        if self._closed:
            return
        self._closed = True

        def close() -> None:
            if self._database is not None:
                self._database.close()
                self._database = None

        await asyncio.get_running_loop().run_in_executor(self._worker, close)
        await asyncio.to_thread(self._worker.shutdown)


def _open(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    private.file(path)  # conversations are nobody else's business
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA journal_mode = WAL")
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version == 0:
        database.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
    elif version != VERSION:
        database.close()
        raise PagurusError(
            f"the gateway's journal {path} has schema {version}, this daemon reads {VERSION}",
            remedy="start the daemon that wrote it, or move the file away",
        )
    return database


def _refused(error: sqlite3.Error) -> PagurusError:
    if getattr(error, "sqlite_errorname", "") in ("SQLITE_FULL", "SQLITE_IOERR_WRITE"):
        return NoSpace(f"the gateway's journal cannot grow: {error}", remedy="free some space on the state directory")
    return PagurusError(f"the gateway's journal refuses: {error}", remedy="see the daemon's log")
