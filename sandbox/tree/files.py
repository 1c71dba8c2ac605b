"""The file tree of one sandbox, seen from the host: read, write, list, move, remove.

Guarantee: only regular files are read or written; a FIFO or device is refused and cannot block the host. A written
file belongs to the sandbox's root. Paths are taken, and names given, as they are shown.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import IO, Literal, Self

from sandbox.errors import Conflict, Invalid, NotFound
from sandbox.messages import FileInfo
from sandbox.names import native, reported
from sandbox.tree import walk
from sandbox.tree.safe_path import (
    SandboxRoot,
    as_sandbox_root,
    inner_id,
    make_parents,
    need_path,
    need_regular,
    openat2,
    opened,
    refused,
)

CHUNK = 1 << 17  # bytes of a file that the host holds at a time
MAX_ENTRIES = 100_000  # of a directory that is listed


def absolute(path: str) -> PurePosixPath:
    """`path`, as it is shown, from the root; relative ones start there too. Raises Invalid for what is no path."""
    need_path(path)
    return PurePosixPath("/", native(path))


class FileRange:
    """A part of the regular file `path`, read chunk by chunk: the `size` bytes from `offset` on, at most `limit`.

    The size is that of the moment of opening; what is written behind it later is not read. Each step blocks.
    """

    def __init__(self, inside: SandboxRoot, path: str, offset: int = 0, limit: int = 1 << 62) -> None:
        with inside.opened() as root, opened(root, native(path), os.O_RDONLY) as file:
            need_regular(file, path)
            self._file = os.fdopen(os.dup(file), "rb", buffering=0)
        self._path = path
        self._at = offset
        self.size = max(0, min(limit, os.fstat(self._file.fileno()).st_size - offset))
        self.left = self.size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def next(self) -> bytes:
        """The next bytes, at most CHUNK; none at the end. Raises Conflict when the sandbox cut the file since."""
        try:
            part = os.pread(self._file.fileno(), min(self.left, CHUNK), self._at)
        except OSError as error:
            raise refused(error, self._path) from error
        if self.left and not part:
            raise Conflict(f"{self._path} was cut while it was read", hint="read it again")
        self._at += len(part)
        self.left -= len(part)
        return part


def read(inside: SandboxRoot, path: str, *, offset: int = 0, limit: int) -> bytes:
    """Up to `limit` bytes of the regular file `path`, from `offset`."""
    with FileRange(inside, path, offset, limit) as part:
        return b"".join(iter(part.next, b""))


def write(
    inside: SandboxRoot,
    uid_base: int,
    path: str,
    source: IO[bytes],
    *,
    mode: int = 0o644,
    append: bool = False,
    owner: tuple[int, int] = (0, 0),
) -> None:
    """Write what `source` holds to the regular file `path`, created with its missing parents when need be.

    `owner`: user and group of what is created.
    """
    with inside.opened() as root, as_sandbox_root(uid_base, owner):
        make_parents(root, absolute(path).parent)
        with opened(root, native(path), os.O_WRONLY | os.O_CREAT, mode) as file:
            need_regular(file, path)
            try:
                if append:
                    os.lseek(file, 0, os.SEEK_END)
                else:
                    os.ftruncate(file, 0)
                while part := source.read(CHUNK):
                    view = memoryview(part)
                    while view:
                        view = view[os.write(file, view) :]
            except OSError as error:
                raise refused(error, path) from error


def replace(inside: SandboxRoot, uid_base: int, path: str, content: bytes) -> None:
    """Write `content` to `path`: a regular file becomes another one, of the same owner and mode.

    A file of the image that is written to is copied into the sandbox's own tree first, and the kernel waits for the
    disk before that (5 to 10 ms). A new one that takes its name is not.
    """
    former = None
    with contextlib.suppress(NotFound):
        former = status(inside, uid_base, path)
    if former is None or former.kind != "file":  # of a link, what it leads to is written
        write(inside, uid_base, path, io.BytesIO(content))
        return
    new = f"{path}.{secrets.token_hex(4)}"
    owner = former.uid, former.gid
    with inside.opened() as root, as_sandbox_root(uid_base, owner):
        with opened(root, native(new), os.O_WRONLY | os.O_CREAT, 0o600) as file:
            os.fchmod(file, former.mode)
        write(inside, uid_base, new, io.BytesIO(content), owner=owner)
    move(inside, uid_base, new, path)


def status(inside: SandboxRoot, uid_base: int, path: str) -> FileInfo:
    """What `path` is; a symbolic link is not followed."""
    with inside.opened() as root, _located(root, path) as (parent, name):
        try:
            return _info(name, os.stat(name, dir_fd=parent, follow_symlinks=False), uid_base, parent)
        except OSError as error:
            raise refused(error, path) from error


def reach(inside: SandboxRoot, path: str) -> None:
    """Raises what opening `path`, links followed, raises."""
    with inside.opened() as root, opened(root, native(path), os.O_PATH):
        pass


def entries(inside: SandboxRoot, uid_base: int, path: str) -> list[FileInfo]:
    """The entries of the directory `path`, by name. Raises Invalid for one that has more than MAX_ENTRIES."""
    result: list[FileInfo] = []
    with (
        inside.opened() as root,
        opened(root, native(path), os.O_RDONLY | os.O_DIRECTORY) as directory,
        os.scandir(directory) as listing,
    ):
        for entry in listing:
            if len(result) >= MAX_ENTRIES:
                raise Invalid(f"{path} has more than {MAX_ENTRIES} entries", hint="list it by a command")
            with contextlib.suppress(FileNotFoundError):  # removed while we look
                result.append(_info(entry.name, entry.stat(follow_symlinks=False), uid_base, directory))
    return sorted(result, key=lambda info: info.name)


def make_directory(
    inside: SandboxRoot, uid_base: int, path: str, *, mode: int = 0o755, owner: tuple[int, int] = (0, 0)
) -> None:
    """Make the directory `path` and its missing parents. One that exists is left as it is."""
    with inside.opened() as root, as_sandbox_root(uid_base, owner):
        make_parents(root, absolute(path), mode)


def move(inside: SandboxRoot, uid_base: int, source: str, target: str, *, owner: tuple[int, int] = (0, 0)) -> None:
    """Rename `source` to `target`, over a file that is there. Missing parents of `target` are made."""
    with inside.opened() as root, as_sandbox_root(uid_base, owner):
        make_parents(root, absolute(target).parent)
        with _located(root, source) as (from_parent, from_name), _located(root, target) as (to_parent, to_name):
            try:
                os.rename(from_name, to_name, src_dir_fd=from_parent, dst_dir_fd=to_parent)
            except OSError as error:
                raise refused(error, f"{source} -> {target}") from error


def remove(inside: SandboxRoot, uid_base: int, path: str, *, recursive: bool = False) -> None:
    """Remove a file, a link or an empty directory; with `recursive`, a directory and what is in it."""
    with inside.opened() as root, as_sandbox_root(uid_base), _located(root, path) as (parent, name):
        try:
            os.close(openat2(parent, name, os.O_PATH | os.O_NOFOLLOW))  # a mount point is refused
            if recursive or not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                walk.remove(parent, name)
            else:
                os.rmdir(name, dir_fd=parent)
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:
                raise Conflict(f"{path} is not empty", hint="remove it recursively") from error
            if error.errno == errno.ESTALE:
                raise Conflict(f"{path} changes while it is removed", hint="remove it again") from error
            raise refused(error, path) from error


@contextlib.contextmanager
def _located(root: int, path: str) -> Iterator[tuple[int, str]]:
    """The directory that holds `path`, opened, and the name in it."""
    pure = absolute(path)
    if pure.name in ("", ".."):
        raise Invalid(f"{path!r} names no entry of a directory", hint="name a file or directory below /")
    with opened(root, str(pure.parent), os.O_PATH | os.O_DIRECTORY) as parent:
        yield parent, pure.name


def _info(name: str, result: os.stat_result, uid_base: int, directory: int) -> FileInfo:
    kinds: dict[int, Literal["file", "directory", "symlink"]] = {
        stat.S_IFREG: "file",
        stat.S_IFDIR: "directory",
        stat.S_IFLNK: "symlink",
    }
    kind: Literal["file", "directory", "symlink", "other"] = kinds.get(stat.S_IFMT(result.st_mode), "other")
    target = None
    if kind == "symlink":
        with contextlib.suppress(OSError):  # replaced while we look
            target = reported(os.readlink(name, dir_fd=directory))
    return FileInfo(
        name=reported(name),
        kind=kind,
        size=result.st_size,
        mode=stat.S_IMODE(result.st_mode),
        modified_at=result.st_mtime,
        uid=inner_id(result.st_uid, uid_base),
        gid=inner_id(result.st_gid, uid_base),
        target=target,
    )
