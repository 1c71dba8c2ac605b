"""The dump file: everything of one process dump except the content of its memory pages.

Guarantee: the file appears under its name only when it and every page that it refers to are on disk (written aside,
synced, renamed, directory synced); unpacking gives back the same bytes.
"""

from __future__ import annotations

import errno
import functools
import itertools
import mmap
import os
import shutil
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import zstandard
from blake3 import blake3

from sandbox import durable
from sandbox.content import layers
from sandbox.content.layers import Layers
from sandbox.content.lists import Lists, PageHashes
from sandbox.content.page_hashes import HASH, PAGE, HashedPages, hash_pages
from sandbox.content.pages import PageStore
from sandbox.database import is_full
from sandbox.errors import CheckpointFailed, NoSpace

SUFFIX = ".dump"
FORMAT = 1
THREADS = 4  # that unpack
COMPARING = 2  # that compare
PART = 1024  # pages that one of them takes at a time
SMALL = 64 << 10  # bytes read at a time of what is mostly smaller
READ_STEP = 16 << 20  # bytes of page data in hand at a time
PageLists = dict[str, tuple[np.ndarray, np.ndarray]]  # of each file, numbers [n] uint64 and hashes [n, 32] uint8
NOTHING = np.zeros((0, HASH), np.uint8)  # hashes of no page
# The statistics and logs of the dump are no part of the state.
LEFT_OUT = (".log", "stats-dump", "stats-restore")


class DumpFile(msgspec.Struct, kw_only=True, omit_defaults=True):
    """store -> restore: what a dump file holds (MessagePack, zstd, behind a blake3 of the packed bytes)."""

    format: int = FORMAT
    images: dict[str, bytes] = {}  # file name -> content
    pages: dict[str, bytes] = {}  # file name -> page numbers: int64 differences, little endian
    page_count: int = 0
    raw_bytes: int = 0  # of the image directory

    def numbers(self, name: str) -> np.ndarray:
        """Page numbers of a pages file, [n] uint64."""
        return np.cumsum(np.frombuffer(self.pages[name], dtype="<i8")).astype(np.uint64)


@dataclass(frozen=True)
class StoredDump:
    """A dump that is durable. `new_bytes` is what it added to the disk: its file and its new pages."""

    path: Path
    raw_bytes: int
    new_bytes: int
    pages: int
    new_pages: int


@dataclass(frozen=True)
class HashedImages:
    """An image directory whose pages are hashed: what :func:`pack` stores. Holds the page files mapped."""

    images: dict[str, bytes]
    pages: dict[str, list[HashedPages]]  # file name -> its parts, READ_STEP bytes each, or one for each layer
    raw_bytes: int
    orders: dict[str, np.ndarray] = field(default_factory=dict)  # file name -> which page of its parts comes when

    def ordered(self, name: str, values: list[np.ndarray], nothing: np.ndarray) -> np.ndarray:
        """What its parts have for each page, in the order of the pages of the file."""
        joined = np.concatenate([nothing, *values])
        return joined[self.orders[name]] if name in self.orders else joined

    def hashes(self) -> dict[str, np.ndarray]:
        """Of the pages of each file, [n, 32] uint8; zeros for the zero page."""
        return {
            name: self.ordered(name, [part.hashes for part in parts], NOTHING)
            for name, parts in sorted(self.pages.items())
        }

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """Of all pages, file after file as in :meth:`hashes`: which of all parts has it, and where in its data; [n]
        int64."""
        nothing = np.zeros(0, np.int64)
        parts, places, count = [nothing], [nothing], 0
        for name, items in sorted(self.pages.items()):
            numbers = [np.full(len(item.filled), count + index) for index, item in enumerate(items)]
            parts.append(self.ordered(name, numbers, nothing))
            within = [np.arange(len(item.filled)) if item.places is None else item.places for item in items]
            places.append(self.ordered(name, within, nothing))
            count += len(items)
        return np.concatenate(parts), np.concatenate(places)


