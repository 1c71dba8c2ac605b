"""Large private memory, written into restored tasks by several threads instead of by CRIU.

Guarantee: after `write` the memory is what the images say, byte for byte, or RestoreFailed is raised; nothing of the
sandbox has run in between. A lean copy and what was split off it hold each page exactly once.

Where a run spans whole 2 MiB, it is given a huge page first (MADV_COLLAPSE): one allocation then stands for 512 page
faults. The kernel may refuse; then the pages are small as before. Asking waits for every processor once, which takes
long on a busy host, and where free memory is in small pieces the kernel moves others together first, which takes
longer than all the faults: as soon as a huge page has taken too long, no more are requested. A host that has turned
huge pages off keeps them off.

CRIU reads pages with one thread, and each page costs it a page fault in the restored task (2.3 µs on the machine that
this was measured on). process_vm_writev needs no fault (1.5 µs), and two threads halve that. No page comes later
than the first instruction: lazy pages would need a server for as long as the sandbox has not touched them all, whose
death turns untouched memory into zeros.

Chosen are runs of pages in private anonymous, readable and writable mappings, except

- what processes share by fork: CRIU restores it once and keeps it shared;
- stacks that grow, and pages with a thread's rseq area, which the kernel writes while the thread is being restored;
- pages that a system call reads which is taken up again before the memory is written
(:mod:`sandbox.criu.carried.waits`);
- everything, where it is too little to be worth it.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sandbox.container.shim import going_first
from sandbox.content import layers
from sandbox.content.layers import Layers, SpreadPages
from sandbox.criu import Record, image_files
from sandbox.criu.carried import waits
from sandbox.criu.image_files import CriuImageFile
from sandbox.errors import RestoreFailed

PAGE = 4096
MIN_PARALLEL_BYTES = 16 << 20  # bytes in all; below, parsing and threads cost more than CRIU does
MIN_RUN = 32 << 10  # bytes of a run
HUGE = 2 << 20
STEP = 8 << 20  # bytes that a thread takes at a time: what was zeroed is still in the cache when it is written
THREADS = 4
QUICK = 0.003  # seconds that a huge page may take
VECTORS = 1024  # of a system call
SYS_PROCESS_MADVISE, MADV_COLLAPSE = 440, 25
PRESENT, PARENT = 4, 1  # of CRIU's pagemap flags
REGULAR, STACK, ANON_PRIVATE, GUARD, SHADOW = 1 << 0, 1 << 1, 1 << 9, 1 << 16, 1 << 15  # of a mapping's status
READ_WRITE, MAP_GROWSDOWN = 3, 0x100


@dataclass(frozen=True)
class PageRun:
    """Consecutive pages: `address` in the process, `offset` in its file of pages, `size` in bytes."""

    address: int
    offset: int
    size: int


@dataclass
class ProcessMemory:
    """What is written into the process with number `pid` inside the sandbox."""

    pid: int
    pages: SpreadPages
    runs: list[PageRun]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(run.size for run in self.runs)

    def layers(self) -> Layers:
        """Where these pages, and no others of the process, lie in the files of `pages`."""
        rows: list[tuple[int, int, int, int]] = []
        for run in self.runs:
            at = run.address // PAGE
            for index, offset, size in self.pages.pieces(run.offset, run.size):
                rows.append((at, size // PAGE, index, offset // PAGE))
                at += size // PAGE
        names = [name for name, _ in self.pages.files]
        return Layers.of(f"pagemap-{self.pid}.img", names, np.array(rows, np.int64).reshape(-1, 4))


@dataclass
class Fill:
    """All memory that was split off a copy of the images."""

    memories: list[ProcessMemory] = field(default_factory=list)

    def close(self) -> None:
        for memory in self.memories:
            memory.pages.close()


# ---------------------------------------------------------------------------- choosing


def split(directory: Path, lean: Path, spread: dict[str, SpreadPages]) -> Fill | None:
    """Make `lean`, the images without the memory that is returned; None: too little, nothing was made. Blocks.

    `spread`: as of :func:`layers.complete`, for `directory`. Those that CRIU is to read are written.
    """
    chosen = _chosen(directory)
    fill = Fill()
    with contextlib.ExitStack() as undo:
        undo.callback(fill.close)
        try:
            if chosen:
                _divide(directory, lean, chosen, spread, fill)
            else:
                _write_all(directory, spread)
        finally:
            for pages in spread.values():
                pages.close()
            spread.clear()
        undo.pop_all()
    return fill if chosen else None


_Chosen = list[tuple[int, CriuImageFile, list[tuple[Record, tuple[int, int]]], list[PageRun]]]


def _chosen(directory: Path) -> _Chosen:
    """The number of each process that is written by us, its pagemap, what CRIU restores, and what we do; [] if none."""
    result = []
    if sum(path.stat().st_size for path in directory.glob("pages-*.img")) < MIN_PARALLEL_BYTES:
        return []
    for path in directory.glob("mm-*.img"):
        pid = int(path.stem[3:])
        pagemap = image_files.read(directory / f"pagemap-{pid}.img", *_pagemap_kinds())
        mm = image_files.read(path, image_files.messages().mm_entry)
        if mm is not None and pagemap is not None and len(pagemap.entries) > 1:
            result.append((pid, pagemap, mm.entries[0].vmas))
    eligible = _unshared({pid: [(v.start, v.end) for v in vmas if _eligible(v)] for pid, _, vmas in result})
    total = 0
    chosen: _Chosen = []
    for pid, pagemap, _ in result:
        without = _kernel_written(directory, pid) | waits.pages(directory, pid)
        retained, runs = divide(pagemap.entries[1:], eligible[pid], without)
        total += sum(run.size for run in runs)
        if runs:
            chosen.append((pid, pagemap, retained, runs))
    return chosen if total >= MIN_PARALLEL_BYTES else []


def _divide(directory: Path, lean: Path, chosen: _Chosen, spread: dict[str, SpreadPages], fill: Fill) -> None:
    lean.mkdir()
    replaced = set()
    for pid, pagemap, retained, runs in chosen:
        name = f"pages-{pagemap.entries[0].pages_id}.img"
        pages = spread.pop(name, None) or SpreadPages.of_file(directory / name)
        fill.memories.append(ProcessMemory(pid, pages, runs))
        rest = [part for _, (offset, size) in retained for part in pages.parts(offset, size)]
        layers.write_parts(rest, sum(map(len, rest)), lean / name)
        pagemap.entries[1:] = [entry for entry, _ in retained]
        pagemap.write(lean / f"pagemap-{pid}.img")
        replaced |= {name, f"pagemap-{pid}.img"}
    _write_all(directory, spread)
    for entry in os.scandir(directory):
        if entry.name not in replaced:
            os.link(entry.path, lean / entry.name)


def _write_all(directory: Path, spread: dict[str, SpreadPages]) -> None:
    for name, pages in spread.items():
        if pages.in_one:
            continue
        (directory / name).unlink()
        pages.write(directory / name)


def _pagemap_kinds() -> tuple[type[Record], type[Record]]:
    kinds = image_files.messages()
    return kinds.pagemap_head, kinds.pagemap_entry


def _eligible(vma: Record) -> bool:
    target = REGULAR | ANON_PRIVATE
    return (
        vma.status & target == target
        and not vma.status & (STACK | GUARD | SHADOW)
        and vma.prot & READ_WRITE == READ_WRITE
        and not vma.flags & MAP_GROWSDOWN
    )


def _unshared(ranges: dict[int, list[tuple[int, int]]]) -> dict[int, list[tuple[int, int]]]:
    """Of the ranges of each process, sorted, the parts that no other process has."""
    edges = sorted(
        (at, change, pid)
        for pid, result in ranges.items()
        for span in result
        for at, change in zip(span, (1, -1), strict=True)
    )
    alone: dict[int, list[tuple[int, int]]] = {pid: [] for pid in ranges}
    inside: set[int] = set()
    last = 0
    for at, change, pid in edges:
        if len(inside) == 1 and at > last:
            (owner,) = inside
            if alone[owner] and alone[owner][-1][1] == last:
                last = alone[owner].pop()[0]
            alone[owner].append((last, at))
        if change > 0:
            inside.add(pid)
        else:
            inside.discard(pid)
        last = at
    return alone


def _kernel_written(directory: Path, pid: int) -> set[int]:
    """Pages with the rseq areas of the threads of a process."""
    kinds = image_files.messages()
    tree = image_files.read(directory / "pstree.img", kinds.pstree_entry)
    pages: set[int] = set()
    for entry in tree.entries if tree is not None else ():
        for thread in entry.threads if entry.pid == pid else ():
            core = image_files.read(directory / f"core-{thread}.img", kinds.core_entry)
            if core is not None and core.entries:
                area = core.entries[0].thread_core.rseq_entry
                first, last = area.rseq_abi_pointer, area.rseq_abi_pointer + max(area.rseq_abi_size, 64)
                pages |= set(range(first // PAGE * PAGE, last, PAGE)) if first else set()
    return pages


def divide(
    entries: Sequence[Record], ranges: Sequence[tuple[int, int]], without: set[int]
) -> tuple[list[tuple[Record, tuple[int, int]]], list[PageRun]]:
    """Divide a pagemap into what CRIU restores, each record with its (offset, size) in the pages, and runs for us."""
    retained: list[tuple[Record, tuple[int, int]]] = []
    runs: list[PageRun] = []
    excepted = sorted(without)
    ends = [end for _, end in ranges]
    offset = 0
    for entry in entries:
        flags, size = entry.flags, (entry.nr_pages or entry.compat_nr_pages) * PAGE
        if flags & PARENT or entry.in_parent or not (flags & PRESENT or not entry.HasField("flags")):
            retained.append((entry, (offset, 0)))
            continue
        if size < MIN_RUN:
            retained.append((entry, (offset, size)))
            offset += size
            continue
        first = entry.vaddr
        last = first + size
        index = bisect.bisect_right(ends, first)
        # Most records lie in one range, whole: no need to cut them up.
        covered = index < len(ranges) and ranges[index][0] <= first and last <= ends[index]
        if covered and not _one_within(excepted, first, last):
            _append(runs, PageRun(first, offset, size))
            offset += size
            continue
        for start, end, ours in _pieces(first, last, ranges[index:], excepted):
            at = offset + start - first
            if ours:
                _append(runs, PageRun(start, at, end - start))
            else:
                retained.append((_part(entry, start, end), (at, end - start)))
        offset += size
    return retained, runs


def _one_within(places: Sequence[int], first: int, last: int) -> bool:
    """Whether one of these sorted places lies in [first, last)."""
    index = bisect.bisect_left(places, first)
    return index < len(places) and places[index] < last


def _append(runs: list[PageRun], run: PageRun) -> None:
    """Add a run, joined with the last one where it continues that one."""
    last = runs[-1] if runs else None
    if last is not None and (last.address + last.size, last.offset + last.size) == (run.address, run.offset):
        runs[-1] = PageRun(last.address, last.offset, last.size + run.size)
    else:
        runs.append(run)


def _pieces(
    first: int, last: int, ranges: Sequence[tuple[int, int]], without: Sequence[int]
) -> Iterator[tuple[int, int, bool]]:
    """(start, end, whether it is for us) of each piece of an address range, in order, neighbours joined.

    `ranges` and `without` are sorted; no range ends before the first.
    """
    at = first
    for start, end in ranges:
        if start >= last:
            break
        start, end = max(start, first), min(end, last)
        edges = [start, *without[bisect.bisect_left(without, start) : bisect.bisect_left(without, end)], end]
        for number in range(len(edges) - 1):
            low = edges[number] + (PAGE if number else 0)
            if edges[number + 1] - low < MIN_RUN:
                continue
            if low > at:
                yield at, low, False
            yield low, edges[number + 1], True
            at = edges[number + 1]
    if at < last:
        yield at, last, False


def _part(entry: Record, start: int, end: int) -> Record:
    part = type(entry)()
    part.CopyFrom(entry)
    part.vaddr = start
    part.compat_nr_pages = (end - start) // PAGE
    if entry.HasField("nr_pages"):
        part.nr_pages = part.compat_nr_pages
    return part


# ---------------------------------------------------------------------------- writing


class _Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_size_t), ("size", ctypes.c_size_t)]


@dataclass(frozen=True)
class WriteTask:
    """What one thread writes at a time: `size` bytes at `address` in the process."""

    process: StoppedProcess
    address: int
    size: int
    pieces: list[tuple[int, int, int]]  # address in our memory, address in the process, size; in order


def write(fill: Fill, processes: dict[int, int], sandbox: str) -> None:
    """Write all memory into the tasks, given by their numbers inside and on the host. They must not run. Blocks."""
    with contextlib.ExitStack() as opened:
        work = []
        for memory in fill.memories:
            process = opened.enter_context(StoppedProcess(processes[memory.pid]))
            bases = [_address(source) for source in memory.pages.sources]
            for run in memory.runs:
                for start, end in steps(run.address, run.address + run.size):
                    at, pieces = start, []
                    for index, offset, size in memory.pages.pieces(run.offset + start - run.address, end - start):
                        pieces.append((bases[index] + offset, at, size))
                        at += size
                    work.append(WriteTask(process, start, end - start, pieces))
        try:
            failed = _Pipeline(work, huge=_huge_pages() and _quick(work)).run(min(THREADS, os.cpu_count() or 1))
        except OSError as error:
            failed = [error]
    if failed:
        raise RestoreFailed(
            f"memory could not be written: {failed[0]}",
            sandbox=sandbox,
            hint="restore it again, or an older checkpoint (`pagurus tree`)",
        )


def steps(first: int, last: int) -> Iterator[tuple[int, int]]:
    """Divide an address range into parts, at borders of huge pages."""
    while first < last:
        end = min((first + STEP) // HUGE * HUGE, last)
        yield first, end
        first = end


def _quick(work: list[WriteTask]) -> bool:
    """Whether huge pages come quickly now; the first one shows it."""
    for part in work:
        first = -(-part.address // HUGE) * HUGE
        if first + HUGE <= part.address + part.size:
            began = time.monotonic()
            part.process.enlarge_at(part, first, first + HUGE)
            return time.monotonic() - began < QUICK
    return False


class _Pipeline:
    """One thread asks for huge pages, the others write where there are some already; at last all write.

    Requests for huge pages of one process exclude each other, so that several threads would only wait in turn; but
    they do not keep anybody from writing.
    """

    def __init__(self, work: list[WriteTask], *, huge: bool):
        self._work = work
        self._huge = huge
        self._ready: queue.SimpleQueue[WriteTask | None] = queue.SimpleQueue()
        self._failed: list[OSError] = []

    def run(self, threads: int) -> list[OSError]:
        """Returns what failed."""
        helpers = [threading.Thread(target=self._write) for _ in range(threads - 1)]
        for helper in helpers:
            helper.start()
        with going_first():
            for part in self._work:
                if self._huge:
                    began = time.monotonic()
                    self._attempt(part.process.enlarge, part)
                    self._huge = time.monotonic() - began < QUICK * max(1, part.size // HUGE)
                self._ready.put(part)
            for _ in range(threads):
                self._ready.put(None)
        self._write()
        for helper in helpers:
            helper.join()
        return self._failed

    def _write(self) -> None:
        with going_first():
            while (part := self._ready.get()) is not None:
                self._attempt(part.process.write, part)

    def _attempt(self, step: Callable[[WriteTask], None], part: WriteTask) -> None:
        """One failure fails the restore: what comes after it need not be done."""
        if not self._failed:
            try:
                step(part)
            except OSError as error:
                self._failed.append(error)


def _address(mapped: memoryview) -> int:
    """Where a mapping lies in our memory."""
    return int(np.frombuffer(mapped, dtype=np.uint8).ctypes.data) if mapped else 0


@functools.cache
def _huge_pages() -> bool:
    """Whether the host lets anybody have huge pages."""
    try:
        return "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False


class StoppedProcess:
    """The memory of a stopped process of the host."""

    def __init__(self, pid: int):
        self._pid = pid
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._pidfd = -1

    def __enter__(self) -> StoppedProcess:
        self._pidfd = os.pidfd_open(self._pid)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._pidfd)

    def write(self, part: WriteTask) -> None:
        self._copy(part.pieces)

    def enlarge(self, part: WriteTask) -> None:
        """Ask for huge pages wherever the part spans whole ones."""
        first, last = -(-part.address // HUGE) * HUGE, (part.address + part.size) // HUGE * HUGE
        if last > first:
            self.enlarge_at(part, first, last)

    def enlarge_at(self, part: WriteTask, first: int, last: int) -> None:
        """Ask for huge pages at [first, last). The kernel wants one page of each to be there. May do nothing."""
        starts = [at for _, at, _ in part.pieces]
        pages = []
        for address in range(first, last, HUGE):
            source, at, _ = part.pieces[bisect.bisect_right(starts, address) - 1]
            pages.append((source + address - at, address, PAGE))
        self._copy(pages)
        vector = (_Vector * 1)(_Vector(first, last - first))
        self._libc.syscall(
            SYS_PROCESS_MADVISE, self._pidfd, vector, ctypes.c_ulong(1), MADV_COLLAPSE, ctypes.c_ulong(0)
        )

    def _copy(self, pieces: list[tuple[int, int, int]]) -> None:
        """Write (source, address, size) each."""
        while pieces:
            count = min(len(pieces), VECTORS)
            local = (_Vector * count)(*(_Vector(source, size) for source, _, size in pieces[:count]))
            remote = (_Vector * count)(*(_Vector(address, size) for _, address, size in pieces[:count]))
            number = ctypes.c_ulong(count)
            written = self._libc.process_vm_writev(self._pid, local, number, remote, number, ctypes.c_ulong(0))
            if written <= 0:
                error = ctypes.get_errno()
                raise OSError(error, f"at {pieces[0][1]:#x} of {self._pid}: {os.strerror(error)}")
            pieces = _after(pieces, written)


def _after(pieces: list[tuple[int, int, int]], written: int) -> list[tuple[int, int, int]]:
    """What is left of pieces when so many bytes of them are done."""
    for index, (source, address, size) in enumerate(pieces):
        if written < size:
            return [(source + written, address + written, size - written), *pieces[index + 1 :]]
        written -= size
    return []
