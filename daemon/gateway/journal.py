"""Requests and answers of a host: one SQLite file.

Guarantee: that of :mod:`sandbox.database`. Conversations are kept as parts that exchanges share: one
that grows by a message a turn takes linear space.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import blake3
import msgspec
import zstandard

from daemon.gateway import travel
from daemon.gateway.replay import ReplayExchange
from daemon.gateway.wire import MAX_ANSWER, MAX_BODY, AgentRequest, canonical
from sandbox import private
from sandbox.database import WriterThread, connect
from sandbox.errors import NotFound
from sandbox.messages import Exchange, ExchangeInfo, ExecResult, Upstream
from sandbox.messages.cluster import ConversationExport

VERSION = 2
SCHEMA = """
CREATE TABLE exchanges (
    id INTEGER PRIMARY KEY AUTOINCREMENT, sandbox TEXT NOT NULL, parent INTEGER, checkpoint TEXT, turn INTEGER NOT NULL,
    key BLOB NOT NULL, path TEXT NOT NULL, main INTEGER NOT NULL, state TEXT NOT NULL, started REAL NOT NULL,
    ended REAL, status INTEGER, requested INTEGER NOT NULL DEFAULT 0, answered INTEGER NOT NULL DEFAULT 0,
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
ROW = 1024  # bytes that an exchange takes in addition to its content: its row, its place in indexes and in memory
PART = 64  # bytes of a mention of a part
_RENAMED = {"started_at": "started", "ended_at": "ended", "from_record": "recorded"}  # field -> column
_COLUMNS = ", ".join(_RENAMED.get(field, field) for field in ExchangeInfo.__struct_fields__)


class JournalCursor(msgspec.Struct, kw_only=True):
    """How far a sandbox has come on its path. Survives the daemon."""

    tree: str  # name of its file tree when this was written: another one means that it was restored since
    head: int | None = None  # the last exchange of its main loop
    cursor: int = -1  # index on the path that an agent outside has come to
    position: int = 0  # commands of the turn under way whose result it has
    call: str = ""  # name of the last command's call: the same again wants its result again
    script: list[int] = []  # exchanges that are to be acted again, in order


class AgentCommand(msgspec.Struct, kw_only=True):
    """A command of an agent outside."""

    id: int
    key: bytes
    tree: str
    request: bytes
    result: ExecResult | None

    @property
    def ended(self) -> bool:
        return self.result is not None


class RecordedAnswer(msgspec.Struct):
    """An answer from the record."""

    status: int
    headers: dict[str, str]
    body: bytes


_pack = msgspec.msgpack.Encoder().encode
_result = msgspec.msgpack.Decoder(ExecResult).decode


class ConversationJournal:
    """The journal at `path`, created when missing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        private.file(path)  # conversations are private
        self._writer = WriterThread(connect(path, SCHEMA, version=VERSION), "the gateway's journal")
        self._do = self._writer.do
        self.close = self._writer.close
        self._squeeze = zstandard.ZstdCompressor(level=1)
        self._expand = zstandard.ZstdDecompressor()

    # ----------------------------------------------------------------- exchanges

    async def begin(
        self,
        requested: AgentRequest,
        *,
        sandbox: str,
        parent: int | None,
        checkpoint: str | None,
        turn: int,
        open_: Iterable[int],
        place: JournalCursor,
        copied: int | None = None,
    ) -> tuple[int, int]:
        """A new exchange; returns its id, and by how many bytes the record grew.

        One of the main loop becomes the tip of `place` and closes the turn. `copied`: its answer is that of another
        exchange.
        """

        def write(database: sqlite3.Connection) -> tuple[int, int]:
            body, envelope = canonical(requested.body), self._squeeze.compress(canonical(requested.envelope))
            whose = (sandbox, parent, checkpoint, turn, requested.key, requested.path, requested.main)
            number = database.execute(
                "INSERT INTO exchanges (sandbox, parent, checkpoint, turn, key, path, main, state, started, open,"
                " envelope, request_bytes) VALUES (?, ?, ?, ?, ?, ?, ?, 'requested', ?, ?, ?, ?)",
                (*whose, time.time(), _pack(list(open_)), envelope, len(body)),
            ).lastrowid
            assert number is not None
            size = ROW + len(envelope) + self._put_parts(database, number, requested.conversation)
            if copied is not None:
                size += _copy_answer(database, copied, number)
            if requested.main:
                place.head = number
                database.execute(
                    "UPDATE commands SET before = ? WHERE sandbox = ? AND before IS NULL", (number, sandbox)
                )
                _put_place(database, sandbox, place)
            return number, size

        return await self._do(write)

    def _put_parts(self, database: sqlite3.Connection, exchange: int, parts: list[Any]) -> int:
        """Bytes that this added."""
        size = PART * len(parts)
        for position, part in enumerate(parts):
            data = msgspec.json.encode(part, order="deterministic")
            name = blake3.blake3(data).digest()
            packed = self._squeeze.compress(data)
            if database.execute("INSERT OR IGNORE INTO texts VALUES (?, ?)", (name, packed)).rowcount:
                size += len(packed)
            database.execute("INSERT INTO parts VALUES (?, ?, ?)", (exchange, position, name))
        return size

    async def asking(self, exchange: int) -> None:
        """The upstream is about to be called."""
        await self._do(
            lambda db: db.execute("UPDATE exchanges SET requested = requested + 1 WHERE id = ?", (exchange,))
        )

    async def answered(self, exchange: int, answer: RecordedAnswer, *, durable: bool) -> int:
        """The whole answer is here. From now on it may be given to the agent, and again to a repeated request.

        Returns by how many bytes the record grew.
        """
        headers, body = _pack(answer.headers), self._squeeze.compress(answer.body)
        values = (time.time(), answer.status, headers, body, len(answer.body), exchange)
        await self._do(
            lambda db: db.execute(
                "UPDATE exchanges SET state = 'answered', ended = ?, status = ?, headers = ?, response = ?,"
                " response_bytes = ? WHERE id = ?",
                values,
            ),
            durable=durable,
        )
        return len(headers) + len(body)

    async def failed(self, exchange: int, status: int) -> None:
        """The upstream gave no answer: a repeated request calls upstream again."""
        values = (time.time(), status, exchange)
        await self._do(
            lambda db: db.execute(
                "UPDATE exchanges SET state = 'failed', ended = ?, status = ? WHERE id = ? AND state = 'requested'",
                values,
            )
        )

    async def last_seen(self, exchange: int, *, from_record: bool) -> None:
        """The agent was given the whole answer."""
        await self._do(
            lambda db: db.execute(
                "UPDATE exchanges SET answered = answered + 1, recorded = recorded + ? WHERE id = ?",
                (from_record, exchange),
            )
        )

    async def answer(self, exchange: int) -> RecordedAnswer:
        """The recorded answer."""

        def read(database: sqlite3.Connection) -> RecordedAnswer:
            row = database.execute(
                "SELECT status, headers, response FROM exchanges WHERE id = ? AND state = 'answered'", (exchange,)
            ).fetchone()
            if row is None:
                raise NotFound(
                    f"no answer is recorded for exchange {exchange}",
                    hint="only complete answers are recorded: send the request again",
                )
            headers = msgspec.msgpack.decode(row[1], type=dict[str, str])
            return RecordedAnswer(row[0], headers, self._expand.decompress(row[2], max_output_size=MAX_ANSWER))

        return await self._do(read)

    async def exchanges(self, sandbox: str, limit: int = 1000) -> list[ExchangeInfo]:
        """The last exchanges of a sandbox, oldest first."""

        def read(database: sqlite3.Connection) -> list[ExchangeInfo]:
            rows = database.execute(
                f"SELECT {_COLUMNS} FROM exchanges WHERE sandbox = ? ORDER BY id DESC LIMIT ?", (sandbox, limit)
            ).fetchall()
            return [ExchangeInfo(**_fields(row)) for row in reversed(rows)]

        return await self._do(read)

    async def read(self, sandbox: str, exchange: int) -> Exchange:
        """One exchange with its content."""

        def read(database: sqlite3.Connection) -> Exchange:
            row = database.execute(
                f"SELECT {_COLUMNS} FROM exchanges WHERE id = ? AND sandbox = ?", (exchange, sandbox)
            ).fetchone()
            if row is None:
                raise NotFound(f"sandbox {sandbox} has no exchange {exchange}", hint="list them first")
            headers, response, envelope = database.execute(
                "SELECT headers, response, envelope FROM exchanges WHERE id = ?", (exchange,)
            ).fetchone()
            return Exchange(
                **_fields(row),
                request=self._request(database, exchange, row[2], envelope),
                response=b"" if response is None else self._expand.decompress(response, max_output_size=MAX_ANSWER),
                headers={} if headers is None else msgspec.msgpack.decode(headers, type=dict[str, str]),
            )

        return await self._do(read)

    def _request(self, database: sqlite3.Connection, exchange: int, path: str, envelope: bytes) -> bytes:
        body = msgspec.json.decode(self._expand.decompress(envelope, max_output_size=MAX_BODY))
        rows = database.execute(
            "SELECT data FROM parts JOIN texts USING (hash) WHERE exchange = ? ORDER BY position", (exchange,)
        )
        parts = [msgspec.json.decode(self._expand.decompress(data, max_output_size=MAX_BODY)) for (data,) in rows]
        field = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path.partition("?")[0], "messages")
        return canonical({**body, **({field: parts} if field not in body and parts else {})})

    # ----------------------------------------------------------------- what a daemon finds

    async def load(self) -> tuple[dict[str, JournalCursor], list[tuple[str, bool, ReplayExchange]]]:
        """How far each sandbox has come, and every exchange: (sandbox, main, step), oldest first."""

        def read(
            database: sqlite3.Connection,
        ) -> tuple[dict[str, JournalCursor], list[tuple[str, bool, ReplayExchange]]]:
            places = {
                name: msgspec.msgpack.decode(row, type=JournalCursor)
                for name, row in database.execute("SELECT sandbox, row FROM lines")
            }
            rows = database.execute(
                "SELECT id, sandbox, main, key, parent, checkpoint, state, turn, open FROM exchanges ORDER BY id"
            )
            steps = [
                (
                    sandbox,
                    bool(main),
                    ReplayExchange(
                        id=number,
                        key=key,
                        parent=parent,
                        checkpoint=checkpoint,
                        answered=state == "answered",
                        turn=turn,
                        open=tuple(msgspec.msgpack.decode(open_, type=list[int])),
                    ),
                )
                for number, sandbox, main, key, parent, checkpoint, state, turn, open_ in rows
            ]
            return places, steps

        return await self._do(read)

    async def put_place(self, sandbox: str, place: JournalCursor, *, drop_commands: bool = False) -> None:
        def write(database: sqlite3.Connection) -> None:
            if drop_commands:
                database.execute("DELETE FROM commands WHERE sandbox = ? AND before IS NULL", (sandbox,))
            _put_place(database, sandbox, place)

        await self._do(write)

    async def size(self, sandbox: str) -> int:
        """Bytes that the exchanges and commands of a sandbox take, texts counted where they are named."""

        def read(database: sqlite3.Connection) -> int:
            (answers,) = database.execute(
                "SELECT total(? + length(envelope) + ifnull(length(response), 0) + ifnull(length(headers), 0))"
                " FROM exchanges WHERE sandbox = ?",
                (ROW, sandbox),
            ).fetchone()
            (mentions,) = database.execute(
                "SELECT count(*) FROM parts JOIN exchanges ON parts.exchange = exchanges.id WHERE sandbox = ?",
                (sandbox,),
            ).fetchone()
            (texts,) = database.execute(
                "SELECT coalesce(sum(length(data)), 0) FROM texts WHERE hash IN (SELECT hash FROM parts JOIN exchanges"
                " ON parts.exchange = exchanges.id WHERE sandbox = ?)",
                (sandbox,),
            ).fetchone()
            (results,) = database.execute(
                "SELECT total(length(request) + ifnull(length(result), 0)) FROM commands WHERE sandbox = ?", (sandbox,)
            ).fetchone()
            return int(answers + PART * mentions + texts + results)

        return await self._do(read)

    async def forget(self, sandbox: str, exchanges: Iterable[int]) -> None:
        """A sandbox is gone: its place, its token, and the exchanges that no other sandbox needs."""
        gone = list(exchanges)

        def write(database: sqlite3.Connection) -> None:
            database.execute("DELETE FROM lines WHERE sandbox = ?", (sandbox,))
            database.execute("DELETE FROM tokens WHERE sandbox = ?", (sandbox,))
            database.execute("DELETE FROM commands WHERE sandbox = ? AND before IS NULL", (sandbox,))
            for number in gone:
                database.execute("DELETE FROM commands WHERE before = ?", (number,))
                database.execute("DELETE FROM parts WHERE exchange = ?", (number,))
                database.execute("DELETE FROM exchanges WHERE id = ?", (number,))
            if gone:
                database.execute("DELETE FROM texts WHERE hash NOT IN (SELECT hash FROM parts)")

        await self._do(write)

    async def reported(self, sandbox: str, path: list[int], conversation: ConversationExport) -> None:
        """Fill in what another host must know of the sandbox, which has come this far."""
        await self._do(lambda database: travel.read(database, sandbox, path, conversation))

    async def taken(
        self, sandbox: str, tree: str, conversation: ConversationExport
    ) -> tuple[JournalCursor, list[ReplayExchange]]:
        """Take the path of a sandbox that comes from another host, and its place there. Raises Invalid."""
        await asyncio.to_thread(travel.check, conversation)

        def write(database: sqlite3.Connection) -> tuple[JournalCursor, list[ReplayExchange]]:
            path = travel.write(database, sandbox, conversation)
            place = JournalCursor(tree=tree, head=path[-1].id if path else None, cursor=len(path) - 1)
            _put_place(database, sandbox, place)
            return place, path

        return await self._do(write, durable=True)

    # ----------------------------------------------------------------- commands of agents outside

    async def commands(self, sandbox: str, before: int | None) -> list[AgentCommand]:
        """The commands that led to the exchange `before`; of the turn under way when None."""
        where, values = (
            ("before = ?", (before,)) if before is not None else ("sandbox = ? AND before IS NULL", (sandbox,))
        )

        def read(database: sqlite3.Connection) -> list[AgentCommand]:
            rows = database.execute(
                f"SELECT id, key, tree, request, result FROM commands WHERE {where} ORDER BY position", values
            )
            return [
                AgentCommand(
                    id=number,
                    key=key,
                    tree=tree,
                    request=self._expand.decompress(request),
                    result=None if result is None else _result(self._expand.decompress(result)),
                )
                for number, key, tree, request, result in rows
            ]

        return await self._do(read)

    async def command_begins(self, sandbox: str, position: int, key: bytes, tree: str, request: bytes) -> int:
        """A command is about to run. What was at this position and after it is undone and forgotten."""

        def write(database: sqlite3.Connection) -> int:
            database.execute(
                "DELETE FROM commands WHERE sandbox = ? AND before IS NULL AND position >= ?", (sandbox, position)
            )
            number = database.execute(
                "INSERT INTO commands (sandbox, position, key, tree, request) VALUES (?, ?, ?, ?, ?)",
                (sandbox, position, key, tree, self._squeeze.compress(request)),
            ).lastrowid
            assert number is not None
            return number

        return await self._do(write)

    async def command_runs_again(self, command: int, tree: str) -> None:
        await self._do(
            lambda db: db.execute("UPDATE commands SET tree = ?, result = NULL WHERE id = ?", (tree, command))
        )

    async def command_dropped(self, command: int) -> None:
        await self._do(lambda db: db.execute("DELETE FROM commands WHERE id = ?", (command,)))

    async def command_ended(self, command: int, result: ExecResult, sandbox: str, place: JournalCursor) -> int:
        """Its result is here. Returns the bytes that it takes."""
        packed = self._squeeze.compress(_pack(result))

        def write(database: sqlite3.Connection) -> None:
            database.execute("UPDATE commands SET result = ? WHERE id = ?", (packed, command))
            _put_place(database, sandbox, place)

        await self._do(write)
        return len(packed)

    # ----------------------------------------------------------------- tokens and upstreams

    async def put_token(self, sandbox: str, secret: str) -> None:
        digest = _hash(secret)
        await self._do(
            lambda db: db.execute("INSERT OR REPLACE INTO tokens VALUES (?, ?)", (sandbox, digest)), durable=True
        )

    async def knows_token(self, sandbox: str, secret: str) -> bool:
        row = await self._do(lambda db: db.execute("SELECT hash FROM tokens WHERE sandbox = ?", (sandbox,)).fetchone())
        return row is not None and hmac.compare_digest(row[0], _hash(secret))

    async def upstreams(self) -> dict[str, Upstream]:
        rows = await self._do(lambda db: db.execute("SELECT name, row FROM upstreams").fetchall())
        return {name: msgspec.msgpack.decode(row, type=Upstream) for name, row in rows}

    async def put_upstream(self, name: str, upstream: Upstream | None) -> None:
        def write(database: sqlite3.Connection) -> None:
            if upstream is None:
                database.execute("DELETE FROM upstreams WHERE name = ?", (name,))
            else:
                database.execute("INSERT OR REPLACE INTO upstreams VALUES (?, ?)", (name, _pack(upstream)))

        await self._do(write, durable=True)


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def _copy_answer(database: sqlite3.Connection, source: int, into: int) -> int:
    """Give an exchange the answer of another one; returns the bytes that this added."""
    database.execute(
        "UPDATE exchanges SET (state, ended, status, headers, response, response_bytes) ="
        " (SELECT state, ?, status, headers, response, response_bytes FROM exchanges WHERE id = ?)"
        " WHERE id = ?",
        (time.time(), source, into),
    )
    (size,) = database.execute(
        "SELECT ifnull(length(response), 0) + ifnull(length(headers), 0) FROM exchanges WHERE id = ?", (into,)
    ).fetchone()
    return int(size)


def _put_place(database: sqlite3.Connection, sandbox: str, place: JournalCursor) -> None:
    database.execute("INSERT OR REPLACE INTO lines VALUES (?, ?)", (sandbox, _pack(place)))


def _fields(row: tuple[Any, ...]) -> dict[str, Any]:
    fields = dict(zip(ExchangeInfo.__struct_fields__, row, strict=True))
    return {**fields, "main": bool(fields["main"]), "key": fields["key"].hex()}
