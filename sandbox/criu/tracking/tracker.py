"""Which pages of a sandbox were written since its last capture, and captures that hold only those.

Guarantee: after :meth:`Tracker.finish` a capture has all pages that its processes had, or UnknownPages is raised.
Whatever is not known for certain counts as written: a process that is new, small or not registered is dumped whole.

::

    prepare: register new mappings, copy what was written, orders ▸ freeze ▸ begin: take new userfaultfds ▸ CRIU dumps
    what was written since, and the kernel protects it ▸ thaw ▸ finish: its pages + those copied + those of the last
    capture that were not written
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sandbox import procfs
from sandbox.content import layers
from sandbox.content.layers import BELOW, PAGE, SUFFIX, Layers
from sandbox.criu import image_files
from sandbox.criu.tracking import orders, precopy, userfault
from sandbox.criu.tracking.orders import Order, ProcessAnswer
from sandbox.descriptors import closing
from sandbox.errors import CheckpointFailed
from sandbox.libc import descriptor_of
from sandbox.procfs import inner_pid

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sandbox.container.container import Container
    from sandbox.criu.carried import inject
    from sandbox.criu.carried.memory import ProcessMemory

_SYS_CLOSE = 3
MIN_TRACKED = 4 << 20  # bytes of memory of its own; less is copied sooner than it is tracked
MAX_LAYERS = 12  # files in which the pages of one process lie
MAX_DEAD = 0.5  # of the largest of them, pages that have been written since
PRESENT = 4  # of CRIU's pagemap flags
WALKED = 1 / 8  # of the time for a page that is read, what one takes that CRIU only looks at (`pagurus bench dirty`)


class UnknownPages(CheckpointFailed):
    """A page counts as unwritten that no capture has: capture again, all of them."""


@dataclass
class TrackedProcess:
    """A process with a userfaultfd of its own."""

    started: bytes  # distinguishes it from a later one of the same number
    descriptor: int
    mappings: list[userfault.Mapping] = field(default_factory=list)  # private ones, as they were last seen

    def register(self, pid: int) -> None:
        """Register what is not. Raises HasAio; OSError when the process is another program now, or gone."""
        self.mappings = list(userfault.private_mappings(pid))
        for mapping in userfault.unregistered(pid, self.mappings):
            userfault.register(self.descriptor, mapping)


class Tracker:
    """Of one sandbox. All methods block; captures of a sandbox come one after the other."""

    def __init__(self, directory: Path, letters: bytes = b""):
        """`directory`: of its own, on the file system of captures. `letters`: see :func:`orders.write`."""
        self._directory = directory
        self._letters = letters
        directory.mkdir(mode=0o700, parents=True)
        self._processes: dict[int, TrackedProcess] = {}
        self._last: dict[int, Layers] = {}  # of each process, by its number in the sandbox
        self._numbers: dict[int, int] = {}  # of the processes in the capture that is being made: in the sandbox
        self._untracked: set[tuple[int, bytes]] = set()
        self._requested: dict[int, bytes] = {}  # processes that are to make a userfaultfd
        self._capturing = False
        self._read_bytes = 0  # of memory, by the last capture

    def expected_bytes(self, size: int) -> int:
        """As long as reading so many bytes a capture of `size` bytes of memory takes, if as much was written as before
        the last one."""
        return min(size, self._read_bytes + int(WALKED * size)) if self._last else size

    @property
    def pinned(self) -> int:
        """Bytes of memory of earlier captures that it holds, its part of those that others hold as well."""
        with contextlib.suppress(FileNotFoundError):  # closed since
            return sum(one.st_size // one.st_nlink for one in map(os.stat, os.scandir(self._directory)))
        return 0

    def resume(self, memories: Sequence[ProcessMemory], processes: Mapping[int, int], held: inject.Standing) -> None:
        """Take the memory that a restore has just written for that of the last capture, of processes that are `held`.

        `processes`: their numbers on the host, by those in the sandbox. Other pages count as written: CRIU may have
        changed them. A process that cannot have one descriptor more is not tracked yet.
        """
        for memory in memories:
            pid, content = processes[memory.pid], memory.layers()
            if (descriptor := _userfaultfd(pid, held)) is None:
                continue
            one = self._processes[pid] = TrackedProcess(_started(pid), descriptor)
            try:
                userfault.enable(descriptor)
                one.register(pid)
                with contextlib.closing(precopy.PagesOf(pid)) as pages:
                    protected = pages.protect(content.spans, one.mappings)
                for name, place in memory.pages.files:
                    with contextlib.suppress(FileExistsError):
                        os.link(place, self._directory / (name + SUFFIX))
            except (OSError, userfault.HasAio):
                self._let_go(pid)
            else:
                self._last[memory.pid] = content.only(protected)

    def close(self) -> None:
        """Let go of the processes and of all pages. Idempotent."""
        for pid in list(self._processes):
            self._let_go(pid)
        shutil.rmtree(self._directory, ignore_errors=True)

    def lose(self) -> None:
        """A capture may have been made in part: the next one has all pages."""
        self._last = {}
        self._capturing = False

    def forget(self) -> None:
        """Let go of the pages of the last capture, unless the next one is being made of them: that has all then."""
        if self._capturing:
            return
        self._last = {}
        with contextlib.suppress(FileNotFoundError):
            self._drop_unused({})

    # ---------------------------------------------------------------- before

    def prepare(self, container: Container, images: Path) -> None:
        """Say to the CRIU that will dump into `images` what it is to do with each process."""
        self._capturing = True
        self._numbers, self._requested, self._read_bytes = {}, {}, 0
        target: dict[int, Order] = {}
        alive = {pid: started for pid in container.retained_tasks() if (started := _started(pid))}
        for pid, one in list(self._processes.items()):
            if alive.get(pid) != one.started:
                self._let_go(pid)
        self._untracked &= set(alive.items())
        for pid, started in alive.items():
            if (pid, started) in self._untracked:
                continue
            if pid in self._processes and self._renew(pid, started):
                target[pid] = Order.PROTECT
                if self._copy_ahead(pid, started):
                    target[pid] |= Order.SKIP
            elif _own_bytes(pid) >= MIN_TRACKED:
                target[pid] = Order.ATTACH | Order.PROTECT
                self._requested[pid] = started
        if target:
            orders.write(images, target, self._letters)

    def _renew(self, pid: int, started: bytes) -> bool:
        """Whether a process is tracked still, its new mappings too."""
        try:
            self._processes[pid].register(pid)
        except userfault.HasAio:
            self._untracked.add((pid, started))
        except OSError as error:
            if error.errno not in (errno.ENOMEM, errno.ESRCH, errno.ENOENT):
                raise
        else:
            return True
        self._let_go(pid)
        return False

    def _copy_ahead(self, pid: int, started: bytes) -> bool:
        """Copy what a process has written; whether pages that it does not write from now on are known."""
        number = inner_pid(pid)
        last = self._last.pop(number, None) if number is not None else None
        if number is None or last is None:
            return False
        name = layers.new_name()
        try:
            with contextlib.closing(precopy.PagesOf(pid)) as pages:
                if _started(pid) != started:
                    return False
                result = pages.copy(self._processes[pid].mappings, self._directory / (name + SUFFIX))
        except OSError:  # gone, or there is no room
            (self._directory / (name + SUFFIX)).unlink(missing_ok=True)
            return False
        if len(result.protected):
            last = joined(last.pagemap, name, result.copied, last.without(result.protected))
        _ = last.spans  # not only once it is frozen
        self._last[number] = last
        self._read_bytes += len(result.copied) * PAGE
        return True

    def _let_go(self, pid: int) -> None:
        os.close(self._processes.pop(pid).descriptor)

    # ---------------------------------------------------------------- while frozen

    def begin(self, images: Path, criu: int) -> None:
        """Take over the userfaultfds that were made; `criu`: pidfd of the one that has them."""
        made = orders.read(images).descriptors
        self._untracked |= {(pid, started) for pid, started in self._requested.items() if pid not in made}
        for pid, number in made.items():
            descriptor = descriptor_of(criu, number)
            one = TrackedProcess(_started(pid), descriptor)
            try:
                userfault.enable(descriptor)
                one.register(pid)
            except (OSError, userfault.HasAio):
                self._untracked.add((pid, one.started))
                os.close(descriptor)
            else:
                self._processes[pid] = one
        for pid in list(self._processes):
            if userfault.has_aio(pid):  # a transfer may continue while it is frozen, and writes without a fault
                self._untracked.add((pid, self._processes[pid].started))
                self._let_go(pid)
        self._numbers = {pid: inner for pid in self._processes if (inner := inner_pid(pid)) is not None}

    def check(self, images: Path) -> None:
        """Raise UnknownPages unless what was dumped can be completed."""
        for pid, answer in orders.read(images).processes.items():
            require_pages(answer, self._last.get(self._numbers.get(pid, 0)))

    # ---------------------------------------------------------------- afterwards

    def finish(self, directory: Path) -> None:
        """Complete the capture in `directory`, which holds what was dumped. Raises UnknownPages."""
        answers = orders.read(directory)
        orders.remove(directory)
        last, self._last = self._last, {}
        files: dict[str, Layers] = {}
        retained: dict[int, Layers] = {}
        (directory / BELOW).mkdir(mode=0o700)
        for pid, answer in answers.processes.items():
            number = self._numbers.get(pid)  # None: it has no userfaultfd, and all its pages are there
            if number is not None and (directory / f"pagemap-{number}.img").exists():
                name, result = self._layers(directory, number, answer, last.get(number))
                files[name] = result
                if answer.protected:
                    retained[number] = result
        self._read_bytes += sum(path.stat().st_size for path in directory.glob("pages-*.img"))
        if files:
            layers.write(directory, files)
        else:
            (directory / BELOW).rmdir()
        self._drop_unused(retained)
        self._last = retained
        self._capturing = False

    def _layers(self, directory: Path, number: int, answer: ProcessAnswer, last: Layers | None) -> tuple[str, Layers]:
        """The file of pages of a process and where all of its pages lie, whose files are in BELOW then."""
        kinds = image_files.messages()
        pagemap = f"pagemap-{number}.img"
        image = image_files.read(directory / pagemap, kinds.pagemap_head, kinds.pagemap_entry)
        assert image is not None
        name = f"pages-{image.entries[0].pages_id}.img"
        dumped = _pages_of(image)
        require_pages(answer, last)
        unwritten = last.within(answer.unwritten).without(dumped) if last else None
        result = joined(pagemap, layers.new_name(), dumped, unwritten)
        if len(result.names) > MAX_LAYERS:
            result = self._squashed(result)
        own = self._directory / (result.names[0] + SUFFIX)
        with contextlib.suppress(FileNotFoundError):  # it has no pages of its own
            os.link(directory / name, own)
        for item in result.names[1:]:
            os.link(self._directory / (item + SUFFIX), directory / BELOW / (item + SUFFIX))
        image.entries[1:] = [
            kinds.pagemap_entry(vaddr=first * PAGE, compat_nr_pages=0, nr_pages=end - first, flags=PRESENT)
            for first, end in result.spans.tolist()  # the next capture finds them made, while its sandbox is frozen
        ]
        image.write(directory / BELOW / pagemap)
        return name, result

    def _squashed(self, result: Layers) -> Layers:
        """The same with few files: all but the capture's own and the largest become one; that too if much is dead."""
        sizes = np.bincount(result.layer, minlength=len(result.names))
        largest = 1 + int(sizes[1:].argmax())
        complete = (self._directory / (result.names[largest] + SUFFIX)).stat().st_size // PAGE
        gathered = result.layer > 0
        if sizes[largest] >= MAX_DEAD * complete:
            gathered &= result.layer != largest
        part = Layers("", result.names, result.pages[gathered], result.layer[gathered], result.place[gathered])
        sources = [
            layers.mapped(self._directory / (item + SUFFIX)) if index else memoryview(b"")
            for index, item in enumerate(result.names)
        ]
        made = layers.new_name()
        layers.copy_pages(sources, part.runs(), self._directory / (made + SUFFIX))
        left = (
            result.names[0],
            made,
            *([result.names[largest]] if not gathered[result.layer == largest].any() else []),
        )
        layer = np.where(gathered, 1, np.where(result.layer == 0, 0, 2)).astype(np.int32)
        place = result.place.copy()
        place[gathered] = np.arange(int(gathered.sum()))
        return Layers(result.pagemap, left, result.pages, layer, place)

    def _drop_unused(self, retained: dict[int, Layers]) -> None:
        used = {name + SUFFIX for item in retained.values() for name in item.names}
        for entry in os.scandir(self._directory):
            if entry.name not in used:
                os.unlink(entry.path)


