"""Paths below a root that belongs to another user, resolved by the kernel.

No other module opens such a tree by a path string (a test looks for it). Guarantee: a path is resolved below the root
(``openat2`` with RESOLVE_IN_ROOT), whatever symlinks or ``..`` the sandbox races against us, and never into another
mount (so neither ``/proc`` nor a device is reached). What lies there is looked at before it is opened, and opened
without waiting: neither a FIFO nor a device nor a lease can block the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import stat
import struct
import threading
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from sandbox.descriptors import closing
from sandbox.errors import Conflict, Invalid, NoSpace, NotFound, PagurusError

_SYS_OPENAT2 = 437
IDS = 65_536  # users and groups that a sandbox has
NOBODY = 65_534
_RESOLVE_NO_XDEV = 0x01
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_BENEATH = 0x08
_RESOLVE_IN_ROOT = 0x10
IN_ROOT = _RESOLVE_IN_ROOT | _RESOLVE_NO_XDEV | _RESOLVE_NO_MAGICLINKS  # as the sandbox sees it, links followed
ACROSS_MOUNTS = _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS  # likewise, also what is mounted below
NO_LINKS = IN_ROOT | _RESOLVE_NO_SYMLINKS  # real directories only
BENEATH = _RESOLVE_BENEATH | _RESOLVE_NO_MAGICLINKS  # of the host's own: no link and no ".." may leave the directory
ON_HOST = BENEATH | _RESOLVE_NO_SYMLINKS  # likewise, and no link is followed at all
UPWARDS = _RESOLVE_NO_XDEV | _RESOLVE_NO_MAGICLINKS | _RESOLVE_NO_SYMLINKS  # "..": for who knows what must be there
_STEP = 4000  # bytes of a path that the kernel takes at once; it refuses more than 4095
_PR_SET_SECUREBITS = 28
_SECBIT_NO_SETUID_FIXUP = 4

_libc = ctypes.CDLL(None, use_errno=True)


class SandboxRoot:
    """The root directory of a living sandbox, held from the moment its pid 1 is known to the moment it is let go.

    A user of a sandbox's files takes this object when the work is queued. Once pid 1 has died or was
    replaced, `opened` raises Conflict: neither a pid that was given to another process nor a successor is met.
    """

    def __init__(self, init_pid: int, pidfd: int) -> None:
        """`pidfd` is of the same process; this object keeps a copy of it. Raises Conflict when it has died."""
        self._lock = threading.Lock()
        self._pidfd = self._process = self._root = -1
        flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            self._process = os.open(f"/proc/{init_pid}", flags)
            self._root = os.open("root", flags, dir_fd=self._process)
            _need_own(self._root)
            self._pidfd = os.dup(pidfd)
            if not _lives(self._pidfd):  # the number may have been another process's by then
                raise _gone()
        except OSError as error:
            self.close()
            raise _gone() from error
        except PagurusError:
            self.close()
            raise

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """A descriptor of the root. Raises Conflict when pid 1 has died or the sandbox was let go."""
        with self._lock:
            if self._root < 0 or not _lives(self._pidfd):
                raise _gone()
            root = os.dup(self._root)
        try:
            yield root
        finally:
            os.close(root)

    @contextlib.contextmanager
    def of_process(self, name: str) -> Iterator[int]:
        """A file of pid 1 in /proc, such as ``net/tcp`` or ``ns/net``, opened. Raises Conflict likewise."""
        with self._lock:
            if self._root < 0 or not _lives(self._pidfd):
                raise _gone()
            try:
                file = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._process)
            except OSError as error:  # it is dying
                raise _gone() from error
        try:
            yield file
        finally:
            os.close(file)

    def below(self, path: str) -> SandboxRoot:
        """A directory of it as a root of its own, for as long as this one is held: that of a service."""
        return self if not path else _RootBelow(self, path)

    def close(self) -> None:
        """Let go of it. What is open stays open."""
        with self._lock:
            for descriptor in (self._root, self._process, self._pidfd):
                if descriptor >= 0:
                    os.close(descriptor)
            self._root = self._process = self._pidfd = -1


class _RootBelow(SandboxRoot):
    def __init__(self, held: SandboxRoot, path: str) -> None:
        self._held, self._path = held, path

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        flags, resolve = os.O_PATH | os.O_DIRECTORY, ACROSS_MOUNTS | _RESOLVE_NO_SYMLINKS
        with self._held.opened() as top, opened(top, self._path, flags, resolve=resolve) as root:
            yield root

    @contextlib.contextmanager
    def of_process(self, name: str) -> Iterator[int]:
        with self._held.of_process(name) as file:
            yield file

    def close(self) -> None:
        """Nothing is held."""


def _need_own(root: int) -> None:
    if os.path.samestat(os.fstat(root), os.stat("/")):
        raise Conflict("its root is that of the host", hint="restore the sandbox")


@contextlib.contextmanager
def root_of(pid: int) -> Iterator[int]:
    """The root of a process that the caller holds by other means: frozen, its child, or known by the kernel's hook.

    Raises Conflict when it has ended, or has the root of the host.
    """
    descriptors: list[int] = []
    try:
        descriptors.append(os.pidfd_open(pid))
        descriptors.append(os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        _need_own(descriptors[1])
        if not _lives(descriptors[0]):
            raise _gone()
        yield descriptors[1]
    except ProcessLookupError as error:
        raise _gone() from error
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _lives(pidfd: int) -> bool:
    waiting = select.poll()
    waiting.register(pidfd, select.POLLIN)
    return not waiting.poll(0)  # readable: it has died


def _gone() -> Conflict:
    return Conflict("its root is gone: pid 1 has ended", hint="restore the sandbox")


def directory(path: Path) -> closing:
    """A directory whose path is the host's own: the top of an image, of a snapshot, of the upper layer of a sandbox."""
    return closing(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))


