"""Raw images of checkpoints that are stored already, kept for a while: restoring from them costs no decompression.

Guarantee: never more than LIMIT bytes or a SHARE of the file system; the least recently used goes first, but none that
is being read. What leaves has left its name before its files go, so no reader meets it half removed.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

LIMIT = 1 << 30  # bytes
SHARE = 8  # at most one part in so many of the file system


class RecentImages:
    """See the module. Call `keep`, `find` and `make_room` from one thread, so that none comes between two of a reader.

    `busy` says whether the images of a name are being read. What is returned is for the caller to remove.
    """

    def __init__(self, directory: Path, *, limit: int | None = None):
        self._directory = directory
        self._limit = limit
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._numbers = itertools.count(1)

    def prepare(self) -> None:
        """An empty directory, whatever a former daemon left. Blocks."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(mode=0o700)
        if self._limit is None:
            result = os.statvfs(self._directory)
            self._limit = min(LIMIT, result.f_blocks * result.f_frsize // SHARE)

    def place(self) -> Path:
        """Where images may be made that are kept then."""
        return self._directory / f".{next(self._numbers)}"

    def fits(self, size: int) -> bool:
        """Whether images of so many bytes may be kept."""
        return size <= (self._limit or 0)

    def keep(self, name: str, images: Path, *, busy: Callable[[str], bool]) -> list[Path]:
        """Take over the directory `images` under `name`, and let others go for it."""
        try:
            size = sum(result.st_size // result.st_nlink for result in map(os.stat, images.rglob("*")))
            images.rename(self._directory / name)
        except FileNotFoundError:
            return []  # removed with its checkpoint
        self._sizes[name] = size
        return self._shrink(self._limit or 0, busy)

    def find(self, name: str) -> Path | None:
        """Where the images of `name` are, if they are still kept. They are used now."""
        if name not in self._sizes:
            return None
        self._sizes.move_to_end(name)
        return self._directory / name

    def make_room(self, *, busy: Callable[[str], bool]) -> list[Path]:
        """Let all go: space is short."""
        return self._shrink(0, busy)

    def drop(self, name: str) -> None:
        """Remove the images of `name`, which are not being read. Idempotent. Blocks."""
        if (gone := self._leave(name)) is not None:
            shutil.rmtree(gone, ignore_errors=True)

    def _shrink(self, limit: int, busy: Callable[[str], bool]) -> list[Path]:
        gone = []
        for name in list(self._sizes):
            if sum(self._sizes.values()) <= limit:
                break
            if not busy(name) and (path := self._leave(name)) is not None:
                gone.append(path)
        return gone

    def _leave(self, name: str) -> Path | None:
        if self._sizes.pop(name, None) is None:
            return None
        return (self._directory / name).rename(self._directory / f".{next(self._numbers)}")


def remove(directories: list[Path]) -> None:
    """Blocks."""
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)
