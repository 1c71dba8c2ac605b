"""Is what lies on the disk still what was stored? Hashes in the background, verification on demand.

Guarantee: a checkpoint without damage in its report was read from the disk byte by byte: process images, every
memory page, every file of its snapshot, and all of it hashes to what was recorded.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from daemon.catalogue import CheckpointRow, put_checkpoint
from daemon.checkpoints.capture import Places
from daemon.checkpoints.inflight import Services
from daemon.checkpoints.schedule import CheckpointStage
from sandbox.content import dumpfile
from sandbox.content.pages import SLOTS, ZERO
from sandbox.errors import CheckpointFailed, PagurusError
from sandbox.messages import CheckpointState
from sandbox.messages.store import CheckpointReport
from sandbox.tree import hashing

if TYPE_CHECKING:
    from daemon.store.gc import GarbageCollector

log = logging.getLogger("pagurus.verify")

BLOCKS = 64  # of memory pages that are read at a time
TIMEOUT = 60.0  # seconds after which a snapshot should be hashed


class Verifier:
    """Hashes snapshots as they become durable, and verifies checkpoints."""

    def __init__(self, services: Services, places: Places, collector: GarbageCollector) -> None:
        self._services = services
        self._places = places
        self._collector = collector
        self._counts = {"hashed": 0, "verified": 0, "damaged": 0}

    # ----------------------------------------------------------------- hashing

    def later(self, row: CheckpointRow, parent: CheckpointRow | None) -> None:
        """Hash the snapshot of a durable checkpoint in the background."""
        if row.files == row.id:
            self._services.spawn(self._hash(row, parent), f"hash of {row.id}")

    def catch_up(self, rows: Iterable[CheckpointRow]) -> None:
        """Hash what the last daemon did not come to."""
        for row in rows:
            if row.state is CheckpointState.DURABLE and not self._places.digest(row.id).exists():
                self.later(row, self._services.checkpoints.get(row.parent or ""))

    async def _hash(self, row: CheckpointRow, parent: CheckpointRow | None) -> None:
        queue = self._services.queue
        before = parent.files if parent is not None else None
        ticket = queue.submit(
            CheckpointStage.HASH,
            sandbox=row.sandbox,
            owner=row.owner,
            deadline=queue.now() + TIMEOUT,
            cost=max(1.0, float(row.stored_bytes)),
        )
        try:
            async with ticket:
                size = await self._make_digest(row.id, before)
        except (PagurusError, OSError) as error:
            if row.id in self._services.checkpoints:  # it is whole without; a verification says what it lacks
                log.warning("the files of %s could not be hashed: %s", row.id, error)
            return
        if row.id not in self._services.checkpoints:  # removed since
            self._places.digest(row.id).unlink(missing_ok=True)
            return
        row.stored_bytes += size
        self._services.tally.stored_bytes += size
        self._services.catalogue.later([put_checkpoint(row)])
        self._counts["hashed"] += 1

    async def _make_digest(self, checkpoint: str, before: str | None) -> int:
        places = self._places
        older = None if before is None else (places.snapshot(before), places.digest(before))
        return await self._services.aside.do(make_digest, places.snapshot(checkpoint), places.digest(checkpoint), older)

    # ----------------------------------------------------------------- verifying

    async def verify(self, rows: list[CheckpointRow], *, catalogue: bool) -> list[CheckpointReport]:
        """What is damaged of these checkpoints; shared content is read once. Cancelled, it ends at once."""
        reports = [await asyncio.to_thread(self._check_databases)] if catalogue else []
        blocks: dict[str, np.ndarray] = {}
        trees: dict[str, CheckpointReport] = {}
        for row in rows:
            if row.id not in self._services.checkpoints:
                reports.append(CheckpointReport(checkpoint=row.id, notes=["removed since"]))
                continue
            with self._collector.pin(row):
                reports.append(await self._verify(row, blocks, trees))
        wrong = await self._check_blocks(blocks)
        for report in reports:
            damaged = [wrong[block] for block in blocks.get(report.checkpoint, []) if block in wrong]
            report.damage += damaged
            self._counts["verified"] += 1
            await self._note(report)
        return reports

    async def _verify(
        self, row: CheckpointRow, blocks: dict[str, np.ndarray], trees: dict[str, CheckpointReport]
    ) -> CheckpointReport:
        report = CheckpointReport(checkpoint=row.id)
        if row.state in (CheckpointState.PENDING, CheckpointState.FAILED):
            report.notes.append(f"{row.state.value}: there is nothing to verify")
            return report
        if row.dump is not None:
            await asyncio.to_thread(self._check_dump, row, report, blocks)
        if row.files is not None:
            if row.files not in trees:
                trees[row.files] = await self._services.aside.run(
                    check_tree,
                    row.files,
                    self._places.snapshot(row.files),
                    self._places.digest(row.files),
                    sandbox=row.sandbox,
                    owner=row.owner,
                )
            result = trees[row.files]
            report.files = result.files
            report.damage += result.damage
            report.notes += result.notes
        return report

    def _check_dump(self, row: CheckpointRow, report: CheckpointReport, blocks: dict[str, np.ndarray]) -> None:
        path = self._places.packed(row.dump or "")
        if row.state is CheckpointState.CAPTURED and not path.exists():
            report.notes.append("its process images are not packed yet")
            return
        try:
            dump = dumpfile.read(path)
        except CheckpointFailed as error:
            report.damage.append(f"process images: {error.message}")
            return
        numbers = np.concatenate([np.zeros(0, np.uint64), *(dump.numbers(name) for name in dump.pages)])
        report.pages = len(np.unique(numbers[numbers != ZERO]))
        blocks[row.id] = np.unique(numbers[numbers != ZERO] // SLOTS)

    async def _check_blocks(self, blocks: dict[str, np.ndarray]) -> dict[int, str]:
        if not blocks:
            return {}
        every = np.unique(np.concatenate(list(blocks.values()))).tolist()
        wrong: dict[int, str] = {}
        for first in range(0, len(every), BLOCKS):
            some = every[first : first + BLOCKS]
            wrong |= await asyncio.to_thread(self._services.capturer.checkpointer.pages.check, some)
        return wrong

    def _check_databases(self) -> CheckpointReport:
        report = CheckpointReport(checkpoint="catalogue")
        pages = self._services.capturer.checkpointer.pages.directory
        for path in (self._services.catalogue.path, pages / "index.sqlite"):
            try:
                database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
                try:
                    result = [row[0] for row in database.execute("PRAGMA integrity_check")]
                finally:
                    database.close()
            except sqlite3.Error as error:
                result = [str(error)]
            report.damage += [f"{path.name}: {item}" for item in result if item != "ok"]
        return report

    async def _note(self, report: CheckpointReport) -> None:
        """Let the tree of checkpoints say what is damaged, and what is whole again."""
        row = self._services.checkpoints.get(report.checkpoint)
        if report.damage:
            self._counts["damaged"] += 1
            log.error("checkpoint %s is damaged: %s", report.checkpoint, "; ".join(report.damage[:5]))
        elif row is None or not row.damaged:
            return
        if row is not None:
            row.damaged = bool(report.damage)
            row.error = "damaged: " + "; ".join(report.damage[:3]) if report.damage else None
            if report.damage:
                self._services.outcomes.damaged(row)
            await self._services.catalogue.write([put_checkpoint(row)])

    def statistics(self) -> dict[str, int]:
        return dict(self._counts)


# ---------------------------------------------------------------------------- aside


def make_digest(snapshot: Path, into: Path, before: tuple[Path, Path] | None) -> int:
    """Hash a snapshot into a file; `before` is an older snapshot of the same line with its digest. Returns its size."""
    older: tuple[Path, hashing.Digest] | None = None
    if before is not None and before[0].is_dir():
        try:
            older = before[0], hashing.Digest.load(before[1])
        except (FileNotFoundError, CheckpointFailed):
            older = None  # not hashed or damaged: everything is hashed
    return hashing.digest(snapshot, older).save(into)


def check_tree(owner: str, snapshot: Path, digest: Path) -> CheckpointReport:
    """Read a whole snapshot and compare it with its digest."""
    report = CheckpointReport(checkpoint=owner)
    if not snapshot.is_dir():
        report.damage.append(f"its file snapshot {owner} is missing")
        return report
    try:
        expected = hashing.Digest.load(digest)
    except FileNotFoundError:
        report.notes.append("its files were not hashed yet: they were read, but compared with nothing")
        expected = hashing.digest(snapshot, None)
    except CheckpointFailed as error:
        report.damage.append(error.message)
        return report
    report.files = len(expected.inodes)
    report.damage += [f"file {name}" for name in hashing.damage(snapshot, expected)]
    return report
