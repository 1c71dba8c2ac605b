"""The file tree of a checkpoint, as one directory to be read: what its sandbox wrote over its image.

Guarantee: it is mounted nowhere, so no crash leaves it behind, and nothing can be written to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from sandbox.descriptors import closing
from sandbox.tree.safe_path import directory

_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_CLOEXEC, _SET_STRING, _CREATE, _READ_ONLY = 1, 1, 6, 1
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def merged(layers: Sequence[Path]) -> Iterator[int]:
    """A descriptor of the directory that an overlay of these directories shows, the topmost first. Raises OSError."""
    with contextlib.ExitStack() as stack:
        parts = [stack.enter_context(directory(layer)) for layer in layers]
        if len(parts) == 1:
            yield parts[0]
            return
        filesystem = stack.enter_context(closing(_called(_FSOPEN, b"overlay", _CLOEXEC)))
        # By descriptors: a value has at most 255 bytes, and a path may hold colons.
        below = ":".join(f"/proc/self/fd/{part}" for part in parts).encode()
        _called(_FSCONFIG, filesystem, _SET_STRING, b"lowerdir", below, 0)
        _called(_FSCONFIG, filesystem, _CREATE, None, None, 0)
        mount = stack.enter_context(closing(_called(_FSMOUNT, filesystem, _CLOEXEC, _READ_ONLY)))
        yield stack.enter_context(closing(os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=mount)))


def _called(number: int, *arguments: object) -> int:
    result: int = _libc.syscall(number, *arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
