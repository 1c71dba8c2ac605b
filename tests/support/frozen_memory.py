"""The memory of frozen processes, read from outside, and of a capture: what a capture must have, page by page."""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sandbox import procfs
from sandbox.criu import image_files, rewrite, same_pages

PAGE = 4096
SCAN = 0xC0606610
FILE, PRESENT, SWAPPED, PFNZERO = 4, 8, 16, 32
RSEQ_SIZE = 32
Memory = dict[int, dict[int, bytes]]  # number of the process in the sandbox -> number of the page -> content
Spans = dict[int, list[tuple[int, int]]]  # ... -> bytes from here to there


def frozen(pids: Sequence[int]) -> Memory:
    """All pages that processes have of their own. They stand still."""
    result: Memory = {}
    for pid in pids:
        inner = procfs.inner_pid(pid)
        assert inner is not None
        result[inner] = _pages(pid)
    return result


def _pages(pid: int) -> dict[int, bytes]:
    result: dict[int, bytes] = {}
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    pagemap = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY)
    try:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, access, _, _, _, *name = line.split(None, 5)
            if access[3] != "p" or (name and name[0].startswith(("[v", "[uprobes]"))):
                continue
            start, end = (int(item, 16) for item in span.split("-"))
            for first, last in _present(pagemap, start, end):
                entries = np.frombuffer(os.pread(pagemap, (last - first) // PAGE * 8, first // PAGE * 8), "<u8")
                # A swapped page of type 31 is none: the kernel notes so that a page of a file was protected. To read it
                # brings the file's page back.
                data = os.pread(memory, last - first, first)
                for index in np.flatnonzero(((entries >> 62) & 1 == 0) | (entries & 31 != 31)).tolist():
                    result[first // PAGE + index] = data[index * PAGE : (index + 1) * PAGE]
    finally:
        os.close(memory)
        os.close(pagemap)
    return result


def _present(pagemap: int, start: int, end: int) -> list[tuple[int, int]]:
    regions = (ctypes.c_uint64 * (3 * 4096))()
    result = []
    while start < end:
        words = (96, 0, start, end, 0, ctypes.addressof(regions), 4096, 0)
        target = (FILE | PFNZERO, FILE | PFNZERO, PRESENT | SWAPPED, PRESENT)
        argument = bytearray(struct.pack("=12Q", *words, *target))
        count = fcntl.ioctl(pagemap, SCAN, argument)
        result += [(regions[3 * i], regions[3 * i + 1]) for i in range(count)]
        start = struct.unpack_from("=Q", argument, 32)[0]
    return result


def captured(directory: Path, scratch: Path) -> Memory:
    """All pages that a capture says that processes have. `scratch`: on the same file system, must not exist."""
    rewrite.copy(directory, scratch)
    result: Memory = {}
    for path in scratch.glob("pagemap-[0-9]*.img"):
        addresses, words = same_pages.listed(scratch, path.name)
        content = np.ascontiguousarray(words).view(np.uint8)
        pages = zip((addresses // PAGE).tolist(), content, strict=True)
        result[int(path.stem[8:])] = {number: page.tobytes() for number, page in pages}
    return result


def differences(truth: Memory, capture: Memory, spans: Spans) -> list[str]:
    """Pages that are not what they were; `spans`: bytes that the kernel writes, by process."""
    wrong = []
    for pid, pages in truth.items():
        existing = capture.get(pid)
        if existing is None:
            wrong.append(f"process {pid} is not in the capture")
            continue
        for number, content in pages.items():
            if number not in existing:
                if any(content):
                    wrong.append(f"process {pid}: page {number:#x} is missing")
            elif _masked(number, content, spans.get(pid, [])) != _masked(number, existing[number], spans.get(pid, [])):
                changed = [at for at in range(PAGE) if content[at] != existing[number][at]]
                wrong.append(f"process {pid}: page {number:#x} differs at {changed[:8]}, {len(changed)} bytes")
    return wrong


def _masked(number: int, content: bytes, spans: list[tuple[int, int]]) -> bytes:
    changed = bytearray(content)
    for first, last in spans:
        start, end = max(0, first - number * PAGE), min(PAGE, last - number * PAGE)
        if start < end:
            changed[start:end] = bytes(end - start)
    return bytes(changed)


def kernel_written(directory: Path) -> Spans:
    """The rseq areas of the threads of a capture, in which the kernel notes where they run."""
    kinds = image_files.messages()
    result: Spans = {}
    for path in directory.glob("pstree.img"):
        tree = image_files.read(path, kinds.pstree_entry)
        for entry in tree.entries if tree is not None else ():
            for thread in entry.threads:
                core = image_files.read(directory / f"core-{thread}.img", kinds.core_entry)
                if core is not None and (at := core.entries[0].thread_core.rseq_entry.rseq_abi_pointer):
                    result.setdefault(entry.pid, []).append((at, at + RSEQ_SIZE))
    return result
