"""Who hangs, who died: every rank leaves signs of life, the watcher names the one that stopped.

Guarantee: `judge` names a rank without a sign of life within `silent` seconds, or that keeps all others waiting for
`stuck` seconds; a rank that only waits for another is not named. A process that was stopped or killed gives no sign;
one that is caught in its own code gives signs without progress. A rank whose owner has ended ends itself.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec

from rollout.engine.adopted import RoleRecord, hold, started
from sandbox import durable

INTERVAL = 0.5  # seconds between signs
MIN_SIGNS, MAX_SIGNS = 20, 200  # of each rank in steps, by which a slow one is judged
SLOW = 0.4  # of the time: by so much less does a slow rank wait than all others
COLLECTIVES = os.path.join("torch", "distributed")  # code in which a rank waits for the others
ORPHANED = 76  # exit status of a rank whose owner has ended


class Beat(msgspec.Struct, frozen=True):
    """One sign of life."""

    rank: int
    pid: int
    at: float  # seconds since the epoch
    progress: int  # counts what the rank has finished
    phase: str  # what it does now
    since: float
    started: int = 0  # of the process, in the kernel's ticks: a pid alone may be reused by now
    where: str = ""  # the line of code in which it is
    waits: bool = False  # that line belongs to a collective: it may be waiting for another rank

    @property
    def process(self) -> RoleRecord:
        return RoleRecord(name=f"rank-{self.rank}", pid=self.pid, started=self.started, at=self.at)


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank that others wait for. Shares of the time of steps in which it waits, and all others at least."""

    rank: int
    waits: float
    others: float


@dataclass(frozen=True, slots=True)
class LostRank:
    """A rank that must be given up."""

    rank: int
    reason: str


def judge(beats: Sequence[Beat], now: float, *, silent: float, stuck: float) -> list[LostRank]:
    """Those that keep the run from continuing. Pure. Phases that begin with "wait" blame no rank."""
    result = [
        LostRank(
            beat.rank, f"rank {beat.rank} (pid {beat.pid}) gave no sign for {now - beat.at:.1f} s, in: {beat.phase}"
        )
        for beat in beats
        if now - beat.at > silent
    ]
    if result or not beats:
        return result
    newest = max(beat.since for beat in beats)
    behind = [beat for beat in beats if beat.progress == min(item.progress for item in beats)]
    if now - newest <= stuck or all(beat.phase.startswith("wait") for beat in beats):
        return []
    guilty = [beat for beat in behind if not beat.waits] or behind
    return [
        LostRank(
            beat.rank, f"rank {beat.rank} (pid {beat.pid}) has been in {beat.phase} for {now - beat.since:.1f} s{at}"
        )
        for beat in guilty
        for at in [f", at {beat.where}" if beat.where else ""]
    ]


class WaitCount:
    """How often ranks were seen waiting for others in a step. Who hardly waits while the others do is slow."""

    def __init__(self) -> None:
        self._signs: dict[int, list[bool]] = {}  # of each rank, its newest signs
        self._last: dict[int, float] = {}

    def note(self, beats: Sequence[Beat]) -> None:
        for beat in beats:
            at = round(beat.at, 1)  # another host's clock is known about so well
            if beat.phase.startswith("step ") and self._last.get(beat.rank) != at:
                self._last[beat.rank] = at
                self._signs.setdefault(beat.rank, []).append(beat.waits)
                del self._signs[beat.rank][:-MAX_SIGNS]

    def slow(self) -> SlowRank | None:
        """The rank that the others wait for, if there is one. Then counting begins again."""
        if len(self._signs) < 2 or any(len(signs) < MIN_SIGNS for signs in self._signs.values()):
            return None
        shares = {rank: sum(signs) / len(signs) for rank, signs in self._signs.items()}
        rank = min(shares, key=lambda item: shares[item])
        others = min(share for item, share in shares.items() if item != rank)
        if others - shares[rank] < SLOW:
            return None
        self._signs.clear()
        return SlowRank(rank, shares[rank], others)


class Heart:
    """``with Heart(directory, rank) as heart: heart.phase("forward")``. A thread writes the signs."""

    def __init__(self, directory: Path, rank: int, *, owner: RoleRecord | None = None):
        """`owner`: the process that this rank works for, and does not outlive."""
        self.path = directory / f"rank-{rank}.json"
        pid, now = os.getpid(), time.time()
        self._beat = Beat(rank, pid, now, 0, "wait for the others", now, started(pid) or 0)
        self._owner = owner
        self._main = threading.main_thread().ident
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)

    def __enter__(self) -> Heart:
        self._held = None if self._owner is None else hold(self._owner)
        self._need_owner()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._held is not None:
            os.close(self._held)

    def phase(self, name: str) -> None:
        """The last phase has ended, this one begins."""
        now, last = time.time(), self._beat
        self._beat = msgspec.structs.replace(last, at=now, progress=last.progress + 1, phase=name, since=now)
        self._write()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL):
            self._need_owner()
            self._write()

    def _need_owner(self) -> None:
        """No process would read what this rank writes, and another one may have begun to write there."""
        if self._owner is None:
            return
        if self._held is None or select.select([self._held], [], [], 0)[0]:
            os._exit(ORPHANED)

    def _write(self) -> None:
        where, waits = self._where()
        with self._lock:
            beat = msgspec.structs.replace(self._beat, at=time.time(), where=where, waits=waits)
            durable.publish(self.path, msgspec.json.encode(beat), durable=False)

    def _where(self) -> tuple[str, bool]:
        """Where the main thread is, and whether that is below a collective."""
        frame = sys._current_frames().get(self._main or 0)
        if frame is None or threading.get_ident() == self._main:
            return "", False
        text = f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
        above: FrameType | None = frame
        while above is not None:
            if COLLECTIVES in above.f_code.co_filename:
                return text, True
            above = above.f_back
        return text, False


def read(directory: Path) -> list[Beat]:
    """The newest sign of each rank."""
    return [msgspec.json.decode(path.read_bytes(), type=Beat) for path in sorted(directory.glob("rank-*.json"))]