def hashed(
    directory: Path,
    like: HashedImages | None = None,
    *,
    existing: PageHashes | None = None,
    cache: Lists | None = None,
) -> HashedImages:
    """Hash the pages of an image directory. Blocks, needs a processor and no disk.

    `like`: an earlier one of the same sandbox; pages that are the same there are not hashed again. `existing`: the
    hashes.
    `cache`: holds the hashes of files of pages that several captures share (:mod:`sandbox.content.layers`).
    """
    before = {} if like is None else like.pages
    images: dict[str, bytes] = {}
    pages: dict[str, list[HashedPages]] = {}
    raw = 0
    spread = layers.read(directory)
    orders: dict[str, np.ndarray] = {}
    with os.scandir(directory) as entries:
        names = sorted(entry.name for entry in entries if entry.is_file() and not entry.name.endswith(LEFT_OUT))
    full = {item.pagemap: f"{directory}/{layers.BELOW}/{item.pagemap}" for item in spread.values()}
    for name in names:
        if name in spread:
            pages[name], orders[name] = _of_layers(directory, name, spread[name], cache)
            raw += len(orders[name]) * PAGE
        elif name.startswith("pages-"):
            raw += (directory / name).stat().st_size
            chunks = list(_chunks(directory / name))
            if existing is not None and len(hashes := existing.get(name, NOTHING)) * PAGE == sum(map(len, chunks)):
                parts = np.split(hashes, range(READ_STEP // PAGE, len(hashes), READ_STEP // PAGE))
                pages[name] = [
                    HashedPages(chunk, part, np.asarray(part.any(axis=1)))
                    for chunk, part in zip(chunks, parts, strict=False)
                ]
            else:
                with ThreadPoolExecutor(COMPARING) as pool:  # comparing needs no interpreter
                    alike = itertools.chain(before.get(name, ()), itertools.repeat(None))
                    pages[name] = list(pool.map(hash_pages, chunks, alike))
        else:
            images[name] = complete(full.get(name, f"{directory}/{name}"))
            raw += len(images[name])
    return HashedImages(images, pages, raw, orders)


def _of_layers(directory: Path, name: str, spread: Layers, cache: Lists | None) -> tuple[list[HashedPages], np.ndarray]:
    """The pages of a file that lie in several: a part for each of these, and which page of the parts comes when."""
    parts: list[HashedPages] = []
    order, count = np.zeros(len(spread.pages), np.int64), 0
    for index, layer in enumerate(spread.names):
        chosen = np.flatnonzero(spread.layer == index)
        places = spread.place[chosen]
        data = layers.mapped(layers.file_of(directory, name, spread, index))
        existing = None if cache is None else cache.find(f"layer {layer}")
        if existing is None:
            existing = {"hashes": _hashes(data)}
            if cache is not None:
                cache.remember(f"layer {layer}", existing)
        hashes = existing["hashes"][places]
        parts.append(HashedPages(data, hashes, hashes.view(np.uint64).any(axis=1), places, layer))
        order[chosen] = count + np.arange(len(chosen))
        count += len(chosen)
    return parts, order


def _hashes(data: memoryview) -> np.ndarray:
    """Of all pages, [n, 32] uint8; zeros for the zero page."""
    steps = [data[first : first + READ_STEP] for first in range(0, len(data), READ_STEP)]
    with ThreadPoolExecutor(COMPARING) as pool:
        result = list(pool.map(hash_pages, steps))
    return np.concatenate([NOTHING, *(np.where(item.filled[:, None], item.hashes, 0) for item in result)])


def complete(path: str) -> bytes:
    """A file as it is, with as few system calls as can be: of a thousand threads there are as many images, and each
    call lets another thread take the interpreter."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = [os.read(descriptor, SMALL)]
        while len(parts[-1]) == SMALL:
            parts.append(os.read(descriptor, SMALL))
    finally:
        os.close(descriptor)
    return b"".join(parts)


def pack(source: Path | HashedImages, into: Path, store: PageStore, *, reserve: int = 0, owner: str = "") -> StoredDump:
    """Store an image directory; durable on return. Blocks.

    NoSpace says how much is missing, before less than `reserve` bytes of the disk are left; what was added by then
    is found again by the next try, or collected.
    """
    given = source if isinstance(source, HashedImages) else hashed(source)
    try:
        return _pack(given, into, store, reserve, owner)
    except (OSError, sqlite3.OperationalError) as error:
        full = is_full(error) if isinstance(error, sqlite3.Error) else error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not full:
            raise
        raise _full(into.parent, given.raw_bytes, reserve) from error


def _full(directory: Path, target: int, reserve: int) -> NoSpace:
    free = shutil.disk_usage(directory).free
    return NoSpace(
        f"the disk of {directory} has {free >> 20} MiB free; the checkpoint may need "
        f"{max(1, -(free - target - reserve >> 20))} MiB more",
        hint="remove checkpoints or sandboxes, or give the state directory a larger disk",
    )


def _pack(given: HashedImages, into: Path, store: PageStore, reserve: int, owner: str) -> StoredDump:
    pages: dict[str, bytes] = {}
    count = new_pages = new_bytes = 0
    into.parent.mkdir(parents=True, exist_ok=True)
    with store.writing():  # from the first page to the rename: a collection in between would not see the reference
        left = sum(len(part.filled) for parts in given.pages.values() for part in parts) * PAGE
        for name, parts in given.pages.items():
            added = []
            for part in parts:
                size = len(part.filled) * PAGE
                if shutil.disk_usage(into.parent).free - size < reserve:
                    raise _full(into.parent, left, reserve)
                added.append(store.add(part, owner))
                left -= size
            new_pages += sum(item.new_pages for item in added)
            new_bytes += sum(item.new_bytes for item in added)
            pages[name] = differences(
                given.ordered(name, [item.numbers for item in added], np.zeros(0, np.uint64)).astype(np.uint64)
            )
            count += len(pages[name]) // 8
        size = publish(into, DumpFile(images=given.images, pages=pages, page_count=count, raw_bytes=given.raw_bytes))
    return StoredDump(into, given.raw_bytes, new_bytes + size, count, new_pages)


def publish(into: Path, dump: DumpFile) -> int:
    """Write a dump file whose pages are stored; durable on return. The caller is `store.writing`. Returns its size."""
    packed = zstandard.ZstdCompressor(level=3).compress(msgspec.msgpack.encode(dump))
    durable.publish(into, blake3(packed).digest() + packed)
    return len(packed) + 32


def read(path: Path) -> DumpFile:
    """Read a dump file; its own hash is checked."""
    try:
        content = path.read_bytes()
        if blake3(content[32:]).digest() != content[:32]:
            raise CheckpointFailed(f"{path} has changed on disk", hint="the checkpoint is damaged")
        size_limit = 1 << 32
        unpacked = zstandard.ZstdDecompressor().decompress(content[32:], max_output_size=size_limit)
        dump = msgspec.msgpack.decode(unpacked, type=DumpFile)
    except (OSError, zstandard.ZstdError, msgspec.MsgspecError) as error:
        raise CheckpointFailed(f"{path} cannot be read: {error}", hint="the checkpoint is damaged") from error
    if dump.format != FORMAT:
        raise CheckpointFailed(
            f"{path} has format {dump.format}, this version reads {FORMAT}",
            hint="install the version that wrote it, or restore another checkpoint",
        )
    return dump


def page_lists(packed: DumpFile, dump: str, store: PageStore) -> PageLists:
    """Of each file of pages of the dump with this name. Blocks."""
    numbers = {name: packed.numbers(name) for name in sorted(packed.pages)}
    existing = store.lists.find(dump)
    if existing is None or {name: len(item) for name, item in numbers.items()} != {
        n: len(k) for n, k in existing.items()
    }:
        existing = {name: store.digests(item) for name, item in numbers.items()}
        store.lists.remember(dump, existing)
    return {name: (item, existing[name]) for name, item in numbers.items()}


def unpack(path: Path, directory: Path, store: PageStore) -> None:
    """Write the image directory again. Blocks."""
    dump = read(path)
    directory.mkdir(parents=True)
    for name, content in dump.images.items():
        (directory / name).write_bytes(content)
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        for name in dump.pages:
            numbers = dump.numbers(name)
            with open(directory / name, "wb") as file:
                file.truncate(len(numbers) * PAGE)  # a tmpfs gives large pages within a size that it knows
            write = functools.partial(_write_part, directory / name, numbers, store)
            for _ in pool.map(write, range(0, len(numbers), PART)):  # raises what a part raised
                pass


def unpacked_bytes(path: Path) -> int:
    """Bytes of the image directory, about. Blocks."""
    dump = read(path)
    return sum(map(len, dump.images.values())) + PAGE * sum(len(dump.numbers(name)) for name in dump.pages)


def _write_part(path: Path, numbers: np.ndarray, store: PageStore, first: int) -> None:
    """Write PART pages from number `first` on into their place: decompression is what takes the time."""
    with open(path, "r+b", buffering=1 << 20) as file:
        file.seek(first * PAGE)
        store.read(numbers[first : first + PART], file.write)


def verify(path: Path, store: PageStore) -> int:
    """Re-hash the file and all its pages; returns how many pages."""
    dump = read(path)
    lists = [dump.numbers(name) for name in dump.pages]
    return store.verify(np.concatenate(lists)) if lists else 0


def references(paths: list[Path]) -> Iterator[np.ndarray]:
    """The page lists of these dump files, for a collection. One that was removed since refers to nothing."""
    for path in paths:
        try:
            dump = read(path)
        except CheckpointFailed:
            if path.exists():
                raise
            continue
        for name in dump.pages:
            yield dump.numbers(name)


def differences(numbers: np.ndarray) -> bytes:
    """Page numbers as a dump file holds them."""
    return np.diff(numbers.astype("<i8"), prepend=np.int64(0)).astype("<i8").tobytes()


def _chunks(path: Path) -> Iterator[memoryview]:
    """Parts of a file, mapped: it lies on a tmpfs, so that a copy would cost more."""
    if not path.stat().st_size:
        return
    with open(path, "rb") as file:
        view = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    for first in range(0, len(view), READ_STEP):
        yield view[first : first + READ_STEP]
