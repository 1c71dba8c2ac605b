"""The dump file: everything of one process dump except the content of its memory pages.

Owns: packing CRIU's image directory into one compressed file (small images whole, pages as numbers in the page
store) and unpacking it again. Does not own: the pages (:mod:`sandbox.pages`), what the images mean.
Guarantee: the file appears under its name only when it and every page that it refers to are on disk
(written aside, synced, renamed, directory synced); unpacking gives back the same bytes.
"""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import zstandard
from blake3 import blake3

from sandbox.errors import CheckpointFailed, NoSpace
from sandbox.pages import PAGE, PageStore, _sync_directory

SUFFIX = ".dump"
FORMAT = 1
READ_STEP = 16 << 20  # bytes of page data in hand at a time
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


def pack(directory: Path, into: Path, store: PageStore) -> StoredDump:
    """Store the image directory; durable on return. Blocks. A full disk is NoSpace and leaves the store as it was."""
    try:
        return _pack(directory, into, store)
    except (OSError, sqlite3.OperationalError) as error:
        if getattr(error, "errno", None) not in (errno.ENOSPC, errno.EDQUOT) and "full" not in str(error):
            raise
        free = shutil.disk_usage(into.parent).free
        needed = sum(entry.stat().st_size for entry in os.scandir(directory))
        raise NoSpace(
            f"the disk of {into.parent} is full: {free >> 20} MiB free, the checkpoint may take {needed >> 20} MiB",
            remedy="remove checkpoints or sandboxes, or give the state directory a larger disk",
        ) from error


def _pack(directory: Path, into: Path, store: PageStore) -> StoredDump:
    images: dict[str, bytes] = {}
    pages: dict[str, bytes] = {}
    raw = count = new_pages = new_bytes = 0
    into.parent.mkdir(parents=True, exist_ok=True)
    with store.locked():  # from the first page to the rename: a collection in between would not see the reference
        for path in sorted(directory.iterdir()):
            if path.name.endswith(LEFT_OUT) or not path.is_file():
                continue
            raw += path.stat().st_size
            if not path.name.startswith("pages-"):
                images[path.name] = path.read_bytes()
                continue
            numbers = []
            for chunk in _chunks(path):
                added = store.add(chunk)
                numbers.append(added.numbers)
                new_pages += added.new_pages
                new_bytes += added.new_bytes
            pages[path.name] = _differences(np.concatenate(numbers) if numbers else np.zeros(0, np.uint64))
            count += len(pages[path.name]) // 8
        content = msgspec.msgpack.encode(DumpFile(images=images, pages=pages, page_count=count, raw_bytes=raw))
        packed = zstandard.ZstdCompressor(level=3).compress(content)
        _publish(into, blake3(packed).digest() + packed)
    return StoredDump(into, raw, new_bytes + len(packed) + 32, count, new_pages)


def read(path: Path) -> DumpFile:
    """Read a dump file; its own hash is checked."""
    try:
        content = path.read_bytes()
        if blake3(content[32:]).digest() != content[:32]:
            raise CheckpointFailed(f"{path} has changed on disk", remedy="the checkpoint is damaged")
        size_limit = 1 << 32
        unpacked = zstandard.ZstdDecompressor().decompress(content[32:], max_output_size=size_limit)
        dump = msgspec.msgpack.decode(unpacked, type=DumpFile)
    except (OSError, zstandard.ZstdError, msgspec.MsgspecError) as error:
        raise CheckpointFailed(f"{path} cannot be read: {error}", remedy="the checkpoint is damaged") from error
    if dump.format != FORMAT:
        raise CheckpointFailed(f"{path} has format {dump.format}, this version reads {FORMAT}")
    return dump


def unpack(path: Path, directory: Path, store: PageStore) -> None:
    """Write the image directory again. Blocks."""
    dump = read(path)
    directory.mkdir(parents=True)
    for name, content in dump.images.items():
        (directory / name).write_bytes(content)
    for name in dump.pages:
        with open(directory / name, "wb", buffering=1 << 20) as file:
            store.read(dump.numbers(name), file.write)


def verify(path: Path, store: PageStore) -> int:
    """Re-hash the file and all its pages; returns how many pages."""
    dump = read(path)
    lists = [dump.numbers(name) for name in dump.pages]
    return store.verify(np.concatenate(lists)) if lists else 0


def references(paths: list[Path]) -> Iterator[np.ndarray]:
    """The page lists of these dump files, for a collection."""
    for path in paths:
        dump = read(path)
        for name in dump.pages:
            yield dump.numbers(name)


def _differences(numbers: np.ndarray) -> bytes:
    return np.diff(numbers.astype("<i8"), prepend=np.int64(0)).astype("<i8").tobytes()


def _chunks(path: Path) -> Iterator[memoryview]:
    with open(path, "rb") as file:
        while chunk := file.read(READ_STEP - READ_STEP % PAGE):
            yield memoryview(chunk)


def _publish(path: Path, content: bytes) -> None:
    aside = path.with_name(path.name + ".new")
    try:
        with open(aside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)
