"""Room on a disk that a copy of another user's tree leaves free.

The pool is a sparse file. Where images filled the disk below it, writes of sandboxes into a pool that seems to have
room would fail. So what its file may still grow by counts as used, in this process and in those that it starts.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

RETAINED = 256 << 20  # bytes of the disk that a copy leaves free, and as many files as this would be of 16 KiB
CHECK_INTERVAL = 64 << 20  # bytes after which it looks again how much is free
PROMISED = "PAGURUS_PROMISED"  # variable of the environment: the file of the pool


def promise(file: Path) -> None:
    """From now on what this sparse file may still grow by is left free."""
    os.environ[PROMISED] = str(file)


def promised(device: int) -> int:
    """Bytes of this disk that are free and promised."""
    try:
        result = os.stat(os.environ[PROMISED])
    except (KeyError, FileNotFoundError):
        return 0
    return max(0, result.st_size - result.st_blocks * 512) if result.st_dev == device else 0


class Reserve:
    """What is left on the disk of an open file or directory."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._left = 0

    def take(self, size: int) -> None:
        """Before so many bytes, or a file (0), are made. Raises OSError (ENOSPC)."""
        self._left -= max(size, RETAINED >> 14)
        if self._left < 0:
            result = os.fstatvfs(self._target)
            retained = RETAINED + promised(os.fstat(self._target).st_dev)
            if (
                result.f_bavail * result.f_frsize < retained + max(size, CHECK_INTERVAL)
                or 0 < result.f_favail < RETAINED >> 14
            ):
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {retained >> 20} MiB of the disk stay free")
            self._left = CHECK_INTERVAL
