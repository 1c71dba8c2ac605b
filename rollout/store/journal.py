"""The journal of turns: what a rollout process that is killed leaves to its successor.

Guarantee: an entry is with the operating system before the action that it names is executed, so that the death of the
process loses no turn. It need not survive a loss of power: no sandbox does.
"""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import zstandard

from rollout.experts import RoutedExperts
from rollout.messages import Ancestor, Recovery, TurnRecord
from sandbox.database import connect

NAME = "journal.sqlite"
LEVEL = 1  # of zstandard

SCHEMA = """
create table if not exists turns (
    prompt text not null, member integer not null, start integer not null, turn integer not null,
    sandbox text not null, epoch text not null, payload blob not null,
    primary key (prompt, member, start, turn)) without rowid;
"""


class Key(msgspec.Struct, frozen=True, order=True):
    """One attempt at one member of a group."""

    prompt: str
    member: int
    start: int


class TurnEntry(msgspec.Struct, kw_only=True):
    """All that a successor needs to execute an action, whether it was begun or not."""

    turn: int
    sandbox: str
    epoch: str  # of the keys that its commands are sent under; another one after each restore, "" during one
    at: int  # tokens of the trajectory before those below
    tokens: list[int]
    mask: list[int]
    logprobs: list[float]
    versions: list[int]
    action: str
    state: bytes | None  # of the environment, before the action
    checkpoint: str | None  # of the sandbox, before the action; None: none is captured
    records: list[TurnRecord]  # turns that changed since the entry before: the last one, and this
    reward: float = 0.0
    own_s: float = 0.0
    killed: int = 0
    injected: int = 0
    recoveries: list[Recovery] = []
    continued: int = 0
    opening: str = ""
    breaks: list[int] = []
    lineage: list[Ancestor] = []
    base: str | None = None
    experts: list[RoutedExperts] = []  # that were learned of since the entry before


class TurnJournal:
    """Calls block for microseconds to a millisecond. Any thread."""

    def __init__(self, directory: Path | str):
        self.path = Path(directory) / NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._db = connect(self.path, SCHEMA, pragmas=["synchronous = OFF"])  # a killed process loses nothing it wrote

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def append(self, key: Key, entry: TurnEntry) -> None:
        payload = zstandard.compress(msgspec.msgpack.encode(entry), LEVEL)
        row = (key.prompt, key.member, key.start, entry.turn, entry.sandbox, entry.epoch, payload)
        with self._lock:
            self._db.execute("insert or replace into turns values (?, ?, ?, ?, ?, ?, ?)", row)

    def restored(self, key: Key, turn: int, epoch: str) -> None:
        """The sandbox was restored within a turn: its commands are sent under other keys from now on."""
        with self._lock:
            self._db.execute(
                "update turns set epoch=? where prompt=? and member=? and start=? and turn=?",
                (epoch, key.prompt, key.member, key.start, turn),
            )

    def entries(self, key: Key) -> list[TurnEntry]:
        """The turns of one attempt, oldest first."""
        with self._lock:
            rows = self._db.execute(
                "select epoch, payload from turns where prompt=? and member=? and start=? order by turn",
                (key.prompt, key.member, key.start),
            ).fetchall()
        result = []
        for epoch, payload in rows:
            entry = msgspec.msgpack.decode(zstandard.decompress(payload), type=TurnEntry)
            entry.epoch = epoch
            result.append(entry)
        return result

    def open(self) -> dict[Key, str]:
        """The attempts that have not ended, each with its sandbox. No two of one member: the newest counts."""
        with self._lock:
            rows = self._db.execute("select prompt, member, start, max(sandbox) from turns group by 1, 2, 3").fetchall()
        newest: dict[tuple[str, int], tuple[Key, str]] = {}
        for prompt, member, start, sandbox in sorted(rows):
            newest[prompt, member] = (Key(prompt, member, start), sandbox)
        return dict(newest.values())

    def forget(self, key: Key) -> None:
        """The attempt has ended, well or not."""
        with self._lock:
            self._db.execute(
                "delete from turns where prompt=? and member=? and start<=?", (key.prompt, key.member, key.start)
            )