@contextlib.contextmanager
def opened(root: int, path: str, flags: int, mode: int = 0, *, resolve: int = IN_ROOT) -> Iterator[int]:
    """`path` below `root`, opened if it is a regular file or a directory; raises as :func:`refused` says."""
    try:
        file = _open(root, path, flags, mode, resolve)
    except OSError as error:
        raise refused(error, path) from error
    try:
        yield file
    finally:
        os.close(file)


def _open(root: int, path: str, flags: int, mode: int, resolve: int) -> int:
    if flags & os.O_PATH:
        return openat2(root, path, flags, resolve=resolve)
    try:
        return open_kind(root, path, flags & ~os.O_CREAT, resolve=resolve)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    return openat2(root, path, flags, mode, resolve=resolve)


def open_kind(
    root: int,
    path: str,
    flags: int,
    kinds: tuple[int, ...] = (stat.S_IFREG, stat.S_IFDIR),
    *,
    resolve: int = IN_ROOT,
) -> int:
    """A descriptor of `path` if it is of one of these `kinds` (stat.S_IFMT). Raises OSError, and Invalid for others.

    What lies there is looked at first: to open a FIFO or a device is an act already.
    """
    with closing(openat2(root, path, os.O_PATH | flags & (os.O_NOFOLLOW | os.O_DIRECTORY), resolve=resolve)) as result:
        if stat.S_IFMT(os.fstat(result).st_mode) not in kinds:
            raise not_regular(path)
        again = flags & ~os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        return os.open(f"/proc/self/fd/{result}", again)


def regular(parent: int, name: str) -> closing:
    """The regular file `name` of an open directory, to be read. Raises OSError, and Invalid for anything else."""
    return closing(open_kind(parent, name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NOATIME, (stat.S_IFREG,)))


def named(parent: int, name: str) -> str:
    """A path to an entry of an open directory, for calls that take no descriptor. They must not follow links."""
    return f"/proc/self/fd/{parent}/{name}"


@contextlib.contextmanager
def pinned(parent: int, name: str, kind: int) -> Iterator[str]:
    """A path to an entry of an open directory for calls that follow links: it stays that entry, whatever takes its
    name. Raises OSError, also where it is not of this kind (stat.S_IFMT) any more."""
    with closing(openat2(parent, name, os.O_PATH | os.O_NOFOLLOW, resolve=NO_LINKS)) as result:
        if stat.S_IFMT(os.fstat(result).st_mode) != kind:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), name)
        yield f"/proc/self/fd/{result}"


