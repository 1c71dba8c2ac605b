"""SQLite files that one process writes: how they are opened, what a transaction guarantees, one thread that writes.

Guarantee: a transaction leaves all or nothing, whatever ends it. What it wrote survives the death of the process, and
with `durable` the loss of power. The log is sequential: a durable transaction makes every earlier one durable.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from sandbox.errors import Closed, NoSpace, NotFound, PagurusError

T = TypeVar("T")
BUSY = 30.0  # seconds to wait for the transaction of another process
_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)


def connect(
    path: Path, schema: str, *, version: int = 0, pragmas: Iterable[str] = (), create: bool = True
) -> sqlite3.Connection:
    """The file at `path`, created when missing, for any one thread at a time. `create` false: NotFound when missing.

    `schema`: makes the tables; in every file that is opened, or with `version` in a new one alone. Raises PagurusError
    when the file has another version.
    """
    if not create and not path.exists():
        raise NotFound(f"there is no {path}", hint="name a directory that holds it, such as runs/latest")
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=BUSY)
    try:
        for pragma in (*pragmas, "journal_mode = WAL"):
            database.execute(f"PRAGMA {pragma}")
        (result,) = database.execute("PRAGMA user_version").fetchone()
        if result not in (0, version):
            raise PagurusError(
                f"{path} has schema {result}, this version reads {version}",
                hint="start the version that wrote it, or move the file away",
            )
        if not version:
            database.executescript(schema)
        elif not result:
            database.executescript(f"BEGIN; {schema} PRAGMA user_version = {version}; COMMIT;")
    except (sqlite3.Error, PagurusError):
        database.close()
        raise
    return database


@contextlib.contextmanager
def transaction(database: sqlite3.Connection, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
    """What is written within is committed at the end, or none of it (a commit may fail too: the disk is full)."""
    database.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
    database.execute("BEGIN IMMEDIATE")
    try:
        yield database
        database.execute("COMMIT")
    finally:
        if database.in_transaction:
            database.execute("ROLLBACK")


def is_full(error: sqlite3.Error) -> bool:
    """Whether it is the disk that refuses."""
    return getattr(error, "sqlite_errorcode", 0) in _FULL


def refused(error: sqlite3.Error, what: str) -> PagurusError:
    """An error of `what`, as its users should read it."""
    if is_full(error):
        return NoSpace(f"the disk that holds {what} is full", hint="free some space in the state directory")
    return PagurusError(f"{what} refuses: {error}", hint="see the daemon's log")


@dataclass(eq=False)
class QueuedWrite(Generic[T]):
    """One caller's work in a transaction that it shares with others: all of it or none."""

    work: Callable[[sqlite3.Connection], T]
    durable: bool = False
    future: asyncio.Future[T] | None = None  # of who waits for it
    result: T | None = None
    error: BaseException | None = None

    def apply(self, database: sqlite3.Connection, what: str) -> None:
        database.execute("SAVEPOINT change")
        try:
            self.result = self.work(database)
        except (sqlite3.OperationalError, sqlite3.InternalError):
            raise  # of the disk: no change is made
        except Exception as error:  # noqa: BLE001 - the caller's own, also a bug: the others are made all the same
            database.execute("ROLLBACK TO change")
            self.error = refused(error, what) if isinstance(error, sqlite3.Error) else error
        database.execute("RELEASE change")

    def finalize(self) -> None:
        if self.future is None or self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)  # type: ignore[arg-type]


class WriterThread:
    """The thread that writes a file, so that nothing blocks the event loop; from one loop.

    Changes that arrive while it commits share the next transaction.
    """

    def __init__(self, connection: sqlite3.Connection, what: str) -> None:
        self.connection = connection
        self._what = what
        self._queue: queue.SimpleQueue[QueuedWrite[Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=what, daemon=True)
        self.closed = False

    @property
    def started(self) -> bool:
        """Whether something was ever queued; until then the connection is the caller's too."""
        return self._thread.ident is not None

    def queue(self, changes: Iterable[QueuedWrite[Any]]) -> None:
        """The order of all that is queued is kept."""
        self.need_open()
        for change in changes:
            if not self.started:
                self._thread.start()
            self._queue.put(change)

    async def do(self, work: Callable[[sqlite3.Connection], T], *, durable: bool = False) -> T:
        """What `work` returns, when it is committed. Raises NoSpace when the disk is full."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.queue([QueuedWrite(work, durable, future)])
        return await future

    def need_open(self) -> None:
        if self.closed:
            raise Closed(f"{self._what} is closed: the daemon ends", hint="ask again")

    async def close(self) -> None:
        """Commit what is queued, and close. Idempotent."""
        if self.closed:
            return
        self.closed = True
        if self.started:
            self._queue.put(None)
            await asyncio.to_thread(self._thread.join)
        self.connection.close()

    def _run(self) -> None:
        while True:
            batch = [self._queue.get()]
            while not self._queue.empty():
                batch.append(self._queue.get())
            changes = [change for change in batch if change is not None]
            if changes:
                self._commit(changes)
                _report(changes)
            if len(changes) < len(batch):
                return

    def _commit(self, changes: list[QueuedWrite[Any]]) -> None:
        try:
            with transaction(self.connection, durable=any(change.durable for change in changes)):
                for change in changes:
                    change.apply(self.connection, self._what)
        except sqlite3.Error as error:
            for change in changes:
                change.error = change.error or refused(error, self._what)


def _report(changes: list[QueuedWrite[Any]]) -> None:
    loop = next((change.future.get_loop() for change in changes if change.future is not None), None)
    if loop is not None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and no caller waits
            loop.call_soon_threadsafe(_finalize, changes)


def _finalize(changes: list[QueuedWrite[Any]]) -> None:
    for change in changes:
        change.finalize()
