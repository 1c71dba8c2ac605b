"""How one checkpoint is taken, and how it is made durable. The mechanics of one job of the engine.

::

    verdict ── files only, no other process alive ──▶ mark ▸ snapshot
            ── files only, with survivors ─────▶ sync ▸ freeze ▸ look again ▸ mark ▸ snapshot ▸ thaw
            │                                                     └─ processes moved: a dump after all
            ── processes, pid 1 alone ─────────▶ mark (▸ snapshot): "fresh", a new init is all it takes
            ── processes or both ──────────────▶ sync ▸ dump ▸ frozen: mark (▸ snapshot) ▸ thaw

Guarantee (I2, I4): files and processes of a checkpoint are of one instant: the snapshot is taken
while nothing in the sandbox can run. When anything fails after a mark, the sandbox is tainted, so
that the next turn owes the same again: a failed checkpoint is never silently lost.

The account: `stored_bytes` is what the checkpoint added to the disk: new compressed pages and images,
plus the data extents and the tree blocks of its snapshot that no earlier one has. `full_bytes` is
what a full dump and a full copy of the upper would have added at that turn, by the same measure; a
checkpoint without a dump counts the latest full process images of its line (0 while the sandbox is
fresh). Of an upper beyond MAX_EXACT the size is carried on by what each checkpoint adds.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import select
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from daemon.catalogue import CheckpointRow
from daemon.verdict.assess import poll
from daemon.verdict.ignore import NOTHING, IgnoreRuleSet
from daemon.verdict.judge import judge
from sandbox import durable, procfs
from sandbox.container import unstoppable
from sandbox.container.binds import need_in_place
from sandbox.container.unstoppable import HELD_TIMEOUT
from sandbox.content import dumpfile, layers
from sandbox.content.dumpfile import HashedImages
from sandbox.content.pages import PageCollection
from sandbox.criu import recent
from sandbox.criu.carried import frozen
from sandbox.criu.dump import CapturesFull
from sandbox.criu.open_files import changed
from sandbox.errors import CheckpointFailed, NoSpace, SandboxDead
from sandbox.messages import Verdict
from sandbox.tree import btrfs, hashing
from sandbox.tree.extents import added_bytes
from sandbox.tree.pool import BtrfsPool

if TYPE_CHECKING:
    from ebpf.inspector import Inspector
    from sandbox.container.container import Container
    from sandbox.criu.checkpointer import Checkpointer

log = logging.getLogger("pagurus.capture")

MEMORY_RETAINED = 256 << 20  # bytes of the host's memory that no capture may take
SPACE_RETAINED = 64 << 20  # bytes that no checkpoint may take: what the host needs to record that the disk is full
GONE = ".gone-"  # prefix of raw images that are being removed
MAX_FREEZE = 5.0  # seconds
GATHER = 0.05  # seconds for which a sync waits for company; nothing waits for durability by default
MAX_EXACT = 64 << 20  # bytes of an upper up to which its size is measured again at each checkpoint


class NeedsDump(Exception):
    """A checkpoint of files alone found that processes moved as well."""


@dataclass(frozen=True)
class Places:
    """Where content lives. `dumps` need not survive a reboot, the rest must."""

    trees: Path  # one subvolume for each living sandbox
    snapshots: Path  # one read-only snapshot for each checkpoint that captured files
    dumps: Path  # raw process images, until they are stored
    stored: Path  # packed process images

    def tree(self, name: str) -> Path:
        return self.trees / name

    def snapshot(self, checkpoint: str) -> Path:
        return self.snapshots / checkpoint

    def dump(self, checkpoint: str) -> Path:
        return self.dumps / checkpoint

    def packed(self, checkpoint: str) -> Path:
        return self.stored / f"{checkpoint}{dumpfile.SUFFIX}"

    def digest(self, checkpoint: str) -> Path:
        """The hashes of its file snapshot."""
        return self.stored / f"{checkpoint}{hashing.SUFFIX}"


class Capturer:
    """Takes and stores checkpoints. One for all sandboxes of a host."""

    def __init__(self, pool: BtrfsPool, places: Places, checkpointer: Checkpointer, inspector: Inspector) -> None:
        self.pool = pool
        self.places = places
        self.checkpointer = checkpointer
        self.inspector = inspector
        self._sync = _GroupSync(places.snapshots)
        self._readers: dict[str, int] = {}  # dumps in use by restores
        self._unwanted: set[str] = set()  # of these, stored since

    async def take(
        self,
        container: Container,
        tree: str,
        row: CheckpointRow,
        parent: CheckpointRow,
        *,
        busy: bool,
        rules: IgnoreRuleSet = NOTHING,
        hold: bool = False,
    ) -> None:
        """Fill `row` with a captured state. On any error the content is gone and the sandbox tainted.

        `busy` says that a command is under way, so that pid 1 is not alone even if it looks so. `rules`: what is
        ignored when a snapshot of the files alone looks again whether processes moved. `hold`: the sandbox stays
        frozen, unless this raises.
        """
        self.need()
        row.started_at = time.time()
        began = time.monotonic()
        row.files, row.dump, row.ipc = parent.files, parent.dump, row.ipc or parent.ipc
        row.files_bytes, row.dump_bytes, row.held = parent.files_bytes, parent.dump_bytes, parent.held
        tasks = set(container.tasks())
        alone = not busy and tasks <= {container.init_pid}
        fresh = not busy and not row.ipc and tasks - container.excluded.pids() <= {container.init_pid}
        try:
            if row.verdict.processes and not fresh:
                await self._dump(container, tree, row, hold)
            elif alone:
                if hold:
                    container.cgroup.freeze()
                await asyncio.to_thread(self._snapshot_alone, container, tree, row)
            else:
                await asyncio.to_thread(self._snapshot_frozen, container, tree, row, rules, hold)
        except BaseException as error:  # also the caller's cancellation: nothing half taken stays, and it stays pending
            if hold:
                with contextlib.suppress(OSError):  # there may be no group any more
                    await asyncio.shield(asyncio.to_thread(frozen.thaw, container, self.inspector.notes))
            escalates = isinstance(error, NeedsDump)
            processes = row.verdict.processes or escalates
            if not escalates:
                self.taint(container, f"a checkpoint failed: {error}", files=True, processes=processes)
            await asyncio.shield(asyncio.to_thread(self.discard, row.id))
            raise
        row.total_ms = 1000 * (time.monotonic() - began)
        row.captured_at = time.time()

    def need(self) -> None:
        """Raise NoSpace while there is too little for one more checkpoint or sandbox, before the disk is full."""
        self.pool.need()
        need_space(self.places.stored)

    def taint(self, container: Container, reason: str, *, files: bool, processes: bool) -> None:
        self.inspector.taint(container.cgroup.id, reason[:200], files=files, processes=processes)

    # ----------------------------------------------------------------- the three ways

    def _snapshot_alone(self, container: Container, tree: str, row: CheckpointRow) -> None:
        """Pid 1 is alone and only the daemon starts anything: nothing can run."""
        if row.verdict.processes:
            row.dump, row.dump_bytes, row.held = None, 0, None
            self.inspector.mark(container.cgroup.id, files=False, processes=True)
        else:
            _need_held(container, row)
        if row.verdict.files:
            self._snapshot(container, tree, row)
        if row.verdict.processes:
            _need_life(container)

    def _snapshot_frozen(
        self, container: Container, tree: str, row: CheckpointRow, rules: IgnoreRuleSet, hold: bool
    ) -> None:
        """Of the files, while nothing runs. Of processes too, where only such live as are no part of checkpoints."""
        btrfs.flush(self.places.tree(tree))  # takes the flush out of the frozen window
        began = time.monotonic()
        container.cgroup.freeze()
        try:
            _await_frozen(container)
            others = set(container.retained_tasks()) - {container.init_pid}
            if row.verdict.processes:
                row.ipc = self.inspector.ipc_objects(container.cgroup.id) != 0
                if others or row.ipc:
                    raise NeedsDump("there are processes or IPC objects since the verdict")
                row.dump, row.dump_bytes, row.held = None, 0, None
                self.inspector.mark(container.cgroup.id, files=False, processes=True)
            elif poll(self.inspector, container, rules)[1].verdict.processes:
                raise NeedsDump("processes moved since the verdict")
            else:
                _need_held(container, row)
            if row.verdict.files:
                self._snapshot(container, tree, row)
            if row.verdict.processes:
                _need_life(container)
        finally:
            if not hold:
                frozen.thaw(container, self.inspector.notes)
            row.frozen_ms = 1000 * (time.monotonic() - began)

    async def _dump(self, container: Container, tree: str, row: CheckpointRow, hold: bool) -> None:
        row.ipc = row.ipc or self.inspector.read(container.cgroup.id).ipc_changes > 0

        def on_stopped() -> None:
            moved = judge(self.inspector.read(container.cgroup.id)).verdict
            row.verdict = Verdict.of(files=row.verdict.files or moved.files, processes=True)
            if row.verdict.files:
                if row.files == row.id:  # of a dump that is tried again, or before CRIU linked a file
                    btrfs.delete_subvolume(self.places.snapshot(row.id))
                self._snapshot(container, tree, row)

        def on_frozen() -> None:  # what CRIU did in the tasks until now is no effect of theirs
            self.inspector.mark(container.cgroup.id, files=False, processes=True)

        target = max(row.dump_bytes, container.cgroup.anonymous())  # as much as the last one took, or it has grown to
        expected = self.checkpointer.expected_bytes(container, target)
        try:
            _need_memory(self.places.dumps, target, expected)
        except NoSpace:
            await self._make_room()
            _need_memory(self.places.dumps, target, expected)
        try:
            into = self.places.dump(row.id)
            captured = await self.checkpointer.capture(
                container, into, on_stopped=on_stopped, on_frozen=on_frozen, hold=hold
            )
        except CapturesFull as error:
            await self._make_room()  # for the next one
            target = await asyncio.to_thread(_resident, container.tasks())
            free = shutil.disk_usage(self.places.dumps).free
            raise NoSpace(
                f"the memory for captures was full: {free >> 20} MiB are free now, "
                f"the processes hold {target >> 20} MiB",
                hint="wait until checkpoints are durable, or give the host more memory",
                sandbox=container.spec.id,
            ) from error
        row.dump = row.id
        row.frozen_ms = captured.frozen_ms
        row.dump_bytes = captured.raw_bytes
        row.held = captured.held

    async def _make_room(self) -> None:
        """Let go of the raw images that are only kept for restores."""
        gone = self.checkpointer.recent.make_room(busy=self.is_read)
        await asyncio.to_thread(recent.remove, gone)
        await asyncio.to_thread(self.checkpointer.make_room)

    def _snapshot(self, container: Container, tree: str, row: CheckpointRow) -> None:
        need_in_place(container)
        self.inspector.mark(container.cgroup.id, files=True, processes=False)
        btrfs.snapshot(self.places.tree(tree), self.places.snapshot(row.id), readonly=True)
        row.files = row.id

    # ----------------------------------------------------------------- afterwards

    async def hash(self, row: CheckpointRow, before: str | None) -> HashedImages:
        """Hash the process images of `row`: the first half of storing them. `before`: the dump before this one."""
        async with contextlib.AsyncExitStack() as held:
            former = None if before is None else await held.enter_async_context(self.reading(before))
            return await asyncio.to_thread(self._hash, row.id, former, before or "")

    def _hash(self, dump: str, former: Path | None, before: str) -> HashedImages:
        lists, like = self.checkpointer.pages.lists, None
        if layers.present(self.places.dump(dump)):
            former = None  # what is the same is known already
        if former is not None and former.is_dir() and (existing := lists.find(before)) is not None:
            like = dumpfile.hashed(former, existing=existing)
        hashed = dumpfile.hashed(self.places.dump(dump), like, cache=lists)
        lists.remember(dump, hashed.hashes())
        return hashed

    async def pack(self, row: CheckpointRow, hashed: HashedImages) -> None:
        """Store the process images of `row`; durable on return."""
        pages, into = self.checkpointer.pages, self.places.packed(row.id)
        stored = await asyncio.to_thread(dumpfile.pack, hashed, into, pages, reserve=SPACE_RETAINED, owner=row.owner)
        row.stored_bytes += stored.new_bytes
        row.images_bytes = stored.new_bytes
        row.dump_bytes = stored.raw_bytes

    async def unpacked(self, dump: str) -> str:
        """What keeps a checkpoint without raw images from being durable; "" when all of `dump` is packed and synced."""
        return await asyncio.to_thread(self._unpacked, dump)

    def _unpacked(self, dump: str) -> str:
        packed = self.places.packed(dump)
        if not packed.exists():
            return f"its process images {dump}"
        try:
            dumpfile.verify(packed, self.checkpointer.pages)
        except CheckpointFailed as error:
            return f"its process images {dump} are damaged: {error.message}"
        durable.sync(packed)  # its packer may have died before its name was on the disk
        durable.sync(packed.parent)
        return ""

    async def sync_files(self, row: CheckpointRow, parent: CheckpointRow) -> None:
        """Make the snapshot of `row` survive power loss, together with whatever else waits for that, and account."""
        if row.files == row.id:
            await self._sync.wait()
            await asyncio.to_thread(self._account_files, row, parent)
        row.full_bytes = row.dump_bytes + row.files_bytes

    def _account_files(self, row: CheckpointRow, parent: CheckpointRow) -> None:
        snapshot = self.places.snapshot(row.id)
        before = self.places.snapshot(parent.files) if parent.files is not None else None
        added = added_bytes(snapshot, before)
        row.stored_bytes += added
        exact = before is None or parent.files_bytes < MAX_EXACT
        row.files_bytes = added_bytes(snapshot, None) if exact else parent.files_bytes + added

    async def collect_pages(self) -> PageCollection:
        """Free the pages to which no packed dump refers, concurrently with everything else. Nothing, if one of them
        cannot be read."""

        def marks() -> Iterator[np.ndarray]:
            return dumpfile.references(sorted(self.places.stored.rglob(f"*{dumpfile.SUFFIX}")))

        return await asyncio.to_thread(self.checkpointer.pages.collect, marks)

    def process_images(self, dump: str) -> Path:
        """Where the process images of `dump` are best read from."""
        raw = self.places.dump(dump)
        if raw.is_dir():
            return raw
        return self.checkpointer.recent.find(dump) or self.places.packed(dump)

    def is_read(self, dump: str) -> bool:
        """Whether a restore reads the process images of `dump`."""
        return dump in self._readers

    @contextlib.asynccontextmanager
    async def reading(self, dump: str) -> AsyncIterator[Path]:
        """Holds the process images of `dump` while a restore reads them."""
        self._readers[dump] = self._readers.get(dump, 0) + 1
        try:
            yield self.process_images(dump)
        finally:
            self._readers[dump] -= 1
            if not self._readers[dump]:
                del self._readers[dump]
                if dump in self._unwanted:
                    await self.release(dump)

    async def release(self, dump: str) -> None:
        """The raw images are stored, so they may go once they are not being read; the newest ones are kept for
        restores."""
        if dump in self._readers:
            self._unwanted.add(dump)
            return
        self._unwanted.discard(dump)
        gone = self.checkpointer.recent.keep(dump, self.places.dump(dump), busy=self.is_read)
        await asyncio.to_thread(recent.remove, gone)

    def discard(self, checkpoint: str, *, files: bool = True, images: bool = True) -> None:
        """Remove the content of a checkpoint that was never published, or is published no more: all, or half of it."""
        if images:
            shutil.rmtree(self.places.dump(checkpoint), ignore_errors=True)
            self.checkpointer.recent.drop(checkpoint)
            self.places.packed(checkpoint).unlink(missing_ok=True)
        if files:
            self.places.digest(checkpoint).unlink(missing_ok=True)
            snapshot = self.places.snapshot(checkpoint)
            if snapshot.exists():
                self.remove_tree(snapshot)

    def writable(self, files_of: str | None, tree: str) -> None:
        """Make the tree `tree` with the content of a checkpoint's files (None: empty)."""
        target = self.places.tree(tree)
        if self.pool.tight():
            btrfs.sync(self.places.trees)  # what was deleted a moment ago is free only when that is committed
            if self.pool.tight() and self.pool.extend():
                log.warning("the pool is full: it grows by its reserve, so that the restore can be done")
        if files_of is None:
            self.pool.create_tree(target)
            return
        try:
            btrfs.snapshot(self.places.snapshot(files_of), target, readonly=False)
        except NoSpace:
            btrfs.sync(self.places.trees)
            self.pool.extend()
            btrfs.snapshot(self.places.snapshot(files_of), target, readonly=False)

    def remove_tree(self, path: Path) -> None:
        """Delete a subvolume; on a full disk with the help of the reserve."""
        try:
            btrfs.delete_subvolume(path)
        except OSError as error:
            if error.errno != errno.ENOSPC or not self.pool.extend():
                raise
            btrfs.delete_subvolume(path)


