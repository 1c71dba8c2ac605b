"""What builds of images say: kept for who looks, live and afterwards.

Guarantee: a log has no more than its share of the disk, whatever a RUN prints; a build whose daemon is replaced
continues to be reported to the next one.

A build is a file ``ID.jsonl``: its `BuildInfo`, then each `BuildReport` on a line. A line that is half written by a
daemon that died is the last one, and left out.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from sandbox.errors import NotFound
from sandbox.messages.images import BuildInfo, BuildLines, BuildReport

MAX_BUILDS = 100  # that are remembered
MAX_LOG = 2 << 20  # bytes of one
MAX_ANSWER = 1000  # lines
SILENT = 120.0  # seconds without a report after which a build counts as lost: its client reports every second


class BuildLogs:
    """Those of one host, in a directory. Calls block for the disk; any thread."""

    def __init__(self, directory: Path, clock: Callable[[], float]) -> None:
        self._directory, self._clock = directory, clock
        self._lock = threading.Lock()
        self._builds: dict[str, BuildInfo] | None = None  # oldest first
        self._reported: dict[str, float] = {}  # when each was last reported

    def begin(self, name: str) -> BuildInfo:
        with self._lock:
            builds = self._loaded()
            made = BuildInfo(id=f"b-{secrets.token_hex(5)}", name=name, started_at=self._clock())
            self._append(made.id, made)
            builds[made.id], self._reported[made.id] = made, self._clock()
            for old in list(builds)[:-MAX_BUILDS]:
                del builds[old]
                (self._directory / f"{old}.jsonl").unlink(missing_ok=True)
            return made

    def report(self, build: str, report: BuildReport) -> BuildInfo:
        """Raises NotFound for a build that is forgotten, so that its client stops."""
        with self._lock:
            info = self._info(build)
            if self._size(build) > MAX_LOG:
                report = msgspec.structs.replace(report, lines=[])
                info = msgspec.structs.replace(info, cut=True)
            if report != BuildReport():
                self._append(build, report)
            info = _after(info, report, self._clock())
            self._loaded()[build], self._reported[build] = info, self._clock()
            return info

    def all(self) -> list[BuildInfo]:
        """The newest first."""
        with self._lock:
            return [self._shown(info) for info in reversed(self._loaded().values())]

    def lines(self, build: str, begin: int) -> BuildLines:
        """The lines from that number on, as far as one answer holds them."""
        with self._lock:
            info, result, number = self._shown(self._info(build)), list[str](), 0
            for report in self._reports(build):
                for line in report.lines:
                    if number >= begin and len(result) < MAX_ANSWER:
                        result.append(line)
                    number += 1
            return BuildLines(build=info, lines=result, next=min(number, begin + len(result)))

    # ----------------------------------------------------------------- on the disk

    def _loaded(self) -> dict[str, BuildInfo]:
        if self._builds is None:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            read = [info for path in self._directory.glob("b-*.jsonl") if (info := self._read(path)) is not None]
            self._builds = {info.id: info for info in sorted(read, key=lambda info: info.started_at)}
        return self._builds

    def _read(self, path: Path) -> BuildInfo | None:
        with path.open("rb") as file:
            try:
                info = msgspec.json.decode(file.readline(), type=BuildInfo)
            except msgspec.MsgspecError:
                return None
        self._reported[info.id] = at = path.stat().st_mtime
        for report in self._reports(info.id):
            info = _after(info, report, at)
        return info

    def _reports(self, build: str) -> Iterator[BuildReport]:
        with (self._directory / f"{build}.jsonl").open("rb") as file:
            file.readline()
            for line in file:
                try:
                    yield msgspec.json.decode(line, type=BuildReport)
                except msgspec.MsgspecError:
                    return

    def _append(self, build: str, value: BuildInfo | BuildReport) -> None:
        with (self._directory / f"{build}.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(value) + b"\n")

    def _size(self, build: str) -> int:
        return (self._directory / f"{build}.jsonl").stat().st_size

    def _info(self, build: str) -> BuildInfo:
        info = self._loaded().get(build)
        if info is None:
            raise NotFound(f"no such build: {build[:100]}", hint=f"the newest {MAX_BUILDS} are remembered")
        return info

    def _shown(self, info: BuildInfo) -> BuildInfo:
        if info.state == "running" and self._clock() - self._reported[info.id] > SILENT:
            return msgspec.structs.replace(info, state="lost", error="its client went away")
        return info


def _after(info: BuildInfo, report: BuildReport, now: float) -> BuildInfo:
    """A build once this was reported of it."""
    ended = info.ended_at if report.state == "running" else now
    return msgspec.structs.replace(
        info, lines=info.lines + len(report.lines), state=report.state, error=report.error, ended_at=ended
    )
