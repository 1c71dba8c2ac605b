"""Sees every file that chosen processes open for writing, create, move or remove on watched file systems (fanotify).

A queue that overflowed is told: what was not seen is no proof.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

_INIT, _MARK = 300, 301  # system calls
_CLOEXEC, _NONBLOCK, _UNLIMITED = 0x1, 0x2, 0x10 | 0x20
_REPORT_NAMES = 0x400 | 0x800  # FAN_REPORT_DIR_FID | FAN_REPORT_NAME
_ADD, _FILESYSTEM = 0x1, 0x100
_OVERFLOW = 0x4000
_ON_DIRECTORIES = 0x4000_0000
OBSERVED = {
    0x2: "written",
    0x4: "changed",
    0x8: "opened for writing",
    0x40: "moved",
    0x80: "moved",
    0x100: "created",
    0x200: "removed",
}
_EVENT = struct.Struct("=IBBHQii")  # length, version, reserved, length of this, mask, descriptor, pid
_INFO = struct.Struct("=BBH")  # type, padding, length
_HANDLE = struct.Struct("=Ii")  # bytes, type
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Watcher:
    """Use it as a context. `reported`: what was seen of the processes `pids`, by name, without repetitions."""

    places: Sequence[Path]  # one on each file system to watch
    pids: set[int] = field(default_factory=set)
    reported: set[str] = field(default_factory=set)
    events: int = 0  # of anybody
    lost: bool = False
    _file: int = -1

    def __enter__(self) -> Self:
        self._file = _called(_INIT, _CLOEXEC | _NONBLOCK | _UNLIMITED | _REPORT_NAMES, os.O_RDONLY)
        mask = sum(OBSERVED) | _ON_DIRECTORIES
        for place in self.places:
            _called(_MARK, self._file, _ADD | _FILESYSTEM, ctypes.c_ulong(mask), -100, os.fsencode(place))
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def poll(self) -> None:
        """Take what has happened since."""
        while True:
            try:
                data = os.read(self._file, 1 << 20)
            except BlockingIOError:
                return
            place = 0
            while place < len(data):
                length, _, _, head, mask, _, pid = _EVENT.unpack_from(data, place)
                self.events += 1
                self.lost = self.lost or bool(mask & _OVERFLOW)
                if pid in self.pids:
                    how = ", ".join(sorted({words for bit, words in OBSERVED.items() if mask & bit}))
                    self.reported.add(f"{how}: {_name(data[place + head : place + length])}")
                place += length


def _name(info: bytes) -> str:
    """The name that an event tells: behind a file system's id and a handle of the directory."""
    if len(info) < _INFO.size + 8 + _HANDLE.size:
        return "?"
    size, _ = _HANDLE.unpack_from(info, _INFO.size + 8)
    return os.fsdecode(info[_INFO.size + 8 + _HANDLE.size + size :].rstrip(b"\0"))


def _called(number: int, *arguments: object) -> int:
    result = int(_libc.syscall(number, *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
