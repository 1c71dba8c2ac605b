"""Runs of clients: a run whose lease is not renewed ends with its sandboxes.

Guarantee: a sandbox of a run that has ended is removed, also one that was being made then, and whatever call is under
way on it: no caller waits for it any more. A daemon that starts gives each run its full lease again, so that no run
ends because its client could not renew it.

::

    PUT: begun ▸ PUT: renewed ▸ ... ▸ not renewed, or DELETE ▸ ended: refused from now on ▸ MEMORY later: forgotten
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from daemon.auth.visibility import caller_owner
from sandbox import durable
from sandbox.errors import Conflict, NotFound, PagurusError, TooMany
from sandbox.messages.runs import RUN_LABEL

if TYPE_CHECKING:
    from daemon.host.host import Host
    from daemon.turns.turns import LiveSandbox

log = logging.getLogger("pagurus.runs")

POLL_INTERVAL = 0.5  # seconds between looks
MEMORY = 600.0  # seconds for which an ended run is known, at least: what was being made for it has come by then
MAX_RUNS = 1000  # of one owner at a time


class RunRow(msgspec.Struct, kw_only=True):
    owner: str
    run: str
    lease: float  # seconds


class _Run:
    def __init__(self, row: RunRow, now: float) -> None:
        self.row = row
        self.renewed_at = now
        self.ended_at: float | None = None


class Runs:
    """The runs of one host. They are in `file` as well. `clock`: seconds of a clock that only goes forward."""

    def __init__(self, file: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._clock = clock
        self._runs: dict[tuple[str, str], _Run] = {}
        self._writing = asyncio.Lock()

    def load(self) -> None:
        """Take up what an earlier daemon knew. Blocks."""
        try:
            raw = self._file.read_bytes()
        except FileNotFoundError:
            return
        now = self._clock()
        rows = msgspec.json.decode(raw, type=list[RunRow])
        self._runs = {(row.owner, row.run): _Run(row, now) for row in rows}

    async def renew(self, run: str, lease: float) -> None:
        """Begin a run of the caller, or renew its lease. Raises Conflict when it has ended."""
        owner = caller_owner()
        result = self._runs.get((owner, run))
        if result is None:
            if sum(existing.row.owner == owner for existing in self._runs.values()) >= MAX_RUNS:
                raise TooMany(f"{MAX_RUNS} runs at a time", hint="end some of them: pagurus rm --run ID")
            result = self._runs[owner, run] = _Run(RunRow(owner=owner, run=run, lease=lease), self._clock())
        elif result.ended_at is not None:
            raise _ended(run)
        elif result.row.lease == lease:
            result.renewed_at = self._clock()
            return
        result.row.lease, result.renewed_at = lease, self._clock()
        await self._save()

    async def end(self, run: str) -> str:
        """End a run of the caller; whose it is."""
        owner = caller_owner()
        result = self._runs.get((owner, run))
        if result is not None and result.ended_at is None:
            result.ended_at = self._clock()
            await self._save()
        return owner

    def need_open(self, owner: str, labels: Mapping[str, str]) -> None:
        """Raise Conflict for labels that name a run which has ended."""
        result = self._runs.get((owner, labels.get(RUN_LABEL, "")))
        if result is not None and result.ended_at is not None:
            raise _ended(result.row.run)

    async def expired(self) -> set[tuple[str, str]]:
        """The owners and names of runs that have ended, the latest among them."""
        now, changed = self._clock(), False
        for key, result in list(self._runs.items()):
            if result.ended_at is None and now >= result.renewed_at + result.row.lease:
                log.warning("run %s: it was not renewed for %g s", result.row.run, result.row.lease)
                result.ended_at = now
            if result.ended_at is not None and now >= result.ended_at + MEMORY:
                del self._runs[key]
                changed = True
        if changed:
            await self._save()
        return {key for key, result in self._runs.items() if result.ended_at is not None}

    async def _save(self) -> None:
        """Ended ones too: a daemon that is killed has not removed their sandboxes yet."""
        async with self._writing:
            raw = msgspec.json.encode([result.row for result in self._runs.values()])
            await asyncio.to_thread(durable.publish, self._file, raw, mode=0o600)


def _ended(run: str) -> Conflict:
    return Conflict(f"the run {run} has ended: its lease was not renewed, or it was ended", hint="begin another one")


def belonging(sandboxes: Iterable[LiveSandbox], runs: set[tuple[str, str]]) -> list[LiveSandbox]:
    """The sandboxes of these runs."""
    return [live for live in sandboxes if (live.row.owner, live.row.labels.get(RUN_LABEL, "")) in runs]


async def remove(host: Host, sandboxes: Iterable[LiveSandbox]) -> int:
    """End these; how many there were. What cannot be removed now is tried again by the watch."""

    async def one(live: LiveSandbox) -> bool:
        try:
            await host.remove(live.row.id)
        except NotFound:  # another call was faster
            return False
        except PagurusError as error:
            log.warning("not ended with its run: %s", error, extra={"sandbox": live.row.id})
            return False
        return True

    return sum(await asyncio.gather(*map(one, sandboxes)))


async def watch(host: Host) -> None:
    """For as long as the daemon lives."""
    while True:
        await asyncio.sleep(POLL_INTERVAL)
        if ended := await host.runs.expired():
            await remove(host, belonging(list(host.live_sandboxes.values()), ended))
