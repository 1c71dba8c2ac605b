"""The sample store: every prompt in one state, every finished trajectory on disk, every batch written before it is
handed out.

Guarantee (I7): after a crash of any process at any instant each prompt is in exactly one state, and `recover(step)`
makes the states agree with a trainer that has saved `step` steps. What was put is never lost and never put twice. A
batch that was handed out for a step is the batch that is handed out for it again. A process of an older generation can
no longer write.

::

                ┌─ defer ─┐
                ▼         │
    issue ─▶ queued ─▶ in_flight ─▶ buffered ─▶ handed(step) ─▶ consumed(step)
                          │ ▲  put(sample) x size   ▲                 │
                          │ └─── reopen ──────────  └─── recover ─────┘ the trainer went back before this step
                          └─▶ given_up(reason)
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import zstandard

from rollout.decide.blame import TrajectoryFailure
from rollout.messages import Batch, Group, Trajectory
from sandbox.database import connect, transaction
from sandbox.errors import Conflict, Invalid, NotFound

NAME = "samples.sqlite"
LEVEL = 3  # of zstandard
T = TypeVar("T")

SCHEMA = """
create table if not exists owners (name text primary key, generation integer not null) without rowid;
create table if not exists prompts (
    number integer primary key, id text not null unique, seed integer not null, state text not null,
    step integer, reason text not null default '', failures integer not null default 0);
create index if not exists by_state on prompts (state, number);
create table if not exists samples (
    prompt text not null, member integer not null, start integer not null, oldest integer, reward real not null,
    status text not null, payload blob not null, primary key (prompt, member)) without rowid;
create table if not exists deferred (prompt text primary key) without rowid;
create table if not exists batches (
    step integer primary key, version integer not null, oldest integer not null, prompts text not null);
"""

PUT_OFF = "exists (select 1 from deferred where deferred.prompt = id)"

FROM = {  # the states that a prompt may be in before each move
    "buffered": ("in_flight",),
    "in_flight": ("buffered",),
    "handed": ("buffered",),
    "given_up": ("in_flight",),
    "queued": ("in_flight",),
}


class StaleOwner(Conflict):
    """This process was replaced: a newer one owns what it wants to write."""

    code = "conflict"


class Fence(msgspec.Struct, frozen=True):
    """Who writes. Each write is refused once the owner has a newer generation."""

    owner: str
    generation: int


class PromptLease(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt on its way: an episode's seed, played by a whole group."""

    prompt: str
    number: int
    seed: int
    failures: int = 0  # of the environment, so far
    deferred: bool = False  # it was put off once


class SampleSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a sample without reading it."""

    member: int
    start: int
    oldest: int | None


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Where all prompts are. `issued` is the sum of the others; `handed` of the buffered are in a batch."""

    issued: int
    consumed: int
    in_flight: int
    queued: int
    buffered: int
    given_up: int
    handed: int = 0


class FailureField(msgspec.Struct):
    """What is read of a trajectory to know whose fault its end was."""

    failure: TrajectoryFailure | None = None


