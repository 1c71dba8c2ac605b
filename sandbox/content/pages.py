"""Content-addressed store of memory pages: sandboxes of one owner share them, those of all where the host wants it.

Layout. New pages are gathered, 64 to a block; a block is compressed with zstd and appended to the newest
segment; page number = block number * 64 + slot. Number 0 is the zero page, which is stored nowhere. Numbers of
neighbouring pages are neighbours, so that a dump's list of pages is runs and compresses to next to nothing.

Guarantees:
- :meth:`PageStore.add` returns numbers whose content is on disk: the segment is synced before the index commits
  (synchronous=FULL). A crash in between leaves bytes behind the segment's recorded end, which are overwritten.
- :meth:`PageStore.collect` deletes a block only when no dump file that exists refers to one of its pages and no caller
  who is :meth:`PageStore.writing` has met it; a dump file that cannot be read stops the collection before anything
  is deleted. It runs concurrently with adding and reading; killed in the middle, the next one continues.
- A block that is not what was written is found when it is read, and shared with no later dump.

Locks: `_append` (who appends or deletes) before `_lock` (the index and the caches, for moments).
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

from sandbox.content.lists import Lists
from sandbox.content.page_hashes import HASH, PAGE, HashedPages, hash_pages
from sandbox.content.page_index import SCHEMA, add_owners
from sandbox.content.segments import Hole, Segments
from sandbox.database import connect, transaction
from sandbox.errors import CheckpointFailed, Conflict

SLOTS = 64  # pages in a block: 256 KiB compress well and one read serves neighbours
ZERO = 0  # number of the zero page; block 0 is never used
ZERO_PAGE = bytes(PAGE)
SEGMENT_LIMIT = 64 << 20
CACHED_HASHES = 1 << 17
CACHED_BLOCKS = 32
QUESTIONS = 500  # pages that are looked up at once
SWEEP = 256  # blocks deleted in one transaction: no caller waits long for a collection


@dataclass(frozen=True)
class StoredPages:
    """Numbers of the pages given to :meth:`PageStore.add`, in order, and what was new."""

    numbers: np.ndarray  # [n] uint64
    new_pages: int
    new_bytes: int  # compressed, as written


@dataclass(frozen=True)
class PageCollection:
    """What a collection freed."""

    blocks: int
    bytes: int
    pages: int


class PageStore:
    """See the module. All methods block: call them from a worker thread."""

    def __init__(self, directory: Path, *, shared: bool = False):
        """`shared`: owners share pages; then bytes and times of a checkpoint show each what others have stored."""
        self._shared = shared
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)  # an older version let everybody in
        self.directory = directory
        self.lists = Lists()
        self._lock = threading.RLock()
        self._append = threading.RLock()
        self._collecting = threading.Lock()
        self._segments = Segments(directory)
        self._guard = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._guard)
            raise Conflict(
                f"{directory} is in use by another process", hint="only one daemon may own a state directory"
            ) from None
        try:
            self._db = connect(directory / "index.sqlite", SCHEMA)
            add_owners(self._db)
        except sqlite3.Error as error:
            os.close(self._guard)
            raise CheckpointFailed(
                f"{directory / 'index.sqlite'} cannot be opened: {error}",
                hint="is the disk full or damaged? The pages themselves are in the segment files",
            ) from error
        self._hashes: OrderedDict[tuple[bytes, str], int] = OrderedDict()
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._next_block = max(1, (self._db.execute("SELECT MAX(id) FROM blocks").fetchone()[0] or 0) + 1)
        self._writers = 0
        self._met: set[int] = set()  # blocks that writers or a running collection met
        self._swept = 0  # how often pages went: numbers that were known before may lead nowhere
        self._gaps_checked = False
        self._drop_unknown_segments()

    def close(self) -> None:
        with self._append, self._lock:
            if self._guard < 0:
                return
            self._db.close()
            os.close(self._guard)
            self._guard = -1

    # ----------------------------------------------------------------- adding

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """What is added or found inside is not collected before the end: until then nothing may refer to it."""
        with self._lock:
            self._writers += 1
        try:
            yield
        finally:
            with self._lock:
                self._writers -= 1
                if not self._writers:
                    self._met.clear()

    def add(self, data: HashedPages | memoryview | bytes, owner: str = "") -> StoredPages:
        """Store pages of `owner`; durable on return."""
        owner = "" if self._shared else owner
        given = data if isinstance(data, HashedPages) else hash_pages(data)
        fresh: OrderedDict[bytes, int] = OrderedDict()  # hash -> index of the first page that has it
        with self.writing(), self._append:
            numbers = self._numbers_in(given, owner)
            places = np.flatnonzero(given.filled & (numbers == ZERO)).tolist()
            digests = [given.hashes[index].tobytes() for index in places]
            with self._lock:
                stored = self._find(digests, owner)
                for index, digest in zip(places, digests, strict=True):
                    if digest not in stored:
                        fresh.setdefault(digest, index)
                self._met.update(np.unique(numbers // SLOTS).tolist(), (number // SLOTS for number in stored.values()))
            new_bytes, made = self._write(given, fresh, owner) if fresh else (0, {})
            stored |= made
            numbers[places] = [stored[digest] for digest in digests]
            self._remember_numbers(given, owner, numbers)
        return StoredPages(numbers, len(fresh), new_bytes)

    def _numbers_in(self, given: HashedPages, owner: str) -> np.ndarray:
        """The numbers of pages of a layer that were added before, if no page of the store went since; else zeros."""
        existing = self.lists.find(f"numbers {self._swept} {owner} {given.layer}") if given.layer else None
        if existing is None or given.places is None:
            return np.zeros(len(given.filled), dtype=np.uint64)
        numbers: np.ndarray = existing["numbers"][given.places]
        return numbers

    def _remember_numbers(self, given: HashedPages, owner: str, numbers: np.ndarray) -> None:
        if not given.layer or given.places is None:
            return
        name = f"numbers {self._swept} {owner} {given.layer}"
        existing = self.lists.find(name)
        every = np.zeros(len(given.data) // PAGE, np.uint64) if existing is None else existing["numbers"].copy()
        every[given.places] = numbers
        self.lists.remember(name, {"numbers": every})

    def existing(self, digests: Iterable[bytes]) -> dict[bytes, int]:
        """The numbers of those pages that are stored, of any owner: for imports, which only administrators ask for.

        Inside `writing` they stay.
        """
        with self._lock:
            result = self._find(digests, None)
            self._met.update(number // SLOTS for number in result.values())
        return result

    def _find(self, digests: Iterable[bytes], owner: str | None) -> dict[bytes, int]:
        """The numbers of those pages that are stored; `owner` None: of any."""
        result: dict[bytes, int] = {}
        unknown = []
        for digest in dict.fromkeys(digests):
            number = self._hashes.get((digest, owner or ""))
            if number is None:
                unknown.append(digest)
            else:
                self._hashes.move_to_end((digest, owner or ""))
                result[digest] = number
        for first in range(0, len(unknown), QUESTIONS):
            part = unknown[first : first + QUESTIONS]
            query = f"SELECT hash, id, owner FROM pages WHERE hash IN ({', '.join('?' * len(part))})"
            whose = () if owner is None else (owner,)
            for digest, number, of in self._db.execute(query + " AND owner = ?" * len(whose), (*part, *whose)):
                self._remember(digest, of, number)
                result[digest] = number
        return result

    def _remember(self, digest: bytes, owner: str, number: int) -> None:
        self._hashes[digest, owner] = number
        if len(self._hashes) > CACHED_HASHES:
            self._hashes.popitem(last=False)

    def _write(self, given: HashedPages, fresh: OrderedDict[bytes, int], owner: str) -> tuple[int, dict[bytes, int]]:
        """Write blocks of new pages; sync them; only then let the index know. Returns bytes and page numbers."""
        compressor = zstandard.ZstdCompressor(level=1)
        segment, size = self._segment()
        start, written = size, 0
        blocks: list[tuple[int, int, int, int, int, bytes]] = []
        pages: list[tuple[int, bytes]] = []
        view = given.data
        items = [(digest, i if given.places is None else int(given.places[i])) for digest, i in fresh.items()]
        with self._segments.appending(segment, start) as end:
            for first in range(0, len(items), SLOTS):
                chunk = items[first : first + SLOTS]
                packed = compressor.compress(b"".join(view[i * PAGE : (i + 1) * PAGE] for _, i in chunk))
                end.write(packed)
                number = self._next_block + len(blocks)
                blocks.append((number, segment, start + written, len(packed), len(chunk), blake3(packed).digest()))
                pages.extend((number * SLOTS + slot, digest) for slot, (digest, _) in enumerate(chunk))
                written += len(packed)
            end.sync()
            with self._lock, transaction(self._db):
                self._db.executemany("INSERT INTO blocks VALUES (?, ?, ?, ?, ?, ?)", blocks)
                self._db.executemany("INSERT INTO pages VALUES (?, ?, ?)", [(*page, owner) for page in pages])
                self._db.execute("INSERT OR REPLACE INTO segments VALUES (?, ?)", (segment, start + written))
                self._met.update(block[0] for block in blocks)
        self._next_block += len(blocks)
        made = {digest: number for number, digest in pages}
        with self._lock:
            for digest, number in made.items():
                self._remember(digest, owner, number)
        return written, made

    def _segment(self) -> tuple[int, int]:
        """The segment to append to and its recorded end; bytes after that were never committed."""
        with self._lock:
            row = self._db.execute("SELECT id, size FROM segments ORDER BY id DESC LIMIT 1").fetchone()
        if row is None:
            return 1, 0
        return (row[0] + 1, 0) if row[1] >= SEGMENT_LIMIT else (row[0], row[1])

    def _drop_unknown_segments(self) -> None:
        """A crash may leave a segment file that the index never came to know, or one that it has forgotten."""
        with self._lock:
            existing = {row[0] for row in self._db.execute("SELECT id FROM segments")}
        self._segments.keep_only(existing)

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
        """The decompressed content of a block, which is what was written."""
        with self._lock:
            cached = self._blocks.get(number)
            if cached is not None:
                self._blocks.move_to_end(number)
                return cached
        data = self._load(number)
        with self._lock:
            self._blocks[number] = data
            if len(self._blocks) > CACHED_BLOCKS:
                self._blocks.popitem(last=False)
        return data

    def _load(self, number: int) -> bytes:
        """A block from the disk. One that is damaged is never shared again."""
        with self._lock:
            row = self._db.execute(
                "SELECT segment, offset, length, count, hash FROM blocks WHERE id = ?", (number,)
            ).fetchone()
        if row is None:
            raise CheckpointFailed(f"page block {number} is not in the store", hint="the checkpoint is damaged")
        segment, offset, length, count, digest = row
        try:
            packed = self._segments.read(segment, offset, length)
            if digest is not None and blake3(packed).digest() != digest:
                raise ValueError("it has changed on disk")
            data = zstandard.ZstdDecompressor().decompress(packed, max_output_size=SLOTS * PAGE)
            if len(data) != count * PAGE:
                raise ValueError("it is short")
        except (OSError, zstandard.ZstdError, ValueError) as error:
            self._condemn(number)
            raise CheckpointFailed(
                f"page block {number} in {self._segments.path(segment)} is damaged: {error}",
                hint="the checkpoint is damaged",
            ) from error
        return data

    def _condemn(self, block: int) -> None:
        """Forget the hashes of a damaged block: dumps to come store these pages again."""
        span = (block * SLOTS, block * SLOTS + SLOTS - 1)
        with self._lock:
            self._swept += 1
            self._blocks.pop(block, None)
            for key in self._db.execute("SELECT hash, owner FROM pages WHERE id BETWEEN ? AND ?", span).fetchall():
                self._hashes.pop(key, None)
            with contextlib.suppress(sqlite3.Error), transaction(self._db):  # a full disk: tried again at the next read
                self._db.execute(
                    "INSERT OR REPLACE INTO lost SELECT id, hash FROM pages WHERE id BETWEEN ? AND ?", span
                )
                self._db.execute("DELETE FROM pages WHERE id BETWEEN ? AND ?", span)

    def digests(self, numbers: np.ndarray) -> np.ndarray:
        """The hashes of pages, [n, 32] uint8; zeros for the zero page. Blocks; raises when one is not known."""
        unique, back = np.unique(numbers, return_inverse=True)
        table = np.zeros((len(unique), HASH), dtype=np.uint8)
        for place, number in enumerate(unique.tolist()):
            if number == ZERO:
                continue
            with self._lock:
                row = self._db.execute(
                    "SELECT hash FROM pages WHERE id = ?1 UNION ALL SELECT hash FROM lost WHERE id = ?1", (number,)
                ).fetchone()
            if row is None:
                raise CheckpointFailed(f"page {number} is not in the store", hint="the checkpoint is damaged")
            table[place] = np.frombuffer(row[0], dtype=np.uint8)
        return table[back]

    def has_lost(self, lists: Iterable[np.ndarray]) -> bool:
        """Whether it is known of one of these pages that it is damaged."""
        with self._lock:
            lost = [number for (number,) in self._db.execute("SELECT id FROM lost")]
        return bool(lost) and any(np.isin(item, np.array(lost, np.uint64)).any() for item in lists)

    # ----------------------------------------------------------------- verifying

    def check(self, blocks: Iterable[int]) -> dict[int, str]:
        """Read these blocks from the disk and hash their pages again. What is wrong, by block; {} when nothing."""
        wrong: dict[int, str] = {}
        for block in blocks:
            with self._lock:
                self._blocks.pop(block, None)  # from the disk, not from memory
            try:
                self._check_block(block, self._load(block))
            except CheckpointFailed as error:
                wrong[block] = error.message
        return wrong

    def _check_block(self, block: int, data: bytes) -> None:
        first = block * SLOTS
        with self._lock:
            existing = self._db.execute(
                "SELECT id, hash FROM pages WHERE id BETWEEN ?1 AND ?2"
                " UNION ALL SELECT id, hash FROM lost WHERE id BETWEEN ?1 AND ?2",
                (first, first + SLOTS - 1),
            ).fetchall()
        slots = {number - first: digest for number, digest in existing}
        for slot in range(len(data) // PAGE):
            if blake3(data[slot * PAGE : (slot + 1) * PAGE]).digest() != slots.get(slot):
                self._condemn(block)
                raise CheckpointFailed(
                    f"page {first + slot} is not what the index says",
                    hint="`pagurus checkpoint verify` names what is damaged; restore another checkpoint",
                )

    def verify(self, numbers: np.ndarray) -> int:
        """Re-hash the pages with these numbers; raises CheckpointFailed with what is wrong. Returns how many."""
        blocks = np.unique(numbers[numbers != ZERO] // SLOTS).tolist()
        wrong = self.check(blocks)
        if wrong:
            raise CheckpointFailed("; ".join(wrong.values()), hint="the checkpoint is damaged")
        return len(np.unique(numbers[numbers != ZERO]))

    # ----------------------------------------------------------------- collecting

    def collect(self, marks: Callable[[], Iterable[np.ndarray]]) -> PageCollection:
        """Delete the blocks that none of the page lists `marks()` refers to, a few at a time."""
        with self._collecting, self.writing():
            live: set[int] = set()
            for numbers in marks():
                live.update(np.unique(numbers // SLOTS).tolist())
            with self._lock:
                existing = [row[0] for row in self._db.execute("SELECT id FROM blocks ORDER BY id")]
            dead = [block for block in existing if block not in live]
            blocks = size = pages = 0
            for first in range(0, len(dead), SWEEP):
                freed = self._sweep(dead[first : first + SWEEP])
                blocks, size, pages = blocks + freed.blocks, size + freed.bytes, pages + freed.pages
            if not self._gaps_checked:
                self._punch_gaps()
                self._gaps_checked = True
            return PageCollection(blocks, size, pages)

    def _sweep(self, blocks: Sequence[int]) -> PageCollection:
        """Delete these blocks but for those that a writer met since: first from the index, then from the disk."""
        columns = "SELECT id, segment, length, count, offset FROM blocks WHERE id = ?"
        with self._append:
            self._swept += 1
            with self._lock:
                rows = [self._db.execute(columns, (b,)).fetchone() for b in blocks if b not in self._met]
                with transaction(self._db):
                    for block, *_ in rows:
                        span = (block * SLOTS, block * SLOTS + SLOTS - 1)
                        for key in self._db.execute("SELECT hash, owner FROM pages WHERE id BETWEEN ? AND ?", span):
                            self._hashes.pop(key, None)
                        self._blocks.pop(block, None)
                        self._db.execute("DELETE FROM blocks WHERE id = ?", (block,))
                        self._db.execute("DELETE FROM pages WHERE id BETWEEN ? AND ?", span)
                        self._db.execute("DELETE FROM lost WHERE id BETWEEN ? AND ?", span)
                    self._db.execute(
                        "DELETE FROM segments WHERE id != (SELECT MAX(id) FROM segments)"
                        " AND id NOT IN (SELECT segment FROM blocks)"
                    )
            self._segments.punch(Hole(segment, offset, length) for _, segment, length, _, offset in rows)
            self._drop_unknown_segments()
        return PageCollection(len(rows), sum(row[2] for row in rows), sum(row[3] for row in rows))

    def _punch_gaps(self) -> None:
        """What a collection forgot but did not punch before it was killed."""
        with self._append:
            with self._lock:
                sizes = self._db.execute("SELECT id, size FROM segments").fetchall()
                rows = self._db.execute(
                    "SELECT segment, offset, length FROM blocks ORDER BY segment, offset"
                ).fetchall()
            ends = dict.fromkeys((segment for segment, _ in sizes), 0)
            gaps = []
            for segment, offset, length in [*rows, *((segment, size, 0) for segment, size in sizes)]:
                if offset > ends[segment]:
                    gaps.append(Hole(segment, ends[segment], offset - ends[segment]))
                ends[segment] = offset + length
            self._segments.punch(gaps)

    def statistics(self) -> dict[str, int]:
        with self._lock:
            pages = self._db.execute("SELECT COUNT(*) FROM pages").fetchone()[0]
            lost = self._db.execute("SELECT COUNT(*) FROM lost").fetchone()[0]
            blocks, size = self._db.execute("SELECT COUNT(*), COALESCE(SUM(length), 0) FROM blocks").fetchone()
        return {"pages": pages, "blocks": blocks, "stored_bytes": size, "lost_pages": lost}
