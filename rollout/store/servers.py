"""What each engine server of a rollout did: its state, the requests that it had, each change of either.

Guarantee: a disk that takes no more lines causes no failure: the file ends there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rollout.store import lines
from sandbox.errors import Invalid

PATTERN = "servers-*.jsonl.zst"
LEFT = "left"  # the state of servers once the process that used them is gone


class Doing(msgspec.Struct, frozen=True, array_like=True):
    """One line: from `at` on a server was in this state, and had so many requests of those that it takes at once."""

    at: float  # seconds since the epoch
    server: str
    state: str  # rollout.decide.engines.routing.State
    load: int
    slots: int


class ServerLog:
    """``log.note("engine-0", "serving", 3, 16)`` at each change."""

    def __init__(self, directory: Path):
        self._lines: lines.Lines | None = lines.Lines(
            directory / f"servers-{len(list(directory.glob(PATTERN))) + 1:06d}.jsonl.zst"
        )

    def note(self, server: str, state: str, load: int, slots: int) -> None:
        if self._lines is None:
            return
        try:
            self._lines.append(Doing(time.time(), server, state, load, slots))
        except OSError:  # the disk is full: a page of the past is not worth a run
            self.close()

    def close(self) -> None:
        if self._lines is not None:
            with contextlib.suppress(OSError):
                self._lines.close()
            self._lines = None


def read(directory: Path) -> Iterator[Doing]:
    """All changes, in their order. Where a process ended and another followed, its servers are `LEFT`."""
    files = sorted(directory.glob(PATTERN))
    for path in files:
        last: dict[str, Doing] = {}
        try:
            for line in lines.read(path):
                doing = msgspec.json.decode(line, type=Doing)
                last[doing.server] = doing
                yield doing
        except msgspec.MsgspecError as error:
            raise Invalid(
                f"{path} is damaged: {error}", hint="restore it from a copy, or begin another run with --fresh"
            ) from error
        if last and path != files[-1]:
            ended = max(item.at for item in last.values())
            yield from (msgspec.structs.replace(item, at=ended, state=LEFT, load=0) for item in last.values())
