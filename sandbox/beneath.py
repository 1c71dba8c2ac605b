"""Paths below a root that belongs to somebody else, resolved by the kernel.

Owns: every way in which the host opens something in a tree that a sandbox may change under its feet.
Does not own: what is done with it. Guarantee: a path is resolved below the root (``openat2`` with
RESOLVE_IN_ROOT), whatever symlinks or ``..`` the sandbox races against us, and never into another
mount (so neither ``/proc`` nor a device is reached). A FIFO or device cannot block the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import PurePosixPath

from sandbox.errors import Conflict, Invalid, NoSpace, NotFound, PagurusError

_SYS_OPENAT2 = 437
_RESOLVE_NO_XDEV = 0x01
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_IN_ROOT = 0x10
_PR_SET_SECUREBITS = 28
_SECBIT_NO_SETUID_FIXUP = 4

_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def sandbox_root(init_pid: int) -> Iterator[int]:
    """The root of the sandbox whose pid 1 this is, opened."""
    try:
        root = os.open(f"/proc/{init_pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise Conflict(f"its root is gone: {os.strerror(error.errno or 0)}", remedy="restore the sandbox") from error
    try:
        yield root
    finally:
        os.close(root)


@contextlib.contextmanager
def opened(root: int, path: str, flags: int, mode: int = 0) -> Iterator[int]:
    """`path` below `root`, opened; raises as :func:`refused` says."""
    try:
        file = openat2(root, path, flags, mode)
    except OSError as error:
        raise refused(error, path) from error
    try:
        yield file
    finally:
        os.close(file)


def openat2(root: int, path: str, flags: int, mode: int = 0) -> int:
    """A descriptor of `path`, resolved below the directory `root`. Raises OSError, and Invalid for what is no path."""
    need_path(path)
    flags |= os.O_CLOEXEC | (0 if flags & os.O_PATH else os.O_NONBLOCK | os.O_NOCTTY)
    resolve = _RESOLVE_IN_ROOT | _RESOLVE_NO_XDEV | _RESOLVE_NO_MAGICLINKS
    how = struct.pack("=QQQ", flags, mode if flags & os.O_CREAT else 0, resolve)
    for _ in range(64):  # EAGAIN: a rename raced with the resolution
        file = _libc.syscall(_SYS_OPENAT2, root, os.fsencode(path), how, len(how))
        if file >= 0:
            return file
        if ctypes.get_errno() != errno.EAGAIN:
            break
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number), path)


def need_path(path: str) -> None:
    """Raise for a path with a NUL byte: the kernel would read it only up to there."""
    if "\0" in path:
        raise Invalid(f"a path holds no NUL byte: {path!r}")


def make_parents(root: int, directory: PurePosixPath, mode: int = 0o755) -> None:
    """Make `directory`, with `mode`, and whatever is missing above it."""
    missing = []
    while directory != directory.parent:
        try:
            os.close(openat2(root, str(directory), os.O_PATH | os.O_DIRECTORY))
            break
        except FileNotFoundError:
            missing.append(directory)
            directory = directory.parent
        except OSError as error:
            raise refused(error, str(directory)) from error
    for path in reversed(missing):
        with opened(root, str(path.parent), os.O_RDONLY | os.O_DIRECTORY) as parent:
            try:
                os.mkdir(path.name, mode if path == missing[0] else 0o755, dir_fd=parent)
            except FileExistsError:
                pass  # the sandbox made it meanwhile
            except OSError as error:
                raise refused(error, str(path)) from error


@contextlib.contextmanager
def as_sandbox_root(uid_base: int) -> Iterator[None]:
    """This thread creates files as the sandbox's root, without losing its capabilities.

    The upper is mounted with an id mapping, in which host root has no place: a file that host root
    creates fails with EOVERFLOW. File-system ids and secure bits belong to the thread, not the process.
    """
    _libc.prctl(_PR_SET_SECUREBITS, _SECBIT_NO_SETUID_FIXUP, 0, 0, 0)
    _libc.setfsgid(uid_base)
    _libc.setfsuid(uid_base)
    try:
        yield
    finally:
        _libc.setfsuid(0)
        _libc.setfsgid(0)


def need_regular(file: int, path: str) -> None:
    """Raise unless `file` is a regular file."""
    mode = os.fstat(file).st_mode
    if not stat.S_ISREG(mode):
        raise Invalid(f"{path} is not a regular file", remedy="use a command in the sandbox for anything else")


def refused(error: OSError, path: str) -> PagurusError:
    """What the kernel's refusal means to the caller."""
    reason = os.strerror(error.errno or 0)
    if error.errno == errno.ENOENT:
        return NotFound(f"no such file or directory: {path}")
    if error.errno == errno.ENOSPC:
        return NoSpace(f"cannot write {path}: the disk is full", remedy="remove checkpoints or sandboxes")
    if error.errno == errno.EXDEV:
        return Invalid(f"{path} is not part of the sandbox's file tree", remedy="read it with a command")
    return Invalid(f"{path}: {reason}")
