"""The book of states that can be visited again: `retained.sqlite`.

Guarantee: a row is there before its sandbox stops being the run's own, and goes after it was removed.
"""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import zstandard

from rollout.decide.keeping import RetainedRow
from sandbox.database import connect
from sandbox.errors import NotFound

NAME = "kept.sqlite"
LEVEL = 1  # of zstandard

SCHEMA = """
create table if not exists kept (
    prompt text not null, member integer not null, start integer not null, sandbox text not null,
    at real not null, bytes integer not null, payload blob not null, primary key (prompt, member)) without rowid;
"""


class Visit(msgspec.Struct, kw_only=True):
    """The state before an answer: all that is needed to continue from there. Turn n of n turns is the end."""

    turn: int
    at: int  # tokens of the trajectory before the answer
    checkpoint: str
    state: bytes  # of the environment
    reward: float = 0.0  # so far
    own_s: float = 0.0  # of its own clock, so far


class RetainedLedger:
    """Calls block for the disk. Any thread, several processes."""

    def __init__(self, directory: Path | str):
        self.path = Path(directory) / NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._db = connect(self.path, SCHEMA)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def add(self, row: RetainedRow, visits: list[Visit]) -> None:
        """In place of what there was of this member."""
        payload = zstandard.compress(msgspec.msgpack.encode(visits), LEVEL)
        values = (row.prompt, row.member, row.start, row.sandbox, row.at, row.bytes, payload)
        with self._lock:
            self._db.execute("insert or replace into kept values (?, ?, ?, ?, ?, ?, ?)", values)

    def measured(self, row: RetainedRow, size: int) -> None:
        with self._lock:
            self._db.execute(
                "update kept set bytes=? where prompt=? and member=? and sandbox=?",
                (size, row.prompt, row.member, row.sandbox),
            )

    def drop(self, prompt: str, member: int) -> None:
        with self._lock:
            self._db.execute("delete from kept where prompt=? and member=?", (prompt, member))

    def rows(self) -> list[RetainedRow]:
        """All, oldest first."""
        with self._lock:
            result = self._db.execute(
                "select prompt, member, start, sandbox, at, bytes from kept order by at, prompt, member"
            ).fetchall()
        return [RetainedRow(*row) for row in result]

    def visits(self, prompt: str, member: int, start: int) -> list[Visit]:
        """What can be visited of one attempt, by turn. Raises NotFound when it is not kept."""
        with self._lock:
            result = self._db.execute(
                "select payload from kept where prompt=? and member=? and start=?", (prompt, member, start)
            ).fetchone()
        if result is None:
            raise not_retained(prompt, member)
        visits = msgspec.msgpack.decode(zstandard.decompress(result[0]), type=list[Visit])
        if not visits:  # only its end is kept, to be scored again
            text = f"only the end of {prompt}/{member} is kept: it executed nothing, or there is no `snapshot`"
            raise NotFound(text, hint="write `snapshot` and `load` of its environment")
        return visits

    def visit(self, prompt: str, member: int, start: int, turn: int) -> Visit:
        """The state before one answer. Raises NotFound, saying which there are."""
        existing = {visit.turn: visit for visit in self.visits(prompt, member, start)}
        if turn not in existing:
            there = ", ".join(map(str, existing)) or "none"
            raise NotFound(
                f"turn {turn} of {prompt}/{member} cannot be visited: no checkpoint holds the state before it",
                hint=f"there are: {there}",
            )
        return existing[turn]


def not_retained(prompt: str, member: int) -> NotFound:
    return NotFound(
        f"the states of {prompt}/{member} are not kept",
        hint="`pagurus rollouts show RUN` lists what is; the table [visit] of a run says how much stays",
    )
