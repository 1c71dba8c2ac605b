"""The file tree of one sandbox, seen from the host: read, write, list, compare.

Owns: access by path into a running sandbox, and the comparison of two overlay uppers. Does not own:
when a write is allowed, or that it is captured (the daemon's turn loop).

Guarantee: a path is resolved by the kernel below the sandbox's root (``openat2`` with
RESOLVE_IN_ROOT), whatever symlinks or ``..`` the sandbox races against us, and never into another
mount (so neither ``/proc`` nor a device is reached). Only regular files are read or written; a FIFO
or device is refused and cannot block the host. A written file belongs to the sandbox's root.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Literal

from sandbox.errors import Conflict, Invalid, NoSpace, NotFound, PagurusError
from sandbox.messages import Change, FileInfo

_SYS_OPENAT2 = 437
_RESOLVE_NO_XDEV = 0x01
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_IN_ROOT = 0x10
_PR_SET_SECUREBITS = 28
_SECBIT_NO_SETUID_FIXUP = 4

_libc = ctypes.CDLL(None, use_errno=True)

READ_LIMIT = 1 << 30  # bytes that one read returns at most


def read(init_pid: int, path: str, *, offset: int = 0, limit: int = READ_LIMIT) -> bytes:
    """Up to `limit` bytes of the regular file `path`, from `offset`."""
    with _root(init_pid) as root, _opened(root, path, os.O_RDONLY) as file:
        _need_regular(file, path)
        parts = []
        while limit > 0 and (part := os.pread(file, min(limit, 1 << 20), offset)):
            parts.append(part)
            offset += len(part)
            limit -= len(part)
        return b"".join(parts)


def write(init_pid: int, uid_base: int, path: str, data: bytes, *, mode: int = 0o644, append: bool = False) -> None:
    """Write the regular file `path`, created with its missing parents when need be."""
    with _root(init_pid) as root, _as_sandbox_root(uid_base):
        _make_parents(root, PurePosixPath("/", path).parent)
        with _opened(root, path, os.O_WRONLY | os.O_CREAT, mode) as file:
            _need_regular(file, path)
            try:
                if append:
                    os.lseek(file, 0, os.SEEK_END)
                else:
                    os.ftruncate(file, 0)
                view = memoryview(data)
                while view:
                    view = view[os.write(file, view) :]
            except OSError as error:
                raise _refused(error, path) from error


def entries(init_pid: int, path: str) -> list[FileInfo]:
    """The entries of the directory `path`, by name."""
    found = []
    with (
        _root(init_pid) as root,
        _opened(root, path, os.O_RDONLY | os.O_DIRECTORY) as directory,
        os.scandir(directory) as listing,
    ):
        for entry in listing:
            with contextlib.suppress(FileNotFoundError):  # removed while we look
                found.append(_info(entry.name, entry.stat(follow_symlinks=False)))
    return sorted(found, key=lambda info: info.name)


def _info(name: str, status: os.stat_result) -> FileInfo:
    kinds: dict[int, Literal["file", "directory", "symlink"]] = {
        stat.S_IFREG: "file",
        stat.S_IFDIR: "directory",
        stat.S_IFLNK: "symlink",
    }
    return FileInfo(
        name=name,
        kind=kinds.get(stat.S_IFMT(status.st_mode), "other"),
        size=status.st_size,
        mode=stat.S_IMODE(status.st_mode),
        modified_at=status.st_mtime,
    )


# --------------------------------------------------------------------------- safe paths


@contextlib.contextmanager
def _root(init_pid: int) -> Iterator[int]:
    try:
        root = os.open(f"/proc/{init_pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise Conflict(f"its root is gone: {os.strerror(error.errno or 0)}", remedy="restore the sandbox") from error
    try:
        yield root
    finally:
        os.close(root)


@contextlib.contextmanager
def _opened(root: int, path: str, flags: int, mode: int = 0) -> Iterator[int]:
    try:
        file = _openat2(root, path, flags, mode)
    except OSError as error:
        raise _refused(error, path) from error
    try:
        yield file
    finally:
        os.close(file)


def _openat2(root: int, path: str, flags: int, mode: int = 0) -> int:
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


def _make_parents(root: int, directory: PurePosixPath) -> None:
    missing = []
    while directory != directory.parent:
        try:
            os.close(_openat2(root, str(directory), os.O_PATH | os.O_DIRECTORY))
            break
        except FileNotFoundError:
            missing.append(directory)
            directory = directory.parent
        except OSError as error:
            raise _refused(error, str(directory)) from error
    for path in reversed(missing):
        with _opened(root, str(path.parent), os.O_RDONLY | os.O_DIRECTORY) as parent:
            try:
                os.mkdir(path.name, 0o755, dir_fd=parent)
            except FileExistsError:
                pass  # the sandbox made it meanwhile
            except OSError as error:
                raise _refused(error, str(path)) from error


@contextlib.contextmanager
def _as_sandbox_root(uid_base: int) -> Iterator[None]:
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


def _need_regular(file: int, path: str) -> None:
    mode = os.fstat(file).st_mode
    if not stat.S_ISREG(mode):
        raise Invalid(f"{path} is not a regular file", remedy="use a command in the sandbox for anything else")


def _refused(error: OSError, path: str) -> PagurusError:
    reason = os.strerror(error.errno or 0)
    if error.errno == errno.ENOENT:
        return NotFound(f"no such file or directory: {path}")
    if error.errno == errno.ENOSPC:
        return NoSpace(f"cannot write {path}: the disk is full", remedy="remove checkpoints or sandboxes")
    if error.errno == errno.EXDEV:
        return Invalid(f"{path} is not part of the sandbox's file tree", remedy="read it with a command")
    return Invalid(f"{path}: {reason}")


# --------------------------------------------------------------------------- comparing trees


def changes(old: Path, new: Path, lower: Path) -> list[Change]:
    """What differs between the merged views of two uppers over the same `lower`, by path.

    A removed directory is named once, without its content. Metadata (type, mode, owner) counts;
    times alone do not.
    """
    before, after = _Upper(old, lower), _Upper(new, lower)
    found: list[Change] = []
    removed: list[str] = []
    for path in sorted(before.paths | after.paths):
        was, now = before.find(path), after.find(path)
        if was is None and now is None:
            continue
        if now is None:
            if not any(path.startswith(f"{parent}/") for parent in removed):
                removed.append(path)
                found.append(Change(path=path, kind="removed"))
        elif was is None:
            found.append(Change(path=path, kind="added"))
        elif was != now and not _same(was, now):
            found.append(Change(path=path, kind="modified"))
    return found


class _Upper:
    """The merged view of one upper over its lower."""

    def __init__(self, root: Path, lower: Path) -> None:
        self.root = root
        self.lower = lower
        self.own: dict[str, os.stat_result] = {}
        self.hiding: set[str] = set()  # paths below which the lower does not show
        self.paths: set[str] = set()
        self._walk("")

    def _walk(self, prefix: str) -> None:
        with os.scandir(f"{self.root}{prefix}") as listing:
            for entry in listing:
                path = f"{prefix}/{entry.name}"
                status = entry.stat(follow_symlinks=False)
                self.own[path] = status
                self.paths.add(path)
                if not stat.S_ISDIR(status.st_mode):
                    self.hiding.add(path)
                    continue
                if _opaque(f"{self.root}{path}"):
                    self.hiding.add(path)
                    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                        self.paths.update(f"{path}/{name}" for name in os.listdir(f"{self.lower}{path}"))
                self._walk(path)

    def find(self, path: str) -> str | None:
        """The file that shows at `path`, or None."""
        status = self.own.get(path)
        if status is not None:
            return None if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0 else f"{self.root}{path}"
        parent = path
        while parent := parent.rpartition("/")[0]:
            if parent in self.hiding:
                return None
        shown = f"{self.lower}{path}"
        return shown if os.path.lexists(shown) else None


def _opaque(path: str) -> bool:
    for name in ("trusted.overlay.opaque", "user.overlay.opaque"):
        with contextlib.suppress(OSError):
            if os.getxattr(path, name, follow_symlinks=False) == b"y":
                return True
    return False


def _same(one: str, other: str) -> bool:
    first, second = os.lstat(one), os.lstat(other)
    if (first.st_mode, first.st_uid, first.st_gid) != (second.st_mode, second.st_uid, second.st_gid):
        return False
    if stat.S_ISDIR(first.st_mode):
        return True
    if stat.S_ISLNK(first.st_mode):
        return os.readlink(one) == os.readlink(other)
    if not stat.S_ISREG(first.st_mode):
        return first.st_rdev == second.st_rdev
    if first.st_size != second.st_size:
        return False
    if (first.st_ino, first.st_ctime_ns) == (second.st_ino, second.st_ctime_ns):
        return True  # a snapshot keeps both; any change moves the change time
    with open(one, "rb") as left, open(other, "rb") as right:
        while part := left.read(1 << 20):
            if part != right.read(1 << 20):
                return False
    return True
