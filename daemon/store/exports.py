"""A checkpoint leaves this host: what its stream is made of.

Owns: reading files and process images of a checkpoint into frames. Does not own: the format of the stream
(:mod:`sandbox.content.transfer`, which is pure), its way in (:mod:`daemon.store.imports`), HTTP (`daemon.api.store`).

::

    export  = pin ▸ head ▸ file tree ▸ page hashes ▸ content and pages that the other side lacks ▸ end
    pull    = manifest ▸ what is missing there ▸ export of just that ▸ import

Guarantee: what the stream says of a content is what it holds: hashes are those of the snapshot's digest or made on the
way, and the other side compares. Devices and host-only attributes do not travel; what cannot is refused, by its path.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from daemon.catalogue import CheckpointRow
from daemon.checkpoints.capture import Places
from sandbox.content import dumpfile, transfer
from sandbox.content.dumpfile import DumpFile
from sandbox.content.pages import HASH, SLOTS, ZERO, PageStore
from sandbox.content.transfer import Entry, Have, Head, ImageFile
from sandbox.errors import Invalid, PagurusError
from sandbox.tree import hashing

WHITEOUT = (stat.S_IFCHR, 0)
NO_HASH = bytes(HASH)


def export(
    row: CheckpointRow, head: Head, places: Places, pages: PageStore, have: Have | None, *, manifest: bool = False
) -> Iterator[bytes]:
    """The stream of a durable checkpoint that is pinned. Blocks between its parts."""
    writer = transfer.Writer()
    have_pages, have_contents = (have or Have()).sets()
    yield writer.start(head)
    wanted: dict[bytes, bytes] = {}  # content -> path below the upper
    snapshot = places.snapshot(row.files) / "upper" if row.files is not None else None
    if snapshot is not None:
        for batch in _batches(_walk(snapshot, row, places, wanted), transfer.ENTRIES_PER_FRAME):
            yield writer.entries(batch)
    dump = dumpfile.read(places.packed(row.dump)) if row.dump is not None else DumpFile()
    images = {blake3(content).digest(): content for content in dump.images.values()}
    if dump.images:
        listed = [ImageFile(name, len(c), blake3(c).digest()) for name, c in sorted(dump.images.items())]
        for batch in _batches(iter(listed), transfer.ENTRIES_PER_FRAME):
            yield writer.images(batch)
    numbers = {name: dump.numbers(name) for name in sorted(dump.pages)}
    for name, each in numbers.items():
        yield from writer.pages_of(name, pages.digests(each).tobytes())
    if not manifest:
        for content, data in images.items():
            if content[: transfer.HAVE_HASH] not in have_contents:
                yield from _parts(writer, content, _memory(data), len(data))
        if snapshot is not None:
            yield from _files(writer, snapshot, wanted, have_contents)
        yield from _pages(writer, pages, numbers, have_pages)
    yield writer.end()


def contents(row: CheckpointRow, places: Places, pages: PageStore) -> Have:
    """What a checkpoint that is here consists of: need not be sent to somebody who has it."""
    known: set[bytes] = set()
    hashes: set[bytes] = set()
    if row.files is not None:
        with contextlib.suppress(FileNotFoundError, PagurusError):  # not hashed yet, or damaged: then it is sent
            known |= hashing.Digest.load(places.digest(row.files)).content_hashes
    if row.dump is not None:
        dump = dumpfile.read(places.packed(row.dump))
        known |= {blake3(content).digest() for content in dump.images.values()}
        for name in dump.pages:
            hashes |= {each.tobytes() for each in pages.digests(np.unique(dump.numbers(name)))}
    return Have.of(hashes, known)


def _walk(upper: Path, row: CheckpointRow, places: Places, wanted: dict[bytes, bytes]) -> Iterator[Entry]:
    """Entries of a file tree, parents first. Notes where each content lies."""
    known = _known_contents(row, places)
    root = os.open(upper, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        count = 0
        seen: dict[int, int] = {}  # inode of a file with more than one name -> its entry
        pending: list[tuple[bytes, int, bytes]] = [(b"", 0, b"")]  # path, parent, name
        while pending:
            path, parent, name = pending.pop()
            entry, inode, links = _entry(root, path, parent, name, known)
            if links > 1 and entry.kind != "d":
                if inode in seen:
                    entry = Entry(parent=parent, name=name, kind=entry.kind, same_as=seen[inode])
                seen.setdefault(inode, count)
            if entry.kind == "f" and entry.content:
                wanted.setdefault(entry.content, path)
            yield entry
            if entry.kind == "d":
                with os.scandir(f"/proc/self/fd/{root}/{os.fsdecode(path)}") as found:
                    names = sorted((os.fsencode(each.name) for each in found), reverse=True)
                pending += [(path + b"/" + each if path else each, count, each) for each in names]
            count += 1
    finally:
        os.close(root)


def _known_contents(row: CheckpointRow, places: Places) -> dict[int, bytes]:
    """Content hashes by inode, from the digest of the snapshot; what is not there is hashed on the way."""
    try:
        digest = hashing.Digest.load(places.digest(row.files or ""))
    except (FileNotFoundError, PagurusError):
        return {}
    return {
        inode: content
        for inode, content in zip(digest.inodes.tolist(), (each.tobytes() for each in digest.contents), strict=True)
        if content not in (hashing.UNHASHED, NO_HASH)
    }


def _entry(root: int, path: bytes, parent: int, name: bytes, known: dict[int, bytes]) -> tuple[Entry, int, int]:
    where = path or b"."
    found = os.stat(where, dir_fd=root, follow_symlinks=False)
    full = os.fsencode(f"/proc/self/fd/{root}/") + where
    extended = {}
    for each in os.listxattr(full, follow_symlinks=False):
        if each in transfer.HOST_ONLY:
            continue
        if each not in (transfer.OPAQUE, transfer.REDIRECT, *transfer.ACLS) and not each.startswith(transfer.KEPT):
            raise Invalid(f"{os.fsdecode(path)} has the extended attribute {each}, which does not travel")
        extended[each] = os.getxattr(full, each, follow_symlinks=False)
    kinds = {stat.S_IFDIR: "d", stat.S_IFREG: "f", stat.S_IFLNK: "l", stat.S_IFIFO: "p", stat.S_IFSOCK: "s"}
    kind = "w" if (stat.S_IFMT(found.st_mode), found.st_rdev) == WHITEOUT else kinds.get(stat.S_IFMT(found.st_mode))
    if kind is None:
        raise Invalid(f"{os.fsdecode(path)} is a device, which does not travel")
    entry = Entry(
        parent=parent,
        name=name,
        kind=kind,  # type: ignore[arg-type]
        mode=stat.S_IMODE(found.st_mode),
        uid=found.st_uid,
        gid=found.st_gid,
        mtime_ns=found.st_mtime_ns,
        extended=extended,
    )
    if kind == "f" and found.st_size:
        entry.size = found.st_size
        entry.content = known.get(found.st_ino) or hashing.hash_file(root, where)
    elif kind == "l":
        entry.target = os.readlink(where, dir_fd=root)
    return entry, found.st_ino, found.st_nlink


def _files(writer: transfer.Writer, upper: Path, wanted: dict[bytes, bytes], have: set[bytes]) -> Iterator[bytes]:
    root = os.open(upper, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for content, path in wanted.items():
            if content[: transfer.HAVE_HASH] in have:
                continue
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOATIME, dir_fd=root)
            try:
                yield from _parts(writer, content, _reader(fd), os.fstat(fd).st_size)
            finally:
                os.close(fd)
    finally:
        os.close(root)


def _reader(fd: int) -> Callable[[int, int], bytes]:
    return lambda offset, size: os.pread(fd, size, offset)


def _memory(data: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, size: data[offset : offset + size]


def _parts(writer: transfer.Writer, content: bytes, read: Callable[[int, int], bytes], size: int) -> Iterator[bytes]:
    """The pieces of a content that are not zero. One of nothing but zeros still says that it came."""
    sent = False
    for offset in range(0, size, transfer.PART_SIZE):
        data = read(offset, transfer.PART_SIZE)
        last = offset + transfer.PART_SIZE >= size
        if any(data) or (last and not sent):
            yield writer.part(content, offset, data)
            sent = True


def _pages(
    writer: transfer.Writer, pages: PageStore, numbers: dict[str, np.ndarray], have: set[bytes]
) -> Iterator[bytes]:
    """The pages that the other side lacks, each once, by the block in which they lie."""
    if not numbers:
        return
    unique = np.unique(np.concatenate(list(numbers.values())))
    unique = unique[unique != ZERO]
    hashes = pages.digests(unique)
    missing = [
        n for n, digest in zip(unique, hashes, strict=True) if digest.tobytes()[: transfer.HAVE_HASH] not in have
    ]
    for first in range(0, len(missing), SLOTS):
        data: list[bytes] = []
        pages.read(np.array(missing[first : first + SLOTS], dtype=np.uint64), data.append)
        yield writer.pages(b"".join(data))


def _batches(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    batch = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
