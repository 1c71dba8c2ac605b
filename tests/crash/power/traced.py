"""The daemon, writing down every transaction of its catalogue before and after it commits.

Only for `pagurus bench powercut`, whose question needs the exact sequence of catalogues that were ever true.

A record is (place of the log of writes when the transaction began, place when it was committed, whether it was to be
durable, its changes), MessagePack behind its length.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from daemon.catalogue import Statements
from sandbox import database

TRACE, LOG = "PAGURUS_BENCH_TRACE", "PAGURUS_BENCH_LOG"


def follow(trace: Path, log: Path) -> None:
    """Have every commit of this process recorded."""
    commit = database.WriterThread._commit

    def traced(self: database.WriterThread, changes: list[database.QueuedWrite[Any]]) -> None:
        begun = log.stat().st_size
        commit(self, changes)
        ours: list[Any] = [change for change in changes if isinstance(change.work, Statements)]
        if all(change.error is not None for change in ours):
            return  # nothing of it was committed
        durable = any(change.durable for change in ours)
        statements = [change.work.statements for change in ours]
        packed = msgspec.msgpack.encode(
            (
                begun,
                log.stat().st_size,
                durable,
                statements,
            )
        )
        with open(trace, "ab") as file:
            file.write(len(packed).to_bytes(4, "little") + packed)

    database.WriterThread._commit = traced  # type: ignore[method-assign]


if __name__ == "__main__":
    follow(Path(os.environ[TRACE]), Path(os.environ[LOG]))
    from daemon.app import main

    raise SystemExit(main())
