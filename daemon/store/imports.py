"""A checkpoint comes to this host: what is made of its stream.

::

    import  = read ▸ tree of our own in a new subvolume ▸ hash all ▸ snapshot ▸ pages ▸ dump file ▸ sync ▸ row

Guarantee: a stream is all or nothing: until the row is written nothing names what it brought, and what a crash leaves
is collected at the next start. Nothing in it chooses a path: entries are made in a fresh directory that no other
process sees, each by its name in the directory that was just made. Content is what its hash says or the import fails.
The image must be here with the same content. Process images are checked for form and integrity, not for intent:
the restoring user trusts the host that exported them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from blake3 import blake3

from daemon.catalogue import CheckpointRow, ProgramRow, Template
from daemon.checkpoints.capture import Places
from daemon.store import numbered
from daemon.store.local import Sources
from sandbox.content import dumpfile, transfer
from sandbox.content.dumpfile import DumpFile, PageLists
from sandbox.content.page_hashes import HASH, PAGE, HashedPages
from sandbox.content.page_lists import PageListDelta
from sandbox.content.pages import ZERO, PageStore
from sandbox.content.renewed import Former
from sandbox.content.transfer import Entry, FrameKind, Have, ImageFile, PageList, TransferHeader
from sandbox.criu.gate import gate
from sandbox.descriptors import closing
from sandbox.errors import Conflict, Protocol, hinted
from sandbox.messages import CheckpointState
from sandbox.tree import btrfs, hashing, safe_path, walk
from sandbox.tree.pool import TREE_PARTS

_FICLONE = 0x40049409
NO_HASH = bytes(HASH)
REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.ERANGE, errno.E2BIG, errno.ENODATA)
LINKS = "links"  # next to the tree, while it is made
MAX_SOON = 512 << 20  # bytes of new memory of a checkpoint that need not be durable
TOGETHER = 2048  # pages that are stored at once
LIKELY = 4  # checkpoints that are looked through first for what did not come
AGAIN = "export the checkpoint again; `pagurus checkpoint verify` on its host says whether it is damaged there"
REQUESTED_INTERVAL = 16 << 20  # bytes after which an import asks again whether there is room


class Importer:
    """One stream on its way in. `feed` the bytes, `finish`, then publish the row; or `abandon`. All of it blocks."""

    def __init__(
        self,
        places: Places,
        pages: PageStore,
        need: Callable[[], None],
        former: Former | None = None,
        base: PageLists | None = None,
    ) -> None:
        """`need` raises NoSpace while the disks have too little room; it is called repeatedly.

        `former`: the checkpoint is the next one of a sandbox whose raw images are these: they become the new ones, and
        the checkpoint is captured when it is finished, not durable. `base`: the stream may describe pages as changes to
        these lists, whose pages stay stored until then.
        """
        self._former = former
        self._base = base or {}
        self._came_pages: dict[bytes, bytes] = {}  # by their hash; not stored yet
        self._places, self._pages, self._need = places, pages, need
        self._unasked = 0  # bytes that came since
        self._reader = transfer.Reader()
        self._tree = transfer.Tree()
        self._images: list[ImageFile] = []
        self._lists: dict[str, list[PageList]] = {}
        self._sizes: dict[bytes, int] = {}  # announced contents
        self._files: set[bytes] = set()  # of these, those of files
        self._listed: set[bytes] = set()  # announced pages
        self._came: set[bytes] = set()  # contents of which parts came
        self._budget = 0  # bytes of parts that may still come
        self._undo = contextlib.ExitStack()
        self._work = places.trees / f"import-{secrets.token_hex(6)}"
        self._spool = self._work.with_suffix(".spool")
        self._sources = Sources(places, former)
        self._inodes: dict[int, int] = {}  # of files with content, by the number of the entry
        self.head: TransferHeader | None = None
        self.template: Template | None = None  # the head's, admitted by the caller of `feed` when it has come
        self.programs: dict[str, ProgramRow] = {}  # likewise
        self.new_pages = 0

    # ----------------------------------------------------------------- reading

    @property
    def received(self) -> int:
        return self._reader.received

    @property
    def pages(self) -> int:
        """Different memory pages in it."""
        return len(self._listed - {NO_HASH})

    @property
    def contents(self) -> int:
        """Different contents of files and process images."""
        return len(self._sizes)

    @property
    def new_contents(self) -> int:
        """Of these, those that came with the stream."""
        return len(self._came)

    @hinted(AGAIN)
    def feed(self, data: bytes) -> TransferHeader | None:
        """Take the next bytes. Returns the head when it has just come, so that the caller may refuse it."""
        arrived = None
        for kind, value in self._reader.feed(data):
            match kind:
                case FrameKind.HEAD:
                    self.head = arrived = value
                case FrameKind.ENTRY:
                    for entry in value:
                        self._tree.add(entry)
                        if entry.kind == "f" and entry.same_as < 0 and entry.size:
                            self._announce(entry.content, entry.size)
                            self._files.add(entry.content)
                case FrameKind.IMAGE:
                    for image in value:
                        self._images.append(image)
                        self._announce(image.content, image.size)
                case FrameKind.LIST:
                    self._lists.setdefault(value.name, []).append(value)
                    self._listed.update(_split(value.hashes))
                case FrameKind.PART:
                    self._part(value)
                case FrameKind.PAGES:
                    self._add_pages(value)
        return arrived

    def poll_first(self, checkpoints: list[str]) -> None:
        """For what does not come, in these."""
        self._sources.likely = checkpoints[:LIKELY]

    def needed(self) -> Have:
        """Of what a manifest announces: what is here already."""
        self._sources.poll(self._files)
        with self._pages.writing():
            existing = self._pages.existing(self._listed - {NO_HASH})
        return Have.of(
            existing, [*self._sources.result, *self._sources.images({item.content for item in self._images})]
        )

    def _announce(self, content: bytes, size: int) -> None:
        if self._sizes.setdefault(content, size) != size:
            raise Protocol("conflicting sizes for one content")
        self._budget += size + transfer.PART_SIZE

    def _open(self) -> None:
        """Where everything is made: two subvolumes. A crash leaves them to the next start, which removes them."""
        if self._work.exists():
            return
        self._need()
        for path in (self._work, self._spool):
            btrfs.create_subvolume(path)
            self._undo.callback(btrfs.delete_subvolume, path)
        self._undo.enter_context(self._pages.writing())

    def _part(self, part: transfer.ContentPart) -> None:
        size = self._sizes.get(part.content)
        self._budget -= part.size
        if size is None or part.offset + part.size > size or self._budget < 0:
            raise Protocol("unexpected content frame")
        self._open()
        self._capacity(part.size)
        data = transfer.unpack(part.packed, part.size)
        if len(data) != part.size:
            raise Protocol("truncated content frame")
        with closing(os.open(self._spooled(part.content), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)) as fd:
            if part.content not in self._came:
                os.ftruncate(fd, size)
                self._came.add(part.content)
            os.pwrite(fd, data, part.offset)

    def _capacity(self, size: int) -> None:
        self._unasked += size
        if self._unasked >= REQUESTED_INTERVAL:
            self._unasked = 0
            self._need()

    def _spooled(self, content: bytes) -> Path:
        return self._spool / content.hex()

    def _add_pages(self, data: bytes) -> None:
        if len(data) % PAGE:
            raise Protocol("truncated page frame")
        pages = (data[first : first + PAGE] for first in range(0, len(data), PAGE))
        came = {blake3(page).digest(): page for page in pages}
        if not came.keys() <= self._listed:
            raise Protocol("unexpected page frame")
        self._open()
        self._capacity(len(data))
        self._came_pages |= came
        if self._former is not None:
            self.new_pages = len(self._came_pages)
            if self.new_pages * PAGE > MAX_SOON:
                raise Conflict("too much has changed", hint="export it once it is durable")
        elif len(self._came_pages) >= TOGETHER:
            self._keep_pages()

    def _keep_pages(self) -> None:
        """Store those that came, many at once: each time the disk is waited for."""
        if self._came_pages:
            hashes = np.frombuffer(b"".join(self._came_pages), np.uint8).reshape(-1, HASH)
            data = memoryview(b"".join(self._came_pages.values()))
            self.new_pages += self._pages.add(HashedPages(data, hashes, np.ones(len(hashes), bool))).new_pages
            self._came_pages.clear()

    # ----------------------------------------------------------------- making

    @hinted(AGAIN)
    def finish(self) -> CheckpointRow:
        """Make everything of it, durably, but for its row, which is returned. Raises and leaves nothing otherwise.

        With `former`: not durably, and `confirm` is still to be done.
        """
        self._reader.finish()
        head = self.head
        if head is None:
            raise Protocol("the stream holds no checkpoint")
        if head.files != bool(self._tree.entries) or head.processes != bool(self._images):
            raise Protocol("the stream lacks content that its head announces")
        self._open()
        if self._former is None:
            self._keep_pages()
        self._sources.poll(self._files - self._came)
        row = self._row(head)
        with contextlib.ExitStack() as undo:
            undo.callback(self._remove, row.id)  # nothing half made stays, whatever ends it
            if head.files:
                self._make_files(row)
            if head.processes:
                self._make_dump(row)
            if self._former is None:
                self.confirm(row)
                btrfs.sync(self._places.snapshots)
            undo.pop_all()
        return row

    def confirm(self, row: CheckpointRow) -> None:
        """Raise unless its files hold what the stream said; keep their hashes. Without `former`, `finish` does it."""
        if row.files is not None:
            digest = hashing.digest(self._places.snapshot(row.files), None, limit=hashing.COMPLETE)
            self._compare(digest)
            row.stored_bytes += digest.save(self._places.digest(row.id))

    def _row(self, head: TransferHeader) -> CheckpointRow:
        if self.template is None:
            raise Protocol("the settings of the checkpoint were not admitted")
        now = time.time()
        return CheckpointRow(
            id=head.id,
            sandbox=head.sandbox,
            number=0,
            state=CheckpointState.DURABLE if self._former is None else CheckpointState.CAPTURED,
            verdict=head.verdict,
            label=head.label,
            turn=head.turn,
            files=head.id if head.files else None,
            dump=head.id if head.processes else None,
            ipc=head.ipc,
            created_at=head.created_at,
            started_at=now,
            captured_at=now,
            durable_at=now if self._former is None else None,
            full_bytes=head.full_bytes,
            dump_bytes=head.raw_bytes,
            template=self.template,
            composition=self.template.composition if self.template.docker else msgspec.UNSET,
            programs=self.programs if head.processes else {},
        )

    def _make_files(self, row: CheckpointRow) -> None:
        for part in (*TREE_PARTS, LINKS):
            (self._work / part).mkdir(mode=0o755)
        with safe_path.directory(self._work / LINKS) as links, safe_path.directory(self._work / "upper") as root:
            numbered.make(links, {n: entry.inode for n, entry in enumerate(self._tree.entries) if entry.inode})
            self._make_tree(root, links)
        walk.remove_path(self._work / LINKS)
        btrfs.snapshot(self._work, self._places.snapshot(row.id), readonly=True)
        row.files_bytes = sum(entry.size for entry in self._tree.entries)

    def _make_tree(self, root: int, links: int) -> None:
        """All entries, in their order. `links` has each file that gets another name, by the number of its entry."""
        entries = self._tree.entries
        shared = {entry.same_as for entry in entries if entry.same_as >= 0}
        here, above = os.dup(root), [0]
        try:
            for number, entry in enumerate(entries[1:], 1):
                while above[-1] != entry.parent:
                    here = _left(here, entries[above.pop()])
                name = os.fsdecode(entry.name)
                if entry.same_as >= 0:
                    os.link(str(entry.same_as), name, src_dir_fd=links, dst_dir_fd=here, follow_symlinks=False)
                elif entry.kind == "d":
                    os.mkdir(name, 0o700, dir_fd=here)  # its attributes when it is full
                    here = _moved(here, name, safe_path.NO_LINKS)
                    above.append(number)
                else:
                    self._make_entry(here, name, number, links)
                if number in shared and entry.kind != "d":
                    os.link(name, str(number), src_dir_fd=here, dst_dir_fd=links, follow_symlinks=False)
            while len(above) > 1:
                here = _left(here, entries[above.pop()])
            _finish_directory(here, entries[0])
        finally:
            os.close(here)

    def _make_entry(self, parent: int, name: str, number: int, links: int) -> None:
        entry = self._tree.entries[number]
        match entry.kind:
            case "f":
                made = numbered.move(links, number, parent, name)
                self._make_file(parent, name, number, 0 if made else os.O_CREAT | os.O_EXCL)
                return
            case "l":
                os.symlink(os.fsdecode(entry.target), name, dir_fd=parent)
            case "p":
                os.mkfifo(name, 0o600, dir_fd=parent)
            case "s":
                os.mknod(name, stat.S_IFSOCK | 0o600, dir_fd=parent)
            case "w":
                os.mknod(name, stat.S_IFCHR | 0o600, 0, dir_fd=parent)
        os.chown(name, entry.uid, entry.gid, dir_fd=parent, follow_symlinks=False)
        if entry.kind != "l":
            os.chmod(name, entry.mode, dir_fd=parent)
        _set_attributes(safe_path.named(parent, name), entry)
        os.utime(name, ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=parent, follow_symlinks=False)

    def _make_file(self, parent: int, name: str, number: int, create: int) -> None:
        entry = self._tree.entries[number]
        with closing(os.open(name, os.O_RDWR | create | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent)) as fd:
            if entry.size:
                self._fill(fd, entry)
                self._inodes[number] = os.fstat(fd).st_ino
            os.fchown(fd, entry.uid, entry.gid)
            os.fchmod(fd, entry.mode)
            _set_attributes(fd, entry)
            os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))

    def _fill(self, fd: int, entry: Entry) -> None:
        if entry.content in self._came:
            with closing(os.open(self._spooled(entry.content), os.O_RDONLY | os.O_CLOEXEC)) as source:
                fcntl.ioctl(fd, _FICLONE, source)
        elif not self._sources.clone(entry.content, fd):
            raise Conflict(
                "the stream lacks content that is not here either",
                hint="export it again for what this host has (`pagurus checkpoint have`), or in full",
            )
        if os.fstat(fd).st_size != entry.size:
            raise Protocol("content size does not match its file")

    def _compare(self, digest: hashing.Digest) -> None:
        """Every file holds what the manifest says, whatever its origin."""
        existing = dict(zip(digest.inodes.tolist(), (row.tobytes() for row in digest.contents), strict=True))
        for number, inode in self._inodes.items():
            if existing.get(inode) != self._tree.entries[number].content:
                raise Protocol(
                    f"{os.fsdecode(self._tree.path(number))[-200:]} does not match its hash",
                    hint="export it again by a version that is not older than this one",
                )

    def _make_dump(self, row: CheckpointRow) -> None:
        images: dict[str, bytes] = {}
        for image in self._images:
            if image.content in self._came:
                content = self._spooled(image.content).read_bytes()
            else:
                content = self._sources.image(image.content)
            if len(content) != image.size or blake3(content).digest() != image.content or image.name in images:
                raise Protocol(f"{image.name} does not match its hash")
            images[image.name] = content
        if self._former is not None:
            self._make_raw(row, images, self._former)
            return
        numbers, lists = dict[str, np.ndarray](), dict[str, np.ndarray]()
        for name, frames in self._lists.items():
            reported = PageListDelta.reported(frames)
            hashes = _split(reported.hashes.tobytes())
            existing = self._pages.existing(set(hashes) - {NO_HASH})
            missing = len(set(hashes) - {NO_HASH} - existing.keys())
            if missing:
                raise Conflict(
                    f"the stream lacks {missing} memory pages that are not here either",
                    hint="export it again for what this host has (`pagurus checkpoint have`), or in full",
                )
            result = np.array([existing.get(item, ZERO) for item in hashes], dtype=np.uint64)
            before, former = self._base.get(name, (result[:0], reported.hashes[:0]))
            reported.need(former)
            numbers[name], lists[name] = reported.over(before, result), reported.over(former, reported.hashes)
        _pass(images, {name: len(item) for name, item in numbers.items()})
        count = sum(len(item) for item in numbers.values())
        pages = {name: dumpfile.differences(item) for name, item in numbers.items()}
        raw = count * PAGE + sum(len(content) for content in images.values())
        dump = DumpFile(images=images, pages=pages, page_count=count, raw_bytes=raw)
        row.dump_bytes = raw
        row.stored_bytes += dumpfile.publish(self._places.packed(row.id), dump)
        self._pages.lists.remember(row.id, lists)

    def _make_raw(self, row: CheckpointRow, images: dict[str, bytes], former: Former) -> None:
        """As a capture leaves them: they are packed later."""
        before, lists = former.hashed.hashes(), dict[str, np.ndarray]()
        for name, frames in self._lists.items():
            reported = PageListDelta.reported(frames)
            reported.need(had := before.get(name, reported.hashes[:0]))
            lists[name] = reported.over(had, reported.hashes)
        _pass(images, {name: len(item) for name, item in lists.items()})
        former.become(images, lists, self._came_pages)
        former.directory.rename(self._places.dump(row.id))
        row.dump_bytes = sum(map(len, lists.values())) // HASH * PAGE + sum(map(len, images.values()))

    # ----------------------------------------------------------------- the end

    def close(self) -> None:
        """Remove what was only needed on the way. Call it when the row is written, and when it is not."""
        self._undo.close()

    def abandon(self) -> None:
        """Remove everything that was made."""
        if self.head is not None:
            self._remove(self.head.id)
        self.close()

    def _remove(self, checkpoint: str) -> None:
        for path in (self._places.packed(checkpoint), self._places.digest(checkpoint)):
            path.unlink(missing_ok=True)
        shutil.rmtree(self._places.dump(checkpoint), ignore_errors=True)
        btrfs.delete_subvolume(self._places.snapshot(checkpoint))


def _pass(images: dict[str, bytes], pages: dict[str, int]) -> None:
    try:
        gate.imported(images, pages)
    except gate.ImageRefused as refusal:
        raise Protocol(f"its processes are of no sandbox: {refusal.reason}", hint=refusal.hint) from None


def _split(hashes: bytes) -> list[bytes]:
    return [hashes[first : first + HASH] for first in range(0, len(hashes), HASH)]


def _moved(here: int, name: str, resolve: int) -> int:
    """The directory `name` instead of `here`, opened."""
    there = safe_path.openat2(here, name, os.O_RDONLY | os.O_DIRECTORY, resolve=resolve)
    os.close(here)
    return there


def _left(here: int, entry: Entry) -> int:
    """The directory above `here`, which is full. No other process sees this tree: the way up is the way that led
    here."""
    _finish_directory(here, entry)
    return _moved(here, "..", safe_path.UPWARDS)


def _set_attributes(of: int | str, entry: Entry) -> None:
    for key, value in entry.extended.items():
        try:
            os.setxattr(of, key, value, follow_symlinks=isinstance(of, int))
        except OSError as error:
            if error.errno not in REFUSED:
                raise
            raise Protocol(f"an extended attribute {key[:40]!r} that the kernel refuses: {error.strerror}") from None


def _finish_directory(fd: int, entry: Entry) -> None:
    os.fchown(fd, entry.uid, entry.gid)
    os.fchmod(fd, entry.mode)
    _set_attributes(fd, entry)
    os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