class SampleStore:
    """Calls block for the disk. Any thread; several processes, of which the newest of each owner may write.

    `create` false: of who only reads. Raises NotFound where there is none, and makes none.
    """

    def __init__(self, directory: Path | str, *, create: bool = True):
        self.path = Path(directory) / NAME
        if create:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._db = connect(self.path, SCHEMA, create=create)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def acquire(self, owner: str) -> Fence:
        """Become the owner: all earlier ones are fenced off."""
        with self._write() as db:
            db.execute(
                "insert into owners values (?, 1) on conflict (name) do update set generation = generation + 1",
                (owner,),
            )
            (generation,) = db.execute("select generation from owners where name=?", (owner,)).fetchone()
        return Fence(owner, generation)

    def need(self, fence: Fence) -> None:
        """Raise Fenced when the owner has a newer generation."""
        rows = self._read("select generation from owners where name=?", fence.owner)
        if not rows or rows[0][0] != fence.generation:
            raise self._fenced(fence)

    def _fenced(self, fence: Fence) -> StaleOwner:
        return StaleOwner(
            f"another process is the {fence.owner} of {self.path.parent} now",
            hint="let it work; `pagurus roles` shows it",
        )

    # ----------------------------------------------------------------- prompts

    def issue(self, seeds: Iterable[int], fence: Fence) -> int:
        """New prompts, queued; how many."""
        with self._write(fence) as db:
            (first,) = db.execute("select coalesce(max(number) + 1, 0) from prompts").fetchone()
            rows = [(first + i, f"p{first + i:06d}", seed) for i, seed in enumerate(seeds)]
            db.executemany("insert into prompts (number, id, seed, state) values (?, ?, ?, 'queued')", rows)
        return len(rows)

    def issued(self) -> int:
        """How many prompts were ever issued: where to continue in a sequence of seeds."""
        return int(self._read("select count(*) from prompts")[0][0])

    def issued_of(self, parts: int) -> list[int]:
        """The same, by the part of a mixture that a prompt is of."""
        result = dict(self._read("select seed % ?, count(*) from prompts group by 1", parts))
        return [result.get(part, 0) for part in range(parts)]

    def outcomes(self, count: int) -> list[tuple[int, float, float, float]]:
        """Of the newest `count` groups that are whole: number of the prompt, mean, least and greatest reward."""
        return self._read(
            "select prompts.seed, avg(reward), min(reward), max(reward) from prompts join samples on prompt = id "
            "where state in ('buffered', 'handed', 'consumed') group by id order by number desc limit ?",
            count,
        )

    def queued(self, *, deferred: bool = False) -> int:
        """Prompts that wait and were never put off, or those that were."""
        ((count,),) = self._read(f"select count(*) from prompts where state='queued' and {PUT_OFF}=?", deferred)
        return int(count)

    def lease(self, count: int, fence: Fence, *, deferred: bool = False) -> list[PromptLease]:
        """The queued prompts with the lowest numbers, now in flight; fewer when fewer are queued. With `deferred` only
        those that were put off, else only others."""
        with self._write(fence) as db:
            rows = db.execute(
                "update prompts set state='in_flight' where number in "
                f"(select number from prompts where state='queued' and {PUT_OFF}=? order by number limit ?) "
                "returning id, number, seed, failures",
                (deferred, count),
            ).fetchall()
        return sorted((_lease((*row, deferred)) for row in rows), key=lambda lease: lease.number)

    def defer(self, prompt: str, fence: Fence, *, keep: bool = False) -> None:
        """Put off a prompt that is on its way: it waits among others that were put off. Its samples are forgotten,
        unless it will continue (`keep`)."""
        with self._write(fence) as db:
            _move(db, [prompt], "queued")
            if not keep:
                db.execute("delete from samples where prompt=?", (prompt,))
            db.execute("insert or ignore into deferred values (?)", (prompt,))

    def put_off(self) -> set[str]:
        """The prompts that wait and were put off."""
        return {prompt for (prompt,) in self._read(f"select id from prompts where state='queued' and {PUT_OFF}")}

    def in_flight(self) -> list[PromptLease]:
        """The prompts that a process before this one left on their way, oldest first."""
        return [_lease(row) for row in self._prompts("in_flight")]

    def buffered(self) -> list[PromptLease]:
        return [_lease(row) for row in self._prompts("buffered")]

    def failed(self, prompt: str, fence: Fence) -> None:
        """Its environment failed once more."""
        with self._write(fence) as db:
            db.execute("update prompts set failures = failures + 1 where id=?", (prompt,))

    def give_up(self, prompt: str, reason: str, fence: Fence) -> None:
        """It will never be trained on; the reason is kept, and so are its samples."""
        if not reason:
            raise ValueError("a prompt is given up for a reason")
        with self._write(fence) as db:
            _move(db, [prompt], "given_up", reason=reason)

    # ----------------------------------------------------------------- samples

    def put(self, trajectory: Trajectory, fence: Fence) -> bool:
        """Keep a finished trajectory; False when this member of the group has one already."""
        trajectory.check()
        payload = zstandard.compress(msgspec.msgpack.encode(trajectory), LEVEL)
        row = (
            *(trajectory.prompt, trajectory.index, trajectory.start, trajectory.oldest),
            *(trajectory.reward, trajectory.status, payload),
        )
        with self._write(fence) as db:
            state = db.execute("select state from prompts where id=?", (trajectory.prompt,)).fetchone()
            if state is None:
                raise NotFound(f"no prompt {trajectory.prompt} was ever issued")
            if state[0] != "in_flight":
                return False
            return db.execute("insert or ignore into samples values (?, ?, ?, ?, ?, ?, ?)", row).rowcount == 1

    def discard(self, prompt: str, members: Iterable[int], fence: Fence) -> None:
        """Forget samples of a prompt that is not in a batch, and have them played again."""
        with self._write(fence) as db:
            (state,) = db.execute("select state from prompts where id=?", (prompt,)).fetchone()
            if state == "buffered":
                _move(db, [prompt], "in_flight")
            elif state != "in_flight":
                raise Conflict(f"prompt {prompt} is {state}: its samples are kept")
            db.executemany("delete from samples where prompt=? and member=?", [(prompt, item) for item in members])

    def finished(self, prompt: str) -> list[SampleSummary]:
        """What there is of a group."""
        rows = self._read("select member, start, oldest from samples where prompt=? order by member", prompt)
        return [SampleSummary(member=member, start=start, oldest=oldest) for member, start, oldest in rows]

    def sample(self, prompt: str, member: int) -> Trajectory:
        return unpacked(self.payload(prompt, member))

    def payload(self, prompt: str, member: int) -> bytes:
        """A sample as it lies on disk: see `unpacked`."""
        rows = self._read("select payload from samples where prompt=? and member=?", prompt, member)
        if not rows:
            raise NotFound(f"no finished trajectory {prompt}/{member}", hint="`pagurus rollouts show RUN` lists them")
        return bytes(rows[0][0])

    def samples(self) -> Iterator[tuple[str, int, str, float]]:
        """(prompt, member, status, reward) of all."""
        yield from self._read("select prompt, member, status, reward from samples order by prompt, member")

    def failures(self) -> dict[tuple[str, int], TrajectoryFailure]:
        """Of the samples that are not `completed`, by prompt and member: what went wrong."""
        rows = self._read("select prompt, member, payload from samples where status != 'completed'")
        read = {(prompt, member): _unpacked(payload, FailureField).failure for prompt, member, payload in rows}
        return {name: failure for name, failure in read.items() if failure is not None}

    def buffer(self, prompt: str, fence: Fence) -> None:
        """The group is whole: from now on a batch may have it."""
        with self._write(fence) as db:
            _move(db, [prompt], "buffered")

    # ----------------------------------------------------------------- batches

    def take(
        self, step: int, prompts: Sequence[str], fence: Fence, *, version: int, oldest: int, members: int
    ) -> Batch:
        """The batch of a step, on disk before it is returned. The step's batch, if it has one, is returned instead.

        `members`: of each group the first so many that finished, by their number.
        """
        with self._write(fence) as db:
            if db.execute("select 1 from batches where step=?", (step,)).fetchone() is None:
                _move(db, prompts, "handed", step=step)
                named = [(prompt, self._first(db, prompt, members)) for prompt in prompts]
                text = msgspec.json.encode(named).decode()
                db.execute("insert into batches values (?, ?, ?, ?)", (step, version, oldest, text))
        batch = self.batch(step)
        assert batch is not None
        return batch

    def batch(self, step: int) -> Batch | None:
        """What was handed out for a step; None when nothing was yet."""
        rows = self._read("select version, oldest, prompts from batches where step=?", step)
        if not rows:
            return None
        version, oldest, text = rows[0]
        named = msgspec.json.decode(text, type=list[tuple[str, list[int]]])
        groups = [self._group(prompt, members) for prompt, members in named]
        return Batch(version=version, groups=groups, step=step, oldest=oldest)

    def complete(self, prompts: Sequence[str], members: int) -> list[Group]:
        """Groups that wait for their batch, as it will hold them. Nothing is handed out."""
        return [self._group(prompt, self._first(self._db, prompt, members)) for prompt in prompts]

    def _group(self, prompt: str, members: Sequence[int]) -> Group:
        ((seed,),) = self._read("select seed from prompts where id=?", prompt)
        return Group(prompt=prompt, seed=seed, trajectories=[self.sample(prompt, member) for member in members])

    def ack(self, step: int, fence: Fence) -> None:
        """The step is saved: its prompts are consumed. Again is fine."""
        with self._write(fence) as db:
            db.execute("update prompts set state='consumed' where state='handed' and step=?", (step,))

    def unpublished(self, version: int) -> bool:
        """Whether there is a batch of which the step makes a newer version than this one."""
        return bool(self._read("select 1 from batches where version >= ? limit 1", version))

    def next_step(self) -> int:
        """The step after the last that was acknowledged."""
        return int(self._read("select coalesce(max(step) + 1, 0) from prompts where state='consumed'")[0][0])

    def recover(self, saved: int, fence: Fence) -> Account:
        """Agree with a trainer that has saved `saved` steps. Batches of later steps are handed out again, unchanged."""
        with self._write(fence) as db:
            db.execute("update prompts set state='consumed' where state='handed' and step < ?", (saved,))
            db.execute("update prompts set state='handed' where state='consumed' and step >= ?", (saved,))
        return self.account()

    # ----------------------------------------------------------------- books

    def account(self) -> Account:
        counts = dict(self._read("select state, count(*) from prompts group by state"))
        handed = counts.get("handed", 0)
        return Account(
            issued=sum(counts.values()),
            consumed=counts.get("consumed", 0),
            in_flight=counts.get("in_flight", 0),
            queued=counts.get("queued", 0),
            buffered=counts.get("buffered", 0) + handed,
            given_up=counts.get("given_up", 0),
            handed=handed,
        )

    def trajectories(self) -> list[tuple[str, int]]:
        """(prompt, member) of those whose steps are saved, in the order of their batches."""
        rows = self._read("select prompts from batches where step < ? order by step", self.next_step())
        batches = (msgspec.json.decode(text, type=list[tuple[str, list[int]]]) for (text,) in rows)
        return [(prompt, member) for batch in batches for prompt, members in batch for member in members]

    def reasons(self) -> dict[str, int]:
        """Why prompts were given up."""
        return dict(self._read("select reason, count(*) from prompts where state='given_up' group by reason"))

    def given_up(self) -> dict[str, str]:
        """The prompts that were given up, each with the reason."""
        return dict(self._read("select id, reason from prompts where state='given_up' order by number"))

    def _first(self, db: sqlite3.Connection, prompt: str, members: int) -> list[int]:
        result = db.execute("select member from samples where prompt=? order by member limit ?", (prompt, members))
        return [member for (member,) in result]

    def _prompts(self, state: str) -> list[tuple[str, int, int, int, int]]:
        return self._read(
            f"select id, number, seed, failures, {PUT_OFF} from prompts where state=? order by number", state
        )

    def _read(self, query: str, *values: object) -> list[tuple]:  # type: ignore[type-arg]
        with self._lock:
            return self._db.execute(query, values).fetchall()

    @contextmanager
    def _write(self, fence: Fence | None = None) -> Iterator[sqlite3.Connection]:
        """One transaction, refused when `fence` is not the newest of its owner."""
        with self._lock, transaction(self._db):
            if fence is not None:
                row = self._db.execute("select generation from owners where name=?", (fence.owner,)).fetchone()
                if row is None or row[0] != fence.generation:
                    raise self._fenced(fence)
            yield self._db


