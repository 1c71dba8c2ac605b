"""A checkpoint leaves this host: what its stream is made of.

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from blake3 import blake3

from daemon.catalogue import CheckpointRow
from daemon.checkpoints.capture import Places
from sandbox.content import dumpfile, transfer
from sandbox.content.dumpfile import HashedImages
from sandbox.content.lists import PageHashes
from sandbox.content.page_hashes import HASH, PAGE
from sandbox.content.page_lists import changed, digest
from sandbox.content.pages import SLOTS, PageStore
from sandbox.content.transfer import Entry, Have, ImageFile, TransferHeader
from sandbox.descriptors import closing
from sandbox.errors import Invalid, PagurusError
from sandbox.tree import hashing, safe_path, sparse
from sandbox.tree.extents import added_bytes
from sandbox.tree.holes import data_ranges
from sandbox.tree.walk import WalkEntry, walk

WHITEOUT = (stat.S_IFCHR, 0)
KINDS: dict[int, Literal["d", "f", "l", "p", "s"]] = {
    stat.S_IFDIR: "d",
    stat.S_IFREG: "f",
    stat.S_IFLNK: "l",
    stat.S_IFIFO: "p",
    stat.S_IFSOCK: "s",
}
NO_HASH = bytes(HASH)
MAX_SHARED = 16  # times that a piece of the disk may travel on average: files can share their data
SHARED_FREE = 1 << 30  # bytes that may travel in any case


@dataclass(frozen=True)
class ExportedImages:
    """The process images of a checkpoint, from wherever they are read."""

    images: dict[str, bytes]
    hashes: dict[str, np.ndarray]  # of the pages of each file of pages, [n, 32] uint8; zeros for the zero page
    read: Callable[[np.ndarray], Iterator[bytes]]  # pages, by their place in all lists, SLOTS at a time

    @classmethod
    def at(cls, dump: str | None, source: Path | None, pages: PageStore, base: Base | None = None) -> ExportedImages:
        """`source` is a dump file, or the directory of raw images, which needs neither index nor unpacking."""
        if source is None or dump is None:
            return cls({}, {}, lambda _: iter(()))
        if source.is_dir():
            existing = pages.lists.find(dump)
            return cls.of(dumpfile.hashed(source, None if base is None else base.raw, existing=existing))
        packed = dumpfile.read(source)
        lists = dumpfile.page_lists(packed, dump, pages)
        every = np.concatenate([np.zeros(0, np.uint64), *(numbers for numbers, _ in lists.values())])

        def read(places: np.ndarray) -> Iterator[bytes]:
            for first in range(0, len(places), SLOTS):
                data: list[bytes] = []
                pages.read(every[places[first : first + SLOTS]], data.append)
                yield b"".join(data)

        return cls(packed.images, {name: hashes for name, (_, hashes) in lists.items()}, read)

    @classmethod
    def of(cls, given: HashedImages) -> ExportedImages:
        """From raw images."""
        parts = [part for _, item in sorted(given.pages.items()) for part in item]
        part, place = given.places()

        def read(places: np.ndarray) -> Iterator[bytes]:
            for first in range(0, len(places), SLOTS):
                some = places[first : first + SLOTS]
                at = zip(part[some].tolist(), (place[some] * PAGE).tolist(), strict=True)
                yield b"".join(parts[number].data[start : start + PAGE] for number, start in at)

        return cls(given.images, given.hashes(), read)

    def changed(self, before: PageHashes) -> dict[str, np.ndarray]:
        """Places of the pages that these lists do not have at the same place. A list that is not there is left out."""
        return {name: changed(before[name], item) for name, item in self.hashes.items() if name in before}

    def unsent(self, have: bytes, few: Mapping[str, np.ndarray]) -> Iterator[bytes]:
        """The pages that the other side lacks, each once. `few`: of these lists, only the pages at these places."""
        places, start = [np.zeros(0, np.int64)], 0
        for name, item in self.hashes.items():
            places.append(start + few.get(name, np.arange(len(item))))
            start += len(item)
        looked = np.concatenate(places)
        hashes = np.concatenate([dumpfile.NOTHING, *self.hashes.values()])[looked]
        missing = np.flatnonzero(hashes.any(axis=1) & ~_among(hashes, have))
        _, first = np.unique(np.ascontiguousarray(hashes[missing]).view(f"V{HASH}"), return_index=True)
        yield from self.read(looked[missing[np.sort(first)]])


def _among(hashes: np.ndarray, beginnings: bytes) -> np.ndarray:
    """Which of the hashes [n, 32] begin like one of these, [n] bool."""
    listed = np.frombuffer(beginnings, np.uint64).reshape(-1, transfer.HAVE_HASH // 8)
    if not len(listed):
        return np.zeros(len(hashes), bool)
    listed = listed[np.argsort(listed[:, 0])]
    ours = np.ascontiguousarray(hashes[:, : transfer.HAVE_HASH]).view(np.uint64)
    place = np.minimum(np.searchsorted(listed[:, 0], ours[:, 0]), len(listed) - 1)
    return np.asarray((listed[place] == ours).all(axis=1))  # of two that begin alike, one is sent once too often


@dataclass(frozen=True)
class Base:
    """A checkpoint that the other side has: what of it need not be sent."""

    have: Have
    files: Path | None  # its snapshot
    digest: hashing.Digest | None
    raw: HashedImages | None  # its process images, where they are at hand
    hashes: PageHashes

    @classmethod
    def of(cls, row: CheckpointRow, places: Places, pages: PageStore, source: Path | None) -> Base:
        """All of it is here. `source`: see :meth:`ExportedImages.at`. Reads all of it."""
        raw = None
        if source is not None and source.is_dir():
            raw = dumpfile.hashed(source, existing=pages.lists.find(row.dump or ""))
        processes = ExportedImages.at(row.dump, source, pages) if raw is None else ExportedImages.of(raw)
        existing = {blake3(content).digest() for content in processes.images.values()}
        files, digest = None, None
        if row.files is not None:
            files = places.snapshot(row.files)
            try:
                digest = hashing.Digest.load(places.digest(row.files))
            except (FileNotFoundError, PagurusError):  # not hashed yet, or damaged
                digest = hashing.digest(files, None, limit=hashing.COMPLETE)
            existing |= digest.content_hashes
        every = np.concatenate([np.zeros((0, HASH), np.uint8), *processes.hashes.values()])
        beginnings = np.ascontiguousarray(every[every.any(axis=1)][:, : transfer.HAVE_HASH])
        sorted_once = np.unique(beginnings.view(f"V{transfer.HAVE_HASH}")).tobytes()
        return cls(Have(sorted_once, Have.of((), existing).contents), files, digest, raw, processes.hashes)


def export(
    row: CheckpointRow,
    head: TransferHeader,
    places: Places,
    pages: PageStore,
    source: Path | None,
    have: Have | None,
    base: Base | None,
    *,
    manifest: bool = False,
    brief: bool = False,
) -> Iterator[bytes]:
    """The stream of a checkpoint that is pinned, less what `have` lists. Blocks.

    `source`: see :meth:`ExportedImages.at`. `brief`: the importer builds upon `base`: lists of pages contain what
    changed.
    """
    writer = transfer.TransferWriter()
    listed = have or Have()
    yield writer.start(head)
    with contextlib.ExitStack() as held:
        tree = None
        if row.files is not None:
            snapshot = places.snapshot(row.files)
            root = held.enter_context(safe_path.directory(snapshot / "upper"))
            capacity = ShareBudget(snapshot, row.files_bytes)
            tree = _Tree(root, _existing_contents(row, places, base), capacity)
            for batch in _batches(tree.entries(), transfer.ENTRIES_PER_FRAME):
                yield writer.entries(batch)
        processes = ExportedImages.at(row.dump, source, pages, base)
        images = {blake3(content).digest(): content for content in processes.images.values()}
        names = [ImageFile(name, len(c), blake3(c).digest()) for name, c in sorted(processes.images.items())]
        for batch in _batches(iter(names), transfer.ENTRIES_PER_FRAME):
            yield writer.images(batch)
        before = base.hashes if brief and base is not None else {}
        few = processes.changed(before)
        for name, item in processes.hashes.items():
            if name in few:
                reported = few[name].astype("<u4").tobytes(), item[few[name]].tobytes()
                yield from writer.changed_pages_of(name, len(item), digest(before[name]), *reported)
            else:
                yield from writer.pages_of(name, item.tobytes())
        if not manifest:
            have_contents = listed.sets()[1]
            for content, data in images.items():
                if content[: transfer.HAVE_HASH] not in have_contents:
                    yield from _parts(writer, content, _memory(data), len(data))
            if tree is not None:
                yield from _files(writer, tree, have_contents)
            yield from map(writer.pages, processes.unsent(listed.pages, few))
        yield writer.end()


class ShareBudget:
    """How much content a snapshot may send: files that share their data each need their own elsewhere."""

    def __init__(self, snapshot: Path, existing: int) -> None:
        """`existing`: bytes that it has on the disk, as far as they were counted."""
        self._snapshot = snapshot
        self._left = SHARED_FREE + MAX_SHARED * existing
        self._counted = False

    def take(self, result: os.stat_result, step: WalkEntry) -> None:
        """Before a file is read. Raises Invalid."""
        if stat.S_ISREG(result.st_mode):
            self._left -= sparse.data_size(result)
        if self._left < 0 and not self._counted:
            self._counted = True
            self._left += MAX_SHARED * added_bytes(self._snapshot, None)
        if self._left < 0:
            raise Invalid(
                f"its files share their data more than {MAX_SHARED} times over, at {step.path[-200:]}: elsewhere each "
                "would need a disk of its own",
                hint="remove copies (cp --reflink) that are not needed, then take another checkpoint",
            )


class _Tree:
    """The file tree of a snapshot. Remembers where each content lies, by numbers: paths may be long and many."""

    def __init__(self, root: int, existing: dict[int, bytes], capacity: ShareBudget) -> None:
        self.root = root
        self.capacity = capacity
        self.existing = existing  # content hashes by inode
        self.target: dict[bytes, int] = {}  # content -> the first entry that has it
        self._names: list[tuple[int, str]] = []  # by number: the entry's parent and name

    def entries(self) -> Iterator[Entry]:
        """Parents first."""
        linked: dict[int, int] = {}  # inode of a file with more than one name -> its entry
        above = [0]  # the entries of the directories that lead to a step
        yield self._noted(_entry(self.root, ".", 0, os.fstat(self.root), self.existing, None), "")
        for step in walk(self.root):
            (holder,), (result,) = step.parents, step.result
            assert result is not None  # a snapshot does not change
            del above[step.depth :]
            number, parent = len(self._names), above[-1]
            if result.st_nlink > 1 and not step.enter[0] and linked.setdefault(result.st_ino, number) != number:
                kind = _kind(result, step)
                entry = Entry(parent=parent, name=os.fsencode(step.name), kind=kind, same_as=linked[result.st_ino])
            else:
                self.capacity.take(result, step)
                entry = _entry(holder, step.name, parent, result, self.existing, step)
            yield self._noted(entry, step.name)
            above.append(number)

    def _noted(self, entry: Entry, name: str) -> Entry:
        if entry.kind == "f" and entry.content:
            self.target.setdefault(entry.content, len(self._names))
        self._names.append((entry.parent, name))
        return entry

    def path(self, number: int) -> bytes:
        parts = []
        while number:
            number, name = self._names[number]
            parts.append(os.fsencode(name))
        return b"/".join(reversed(parts))


def _existing_contents(row: CheckpointRow, places: Places, base: Base | None) -> dict[int, bytes]:
    """Content hashes by inode, from the digest of the snapshot; what is not there is hashed on the way."""
    try:
        digest = hashing.Digest.load(places.digest(row.files or ""))
    except (FileNotFoundError, PagurusError):
        if base is None or base.files is None or base.digest is None:
            return {}
        try:
            digest = hashing.digest(places.snapshot(row.files or ""), (base.files, base.digest))
        except OSError:  # no snapshot of the same line, or removed since
            return {}
    return {
        inode: content
        for inode, content in zip(digest.inodes.tolist(), (item.tobytes() for item in digest.contents), strict=True)
        if content not in (hashing.UNHASHED, NO_HASH)
    }


def _kind(result: os.stat_result, step: WalkEntry) -> Literal["d", "f", "l", "p", "s", "w"]:
    if (stat.S_IFMT(result.st_mode), result.st_rdev) == WHITEOUT:
        return "w"
    kind = KINDS.get(stat.S_IFMT(result.st_mode))
    if kind is None:
        raise Invalid(
            f"{step.path} is a device, which does not travel",
            hint="remove it from the sandbox and take another checkpoint",
        )
    return kind


def _entry(
    holder: int, name: str, parent: int, result: os.stat_result, existing: dict[int, bytes], step: WalkEntry | None
) -> Entry:
    """`step` is None for the root."""
    full = safe_path.named(holder, name)
    extended = {}
    for item in os.listxattr(full, follow_symlinks=False):
        if item in transfer.HOST_ONLY:
            continue
        if item not in (transfer.OPAQUE, transfer.REDIRECT, *transfer.ACLS) and not item.startswith(transfer.RETAINED):
            path = step.path if step else "/"
            raise Invalid(
                f"{path} has the extended attribute {item}, which does not travel",
                hint="remove it (`setfattr -x`) and take another checkpoint",
            )
        extended[item] = os.getxattr(full, item, follow_symlinks=False)
    entry = Entry(
        parent=parent,
        name=os.fsencode(name) if step else b"",
        kind=_kind(result, step) if step else "d",
        mode=stat.S_IMODE(result.st_mode),
        uid=result.st_uid,
        gid=result.st_gid,
        mtime_ns=result.st_mtime_ns,
        extended=extended,
    )
    if entry.kind == "f":
        entry.inode = result.st_ino
    if entry.kind == "f" and result.st_size:
        entry.size = result.st_size
        if (content := existing.get(result.st_ino)) is None:
            with safe_path.regular(holder, name) as file:
                content = sparse.of_file(file)
        entry.content = content
    elif entry.kind == "l":
        entry.target = os.fsencode(os.readlink(name, dir_fd=holder))
    return entry


def _files(writer: transfer.TransferWriter, tree: _Tree, have: set[bytes]) -> Iterator[bytes]:
    for content, number in tree.target.items():
        if content[: transfer.HAVE_HASH] in have:
            continue
        with closing(safe_path.open_deep(tree.root, tree.path(number), os.O_RDONLY | os.O_NOATIME)) as fd:
            yield from _parts(writer, content, _pieces_of(fd), os.fstat(fd).st_size)


def _pieces_of(fd: int) -> Iterator[tuple[int, bytes]]:
    """The data of a file, as aligned pieces: (offset, bytes)."""
    done, size = 0, os.fstat(fd).st_size
    for start, end in data_ranges(fd):
        first = start // transfer.PART_SIZE * transfer.PART_SIZE
        for offset in range(max(first, done), end, transfer.PART_SIZE):
            yield offset, os.pread(fd, min(transfer.PART_SIZE, size - offset), offset)
            done = offset + transfer.PART_SIZE


def _memory(data: bytes) -> Iterator[tuple[int, bytes]]:
    for offset in range(0, len(data), transfer.PART_SIZE):
        yield offset, data[offset : offset + transfer.PART_SIZE]


def _parts(
    writer: transfer.TransferWriter, content: bytes, pieces: Iterator[tuple[int, bytes]], size: int
) -> Iterator[bytes]:
    """The pieces of a content that are not zero. One of nothing but zeros still says that it came."""
    sent = False
    for offset, data in pieces:
        if data != bytes(len(data)):
            yield writer.part(content, offset, data)
            sent = True
    if size and not sent:
        yield writer.part(content, size - 1, bytes(1))


def _batches(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    batch = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
