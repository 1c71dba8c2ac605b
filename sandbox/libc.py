"""Calls of the C library that Python has no words for."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

library = ctypes.CDLL(None, use_errno=True)

_FSOPEN = 430
_FSOPEN_CLOEXEC = 1
_PIDFD_GETFD = 438


def checked(result: int, what: str | None = None) -> int:
    """`result`; below zero the OSError that the call has left in errno, about `what`."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return int(result)


def descriptor_of(pidfd: int, number: int) -> int:
    """A descriptor of ours of what is behind one of another process's. Raises OSError when it is gone."""
    return checked(library.syscall(_PIDFD_GETFD, pidfd, number, 0))


def file_system(place: Path | int) -> int:
    """The magic number of the file system of a path or descriptor, which Python's statvfs does not return."""
    result = (ctypes.c_long * 16)()
    call, of = (library.fstatfs, place) if isinstance(place, int) else (library.statfs, os.fsencode(place))
    checked(call(of, result), str(place))
    return result[0] & 0xFFFFFFFF


def load_file_system(name: str) -> bool:
    """Let the kernel load the module of a file system, as a mount would. False when it has none of that name."""
    result = library.syscall(_FSOPEN, name.encode(), _FSOPEN_CLOEXEC)
    if result >= 0:
        os.close(result)
    return bool(result >= 0)
