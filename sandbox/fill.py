"""Large private memory, written into restored tasks by several threads instead of by CRIU.

Owns: choosing the pages, a lean copy of the images without them, writing them before the tasks run. Does not own:
running CRIU (:mod:`sandbox.restore`).
Guarantee: after `write` the memory is what the images say, byte for byte, or RestoreFailed is raised; nothing of the
sandbox has run in between. A lean copy and what was split off it hold each page exactly once.

CRIU reads pages with one thread, and each page costs it a page fault in the restored task (2.3 µs on the machine that
this was measured on). process_vm_writev needs no fault (1.5 µs), and two threads halve that. No page comes later
than the first instruction: lazy pages would need a server for as long as the sandbox has not touched them all, whose
death turns untouched memory into zeros.

Chosen are runs of pages in private anonymous, readable and writable mappings, except

- what processes share by fork: CRIU restores it once and keeps it shared;
- stacks that grow, and pages with a thread's rseq area, which the kernel writes while the thread is being restored;
- everything, where it is too little to be worth it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sandbox import imagefile
from sandbox.errors import RestoreFailed

PAGE = 4096
LEAST = 16 << 20  # bytes in all
RUN_LEAST = 32 << 10  # bytes of a run
STEP = 1 << 20  # bytes in one system call: a kill need not wait for more
THREADS = 4
URGENT = -10  # nice value
PRESENT, PARENT = 4, 1  # of CRIU's pagemap flags
REGULAR, STACK, ANON_PRIVATE, GUARD, SHADOW = 1 << 0, 1 << 1, 1 << 9, 1 << 16, 1 << 15  # of a mapping's status
READ_WRITE, MAP_GROWSDOWN = 3, 0x100


@dataclass(frozen=True)
class Run:
    """Consecutive pages: `address` in the process, `offset` in its file of pages, `size` in bytes."""

    address: int
    offset: int
    size: int


@dataclass
class Memory:
    """What is written into the process with number `pid` inside the sandbox."""

    pid: int
    pages: Path
    runs: list[Run]
    mapped: mmap.mmap | None = None

    def size(self) -> int:
        return sum(run.size for run in self.runs)


@dataclass
class Fill:
    """All memory that was split off a copy of the images."""

    memories: list[Memory] = field(default_factory=list)

    def size(self) -> int:
        return sum(memory.size() for memory in self.memories)

    def close(self) -> None:
        for memory in self.memories:
            if memory.mapped is not None:
                memory.mapped.close()
                memory.mapped = None


# ---------------------------------------------------------------------------- choosing


def split(directory: Path, lean: Path) -> Fill | None:
    """Make `lean`, the images without the memory that is returned; None: too little, nothing was made. Blocks."""
    found = []
    for path in directory.glob("mm-*.img"):
        pid = int(path.stem[3:])
        pagemap = imagefile.read(directory / f"pagemap-{pid}.img", *_pagemap_kinds())
        mm = imagefile.read(path, imagefile.messages().mm_entry)
        if mm is not None and pagemap is not None and len(pagemap.entries) > 1:
            found.append((pid, pagemap, mm.entries[0].vmas))
    eligible = _unshared({pid: [(v.start, v.end) for v in vmas if _eligible(v)] for pid, _, vmas in found})
    total = 0
    chosen = []
    for pid, pagemap, _ in found:
        kept, runs = divide(pagemap.entries[1:], eligible[pid], _kernel_written(directory, pid))
        total += sum(run.size for run in runs)
        if runs:
            chosen.append((pid, pagemap, kept, runs))
    if total < LEAST:
        return None
    fill = Fill()
    lean.mkdir()
    replaced = set()
    try:
        for pid, pagemap, kept, runs in chosen:
            pages = f"pages-{pagemap.entries[0].pages_id}.img"
            memory = Memory(pid, directory / pages, runs, _map(directory / pages))
            fill.memories.append(memory)
            assert memory.mapped is not None
            _write_rest(lean / pages, memory.mapped, kept)
            pagemap.entries[1:] = [entry for entry, _ in kept]
            pagemap.write(lean / f"pagemap-{pid}.img")
            replaced |= {pages, f"pagemap-{pid}.img"}
    except BaseException:
        fill.close()
        raise
    for entry in os.scandir(directory):
        if entry.name not in replaced:
            os.link(entry.path, lean / entry.name)
    return fill


def _pagemap_kinds() -> tuple[Any, Any]:
    kinds = imagefile.messages()
    return kinds.pagemap_head, kinds.pagemap_entry


def _eligible(vma: Any) -> bool:
    wanted = REGULAR | ANON_PRIVATE
    return (
        vma.status & wanted == wanted
        and not vma.status & (STACK | GUARD | SHADOW)
        and vma.prot & READ_WRITE == READ_WRITE
        and not vma.flags & MAP_GROWSDOWN
    )


def _unshared(ranges: dict[int, list[tuple[int, int]]]) -> dict[int, list[tuple[int, int]]]:
    """Of the ranges of each process, sorted, the parts that no other process has."""
    edges = sorted(
        (at, change, pid)
        for pid, found in ranges.items()
        for span in found
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
    kinds = imagefile.messages()
    tree = imagefile.read(directory / "pstree.img", kinds.pstree_entry)
    pages: set[int] = set()
    for entry in tree.entries if tree is not None else ():
        for thread in entry.threads if entry.pid == pid else ():
            core = imagefile.read(directory / f"core-{thread}.img", kinds.core_entry)
            if core is not None and core.entries:
                area = core.entries[0].thread_core.rseq_entry
                first, last = area.rseq_abi_pointer, area.rseq_abi_pointer + max(area.rseq_abi_size, 64)
                pages |= set(range(first // PAGE * PAGE, last, PAGE)) if first else set()
    return pages


def divide(
    entries: Sequence[Any], ranges: Sequence[tuple[int, int]], without: set[int]
) -> tuple[list[tuple[Any, tuple[int, int]]], list[Run]]:
    """Divide a pagemap into what CRIU restores, each record with its (offset, size) in the pages, and runs for us."""
    kept: list[tuple[Any, tuple[int, int]]] = []
    runs: list[Run] = []
    offset = 0
    for entry in entries:
        size = (entry.nr_pages or entry.compat_nr_pages) * PAGE
        present = bool(entry.flags & PRESENT) or not entry.HasField("flags")
        if entry.flags & PARENT or entry.in_parent or not present:
            kept.append((entry, (offset, 0)))
            continue
        for start, end, ours in _pieces(entry.vaddr, entry.vaddr + size, ranges, without):
            at = offset + start - entry.vaddr
            if ours:
                runs.append(Run(start, at, end - start))
            else:
                kept.append((_part(entry, start, end), (at, end - start)))
        offset += size
    return kept, runs


def _pieces(
    first: int, last: int, ranges: Sequence[tuple[int, int]], without: set[int]
) -> Iterator[tuple[int, int, bool]]:
    """(start, end, whether it is for us) of each piece of an address range, in order, neighbours joined."""
    at = first
    for start, end in ranges:
        start, end = max(start, first), min(end, last)
        edges = [start, *sorted(page for page in without if start <= page < end), end]
        for index in range(len(edges) - 1):
            low = edges[index] + (PAGE if index else 0)
            if edges[index + 1] - low < RUN_LEAST:
                continue
            if low > at:
                yield at, low, False
            yield low, edges[index + 1], True
            at = edges[index + 1]
    if at < last:
        yield at, last, False


def _part(entry: Any, start: int, end: int) -> Any:
    part = type(entry)()
    part.CopyFrom(entry)
    part.vaddr = start
    part.compat_nr_pages = (end - start) // PAGE
    if entry.HasField("nr_pages"):
        part.nr_pages = part.compat_nr_pages
    return part


def _map(path: Path) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)


def _write_rest(path: Path, pages: mmap.mmap, kept: Sequence[tuple[Any, tuple[int, int]]]) -> None:
    with memoryview(pages) as view, open(path, "wb", buffering=0) as file:
        for _, (offset, size) in kept:
            with view[offset : offset + size] as part:
                written = 0
                while written < size:
                    with part[written:] as rest:
                        written += file.write(rest)


# ---------------------------------------------------------------------------- writing


class _Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_size_t), ("size", ctypes.c_size_t)]


def write(fill: Fill, processes: dict[int, int], sandbox: str) -> None:
    """Write all memory into the tasks, given by their numbers inside and on the host. They must not run. Blocks."""
    work = [
        (processes[memory.pid], _address(memory.mapped), run.address + at, run.offset + at, min(STEP, run.size - at))
        for memory in fill.memories
        if memory.mapped is not None
        for run in memory.runs
        for at in range(0, run.size, STEP)
    ]
    queue = iter(work)
    failed: list[OSError] = []
    lock = threading.Lock()

    def take() -> None:
        with contextlib.suppress(PermissionError):  # the sandbox stands still meanwhile: as urgent as CRIU
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), URGENT)
        while not failed:
            with lock:
                one = next(queue, None)
            if one is None:
                return
            try:
                _write_one(*one)
            except OSError as error:
                failed.append(error)

    helpers = [threading.Thread(target=take) for _ in range(min(THREADS, os.cpu_count() or 1))]
    for helper in helpers:
        helper.start()
    for helper in helpers:
        helper.join()
    if failed:
        raise RestoreFailed(f"memory could not be written: {failed[0]}", sandbox=sandbox)


def _address(mapped: mmap.mmap) -> int:
    """Where a mapping lies in our memory."""
    return int(np.frombuffer(mapped, dtype=np.uint8).ctypes.data)


def _write_one(pid: int, base: int, address: int, offset: int, size: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    done = 0
    while done < size:
        local, remote = _Vector(base + offset + done, size - done), _Vector(address + done, size - done)
        written = libc.process_vm_writev(
            pid, ctypes.byref(local), ctypes.c_ulong(1), ctypes.byref(remote), ctypes.c_ulong(1), ctypes.c_ulong(0)
        )
        if written <= 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{size - done} bytes at {address + done:#x} of {pid}: {os.strerror(number)}")
        done += written