def _userfaultfd(pid: int, held: inject.Standing) -> int | None:
    """A userfaultfd of a process, made by it and taken away from it; None where it can have no descriptor more."""
    number = held.call(pid, userfault.CALL, userfault.FLAGS)
    if number < 0:
        return None
    try:
        with closing(os.pidfd_open(pid)) as process:
            return descriptor_of(process, number)
    finally:
        held.call(pid, _SYS_CLOSE, number)


def require_pages(answer: ProcessAnswer, last: Layers | None) -> None:
    """Raise UnknownPages unless the last capture of a process has what it did not write."""
    if len(answer.unwritten) and (last is None or not answer.within(last.spans)):
        raise UnknownPages("pages count as unwritten that no capture has", hint="try again")


def joined(pagemap: str, own: str, dumped: np.ndarray, unwritten: Layers | None) -> Layers:
    """Where the pages of a process lie: those that were `dumped` under the name `own`, and the `unwritten`, of others.

    `dumped`: numbers of pages [n] int64, sorted. Pure.
    """
    places = np.arange(len(dumped))
    if unwritten is None or not len(unwritten.pages):
        return Layers(pagemap, (own,), dumped, np.zeros(len(dumped), np.int32), places)
    used = np.flatnonzero(np.bincount(unwritten.layer, minlength=len(unwritten.names)))
    renamed = np.zeros(len(unwritten.names), np.int32)
    renamed[used] = 1 + np.arange(len(used))
    names = (own, *(unwritten.names[index] for index in used.tolist()))
    at = np.searchsorted(unwritten.pages, dumped)
    pages = np.insert(unwritten.pages, at, dumped)
    layer = np.insert(renamed[unwritten.layer], at, np.int32(0))
    return Layers(pagemap, names, pages, layer, np.insert(unwritten.place, at, places))


def _pages_of(image: image_files.CriuImageFile) -> np.ndarray:
    """Numbers of the pages that an image maps."""
    spans = [(entry.vaddr // PAGE, entry.nr_pages or entry.compat_nr_pages) for entry in image.entries[1:]]
    return layers.numbers([(first, first + count) for first, count in spans])


def _started(pid: int) -> bytes:
    """When a process began; empty when it is gone."""
    with contextlib.suppress(OSError, IndexError):
        return procfs.stat(pid)[procfs.STARTED]
    return b""


def _own_bytes(pid: int) -> int:
    """Bytes in memory that are of no file."""
    with contextlib.suppress(OSError), closing(os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)) as file:
        words = os.read(file, 256).split()
        return (int(words[1]) - int(words[2])) * PAGE
    return 0
