"""Answers that are kept so that a call which is sent again is not carried out again.

Guarantee: under one key of one caller a call is carried out at most once by living daemons and by those that follow
a killed one: the key is written down before the call begins. Its answer is written down right after it has been
handed to the connection: a caller that got it does not ask again, and one that asks in between waits. The same key with
another body or query is a Conflict. What a killed daemon had begun, and whose answer it had not written down, is, by
its route's choice, carried out again (where that is harmless), undone and carried out again, or reported as
Interrupted.

Keys lie in the run directory, which a loss of power empties: no process that they are about survives it
either. They are forgotten after a day, and earlier when there are too many of them: those of a caller with more than an
equal part of the room, the oldest first. No caller makes the daemon forget another caller's.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from sandbox import private
from sandbox.database import connect
from sandbox.errors import Conflict, Interrupted, Invalid

Repeat = Literal["once", "again", "redo"]

KEY_FORM = re.compile(r"[\x21-\x7e]{1,200}")
MAX_AGE = 86_400.0  # seconds
MAX_COUNT = 50_000
MAX_BYTES = 64 << 20  # of answers
MAX_ANSWER = 8 << 20  # bytes of one answer that is kept
_SWEEP = 256  # calls between two looks at what is too old

# Rows are found by the number that we remember of each: a call waits for one write at the end of one table.
SCHEMA = """
CREATE TABLE IF NOT EXISTS calls (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL, at REAL NOT NULL, body BLOB NOT NULL, status INTEGER, kind TEXT, answer BLOB);
"""
CALLER = "ALTER TABLE calls ADD COLUMN caller TEXT NOT NULL DEFAULT ''"  # a former daemon's file may lack it


class CallRecord(msgspec.Struct, frozen=True):
    """What is known of a key. ``status`` None: begun, not answered; 0: answered, too large to be kept."""

    body: bytes  # digest of the request
    status: int | None = None
    kind: str = ""  # content type
    answer: bytes = b""


class KeyRecord(msgspec.Struct):
    """Where a key is written down."""

    number: int
    at: float  # seconds since the epoch
    size: int = 0  # bytes of its answer
    caller: str = ""


class CallerUsage(msgspec.Struct):
    """What the keys of one caller take."""

    count: int = 0
    size: int = 0  # bytes of answers


def identity(caller: str, method: str, path: str, key: str) -> str:
    """One key of one caller for one thing. Two callers, or two paths, never meet."""
    if not KEY_FORM.fullmatch(key):
        raise Invalid("an Idempotency-Key is 1 to 200 printable characters without spaces", hint="use a UUID")
    return hashlib.sha256("\0".join((caller, method, path, key)).encode()).hexdigest()


def fingerprint(kind: str, form: str, body: bytes) -> bytes:
    """A digest of the request: the same bytes of the same `kind`, to be answered in the same `form`.

    Parameters of the query are part of `form`.
    """
    return hashlib.sha256(b"\0".join((kind.encode(), form.encode(), body))).digest()


def decide(
    retained: CallRecord | None, requested: bytes, repeat: Repeat
) -> Literal["carry out", "undo first", "replay"]:
    """What a call gets whose key no living call holds. Raises Conflict or Interrupted."""
    if retained is None:
        return "carry out"
    if retained.body != requested:
        raise Conflict("this Idempotency-Key was used for something else", hint="use a new key for each call")
    if retained.status is None:
        if repeat == "once":
            raise Interrupted(
                "the daemon ended while it carried this out; it may or may not have taken place",
                hint="look at the sandbox (`turns()`), then call again with a new key",
            )
        return "undo first" if repeat == "redo" else "carry out"
    if retained.status == 0:
        raise Conflict("it was carried out; its answer was too large to be kept", hint="ask for less output")
    return "replay"


class Answers:
    """The keys of one daemon, in the file `path`. Use from one event loop.

    Calling pattern::

        kept = await answers.claim(id, request, repeat, undo)     # None: carry it out, then one of
        answers.settle(id, status, kind, answer)                #   it was answered so
        answers.release(id)                                     #   it did not begin: the key is free again
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        private.file(path)
        # A tmpfs, and a killed process loses nothing that it wrote: no call here waits for a disk.
        pragmas = ("locking_mode = EXCLUSIVE", "busy_timeout = 5000", "synchronous = OFF", "mmap_size = 0")
        try:
            self._database = connect(path, SCHEMA, pragmas=pragmas)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                raise
            raise Conflict(
                f"another daemon works in {path.parent}", hint="stop it first, or set PAGURUS_RUN and PAGURUS_STATE"
            ) from None
        if "caller" not in [column[1] for column in self._database.execute("PRAGMA table_info(calls)")]:
            self._database.execute(CALLER)
        self._rooms: dict[str, CallerUsage] = {}  # by caller
        self._existing: dict[str, KeyRecord] = {}  # the oldest first
        result = "SELECT id, number, at, ifnull(length(answer), 0), caller FROM calls ORDER BY number"
        for name, *columns in self._database.execute(result):
            self._remember(name, KeyRecord(*columns))
        self._size = sum(existing.size for existing in self._existing.values())
        self._clock = clock
        self._running: dict[str, asyncio.Future[None]] = {}
        self._until_sweep = 0

    async def claim(
        self, name: str, requested: bytes, repeat: Repeat, caller: str = ""
    ) -> tuple[CallRecord | None, bool]:
        """(what to replay or None, whether to undo first). A call under way with this key is waited for."""
        while (running := self._running.get(name)) is not None:
            await asyncio.shield(running)
        retained = self._read(name) if name in self._existing else None
        decision = decide(retained, requested, repeat)
        if decision == "replay":
            return retained, False
        self._running[name] = asyncio.get_running_loop().create_future()
        self._sweep()
        if name not in self._existing:  # else it stands there as begun, with the same body
            now = self._clock()
            new = "INSERT INTO calls (id, at, body, caller) VALUES (?, ?, ?, ?)"
            row = self._database.execute(new, (name, now, requested, caller))
            self._remember(name, KeyRecord(row.lastrowid or 0, now, caller=caller))
        return None, decision == "undo first"

    def _remember(self, name: str, existing: KeyRecord) -> None:
        self._existing[name] = existing
        capacity = self._rooms.setdefault(existing.caller, CallerUsage())
        capacity.count += 1
        capacity.size += existing.size

    def finalize(self, name: str, status: int, kind: str, answer: bytes) -> None:
        """It was carried out; this is what everybody who asks again hears."""
        if len(answer) > MAX_ANSWER:
            status, answer = 0, b""
        existing = self._existing[name]
        try:
            self._database.execute(
                "UPDATE calls SET status = ?, kind = ?, answer = ? WHERE number = ?",
                (status, kind, answer, existing.number),
            )
            self._size += len(answer) - existing.size
            self._rooms[existing.caller].size += len(answer) - existing.size
            existing.size = len(answer)
        finally:
            self.abandon(name)
        if self._size > MAX_BYTES:
            self._make_room()

    def release(self, name: str) -> None:
        """It was not carried out."""
        self._forget(name)
        self.abandon(name)

    def _forget(self, name: str) -> None:
        existing = self._existing.pop(name)
        self._size -= existing.size
        capacity = self._rooms[existing.caller]
        capacity.count, capacity.size = capacity.count - 1, capacity.size - existing.size
        if not capacity.count:
            del self._rooms[existing.caller]
        self._database.execute("DELETE FROM calls WHERE number = ?", (existing.number,))

    def abandon(self, name: str) -> None:
        """No call of this process holds it any more. Where it is not answered, the next process decides."""
        future = self._running.pop(name, None)
        if future is not None and not future.done():
            future.set_result(None)

    def _read(self, name: str) -> CallRecord | None:
        result = "SELECT body, status, kind, answer FROM calls WHERE number = ?"
        row = self._database.execute(result, (self._existing[name].number,)).fetchone()
        return None if row is None else CallRecord(row[0], row[1], row[2] or "", row[3] or b"")

    def _sweep(self) -> None:
        """Forget what is too old or too much, the oldest first; never a call under way."""
        self._until_sweep -= 1
        if self._until_sweep > 0:
            return
        self._until_sweep = _SWEEP
        oldest = self._clock() - MAX_AGE
        for name, existing in list(self._existing.items()):
            if existing.at >= oldest:
                break
            if name not in self._running:
                self._forget(name)
        if len(self._existing) > MAX_COUNT:
            self._make_room()

    def _make_room(self) -> None:
        """Down to three quarters of what may be kept. Of these each caller may have an equal part, and who has less
        keeps all of it."""
        for name, existing in list(self._existing.items()):
            many, large = len(self._existing) > MAX_COUNT * 3 // 4, self._size > MAX_BYTES * 3 // 4
            if not (many or large):
                break
            capacity, callers = self._rooms[existing.caller], len(self._rooms)
            greedy = (many and capacity.count * callers > MAX_COUNT * 3 // 4) or (
                large and capacity.size * callers > MAX_BYTES * 3 // 4
            )
            if greedy and name not in self._running:
                self._forget(name)

    def close(self) -> None:
        self._database.close()
