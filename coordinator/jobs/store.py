"""What is known of jobs, in one SQLite file that the coordinator and the head of the jobs share.

Guarantee: a change that has returned survives a loss of power; a job that has ended stays as it is.

::

    queued ─▶ starting ─▶ running ─▶ done | failed
       ╰──────────┴───────────┴────▶ cancelled

    who moves a job: the head, all; the coordinator, one that is queued to cancelled; else it asks the head
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection
from pathlib import Path

import msgspec

from sandbox import private
from sandbox.database import connect, transaction
from sandbox.errors import Conflict, NotFound
from sandbox.messages.cluster import JobInfo, JobRequest

NAME = "jobs.sqlite"
VERSION = 1
SCHEMA = """
CREATE TABLE jobs (number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, open INTEGER NOT NULL, row BLOB NOT NULL);
CREATE INDEX jobs_open ON jobs (open) WHERE open;
"""
ENDED = ("done", "failed", "cancelled")
RETAINED = 1000  # jobs that have ended


class JobRow(JobInfo, kw_only=True):
    """A job as it is kept."""

    cancelling: bool = False  # the head is to end it
    number: int = 0

    def reported(self) -> JobInfo:
        return msgspec.convert(self, JobInfo, from_attributes=True)


class JobStore:
    """The file in a directory. Blocking; for one thread at a time."""

    def __init__(self, directory: Path) -> None:
        private.file(directory / NAME)
        self._database = connect(directory / NAME, SCHEMA, version=VERSION)

    def close(self) -> None:
        self._database.close()

    def submit(self, request: JobRequest, owner: str) -> JobInfo:
        """A new job. Raises Conflict when its run is an unfinished job's already."""
        with transaction(self._database) as database:
            for item in self._read("WHERE open"):
                if item.run == request.run:
                    raise Conflict(
                        f"{request.run} is job {item.id}, which has not ended", hint=f"pagurus cancel {item.id}"
                    )
            row = JobRow(
                id=f"j-{secrets.token_hex(5)}",
                run=request.run,
                owner=owner,
                needs=request.needs,
                trainer_needs=request.trainer_needs,
                trainer_hosts=request.trainer_hosts,
                engine_needs=request.engine_needs,
                engines=request.engines,
                priority=request.priority,
                submitted_at=time.time(),
            )
            database.execute("INSERT INTO jobs (id, open, row) VALUES (?, 1, ?)", (row.id, msgspec.msgpack.encode(row)))
            database.execute(
                "DELETE FROM jobs WHERE NOT open AND number <= (SELECT max(number) FROM jobs) - ?", (RETAINED,)
            )
        return row.reported()

    def all(self) -> list[JobInfo]:
        return [item.reported() for item in self._read("")]

    def unfinished(self) -> list[JobRow]:
        return self._read("WHERE open")

    def job(self, id: str) -> JobRow:
        """By its id or how that begins."""
        result = self._read("WHERE substr(id, 1, ?) = ?", (len(id), id))
        if len(result) != 1:
            raise NotFound(f"no such job: {id}", hint="list those there are with `pagurus jobs`")
        return result[0]

    def change(self, id: str, *, only: Collection[str] = (), **fields: object) -> JobRow:
        """The job with these fields, if it has not ended and is in one of the states `only`; else as it is."""
        with transaction(self._database) as database:
            row = self.job(id)
            if row.state in ENDED or (only and row.state not in only):
                return row
            row = msgspec.structs.replace(row, **fields)
            still = row.state not in ENDED
            if not still:
                row.ended_at = time.time()
            database.execute(
                "UPDATE jobs SET open = ?, row = ? WHERE id = ?", (still, msgspec.msgpack.encode(row), row.id)
            )
        return row

    def cancel(self, id: str) -> JobInfo:
        """At once if it waits; else by the head."""
        row = self.change(self.job(id).id, only=("queued",), state="cancelled", reason="")
        if row.state not in ENDED:
            row = self.change(row.id, cancelling=True)
        return row.reported()

    def _read(self, where: str, values: tuple[object, ...] = ()) -> list[JobRow]:
        rows = self._database.execute(f"SELECT number, row FROM jobs {where} ORDER BY number", values).fetchall()
        return [
            msgspec.structs.replace(msgspec.msgpack.decode(row, type=JobRow), number=number) for number, row in rows
        ]