class _GroupSync:
    """One file-system sync for all who ask while the previous one runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next: asyncio.Future[None] | None = None
        self._busy = asyncio.Lock()

    async def wait(self) -> None:
        """Returns when everything written before the call is on the disk."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._run())
        await asyncio.shield(self._next)

    async def _run(self) -> None:
        async with self._busy:
            await asyncio.sleep(GATHER)
            self._next = None  # a caller that comes now needs the next one
            await asyncio.to_thread(btrfs.sync, self._path)


def _await_frozen(container: Container) -> None:
    """Freezing is asynchronous: the kernel says in ``cgroup.events`` when every task has stopped."""
    with open(container.cgroup.path / "cgroup.events", "rb", buffering=0) as events:
        change = select.poll()
        change.register(events, select.POLLPRI)
        began, parents = time.monotonic(), None
        while b"frozen 1" not in os.pread(events.fileno(), 4096, 0):
            passed = time.monotonic() - began
            if passed > HELD_TIMEOUT:
                observed = unstoppable.stuck(container.tasks())
                parents = {item for item in observed if item.vforked} & (observed if parents is None else parents)
                if (parents and passed > 2 * HELD_TIMEOUT) or passed > MAX_FREEZE:
                    raise unstoppable.blamed(container, parents or observed)
            change.poll(100)


