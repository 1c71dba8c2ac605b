"""Checkpoint and restore of the processes of a sandbox: the main path, in order.

Guarantee: a capture is complete or CheckpointFailed is raised and the sandbox runs on; a stored dump is durable when
`store` returns; `restore` gives a running tree (with `verify`, one that equals the checkpoint) or leaves no process.

::

    capture = syncfs ▸ freeze ▸ dump to tmpfs, on_stopped ▸ on_frozen ▸ thaw  (dump.py over criu.py)
            ▸ without the processes that are apart                        (prune.py)
    store   = pages by content ▸ dump file, synced                        (pages.py, dumpfile.py; after the thaw)
    restore = images to tmpfs ▸ adapt ▸ CRIU in the cgroup ▸ attach, held (restore.py)
            ▸ POSIX locks ▸ stops ▸ let run                               (locks.py, amend.py)
    verify  = before the stops: dump again ▸ compare                      (digest.py)
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import itertools
import logging
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandbox import paths
from sandbox.container.identity import machine_id
from sandbox.container.shim import ShimError, going_first
from sandbox.content import dumpfile
from sandbox.content.pages import PageStore
from sandbox.criu import dump, equality, inotify, prune, rewrite, service_groups
from sandbox.criu import restore as restoring
from sandbox.criu.bases import RestoreBases
from sandbox.criu.carried import amend, inject, locks, memory
from sandbox.criu.gate import gate
from sandbox.criu.recent import RecentImages
from sandbox.criu.tracking import mapping_flags, userfault
from sandbox.criu.tracking.tracker import Tracker, UnknownPages
from sandbox.errors import CheckpointFailed, NotEqual, PagurusError, RestoreFailed, Unsupported
from sandbox.libc import file_system, library
from sandbox.tree import btrfs, facts

if TYPE_CHECKING:
    from sandbox.container.container import Container

log = logging.getLogger("pagurus")

TMPFS_MAGIC = 0x01021994
TRACKED_SHARE = 4  # at most one part in so many of the file system is held for captures to come
PAUSES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)  # seconds before a dump that a passing state failed is tried again
MIN_RESUMED = 8 << 20  # bytes of a process; less is read by the next capture sooner than the process is stopped again
LEAN = "-lean"  # suffix of images without the memory that is written after CRIU


@dataclass
class RestoreReport:
    """A restored sandbox. `differences` is empty when it was verified."""

    init_pid: int
    total_ms: float
    verified: bool = False
    differences: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)  # far ends, outside the sandbox, of TCP connections that ended


class Checkpointer:
    """See the module. One per state directory (the page store is locked)."""

    def __init__(
        self,
        *,
        state: Path | None = None,
        run: Path | None = None,
        notes: int | None = None,
        share_pages: bool = False,
        track: bool = False,
        mappings: int | None = None,
    ):
        """`notes`: descriptor of the map in which the inspector notes when waits end; it stays the caller's.
        `share_pages`: owners share memory pages on the disk. `track`: captures hold only the pages that were
        written since the one before, where the kernel knows (:mod:`sandbox.criu.tracking`). `mappings`: descriptor
        of the inspector's program that lists mappings; it stays the caller's."""
        self._run = run or paths.run()
        self._notes = notes
        self.pages = PageStore((state or paths.state()) / "pages", shared=share_pages)
        self._warm: dict[str, dump.Ready] = {}
        self._waiting: dict[str, restoring.WarmCriu] = {}  # for the next restore
        self._warming: dict[str, asyncio.Task[None]] = {}
        self._readying: dict[str, asyncio.Task[None]] = {}
        self._dropping: set[asyncio.Future[None]] = set()
        self._forgotten: set[str] = set()  # sandboxes whose directory of restores may go
        self._tracks = track and not userfault.missing()
        self._mappings = mappings if self._tracks else None
        self._letters = b""
        self._trackers: dict[str, Tracker] = {}
        self._watched: dict[str, list[str]] = {}  # sandbox -> paths that its processes watch, as last seen
        self._numbers = itertools.count(1)
        self.cache = self._run / "criu"  # lies over /run for CRIU
        self.captures = self._run / "captures"
        self.recent = RecentImages(self.captures / ".recent")
        # Each CRIU process sees one directory, on the same tmpfs: images are linked or moved, not copied.
        self._restores = self.captures / ".restores"  # of a sandbox, with a directory for each of its restores
        self._dumps = self.captures / ".dumps"  # of one dump
        self._layers = self.captures / ".layers"  # of each sandbox, the pages of its last capture
        self._bases = RestoreBases(self.captures / ".bases")

    async def prepare(self) -> None:
        """Have the directories on a tmpfs. Call it before the first sandbox is made: shims copy the mounts."""
        await asyncio.to_thread(self._prepare)

    def _prepare(self) -> None:
        for directory in (self.cache, self.captures):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Captures want a tmpfs of their own also where /run is one: with its size, and with large pages.
            captures = directory == self.captures
            if not (os.path.ismount(directory) if captures else file_system(directory) == TMPFS_MAGIC):
                _mount_tmpfs(directory)
        self.cache.chmod(0o711)  # it lies over /run for CRIU, which finds sources of mounts with a sandbox's rights
        for directory in (self._restores, self._dumps, self._layers, self.captures / ".bases"):
            shutil.rmtree(directory, ignore_errors=True)  # of a daemon that was killed
            directory.mkdir(mode=0o700)
        self.recent.prepare()
        if self._mappings is not None:
            try:
                self._letters = mapping_flags.learned(self._mappings)
            except OSError as error:  # then CRIU counts the pages of processes, which takes longer
                log.warning("the flags of mappings cannot be read: %s", error)

    # ---------------------------------------------------------------- capture

    def expected_bytes(self, container: Container, size: int) -> int:
        """As long as reading so many bytes the next capture takes, of a sandbox with `size` bytes of memory."""
        tracker = self._trackers.get(container.spec.id)
        return size if tracker is None else tracker.expected_bytes(size)

    async def capture(
        self,
        container: Container,
        dest: Path,
        *,
        on_stopped: Callable[[], None] | None = None,
        on_frozen: Callable[[], None] | None = None,
        hold: bool = False,
    ) -> dump.Dump:
        """Capture into `dest` (must not exist). `on_stopped` and `on_frozen` run on worker threads, see the module.

        `on_stopped` runs again, from the start, when the dump has to be tried again.
        With `hold` the sandbox stays frozen, also when this raises: the caller thaws it.
        """
        began = time.monotonic()
        await asyncio.to_thread(_begin, container.tree, dest)
        try:
            done = await self._dump(container, dest, on_stopped, on_frozen, hold)
            if done.excluded:
                done.raw_bytes = await asyncio.to_thread(_without, dest, done.excluded)
            await asyncio.to_thread(_check, container, dest)
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, dest, ignore_errors=True)
            if (tracker := self._trackers.get(container.spec.id)) is not None:
                tracker.lose()
            raise
        if not hold:
            self._warm_later(container)
        done.total_ms = (time.monotonic() - began) * 1e3
        return done

    async def _dump(
        self,
        container: Container,
        dest: Path,
        on_stopped: Callable[[], None] | None,
        on_frozen: Callable[[], None] | None,
        hold: bool,
    ) -> dump.Dump:
        tried: set[type[PagurusError]] = set()
        pauses = iter(PAUSES)
        while True:
            existing = self._watched.get(container.spec.id, [])
            process = await self._ready(container, existing, outside=dump.NewObjects in tried, hold=hold)
            tracker = self._tracker_of(container) if process.tracks else None
            try:
                if tracker is not None:
                    await asyncio.to_thread(tracker.prepare, container, process.images)
                done = await dump.dump(
                    container,
                    dest,
                    process,
                    on_stopped=on_stopped,
                    on_frozen=on_frozen,
                    tracker=tracker,
                )
                if tracker is not None:
                    await asyncio.to_thread(tracker.finish, dest)
                    await asyncio.to_thread(self._bound, tracker)
                return done
            except (dump.UnknownWatch, dump.NewObjects, UnknownPages, dump.TransientState) as error:
                pause = next(pauses, None) if isinstance(error, dump.TransientState) else 0.0
                if type(error) in tried or pause is None:
                    raise
                if not isinstance(error, dump.TransientState):  # the others can be helped once
                    tried.add(type(error))
                await asyncio.sleep(pause)
                if tracker is not None:
                    tracker.lose()
                if isinstance(error, dump.UnknownWatch):
                    result = await asyncio.to_thread(inotify.find, container)
                    if set(result) <= set(existing):
                        raise  # gone, or too far away
                    self._watched[container.spec.id] = result
            await asyncio.to_thread(_empty, dest)

    async def warm(self, container: Container) -> None:
        """Have the CRIU processes of the next dump and of the next restore ready. Optional."""
        name = container.spec.id
        started = [tasks[name] for tasks in (self._warming, self._readying) if name in tasks]
        await asyncio.gather(*started, return_exceptions=True)
        await self._warm_dump(container)
        await self._warm_restore(container)

    async def warm_dump(self, container: Container, *, hold: bool = False) -> None:
        """Have the CRIU process ready of the next dump, which leaves the sandbox frozen if `hold`. Optional."""
        await asyncio.gather(*filter(None, [self._warming.get(container.spec.id)]), return_exceptions=True)
        await self._warm_dump(container, hold=hold)

    async def _warm_dump(self, container: Container, *, hold: bool = False) -> None:
        retained = self._warm.get(container.spec.id)
        watched = self._watched.get(container.spec.id, [])
        if retained is None or not retained.fits(container, watched) or retained.holds != hold:
            made = await self._start_dump(container, watched, hold=hold)
            if (retained := self._warm.get(container.spec.id)) is not None:
                retained.close()
            self._warm[container.spec.id] = made

    async def _warm_restore(self, container: Container) -> None:
        retained = self._waiting.get(container.spec.id)
        if retained is None or not retained.worker.alive():
            with contextlib.suppress(ShimError):  # the shim of an older version
                made = await restoring.wait(container, self.cache, self._images_of(container), self._notes)
                if (retained := self._waiting.get(container.spec.id)) is not None:
                    retained.worker.close()
                self._waiting[container.spec.id] = made

    def _warm_later(self, container: Container) -> None:
        async def attempt(step: Callable[[Any], Awaitable[None]]) -> None:
            with contextlib.suppress(PagurusError, OSError):  # the sandbox may be gone; the next dump will say so
                await step(container)

        name = container.spec.id
        self._warming[name] = asyncio.create_task(attempt(self._warm_dump))
        if name not in self._readying or self._readying[name].done():
            self._readying[name] = asyncio.create_task(attempt(self._warm_restore))

    async def _warmed(self, sandbox: str) -> dump.Ready | None:
        """Take the warm process for a dump of a sandbox, once one that is being started has started."""
        task = self._warming.pop(sandbox, None)
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)
        return self._warm.pop(sandbox, None)

    async def _waited(self, sandbox: str) -> restoring.WarmCriu | None:
        """Likewise, for a restore."""
        task = self._readying.pop(sandbox, None)
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)
        return self._waiting.pop(sandbox, None)

    async def _ready(self, container: Container, watched: list[str], *, outside: bool, hold: bool) -> dump.Ready:
        retained = await self._warmed(container.spec.id)
        if retained is not None and retained.fits(container, watched) and retained.holds == hold and not outside:
            return retained
        if retained is not None:
            retained.close()
        return await self._start_dump(container, watched, outside=outside, hold=hold)

    async def _start_dump(
        self, container: Container, watched: list[str], *, outside: bool = False, hold: bool = False
    ) -> dump.Ready:
        """With `hold` our plugin freezes the sandbox at the end."""
        images = self._dumps / f"{container.spec.id}-{os.getpid()}-{next(self._numbers)}"
        images.mkdir(mode=0o700)
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as passed:
            undo.callback(shutil.rmtree, images, ignore_errors=True)
            freezer = passed.enter_context(restoring.RestoreHold(container).file()) if hold else None
            ready = await dump.ready(
                container,
                self.cache,
                images,
                outside=outside,
                notes=self._notes,
                freezer=freezer,
                mappings=self._mappings,
                watched=watched,
                tracks=self._tracks,
            )
            undo.pop_all()
        return dataclasses.replace(ready, holds=hold)

    def _tracker_of(self, container: Container) -> Tracker:
        name = container.spec.id
        tracker = self._trackers.pop(name, None) or Tracker(
            self._layers / f"{name}-{next(self._numbers)}", self._letters
        )
        self._trackers[name] = tracker  # the last one: it was used last
        return tracker

    @going_first()
    def _bound(self, used: Tracker) -> None:
        """Let trackers forget pages, those of the least recently used first, while all hold too many."""
        status = os.statvfs(self.captures)
        capacity = status.f_blocks * status.f_frsize // TRACKED_SHARE
        existing = list(self._trackers.values())
        held = sum(tracker.pinned for tracker in existing)
        for tracker in [item for item in existing if item is not used] + [used]:
            if held <= capacity:
                break
            held -= tracker.pinned
            tracker.forget()

    def make_room(self) -> None:
        """Let go of all memory that is held only for captures to come. Blocks."""
        for tracker in list(self._trackers.values()):
            tracker.forget()

    def _images_of(self, container: Container) -> Path:
        """The directory of a sandbox's restores."""
        self._forgotten.discard(container.spec.id)
        directory = self._restores / container.spec.id
        directory.mkdir(mode=0o700, exist_ok=True)
        return directory

    async def forget(self, container: Container, *, restoring: bool = False) -> None:
        """End the warm processes of a container: before its processes are killed or it is destroyed.

        With `restoring` the one for the restore that follows stays.
        """
        self._watched.pop(container.spec.id, None)
        if (tracker := self._trackers.pop(container.spec.id, None)) is not None:
            await asyncio.to_thread(tracker.close)
        retained = await self._warmed(container.spec.id)
        if retained is not None:
            retained.close()
        waiting = None if restoring else await self._waited(container.spec.id)
        if waiting is not None:
            waiting.worker.close()
        if not restoring:
            self._forgotten.add(container.spec.id)
            self._tidy(container.spec.id)

    # ---------------------------------------------------------------- restore

    async def restore(
        self, container: Container, source: Path, *, verify: bool = False, reference: Path | None = None
    ) -> RestoreReport:
        """As `restored`, with nothing to be done before it runs."""
        async with self.restored(container, source, verify=verify, reference=reference) as report:
            pass
        return report

    @contextlib.asynccontextmanager
    async def restored(
        self,
        container: Container,
        source: Path,
        *,
        verify: bool = False,
        reference: Path | None = None,
        hold: Callable[[], None] | None = None,
    ) -> AsyncIterator[RestoreReport]:
        """Restore into a prepared or killed container that is mounted over the right tree.

        Within, all of it is back and nothing has run; it runs when the block has ended, and is killed when that raises.
        `source` is a dump file or a capture directory. With `verify` the tree is held before it runs, dumped again and
        compared; `reference` is the checkpoint's own file tree to compare the upper with. With `hold` it stays frozen
        after the block, and the caller thaws it: that is called on a worker thread right before it is frozen.
        """
        began = time.monotonic()
        await self.forget(container, restoring=True)
        waiting = await self._waited(container.spec.id)
        images = self._images_of(container) / str(next(self._numbers))
        preparing = asyncio.ensure_future(asyncio.to_thread(self._images, container, source, images, verify))
        try:
            container.lift()
            if waiting is None:  # a fresh CRIU starts during the preparation, and needs the pipes before
                pipes = await asyncio.to_thread(_outside_pipes, source)
            else:
                pipes = (await asyncio.shield(preparing)).pipes
            starting = restoring.worker(container, self.cache, images.parent, pipes, waiting, self._notes)
            async with starting as process:
                adapted = await asyncio.shield(preparing)
                holder = restoring.RestoreHold(container)
                pid = await restoring.restore(container, adapted, process, holder, hold)
            report = RestoreReport(pid, 0.0, closed=adapted.closed, verified=verify)
            try:
                await self._complete(container, adapted, holder, (images, reference) if verify else None)
                yield report
                if hold is None:
                    holder.release()
            except BaseException:
                await container.kill()
                raise
        finally:
            if waiting is not None:
                waiting.worker.close()
            self._drop_later(images, preparing)
        report.total_ms = (time.monotonic() - began) * 1e3

    def _drop_later(self, images: Path, preparing: asyncio.Future[rewrite.AdaptedImages]) -> None:
        """Remove a restore's own copies; no caller needs to wait for that."""
        task = asyncio.ensure_future(self._drop(images, preparing))
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)

    async def _drop(self, images: Path, preparing: asyncio.Future[rewrite.AdaptedImages]) -> None:
        await _drop_images(images, preparing)
        self._tidy(images.parent.name)

    def _tidy(self, sandbox: str) -> None:
        """Remove the directory of a forgotten sandbox's restores, unless images in it are still on their way out."""
        if sandbox in self._forgotten:
            with contextlib.suppress(OSError):
                (self._restores / sandbox).rmdir()
            if not (self._restores / sandbox).exists():
                self._forgotten.discard(sandbox)

    @going_first()
    def _images(self, container: Container, source: Path, images: Path, verify: bool) -> rewrite.AdaptedImages:
        base = None
        with contextlib.ExitStack() as undo:
            with _refusals(container):
                if source.is_dir() and not verify:
                    base = self._bases.take(source)
                    undo.callback(self._bases.leave, source)
                    base.link(images)
                elif source.is_dir():
                    rewrite.copy(source, images)  # a comparison reads all of them
                else:
                    dumpfile.unpack(source, images, self.pages)
                with gate.trees(*container.trees()) as opened:
                    complete = gate.of_directory(images) if base is None else base.complete
                    gate.passes(complete, opened, no_new_privs=container.spec.no_new_privs)
            adapted = self._adapted(container, images, held=verify)
            if base is not None:
                adapted.fill = base.fill
            else:
                lean = images.with_name(images.name + LEAN)
                adapted.fill = memory.split(images, lean, {})
                if adapted.fill is not None:
                    undo.callback(adapted.fill.close)
                    adapted.directory = lean
            adapted.release = undo.pop_all().close
            return adapted

    def _adapted(self, container: Container, images: Path, *, held: bool) -> rewrite.AdaptedImages:
        """Fit a private copy to the container; `held`: nothing of it runs at once."""
        spec = container.spec
        adapted = rewrite.adapt(
            images,
            uid_base=spec.uid_base,
            hostname=spec.hostname[:64],
            machine=machine_id(spec.id),
            address=container.address,
        )
        groups = container.groups
        adapted.grouped = service_groups.place(images, groups.paths(), groups.places())
        if held or adapted.locks:
            adapted.stopped = rewrite.wake(images)
        return adapted

    async def _complete(
        self,
        container: Container,
        adapted: rewrite.AdaptedImages,
        hold: restoring.RestoreHold,
        verify: tuple[Path, Path | None] | None,
    ) -> None:
        """What is done to a tree that is held, before it runs. `verify`: its images, and its file tree to compare."""
        if adapted.locks:
            await asyncio.to_thread(_lock, container, adapted.locks, hold)
        if verify is not None:
            await self._verify(container, *verify, hold, adapted.recreated)
        if self._tracks and adapted.fill is not None:
            await asyncio.to_thread(self._track, container, adapted.fill, hold)
        if adapted.stopped:
            await asyncio.to_thread(amend.stop, container, adapted.stopped)
        await container.limit()

    @going_first()
    def _track(self, container: Container, fill: memory.Fill, hold: restoring.RestoreHold) -> None:
        """Have the next capture read only what is written from now on, of the memory that was written after CRIU."""
        memories = [item for item in fill.memories if item.size >= MIN_RESUMED]
        if not memories:
            return
        tracker, numbers = self._tracker_of(container), amend.numbers(container)
        with inject.standing(container.tasks(), thaw=hold.seized, freeze=hold.hold) as held:
            tracker.resume(memories, numbers, held)
        self._bound(tracker)

    async def _verify(
        self,
        container: Container,
        images: Path,
        reference: Path | None,
        hold: restoring.RestoreHold,
        touched: list[str],
    ) -> None:
        """`touched`: directories in which the dump for the comparison may make and remove links."""
        again = images.with_name(images.name + "-again")
        await asyncio.to_thread(again.mkdir, mode=0o700)
        try:
            watched = await asyncio.to_thread(inotify.find, container)
            times = await asyncio.to_thread(amend.times, container, touched)
            await self._dump_held(container, again, watched, hold)
            if (init := container.init_pid) is not None:
                await asyncio.to_thread(amend.set_times, init, times)
            result = await asyncio.to_thread(_compare, images, again, reference, container.tree)
            if result:
                raise NotEqual(
                    f"the restored state differs in {len(result)} points: " + "; ".join(result),
                    hint="restore an older checkpoint",
                    sandbox=container.spec.id,
                )
        finally:
            await asyncio.to_thread(shutil.rmtree, again, ignore_errors=True)

    async def _dump_held(
        self, container: Container, dest: Path, watched: list[str], hold: restoring.RestoreHold
    ) -> None:
        """Dump a tree that is held; our plugin holds it again however that ends. The kernel serves its connections."""
        pauses = iter(PAUSES)
        while True:
            process = await self._start_dump(container, watched, hold=True)
            steps = {"network-lock": hold.seized, "query-ext-files": hold.seized}
            try:
                await dump.dump(container, dest, process, steps=steps)
                pause = next(pauses, None) if await asyncio.to_thread(equality.torn, dest) else None
                if pause is None:
                    return
            except dump.PartlyAcknowledged:
                if (pause := next(pauses, None)) is None:
                    raise
            await asyncio.sleep(pause)
            await asyncio.to_thread(_empty, dest)

    # ---------------------------------------------------------------- the rest

    async def close(self) -> None:
        """Let go of the store and the warm processes. Captures stay."""
        await asyncio.gather(*self._warming.values(), *self._readying.values(), *self._dropping, return_exceptions=True)
        for retained in self._warm.values():
            retained.close()
        for waiting in self._waiting.values():
            waiting.worker.close()
        self._warm.clear()
        self._waiting.clear()
        for tracker in self._trackers.values():
            await asyncio.to_thread(tracker.close)
        self._trackers.clear()
        await asyncio.to_thread(self.pages.close)


