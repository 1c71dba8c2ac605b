"""Scores by what was scored: the same function, options, code and final state are scored once."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec

from rollout.rewards.messages import Score
from sandbox.database import connect

NAME = "scores.sqlite"
SCHEMA = "create table if not exists scores (key text primary key, score blob not null) without rowid;"


class ScoreLedger:
    """Calls block for microseconds. Any thread."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._db = connect(path, SCHEMA, pragmas=["synchronous = OFF"])  # what a power cut takes is scored again

    def get(self, key: str) -> Score | None:
        with self._lock:
            row = self._db.execute("select score from scores where key = ?", (key,)).fetchone()
        return None if row is None else msgspec.msgpack.decode(row[0], type=Score)

    def put(self, key: str, score: Score) -> None:
        with self._lock:
            self._db.execute("insert or replace into scores values (?, ?)", (key, msgspec.msgpack.encode(score)))

    def close(self) -> None:
        with self._lock:
            self._db.close()
