"""The daemon, writing down every transaction of its catalogue before and after it commits.

Owns: the trace. Does not own: what follows from it (:mod:`bench.power.story`). Only for `pagurus bench powercut`, whose
question needs the exact sequence of catalogues that were ever true.

A record is (place of the log of writes when the transaction began, place when it was committed, whether it was to be
durable, its changes), MessagePack behind its length.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from daemon import catalogue

TRACE, LOG = "PAGURUS_BENCH_TRACE", "PAGURUS_BENCH_LOG"


def follow(trace: Path, log: Path) -> None:
    """Have every commit of this process recorded."""
    commit = catalogue.Catalogue._commit

    def traced(self: catalogue.Catalogue, changes: list[Any]) -> None:
        begun = log.stat().st_size
        commit(self, changes)
        if all(change.error is not None for change in changes):
            return  # nothing of it was committed
        durable = any(change.durable for change in changes)
        packed = msgspec.msgpack.encode((begun, log.stat().st_size, durable, [each.statements for each in changes]))
        with open(trace, "ab") as file:
            file.write(len(packed).to_bytes(4, "little") + packed)

    catalogue.Catalogue._commit = traced  # type: ignore[method-assign]


if __name__ == "__main__":
    follow(Path(os.environ[TRACE]), Path(os.environ[LOG]))
    from daemon.app import main

    raise SystemExit(main())