@going_first()
def _begin(tree: Path, dest: Path) -> None:
    btrfs.flush(tree)  # takes the flush of dirty data out of the frozen window
    dest.mkdir(mode=0o700, parents=True)


@going_first()
def _without(directory: Path, numbers: frozenset[int]) -> int:
    """Take these processes out of a dump; returns its size."""
    prune.prune(directory, numbers)
    return sum(entry.stat().st_size for entry in os.scandir(directory))


@going_first()
def _lock(container: Container, pending: list[locks.Lock], hold: restoring.RestoreHold) -> None:
    """Have the processes of a held tree take the POSIX locks again that CRIU lost."""
    existing = amend.numbers(container)
    if lost := locks.missing(pending, existing):
        with inject.standing(container.tasks(), thaw=hold.seized, freeze=hold.hold) as tasks:
            locks.take(lost, existing, tasks)


@going_first()
def _check(container: Container, images: Path) -> None:
    """Refuse a dump that no restore would let through."""
    try:
        gate.checked(gate.of_directory(images))
    except gate.ImageRefused as refusal:
        hint = refusal.hint or "the sandbox keeps running"
        raise CheckpointFailed(refusal.reason, hint=hint, sandbox=container.spec.id) from None


def _empty(directory: Path) -> None:
    for entry in os.scandir(directory):
        os.unlink(entry.path)


