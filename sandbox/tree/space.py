"""Room on a disk that a copy of somebody else's tree leaves free.

Owns: looking how much is free, now and then. Does not own: limits of a sandbox's own disk (:mod:`sandbox.tree.quota`).
"""

from __future__ import annotations

import errno
import os

RETAINED = 256 << 20  # bytes of the disk that a copy leaves free, and as many files as this would be of 16 KiB
CHECK_INTERVAL = 64 << 20  # bytes after which it looks again how much is free


class Reserve:
    """What is left on the disk of an open directory."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._left = 0

    def take(self, size: int) -> None:
        """Before so many bytes, or a file (0), are made. Raises OSError (ENOSPC)."""
        self._left -= max(size, RETAINED >> 14)
        if self._left < 0:
            result = os.fstatvfs(self._target)
            if result.f_bavail * result.f_frsize < RETAINED + CHECK_INTERVAL or 0 < result.f_favail < RETAINED >> 14:
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {RETAINED >> 20} MiB of the disk stay free")
            self._left = CHECK_INTERVAL