def _resident(pids: list[int]) -> int:
    """Bytes of memory of these processes that a dump may have to hold."""
    result = 0
    for pid in pids:
        for kind in ("RssAnon", "RssShmem"):
            result += int((procfs.status(pid, kind) or "0 kB").split()[0]) << 10
    return result


def _need_held(container: Container, row: CheckpointRow) -> None:
    """Raise unless the process images that `row` keeps can be restored over the files as they are."""
    if row.dump is not None and (result := changed(container, row.held)):
        raise NeedsDump(f"held by a process that lives on: {result[0]}")


def _need_life(container: Container) -> None:
    """Raise unless pid 1 lives and is not about to die.

    A program that kills a complete sandbox from outside may be seen between the end of its services and the end of
    pid 1. What is left then must not become a checkpoint: it is not what the agent left behind.
    """
    if not container.alive:
        raise SandboxDead("it was killed before its state was captured", hint="restore it", sandbox=container.spec.id)


def need_space(path: Path, target: int = 0) -> None:
    """Raise NoSpace, saying how much is missing, unless `target` bytes and a reserve are free at `path`."""
    status = shutil.disk_usage(path)
    missing = target + SPACE_RETAINED - status.free
    if missing > 0:
        raise NoSpace(
            f"{path} has {status.free >> 20} MiB free, {missing / (1 << 20):.1f} MiB more are needed",
            hint="remove sandboxes or checkpoints, or enlarge the disk; older checkpoints are whole",
        )


def _need_memory(dumps: Path, target: int, expected: int) -> None:
    """Raise NoSpace unless `dumps`, a tmpfs, can take `target` bytes, and the host's memory the `expected` ones.

    The kernel's out-of-memory killer would end programs of sandboxes that have nothing to do with this capture.
    """
    need_space(dumps, target)
    missing = expected + MEMORY_RETAINED - procfs.memory()["MemAvailable"]
    if missing > 0:
        raise NoSpace(
            f"the host's memory is too full for the capture: {missing / (1 << 20):.1f} MiB more are needed",
            hint="end sandboxes, or give the host more memory; the sandbox runs on",
        )


def failure(error: BaseException) -> CheckpointFailed | NoSpace | SandboxDead:
    """What a failed capture means to the user of the sandbox."""
    if isinstance(error, NoSpace | CheckpointFailed | SandboxDead):
        return error
    if isinstance(error, OSError) and error.errno == 28:
        return NoSpace(f"no space left for the checkpoint: {error}", hint="remove sandboxes or checkpoints")
    return CheckpointFailed(str(error) or type(error).__name__, hint="the sandbox runs on; the next turn tries again")