async def _drop_images(images: Path, preparing: asyncio.Future[rewrite.AdaptedImages]) -> None:
    await asyncio.wait([preparing])  # also when the restore was cancelled: the thread keeps writing
    if preparing.exception() is None:
        await asyncio.to_thread(preparing.result().release)
    for directory in (images, images.with_name(images.name + LEAN)):
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)


@contextlib.contextmanager
def _refusals(container: Container) -> Iterator[None]:
    try:
        yield
    except gate.ImageRefused as refusal:
        raise RestoreFailed(
            f"its processes cannot be restored: {refusal.reason}",
            hint=refusal.hint or "restore another checkpoint",
            sandbox=container.spec.id,
        ) from None


@going_first()
def _outside_pipes(source: Path) -> list[int]:
    if not source.is_dir():
        return rewrite.outside_pipes(dumpfile.read(source).images.get("files.img", b""))
    files = source / "files.img"
    return rewrite.outside_pipes(files.read_bytes() if files.exists() else b"")


def _compare(before: Path, after: Path, reference: Path | None, tree: Path) -> list[str]:
    result = equality.compared(before, after)
    if reference is not None:
        result += facts.tree_differences(reference / "upper", tree / "upper")
    return result


def _mount_tmpfs(directory: Path) -> None:
    """With pages of 2 MiB inside large files, where the kernel has them: writing images then takes a third less."""
    for options in (b"mode=700,size=50%,huge=within_size", b"mode=700,size=50%"):
        if not library.mount(b"pagurus", os.fsencode(directory), b"tmpfs", 0, options):
            return
    number = ctypes.get_errno()
    raise Unsupported(f"cannot mount a tmpfs on {directory}: {os.strerror(number)}", hint="run as root")
