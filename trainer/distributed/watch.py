"""Who hangs, who died: every rank leaves signs of life, whoever watches names the one that stopped.

Owns: the signs (one small file per rank), the judgement. Does not own: what happens then (launch, loop).
Guarantee: `judge` names a rank that is not heard of within `silent` seconds, or that keeps all others waiting for
`stuck` seconds; a rank that only waits for another is not named. A process that was stopped or killed gives no
sign; one that is caught in its own code gives signs without progress.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sandbox import durable

INTERVAL = 0.5  # seconds between signs


class Beat(msgspec.Struct, frozen=True):
    """One sign of life."""

    rank: int
    pid: int
    at: float  # seconds since the epoch
    progress: int  # counts what the rank has finished
    phase: str  # what it does now
    since: float


@dataclass(frozen=True, slots=True)
class Lost:
    """A rank that must be given up."""

    rank: int
    reason: str


def judge(beats: Sequence[Beat], now: float, *, silent: float, stuck: float) -> list[Lost]:
    """Those that keep the run from going on. Pure. Phases that begin with "wait" are nobody's fault."""
    found = [
        Lost(beat.rank, f"rank {beat.rank} (pid {beat.pid}) gave no sign for {now - beat.at:.1f} s, in: {beat.phase}")
        for beat in beats
        if now - beat.at > silent
    ]
    if found or not beats:
        return found
    newest = max(beat.since for beat in beats)
    behind = min(beat.progress for beat in beats)
    if now - newest <= stuck or all(beat.phase.startswith("wait") for beat in beats):
        return []
    return [
        Lost(beat.rank, f"rank {beat.rank} (pid {beat.pid}) has been in {beat.phase} for {now - beat.since:.1f} s")
        for beat in beats
        if beat.progress == behind
    ]


class Heart:
    """``with Heart(folder, rank) as heart: heart.phase("forward")``. A thread writes the signs."""

    def __init__(self, folder: Path, rank: int):
        self.path = folder / f"rank-{rank}.json"
        self._beat = Beat(rank, os.getpid(), time.time(), 0, "wait for the others", time.time())
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)

    def __enter__(self) -> Heart:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def phase(self, name: str) -> None:
        """The last phase has ended, this one begins."""
        now, last = time.time(), self._beat
        self._beat = Beat(last.rank, last.pid, now, last.progress + 1, name, now)
        self._write()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL):
            self._write()

    def _write(self) -> None:
        with self._lock:
            beat = msgspec.structs.replace(self._beat, at=time.time())
            durable.publish(self.path, msgspec.json.encode(beat), durable=False)


def read(folder: Path) -> list[Beat]:
    """The newest sign of each rank."""
    return [msgspec.json.decode(path.read_bytes(), type=Beat) for path in sorted(folder.glob("rank-*.json"))]
