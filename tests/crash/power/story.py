"""What a daemon answered and committed, and what a power cut may leave of that. Pure, but for reading the trace.

Two judges, independent of each other. The *ledger* knows every transaction that the daemon committed, so every
catalogue that was ever true: what comes back must be one of them, not older than the last one that had been confirmed
as durable, not younger than the last one begun. The *story* knows what clients were told: a checkpoint answered as
durable is there, one whose removal was answered is not, a label is the last one confirmed or one asked for since.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from daemon.catalogue import SCHEMA, CheckpointRow, Statements
from sandbox.database import QueuedWrite
from sandbox.messages import CheckpointState
from sandbox.tree.hashing import Digest

NEVER = 1 << 62
TABLES = ("sandboxes", "checkpoints", "turns")


# ---------------------------------------------------------------------------- what clients were told


@dataclass
class Life:
    """Of one checkpoint: the places of the log at which it was asked for, answered as durable, its removal asked for,
    answered. One that is imported again lives again."""

    begun: int = 0
    durable: int = NEVER
    leaving: int = NEVER
    gone: int = NEVER


@dataclass
class Story:
    """What the daemon answered, and when."""

    checkpoints: dict[str, list[Life]] = field(default_factory=dict)
    labels: dict[str, list[tuple[int, int, str]]] = field(default_factory=dict)  # (asked, answered, label)
    files: dict[str, Digest] = field(default_factory=dict)  # what each file snapshot held before any power was cut
    end: int = NEVER  # what comes later is the bench tidying up

    def life(self, checkpoint: str) -> Life:
        return self.checkpoints.setdefault(checkpoint, [Life()])[-1]

    def again(self, checkpoint: str, begun: int) -> Life:
        """It is brought back after its removal."""
        self.checkpoints[checkpoint].append(Life(begun))
        return self.checkpoints[checkpoint][-1]

    def wrong(self, rows: Mapping[str, CheckpointRow], position: int) -> list[str]:
        """What the answers until `position` do not allow."""
        result = []
        for name, lives in self.checkpoints.items():
            row = rows.get(name)
            there = row is not None and row.state is CheckpointState.DURABLE
            if not there and any(life.durable <= position < life.leaving for life in lives):
                result.append(f"{name} was answered as durable and is {row.state if row else 'not there'}")
            last = [life for life in lives if life.begun <= position][-1]
            if last.gone <= position and row is not None:
                result.append(f"{name} was answered as removed and is there")
        for name, changes in self.labels.items():
            row = rows.get(name)
            existing = [text for _, answered, text in changes if answered <= position]
            begun = [text for requested, answered, text in changes if requested <= position < answered]
            if row is not None and existing and row.label not in {existing[-1], *begun}:
                result.append(f"{name} was labelled {existing[-1]!r} and is labelled {row.label!r}")
        return result


# ---------------------------------------------------------------------------- what was committed


@dataclass(frozen=True)
class Transaction:
    begun: int
    committed: int
    durable: bool
    mark: str  # of the whole catalogue after it


class Ledger:
    """Every catalogue that was ever true, in order."""

    def __init__(self, transactions: Iterable[Transaction]) -> None:
        self.transactions = [Transaction(0, 0, True, EMPTY), *transactions]

    @classmethod
    def read(cls, trace: Path) -> Ledger:
        """Carry out the recorded transactions once more, in memory."""
        database = _empty()
        result = []
        try:
            for begun, committed, durable, changes in _records(trace):
                for statements in changes:
                    QueuedWrite(Statements([(sql, values) for sql, values in statements])).apply(
                        database, "the catalogue"
                    )
                result.append(Transaction(begun, committed, durable, mark(database)))
        finally:
            database.close()
        return cls(result)

    def wrong(self, result: str, position: int) -> list[str]:
        """Whether the catalogue with the mark `result` may come back after a power cut at `position`."""
        oldest = max(n for n, item in enumerate(self.transactions) if item.durable and item.committed <= position)
        numbers = [n for n, item in enumerate(self.transactions) if item.mark == result]
        if not numbers:
            return ["the catalogue is none that ever was"]
        if not any(oldest <= number and self.transactions[number].begun <= position for number in numbers):
            return [f"the catalogue is that after transaction {numbers}, but {oldest} was durable"]
        return []

    def newest(self, position: int) -> str:
        """The mark of the catalogue after the last transaction that had begun."""
        return [item.mark for item in self.transactions if item.begun <= position][-1]


def mark(database: sqlite3.Connection) -> str:
    """Equal for equal content of all tables."""
    hasher = blake3()
    for table in TABLES:
        for row in sorted(database.execute(f"SELECT * FROM {table}"), key=repr):
            hasher.update(repr(row).encode())
        hasher.update(b"\0")
    return hasher.hexdigest()


def _empty() -> sqlite3.Connection:
    database = sqlite3.connect(":memory:", isolation_level=None)
    database.executescript(SCHEMA)
    return database


EMPTY = mark(_empty())


def _records(trace: Path) -> Iterable[tuple[int, int, bool, list[Any]]]:
    data, place = trace.read_bytes(), 0
    while place < len(data):
        size = int.from_bytes(data[place : place + 4], "little")
        yield tuple(msgspec.msgpack.decode(data[place + 4 : place + 4 + size]))
        place += 4 + size


@dataclass(frozen=True)
class CrashResult:
    """What one disk holds. `damage`: what its catalogue calls durable and is not whole, or why nothing can be read."""

    mark: str = ""
    rows: Mapping[str, CheckpointRow] = field(default_factory=dict)
    damage: tuple[str, ...] = ()
    unreadable: str = ""
