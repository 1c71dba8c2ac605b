"""The ledger of prompts: every prompt issued is accounted for exactly once, on disk (I7).

Owns: ``ledger.sqlite`` and the states below. Does not own: which prompts there are, what consuming means.
Guarantee: after a crash of any process at any instant, `recover(step)` puts every prompt into exactly one state that
agrees with the trainer's saved state of `step` steps: trained prompts are consumed, all others are queued again.

::

    issue ─▶ queued ─▶ in_flight ─▶ claimed(step) ─▶ consumed(step)
                ▲          │ requeue       │ recover: step not saved
                └──────────┴───────────────┘
                           └─▶ given_up(reason)
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path

import msgspec

from sandbox.errors import Conflict

SCHEMA = """
create table if not exists prompts (
    id text primary key, number integer not null unique, seed integer not null, state text not null,
    step integer, reason text not null default '', attempts integer not null default 0
) without rowid;
create index if not exists by_state on prompts (state, number);
"""

FROM = {  # the states that a prompt may be in before each move
    "in_flight": ("queued",),
    "queued": ("in_flight",),
    "claimed": ("in_flight",),
    "consumed": ("claimed",),
    "given_up": ("queued", "in_flight"),
}


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt: an episode's seed, played by a whole group."""

    id: str
    number: int
    seed: int
    attempts: int = 0


class Ledger:
    """Calls block for the disk (tens of microseconds to a millisecond); not thread-safe, one owner."""

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        self._db.execute("pragma journal_mode=wal")
        self._db.execute("pragma synchronous=full")
        self._db.executescript(SCHEMA)

    def close(self) -> None:
        self._db.close()

    def recover(self, step: int) -> int:
        """Agree with a trainer that has saved `step` steps; the number of prompts queued again.

        Claimed for a saved step: consumed. Claimed or consumed for a later one: the trainer forgot it, queue again.
        """
        with self._db:
            self._db.execute("begin immediate")
            self._db.execute("update prompts set state='consumed' where state='claimed' and step < ?", (step,))
            return self._db.execute(
                "update prompts set state='queued', step=null where state='in_flight' "
                "or (state in ('claimed', 'consumed') and step >= ?)",
                (step,),
            ).rowcount

    def issue(self, seeds: Iterable[int]) -> list[Prompt]:
        """New prompts, queued."""
        with self._db:
            self._db.execute("begin immediate")
            (first,) = self._db.execute("select coalesce(max(number) + 1, 0) from prompts").fetchone()
            prompts = [Prompt(id=f"p{first + i:06d}", number=first + i, seed=seed) for i, seed in enumerate(seeds)]
            rows = [(prompt.id, prompt.number, prompt.seed) for prompt in prompts]
            self._db.executemany("insert into prompts (id, number, seed, state) values (?, ?, ?, 'queued')", rows)
        return prompts

    def issued(self) -> int:
        """How many prompts were ever issued: where to go on in a sequence of seeds."""
        return self._db.execute("select count(*) from prompts").fetchone()[0]

    def take(self) -> Prompt | None:
        """The queued prompt with the lowest number, now in flight; None when none is queued."""
        with self._db:
            self._db.execute("begin immediate")
            row = self._db.execute(
                "select id, number, seed, attempts from prompts where state='queued' order by number limit 1"
            ).fetchone()
            if row is None:
                return None
            self._db.execute("update prompts set state='in_flight', attempts=attempts+1 where id=?", (row[0],))
        return Prompt(id=row[0], number=row[1], seed=row[2], attempts=row[3] + 1)

    def requeue(self, prompt: str, reason: str) -> None:
        self._move([prompt], "queued", reason=reason)

    def give_up(self, prompt: str, reason: str) -> None:
        """It will never be trained on; the reason is kept."""
        if not reason:
            raise ValueError("a prompt is given up for a reason")
        self._move([prompt], "given_up", reason=reason)

    def claim(self, prompts: Iterable[str], step: int) -> None:
        """Handed to the trainer for its step number `step` (counted from 0)."""
        self._move(prompts, "claimed", step=step)

    def consume(self, prompts: Iterable[str]) -> None:
        """The step that they were claimed for is saved."""
        self._move(prompts, "consumed")

    def counts(self) -> dict[str, int]:
        known = dict.fromkeys(("queued", "in_flight", "claimed", "consumed", "given_up"), 0)
        return known | dict(self._db.execute("select state, count(*) from prompts group by state"))

    def reasons(self) -> dict[str, int]:
        """Why prompts were given up."""
        query = "select reason, count(*) from prompts where state='given_up' group by reason"
        return dict(self._db.execute(query))

    def _move(self, prompts: Iterable[str], to: str, *, reason: str = "", step: int | None = None) -> None:
        marks = ", ".join("?" * len(FROM[to]))
        with self._db:
            self._db.execute("begin immediate")
            for prompt in prompts:
                changed = self._db.execute(
                    f"update prompts set state=?, reason=?, step=coalesce(?, step) where id=? and state in ({marks})",
                    (to, reason, step, prompt, *FROM[to]),
                ).rowcount
                if changed != 1:
                    (state,) = self._db.execute("select state from prompts where id=?", (prompt,)).fetchone() or (
                        "unknown",
                    )
                    raise Conflict(f"prompt {prompt} is {state}: it cannot become {to}")