def openat2(root: int, path: str, flags: int, mode: int = 0, *, resolve: int = IN_ROOT) -> int:
    """A descriptor of `path`, resolved below the directory `root`. Raises OSError, and Invalid for what is no path."""
    need_path(path)
    flags |= os.O_CLOEXEC | (0 if flags & os.O_PATH else os.O_NONBLOCK | os.O_NOCTTY)
    how = struct.pack("=QQQ", flags, mode if flags & os.O_CREAT else 0, resolve)
    for _ in range(64):  # EAGAIN: a rename raced with the resolution
        file: int = _libc.syscall(_SYS_OPENAT2, root, os.fsencode(path), how, len(how))
        if file >= 0:
            return file
        if ctypes.get_errno() != errno.EAGAIN:
            break
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number), path[:200])


def open_deep(root: int, path: bytes, flags: int) -> int:
    """A descriptor of `path`, which may be of any length, by real directories only. Raises OSError."""
    here, names = os.dup(root), path.split(b"/")
    try:
        while True:
            part = [names.pop(0)]
            while names and sum(map(len, part)) + len(part) + len(names[0]) < _STEP:
                part.append(names.pop(0))
            step = os.fsdecode(b"/".join(part)) or "."
            kind = os.O_PATH | os.O_DIRECTORY if names else flags | os.O_NOFOLLOW
            below = openat2(here, step, kind, resolve=NO_LINKS)
            os.close(here)
            here = below
            if not names:
                return here
    except (OSError, ValueError, Invalid):  # also a name that no path can hold
        os.close(here)
        raise


def need_path(path: str) -> None:
    """Raise for a path with a NUL byte: the kernel would read it only up to there."""
    if "\0" in path:
        raise Invalid(f"a path holds no NUL byte: {path!r}", hint="remove the byte")


def make_parents(root: int, directory: PurePosixPath, mode: int = 0o755, *, resolve: int = IN_ROOT) -> None:
    """Make `directory`, with `mode`, and whatever is missing above it."""
    missing = []
    while directory != directory.parent:
        try:
            os.close(openat2(root, str(directory), os.O_PATH | os.O_DIRECTORY, resolve=resolve))
            break
        except FileNotFoundError:
            missing.append(directory)
            directory = directory.parent
        except OSError as error:
            raise refused(error, str(directory)) from error
    for path in reversed(missing):
        with opened(root, str(path.parent), os.O_RDONLY | os.O_DIRECTORY, resolve=resolve) as parent:
            try:
                os.mkdir(path.name, mode if path == missing[0] else 0o755, dir_fd=parent)
            except FileExistsError:
                pass  # the sandbox made it since
            except OSError as error:
                raise refused(error, str(path)) from error


def inner_id(number: int, base: int) -> int:
    """A user or group as a sandbox sees it whose ids begin at `base` (0: as it is). One that has no number there, such
    as the owner of /proc/sys, gets the overflow id, as from the kernel.

    >>> inner_id(165536, 165536), inner_id(0, 165536), inner_id(70000, 0)
    (0, 65534, 70000)
    """
    return number - base if not base or 0 <= number - base < IDS else NOBODY


@contextlib.contextmanager
def as_sandbox_root(uid_base: int, owner: tuple[int, int] = (0, 0)) -> Iterator[None]:
    """This thread creates files as the sandbox's root, or for this user and group, without losing its capabilities.

    The upper is mounted with an id mapping, in which host root has no place: a file that host root
    creates fails with EOVERFLOW. File-system ids and secure bits belong to the thread, not the process.
    """
    _libc.prctl(_PR_SET_SECUREBITS, _SECBIT_NO_SETUID_FIXUP, 0, 0, 0)
    _libc.setfsgid(uid_base + owner[1])
    _libc.setfsuid(uid_base + owner[0])
    try:
        yield
    finally:
        _libc.setfsuid(0)
        _libc.setfsgid(0)


def need_regular(file: int, path: str) -> None:
    """Raise unless `file` is a regular file."""
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise not_regular(path)


def not_regular(path: str) -> Invalid:
    """Only regular files and directories are opened."""
    return Invalid(f"{path} is not a regular file", hint="use a command in the sandbox for anything else")


def refused(error: OSError, path: str) -> PagurusError:
    """What the kernel's refusal means to the caller."""
    reason = os.strerror(error.errno or 0)
    if error.errno == errno.ENOENT:
        return NotFound(f"no such file or directory: {path}")
    if error.errno == errno.ENOSPC:
        return NoSpace(f"cannot write {path}: the disk is full", hint="remove checkpoints or sandboxes")
    if error.errno == errno.EXDEV:
        return Invalid(f"{path} is not part of the sandbox's file tree", hint="read it with a command")
    return Invalid(f"{path}: {reason}")
