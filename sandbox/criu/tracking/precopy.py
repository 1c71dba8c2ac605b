"""The written pages of a process, copied while it runs: a dump then reads only what it writes after that.

Guarantee: a page is protected before it is read, so that whatever is written to it later marks it again, and the dump
reads it once more. A page that was protected and could not be read is reported: it must not count as known.

::

    PAGEMAP_SCAN: list and protect ▸ read /proc/PID/mem ▸ a file of pages
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sandbox.criu.tracking import userfault
from sandbox.criu.tracking.userfault import Mapping
from sandbox.descriptors import closing

PAGE = 4096
MAX_PAGES = 1 << 16  # of one process; the dump reads the others
#: Of memory of its own: pages of files and the page of zeros are not copied.
WRITTEN_PAGES = userfault.PageQuery(
    every=userfault.WPALLOWED | userfault.WRITTEN, none=userfault.FILE | userfault.PFNZERO, returned=userfault.WRITTEN
)


@dataclass(frozen=True)
class CopiedPages:
    """Numbers of pages, [n] int64, sorted: all that are `protected` now, and those of them that the file holds."""

    protected: np.ndarray
    copied: np.ndarray


class PagesOf:
    """A process whose written pages are copied; it stays the same one when its number is used again."""

    def __init__(self, pid: int):
        """Raises OSError when it is gone."""
        self._pagemap = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            os.close(self._pagemap)
            raise

    def close(self) -> None:
        """Once."""
        os.close(self._pagemap)
        os.close(self._memory)

    def protect(self, spans: np.ndarray) -> np.ndarray:
        """Protect the written pages in `spans`, [n, 2] int64, each from here to there; their numbers. Blocks."""
        regions = [
            np.arange(start // PAGE, end // PAGE)
            for first, last in spans.tolist()
            for start, end, _ in WRITTEN_PAGES.regions(self._pagemap, first * PAGE, last * PAGE, protect=True)
        ]
        return np.concatenate([np.zeros(0, np.int64), *regions])

    def copy(self, mappings: list[Mapping], into: Path) -> CopiedPages:
        """Copy what was written since it was protected last to `into`, which must not exist. Blocks.

        Raises OSError when there is no room; then nothing is known of what is protected.
        """
        regions = list(self._protected(mappings)) if mappings else []
        protected = np.concatenate([np.zeros(0, np.int64), *(np.arange(start, end) for start, end in regions)])
        if not len(protected):
            return CopiedPages(protected, protected)
        with closing(os.open(into, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)) as file:
            os.posix_fallocate(file, 0, len(protected) * PAGE)  # else a write to the mapping may end this process
            with mmap.mmap(file, len(protected) * PAGE) as pages, memoryview(pages) as view:
                count, copied = 0, []
                for start, end in regions:
                    done = self._read(start, view[count * PAGE : (count + end - start) * PAGE])
                    copied.append(np.arange(start, start + done))
                    count += done
            os.truncate(file, count * PAGE)
        return CopiedPages(protected, np.concatenate(copied))

    def _read(self, page: int, target: memoryview) -> int:
        """How many pages from this one on could be read."""
        try:
            return os.preadv(self._memory, [target], page * PAGE) // PAGE
        except OSError:  # unmapped since, or the process is gone
            return 0

    def _protected(self, mappings: list[Mapping]) -> Iterator[tuple[int, int]]:
        """Protect the written pages of memory of its own, at most MAX_PAGES; yields them, each from here to there."""
        regions = WRITTEN_PAGES.regions(
            self._pagemap, mappings[0].start, mappings[-1].end, protect=True, limit=MAX_PAGES
        )
        for start, end, _ in regions:
            yield start // PAGE, end // PAGE
