"""Segment files: where the page store keeps the bytes of its blocks.

Guarantee: what was appended is on the disk when `SegmentTail.sync` returns; an `appending` that fails leaves the file
as long as it was.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from sandbox import durable

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate


class Hole(NamedTuple):
    """Bytes of a segment that are no longer needed."""

    segment: int
    offset: int
    length: int


class SegmentTail:
    """The end of a segment file, from `start` on."""

    def __init__(self, directory: Path, fd: int, start: int):
        self._directory = directory
        self._fd = fd
        self._start = self._offset = start

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._fd, view, self._offset)
            view, self._offset = view[written:], self._offset + written

    def sync(self) -> None:
        os.fdatasync(self._fd)
        if self._start == 0:
            durable.sync(self._directory)


class Segments:
    """See the module. All methods block."""

    def __init__(self, directory: Path):
        self.directory = directory

    def path(self, segment: int) -> Path:
        return self.directory / f"{segment:08d}.segment"

    @contextlib.contextmanager
    def appending(self, segment: int, start: int) -> Iterator[SegmentTail]:
        """Append from offset `start` on; what lies behind it is overwritten."""
        fd = os.open(self.path(segment), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, fd)
            undo = stack.enter_context(contextlib.ExitStack())
            undo.callback(os.ftruncate, fd, start)  # a full disk must get its space back
            yield SegmentTail(self.directory, fd, start)
            undo.pop_all()

    def read(self, segment: int, offset: int, length: int) -> bytes:
        with open(self.path(segment), "rb") as file:
            return os.pread(file.fileno(), length, offset)

    def keep_only(self, existing: set[int]) -> None:
        """Remove all other segments."""
        for path in self.directory.glob("*.segment"):
            if int(path.stem) not in existing:
                path.unlink()

    def punch(self, holes: Iterable[Hole]) -> None:
        """Give space back inside segments that live on. A file system that cannot do that keeps it, no more."""
        by_segment: dict[int, list[Hole]] = {}
        for hole in holes:
            by_segment.setdefault(hole.segment, []).append(hole)
        libc = ctypes.CDLL(None, use_errno=True)
        for segment, result in by_segment.items():
            if not self.path(segment).exists():
                continue
            with open(self.path(segment), "r+b") as file:
                for hole in result:
                    where = ctypes.c_long(hole.offset), ctypes.c_long(hole.length)
                    libc.fallocate(file.fileno(), _KEEP_SIZE | _PUNCH_HOLE, *where)