def _lease(row: tuple[str, int, int, int, int]) -> PromptLease:
    prompt, number, seed, failures, deferred = row
    return PromptLease(prompt=prompt, number=number, seed=seed, failures=failures, deferred=bool(deferred))


def unpacked(payload: bytes) -> Trajectory:
    """The trajectory of a payload."""
    return _unpacked(payload, Trajectory)


def _unpacked(payload: bytes, kind: type[T]) -> T:
    """`kind`: a trajectory, or some of its fields."""
    try:
        return msgspec.msgpack.decode(zstandard.decompress(payload), type=kind)
    except (zstandard.ZstdError, msgspec.MsgspecError) as error:
        raise Invalid(f"a sample on disk is damaged: {error}", hint="copy the run directory back") from error


def _move(
    db: sqlite3.Connection, prompts: Iterable[str], to: str, *, reason: str = "", step: int | None = None
) -> None:
    marks = ", ".join("?" * len(FROM[to]))
    for prompt in prompts:
        changed = db.execute(
            f"update prompts set state=?, reason=?, step=? where id=? and state in ({marks})",
            (to, reason, step, prompt, *FROM[to]),
        ).rowcount
        if changed != 1:
            row = db.execute("select state from prompts where id=?", (prompt,)).fetchone()
            raise Conflict(f"prompt {prompt} is {row[0] if row else 'unknown'}: it cannot become {to}")
