"""The written pages of a process, copied while it runs: a dump then reads only what it writes after that.

Guarantee: a page is protected before it is read, so that whatever is written to it later marks it again, and the dump
reads it once more. A page that was protected and could not be read is reported: it must not count as known.

::

    PAGEMAP_SCAN: list and protect ▸ read many regions at once ▸ a file of pages
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import dataclasses
import errno
import itertools
import mmap
import operator
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sandbox.content import layers
from sandbox.criu.tracking import userfault
from sandbox.criu.tracking.userfault import Mapping
from sandbox.descriptors import closing
from sandbox.libc import library

PAGE = 4096
MAX_PAGES = 1 << 16  # of one process; the dump reads the others
MAX_BATCH_PAGES, MAX_BATCH = 1024, 1024  # pages and regions (the kernel's limit) that are read at once
#: Of memory of its own: pages of files and the page of zeros are not copied.
WRITTEN_PAGES = userfault.PageQuery(
    every=userfault.WPALLOWED | userfault.WRITTEN, none=userfault.FILE | userfault.PFNZERO, returned=userfault.WRITTEN
)
#: The same in anonymous mappings.
WRITTEN_ANONYMOUS = dataclasses.replace(WRITTEN_PAGES, none=userfault.PFNZERO)


Region = tuple[int, int]  # numbers of pages: from here to there
ONE, NONE = ctypes.c_ulong(1), ctypes.c_ulong(0)


@dataclass(frozen=True)
class CopiedPages:
    """Numbers of pages, [n] int64, sorted: all that are `protected` now, and those of them that the file holds."""

    protected: np.ndarray
    copied: np.ndarray


class PagesOf:
    """A process whose written pages are copied; it stays the same one when its number is used again."""

    def __init__(self, pid: int):
        """Raises OSError when it is gone."""
        with contextlib.ExitStack() as opened:
            self._pid = pid
            self._process = os.pidfd_open(pid)
            opened.callback(os.close, self._process)
            self._pagemap = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, self._pagemap)
            self._memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, self._memory)
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Idempotent."""
        self._opened.close()

    def protect(self, spans: np.ndarray, mappings: Sequence[Mapping]) -> np.ndarray:
        """Protect the written pages in `spans`, [n, 2] int64, each from here to there; their numbers. Blocks.

        `mappings`: all private ones of the process, sorted.
        """
        ends = [mapping.end for mapping in mappings]
        regions: list[tuple[int, int, int]] = []
        for first, last in (spans * PAGE).tolist():
            at = bisect.bisect_right(ends, first)
            inside = at < len(ends) and mappings[at].anonymous and last <= ends[at]
            query = WRITTEN_ANONYMOUS if inside else WRITTEN_PAGES
            regions += query.regions(self._pagemap, first, last, protect=True)
        return layers.numbers([(start // PAGE, end // PAGE) for start, end, _ in regions])

    def copy(self, mappings: list[Mapping], into: Path) -> CopiedPages:
        """Copy what was written since it was protected last to `into`, which must not exist. Blocks.

        Raises OSError when there is no room, or the process is gone; then nothing is known of what is protected.
        """
        regions = list(self._protected(mappings))
        copied: list[Region] = []
        if regions:
            with (
                closing(os.open(into, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)) as file,
                mmap.mmap(-1, MAX_BATCH_PAGES * PAGE) as buffer,
                memoryview(buffer) as view,
            ):
                for batch in batches(regions):
                    size, pages = self._read(batch, view)
                    copied += pages
                    if os.write(file, view[:size]) != size:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(into))
            signal.pidfd_send_signal(self._process, 0)  # its number was its own until now
        return CopiedPages(layers.numbers(regions), layers.numbers(copied))

    def _read(self, batch: Sequence[Region], buffer: memoryview) -> tuple[int, list[Region]]:
        """Read pages into `buffer`, one behind the other: how many bytes, and which pages. Some cannot be read."""
        size, pages, rest = 0, [], list(batch)
        while rest:
            done, size = self._read_ahead(rest, buffer, size)
            pages += rest[:done]
            if (rest := rest[done:]) and (count := self._read_one(rest[0], buffer[size:])):
                pages.append((rest[0][0], rest[0][0] + count))
                size += count * PAGE
            rest = rest[1:]
        return size, pages

    def _read_ahead(self, regions: Sequence[Region], buffer: memoryview, size: int) -> tuple[int, int]:
        """How many regions could be read as a whole, and where they end in `buffer`."""
        theirs = np.array(regions, np.uint64) * np.uint64(PAGE)
        theirs[:, 1] -= theirs[:, 0]
        ours = np.array([np.frombuffer(buffer, np.uint8).ctypes.data + size, len(buffer) - size], np.uint64)
        addresses = ctypes.c_void_p(ours.ctypes.data), ctypes.c_void_p(theirs.ctypes.data)
        done = library.process_vm_readv(self._pid, addresses[0], ONE, addresses[1], ctypes.c_ulong(len(regions)), NONE)
        ends = np.cumsum(theirs[:, 1])
        count = int(np.searchsorted(ends, max(done, 0), side="right"))
        return count, size + (int(ends[count - 1]) if count else 0)

    def _read_one(self, region: Region, buffer: memoryview) -> int:
        """How many of its pages could be read, also without permission to read them."""
        first, last = region
        try:
            return os.preadv(self._memory, [buffer[: (last - first) * PAGE]], first * PAGE) // PAGE
        except OSError:  # unmapped since, or the process is gone
            return 0

    def _protected(self, mappings: list[Mapping]) -> Iterator[Region]:
        """Protect the written pages of memory of its own, at most MAX_PAGES; yields them, each from here to there."""
        left = MAX_PAGES
        for anonymous, group in itertools.groupby(mappings, key=operator.attrgetter("anonymous")):
            first, *others = group
            end = others[-1].end if others else first.end
            query = WRITTEN_ANONYMOUS if anonymous else WRITTEN_PAGES
            for here, there, _ in query.regions(self._pagemap, first.start, end, protect=True, limit=left):
                left -= (there - here) // PAGE
                yield here // PAGE, there // PAGE
            if left <= 0:
                return


def batches(regions: Sequence[Region]) -> Iterator[list[Region]]:
    """The same pages in the same order, so many at a time as can be read at once."""
    batch: list[Region] = []
    size = 0
    for start, end in regions:
        while start < end:
            stop = min(end, start + MAX_BATCH_PAGES - size)
            batch.append((start, stop))
            size += stop - start
            start = stop
            if size == MAX_BATCH_PAGES or len(batch) == MAX_BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
