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
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from blake3 import blake3

from daemon.catalogue import CheckpointRow
from daemon.checkpoints.capture import Places
from sandbox.content import dumpfile, transfer
from sandbox.content.dumpfile import DumpFile
from sandbox.content.pages import HASH, SLOTS, ZERO, PageStore
from sandbox.content.transfer import Entry, Have, Head, ImageFile
from sandbox.errors import Invalid, PagurusError
from sandbox.tree import hashing, safe_path, sparse
from sandbox.tree.walk import Step, walk

WHITEOUT = (stat.S_IFCHR, 0)
KINDS: dict[int, Literal["d", "f", "l", "p", "s"]] = {
    stat.S_IFDIR: "d",
    stat.S_IFREG: "f",
    stat.S_IFLNK: "l",
    stat.S_IFIFO: "p",
    stat.S_IFSOCK: "s",
}
NO_HASH = bytes(HASH)


def export(
    row: CheckpointRow, head: Head, places: Places, pages: PageStore, have: Have | None, *, manifest: bool = False
) -> Iterator[bytes]:
    """The stream of a durable checkpoint that is pinned. Blocks between its parts."""
    with contextlib.ExitStack() as held:
        yield from _export(row, head, places, pages, have, manifest, held)


def _export(
    row: CheckpointRow,
    head: Head,
    places: Places,
    pages: PageStore,
    have: Have | None,
    manifest: bool,
    held: contextlib.ExitStack,
) -> Iterator[bytes]:
    writer = transfer.Writer()
    have_pages, have_contents = (have or Have()).sets()
    yield writer.start(head)
    tree = None
    if row.files is not None:
        root = held.enter_context(safe_path.directory(places.snapshot(row.files) / "upper"))
        tree = _Tree(root, _known_contents(row, places))
        for batch in _batches(tree.entries(), transfer.ENTRIES_PER_FRAME):
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
        if tree is not None:
            yield from _files(writer, tree, have_contents)
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


class _Tree:
    """The file tree of a snapshot. Remembers where each content lies, by numbers: paths may be long and many."""

    def __init__(self, root: int, known: dict[int, bytes]) -> None:
        self.root = root
        self.known = known  # content hashes by inode
        self.wanted: dict[bytes, int] = {}  # content -> the first entry that has it
        self._names: list[tuple[int, str]] = []  # by number: the entry's parent and name

    def entries(self) -> Iterator[Entry]:
        """Parents first."""
        linked: dict[int, int] = {}  # inode of a file with more than one name -> its entry
        above = [0]  # the entries of the directories that lead to a step
        yield self._noted(_entry(self.root, ".", 0, os.fstat(self.root), self.known, None), "")
        for step in walk(self.root):
            (holder,), (found,) = step.parents, step.found
            assert found is not None  # nobody changes a snapshot
            del above[step.depth :]
            number, parent = len(self._names), above[-1]
            if found.st_nlink > 1 and not step.enter[0] and linked.setdefault(found.st_ino, number) != number:
                kind = _kind(found, step)
                entry = Entry(parent=parent, name=os.fsencode(step.name), kind=kind, same_as=linked[found.st_ino])
            else:
                entry = _entry(holder, step.name, parent, found, self.known, step)
            yield self._noted(entry, step.name)
            above.append(number)

    def _noted(self, entry: Entry, name: str) -> Entry:
        if entry.kind == "f" and entry.content:
            self.wanted.setdefault(entry.content, len(self._names))
        self._names.append((entry.parent, name))
        return entry

    def path(self, number: int) -> bytes:
        parts = []
        while number:
            number, name = self._names[number]
            parts.append(os.fsencode(name))
        return b"/".join(reversed(parts))


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


def _kind(found: os.stat_result, step: Step) -> Literal["d", "f", "l", "p", "s", "w"]:
    if (stat.S_IFMT(found.st_mode), found.st_rdev) == WHITEOUT:
        return "w"
    kind = KINDS.get(stat.S_IFMT(found.st_mode))
    if kind is None:
        raise Invalid(f"{step.path} is a device, which does not travel")
    return kind


def _entry(
    holder: int, name: str, parent: int, found: os.stat_result, known: dict[int, bytes], step: Step | None
) -> Entry:
    """`step` is None for the root."""
    full = safe_path.named(holder, name)
    extended = {}
    for each in os.listxattr(full, follow_symlinks=False):
        if each in transfer.HOST_ONLY:
            continue
        if each not in (transfer.OPAQUE, transfer.REDIRECT, *transfer.ACLS) and not each.startswith(transfer.KEPT):
            path = step.path if step else "/"
            raise Invalid(f"{path} has the extended attribute {each}, which does not travel")
        extended[each] = os.getxattr(full, each, follow_symlinks=False)
    entry = Entry(
        parent=parent,
        name=os.fsencode(name) if step else b"",
        kind=_kind(found, step) if step else "d",
        mode=stat.S_IMODE(found.st_mode),
        uid=found.st_uid,
        gid=found.st_gid,
        mtime_ns=found.st_mtime_ns,
        extended=extended,
    )
    if entry.kind == "f" and found.st_size:
        entry.size = found.st_size
        if (content := known.get(found.st_ino)) is None:
            with safe_path.regular(holder, name) as file:
                content = sparse.of_file(file)
        entry.content = content
    elif entry.kind == "l":
        entry.target = os.fsencode(os.readlink(name, dir_fd=holder))
    return entry


def _files(writer: transfer.Writer, tree: _Tree, have: set[bytes]) -> Iterator[bytes]:
    for content, number in tree.wanted.items():
        if content[: transfer.HAVE_HASH] in have:
            continue
        fd = safe_path.open_deep(tree.root, tree.path(number), os.O_RDONLY | os.O_NOATIME)
        try:
            yield from _parts(writer, content, _pieces_of(fd), os.fstat(fd).st_size)
        finally:
            os.close(fd)


def _pieces_of(fd: int) -> Iterator[tuple[int, bytes]]:
    """The data of a file, as aligned pieces: (offset, bytes)."""
    done, size = 0, os.fstat(fd).st_size
    for start, end in sparse.data_ranges(fd):
        first = start // transfer.PART_SIZE * transfer.PART_SIZE
        for offset in range(max(first, done), end, transfer.PART_SIZE):
            yield offset, os.pread(fd, min(transfer.PART_SIZE, size - offset), offset)
            done = offset + transfer.PART_SIZE


def _memory(data: bytes) -> Iterator[tuple[int, bytes]]:
    for offset in range(0, len(data), transfer.PART_SIZE):
        yield offset, data[offset : offset + transfer.PART_SIZE]


def _parts(writer: transfer.Writer, content: bytes, pieces: Iterator[tuple[int, bytes]], size: int) -> Iterator[bytes]:
    """The pieces of a content that are not zero. One of nothing but zeros still says that it came."""
    sent = False
    for offset, data in pieces:
        if data != bytes(len(data)):
            yield writer.part(content, offset, data)
            sent = True
    if size and not sent:
        yield writer.part(content, size - 1, bytes(1))


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
