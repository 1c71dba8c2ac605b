"""Content-addressed store of memory pages, shared by all sandboxes of a host.

Owns: ``<state>/pages``: append-only segment files of compressed blocks, and the index (SQLite) from the blake3
hash of a page to its number. Does not own: dump files (they refer to pages by number), checkpoints, policy.

Layout. New pages are gathered, 64 to a block; a block is compressed with zstd and appended to the newest
segment; page number = block number * 64 + slot. Number 0 is the zero page, which is stored nowhere. Numbers of
neighbouring pages are neighbours, so that a dump's list of pages is runs and compresses to next to nothing.

Guarantees:
- :meth:`PageStore.add` returns numbers whose content is on disk: the segment is synced before the index commits
  (synchronous=FULL). A crash in between leaves bytes behind the segment's recorded end, which are overwritten.
- :meth:`PageStore.collect` deletes a block only when no dump file that exists refers to one of its pages; a dump
  file that cannot be read stops the collection before anything is deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zstandard
from blake3 import blake3

from sandbox.errors import CheckpointFailed, Conflict

PAGE = 4096
SLOTS = 64  # pages in a block: 256 KiB compress well and one read serves neighbours
ZERO = 0  # number of the zero page; block 0 is never used
ZERO_PAGE = bytes(PAGE)
SEGMENT_LIMIT = 64 << 20
CACHED_HASHES = 1 << 17
CACHED_BLOCKS = 32

SCHEMA = """
CREATE TABLE IF NOT EXISTS segments (id INTEGER PRIMARY KEY, size INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS blocks (
    id INTEGER PRIMARY KEY, segment INTEGER NOT NULL, offset INTEGER NOT NULL,
    length INTEGER NOT NULL, count INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS blocks_by_segment ON blocks (segment);
CREATE TABLE IF NOT EXISTS pages (id INTEGER PRIMARY KEY, hash BLOB NOT NULL UNIQUE);
"""


@dataclass(frozen=True)
class Added:
    """Numbers of the pages given to :meth:`PageStore.add`, in order, and what was new."""

    numbers: np.ndarray  # [n] uint64
    new_pages: int
    new_bytes: int  # compressed, as written


@dataclass(frozen=True)
class Collected:
    """What a collection freed."""

    blocks: int
    bytes: int
    pages: int


class PageStore:
    """See the module. All methods block: call them from a worker thread."""

    def __init__(self, directory: Path):
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._lock = threading.RLock()
        self._guard = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._guard)
            raise Conflict(
                f"{directory} is in use by another process", remedy="only one daemon may own a state directory"
            ) from None
        self._db = sqlite3.connect(directory / "index.sqlite", isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.executescript(SCHEMA)
        self._hashes: OrderedDict[bytes, int] = OrderedDict()
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._next_block = max(1, (self._db.execute("SELECT MAX(id) FROM blocks").fetchone()[0] or 0) + 1)
        self._drop_unknown_segments()

    def close(self) -> None:
        with self._lock:
            if self._guard < 0:
                return
            self._db.close()
            os.close(self._guard)
            self._guard = -1

    # ----------------------------------------------------------------- adding

    def add(self, data: memoryview | bytes) -> Added:
        """Store the pages of `data` (a multiple of 4096 bytes); durable on return."""
        view = memoryview(data)
        if len(view) % PAGE:
            raise CheckpointFailed(f"page data of {len(view)} bytes is not a multiple of {PAGE}")
        count = len(view) // PAGE
        rows = np.frombuffer(view, dtype=np.uint64).reshape(count, PAGE // 8)
        filled = np.flatnonzero(rows.any(axis=1))
        hashes = {int(i): blake3(view[i * PAGE : (i + 1) * PAGE]).digest() for i in filled}
        numbers = np.zeros(count, dtype=np.uint64)
        with self._lock:
            fresh: OrderedDict[bytes, int] = OrderedDict()  # hash -> index of the first page that has it
            for index, digest in hashes.items():
                number = self._find(digest)
                if number is None:
                    fresh.setdefault(digest, index)
                else:
                    numbers[index] = number
            new_bytes, given = self._append(view, fresh) if fresh else (0, {})
            for index, digest in hashes.items():
                if digest in given:
                    numbers[index] = given[digest]
        return Added(numbers, len(fresh), new_bytes)

    def _find(self, digest: bytes) -> int | None:
        number = self._hashes.get(digest)
        if number is not None:
            self._hashes.move_to_end(digest)
            return number
        row = self._db.execute("SELECT id FROM pages WHERE hash = ?", (digest,)).fetchone()
        if row is None:
            return None
        self._remember(digest, row[0])
        return int(row[0])

    def _remember(self, digest: bytes, number: int) -> None:
        self._hashes[digest] = number
        if len(self._hashes) > CACHED_HASHES:
            self._hashes.popitem(last=False)

    def _append(self, view: memoryview, fresh: OrderedDict[bytes, int]) -> tuple[int, dict[bytes, int]]:
        """Write blocks of new pages; sync them; only then let the index know. Returns bytes and page numbers."""
        compressor = zstandard.ZstdCompressor(level=1)
        segment, size = self._segment()
        start, written = size, 0
        blocks: list[tuple[int, int, int, int, int]] = []
        pages: list[tuple[int, bytes]] = []
        items = list(fresh.items())
        path = self._segment_path(segment)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            for first in range(0, len(items), SLOTS):
                chunk = items[first : first + SLOTS]
                packed = compressor.compress(b"".join(view[i * PAGE : (i + 1) * PAGE] for _, i in chunk))
                _pwrite(fd, packed, start + written)
                number = self._next_block + len(blocks)
                blocks.append((number, segment, start + written, len(packed), len(chunk)))
                pages.extend((number * SLOTS + slot, digest) for slot, (digest, _) in enumerate(chunk))
                written += len(packed)
            os.fdatasync(fd)
            if start == 0:
                _sync_directory(self.directory)
            with self._transaction():
                self._db.executemany("INSERT INTO blocks VALUES (?, ?, ?, ?, ?)", blocks)
                self._db.executemany("INSERT INTO pages VALUES (?, ?)", pages)
                self._db.execute("INSERT OR REPLACE INTO segments VALUES (?, ?)", (segment, start + written))
        except BaseException:
            os.ftruncate(fd, start)  # a full disk must get its space back
            raise
        finally:
            os.close(fd)
        self._next_block += len(blocks)
        given = {digest: number for number, digest in pages}
        for digest, number in given.items():
            self._remember(digest, number)
        return written, given

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Durable when it ends well, without a trace when not (a commit may fail too: the disk is full)."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _segment(self) -> tuple[int, int]:
        """The segment to append to and its recorded end; bytes after that were never committed."""
        row = self._db.execute("SELECT id, size FROM segments ORDER BY id DESC LIMIT 1").fetchone()
        if row is None:
            return 1, 0
        return (row[0] + 1, 0) if row[1] >= SEGMENT_LIMIT else (row[0], row[1])

    def _segment_path(self, segment: int) -> Path:
        return self.directory / f"{segment:08d}.segment"

    def _drop_unknown_segments(self) -> None:
        """A crash may leave a segment file that the index never came to know, or one that it has forgotten."""
        known = {row[0] for row in self._db.execute("SELECT id FROM segments")}
        for path in self.directory.glob("*.segment"):
            if int(path.stem) not in known:
                path.unlink()

    # ----------------------------------------------------------------- reading

    def read(self, numbers: np.ndarray, sink: Callable[[bytes], object]) -> None:
        """Give the pages with these numbers to `sink`, in order, in runs that are as long as they come."""
        blocks = (numbers // SLOTS).astype(np.int64)
        edges = np.flatnonzero(np.diff(blocks)) + 1
        for part in np.split(numbers, edges):
            if not len(part):
                continue
            if part[0] == ZERO:
                for _ in part:
                    sink(ZERO_PAGE)
                continue
            block = self.block(int(part[0]) // SLOTS)
            slots = (part % SLOTS).astype(np.int64)
            if len(slots) > 1 and (np.diff(slots) == 1).all():
                sink(block[int(slots[0]) * PAGE : (int(slots[-1]) + 1) * PAGE])
            else:
                for slot in slots.tolist():
                    sink(block[slot * PAGE : (slot + 1) * PAGE])

    def block(self, number: int) -> bytes:
        """The decompressed content of a block."""
        with self._lock:
            cached = self._blocks.get(number)
            if cached is not None:
                self._blocks.move_to_end(number)
                return cached
            row = self._db.execute(
                "SELECT segment, offset, length, count FROM blocks WHERE id = ?", (number,)
            ).fetchone()
            if row is None:
                raise CheckpointFailed(f"page block {number} is not in the store", remedy="the checkpoint is damaged")
            segment, offset, length, count = row
            data = self._decompress(number, segment, offset, length, count)
            self._blocks[number] = data
            if len(self._blocks) > CACHED_BLOCKS:
                self._blocks.popitem(last=False)
            return data

    def _decompress(self, number: int, segment: int, offset: int, length: int, count: int) -> bytes:
        path = self._segment_path(segment)
        try:
            with open(path, "rb") as file:
                packed = os.pread(file.fileno(), length, offset)
            data = zstandard.ZstdDecompressor().decompress(packed, max_output_size=SLOTS * PAGE)
        except (OSError, zstandard.ZstdError) as error:
            raise CheckpointFailed(
                f"page block {number} in {path} cannot be read: {error}", remedy="the checkpoint is damaged"
            ) from error
        if len(data) != count * PAGE:
            raise CheckpointFailed(f"page block {number} in {path} is short", remedy="the checkpoint is damaged")
        return data

    def verify(self, numbers: np.ndarray) -> int:
        """Re-hash the pages with these numbers; raises on the first that is not what it was. Returns how many."""
        checked = 0
        for block in np.unique(numbers[numbers != ZERO] // SLOTS).tolist():
            with self._lock:
                self._blocks.pop(int(block), None)  # from the disk, not from memory
            data = self.block(int(block))
            with self._lock:
                known = self._db.execute(
                    "SELECT id, hash FROM pages WHERE id BETWEEN ? AND ?", (block * SLOTS, block * SLOTS + SLOTS - 1)
                ).fetchall()
            if len(known) != len(data) // PAGE:
                raise CheckpointFailed(f"page block {block} and the index disagree", remedy="the checkpoint is damaged")
            for number, digest in known:
                slot = number % SLOTS
                if blake3(data[slot * PAGE : (slot + 1) * PAGE]).digest() != digest:
                    raise CheckpointFailed(f"page {number} has changed on disk", remedy="the checkpoint is damaged")
                checked += 1
        return checked

    # ----------------------------------------------------------------- collecting

    def locked(self) -> threading.RLock:
        """Held while a dump file is being published, so that a collection sees it or comes before its pages."""
        return self._lock

    def collect(self, marks: Callable[[], Iterable[np.ndarray]]) -> Collected:
        """Delete the blocks that none of the page lists `marks()` refers to. Runs under the store's lock."""
        with self._lock:
            live: set[int] = set()
            for numbers in marks():
                live.update(np.unique(numbers // SLOTS).tolist())
            rows = self._db.execute("SELECT id, segment, length, count, offset FROM blocks").fetchall()
            dead = [row for row in rows if row[0] not in live]
            if not dead:
                return Collected(0, 0, 0)
            with self._transaction():
                self._db.executemany("DELETE FROM blocks WHERE id = ?", [(row[0],) for row in dead])
                self._db.executemany(
                    "DELETE FROM pages WHERE id BETWEEN ? AND ?",
                    [(row[0] * SLOTS, row[0] * SLOTS + SLOTS - 1) for row in dead],
                )
                newest = self._db.execute("SELECT MAX(id) FROM segments").fetchone()[0]
                self._db.execute(
                    "DELETE FROM segments WHERE id != ? AND id NOT IN (SELECT segment FROM blocks)", (newest,)
                )
            self._hashes.clear()
            self._blocks.clear()
            self._punch(dead)
            self._drop_unknown_segments()
            return Collected(len(dead), sum(row[2] for row in dead), sum(row[3] for row in dead))

    def _punch(self, dead: Sequence[tuple[int, int, int, int, int]]) -> None:
        """Give the space of dead blocks back inside segments that live on (after the index forgot them)."""
        by_segment: dict[int, list[tuple[int, int]]] = {}
        for _, segment, length, _, offset in dead:
            by_segment.setdefault(segment, []).append((offset, length))
        for segment, holes in by_segment.items():
            path = self._segment_path(segment)
            if not path.exists():
                continue
            with open(path, "r+b") as file:
                for offset, length in holes:
                    _punch_hole(file.fileno(), offset, length)

    def statistics(self) -> dict[str, int]:
        with self._lock:
            pages = self._db.execute("SELECT COUNT(*) FROM pages").fetchone()[0]
            blocks, size = self._db.execute("SELECT COUNT(*), COALESCE(SUM(length), 0) FROM blocks").fetchone()
        return {"pages": pages, "blocks": blocks, "stored_bytes": size}


def _pwrite(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _punch_hole(fd: int, offset: int, length: int) -> None:
    """fallocate(PUNCH_HOLE | KEEP_SIZE); a file system without it keeps the space, nothing else changes."""
    import ctypes

    keep_size, punch_hole = 1, 2
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate(fd, keep_size | punch_hole, ctypes.c_long(offset), ctypes.c_long(length))
