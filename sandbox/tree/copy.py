"""Copies a whole file tree: ``python -m sandbox.tree.copy SOURCE TARGET``, a process of its own.

Guarantee: owners, modes, times, extended attributes, links and holes are those of the source; device nodes and sockets
are left out; nothing is read through links; a tree may be as deep as it likes; whatever the source holds (in btrfs many
files can share their data, which the copy has once for each), the target's disk is not filled.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

from sandbox.descriptors import closing
from sandbox.tree.holes import pieces
from sandbox.tree.safe_path import directory, named, open_deep, regular
from sandbox.tree.space import Reserve
from sandbox.tree.walk import WalkEntry, walk

SOURCE, TARGET = 0, 1
_OTHER_WAYS = (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


def link(source: Path, target: Path) -> None:
    """Fill the empty directory `target` with directories like those in `source`, and hard links to all else there.

    Both lie on one file system, and the files are never written to. Raises OSError.
    """

    def name_again(step: WalkEntry, _: os.stat_result) -> None:
        holder, into = step.parents
        os.link(step.name, step.name, src_dir_fd=holder, dst_dir_fd=into, follow_symlinks=False)

    with directory(source) as before, directory(target) as after:
        _fill(before, after, name_again)


def copy(source: Path, target: Path) -> None:
    """Fill the empty directory `target` with what is in `source`. Raises OSError, Invalid."""
    linked: dict[int, str] = {}  # inode of a file with several names -> the first of them
    with directory(source) as before, directory(target) as after:
        reserve = Reserve(after)

        def make(step: WalkEntry, result: os.stat_result) -> None:
            if result.st_nlink > 1 and linked.setdefault(result.st_ino, step.path) != step.path:
                _link(after, linked[result.st_ino], step)
            elif _make(step, result, reserve):
                _finish(step)

        _fill(before, after, make)


def _fill(before: int, after: int, make: Callable[[WalkEntry, os.stat_result], None]) -> None:
    """Make the directories, and have all else made."""
    for step in walk(before, after, naming=TARGET, leave=_finish):
        result = step.result[SOURCE]
        assert result is not None  # it does not change
        if stat.S_ISDIR(result.st_mode):
            os.mkdir(step.name, 0o700, dir_fd=step.parents[TARGET])
            step.result[TARGET] = os.stat(step.name, dir_fd=step.parents[TARGET], follow_symlinks=False)
            step.enter[TARGET] = True
        else:
            make(step, result)
    _attributes(f"/proc/self/fd/{before}/.", f"/proc/self/fd/{after}/.", os.fstat(before))


def _make(step: WalkEntry, result: os.stat_result, reserve: Reserve) -> bool:
    """Anything but a directory; False: it is left out."""
    name, holder, into = step.name, *step.parents
    reserve.take(0)
    if stat.S_ISREG(result.st_mode):
        with regular(holder, name) as one:
            other = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=into)
            try:
                os.ftruncate(other, result.st_size)
                for offset, size in pieces(one):
                    reserve.take(size)
                    _copy_piece(one, other, offset, size)
            except OSError as error:
                if error.errno != errno.EFBIG:
                    raise
                raise OSError(
                    errno.EFBIG,
                    f"/{step.path} of {result.st_size} bytes is larger than a file of the host's disk can be",
                ) from error
            finally:
                os.close(other)
    elif stat.S_ISLNK(result.st_mode):
        os.symlink(os.readlink(name, dir_fd=holder), name, dir_fd=into)
    elif stat.S_ISFIFO(result.st_mode):
        os.mkfifo(name, 0o600, dir_fd=into)
    else:
        return False
    return True


def copy_data(one: int, other: int) -> None:
    """The data of an open file into another one of the same size, holes left out. Raises OSError."""
    for offset, size in pieces(one):
        _copy_piece(one, other, offset, size)


def _copy_piece(one: int, other: int, offset: int, size: int) -> None:
    while size:
        try:
            done = os.copy_file_range(one, other, size, offset, offset)
        except OSError as error:
            if error.errno not in _OTHER_WAYS:
                raise
            os.lseek(other, offset, os.SEEK_SET)
            done = os.sendfile(other, one, offset, size)
        if not done:
            return
        offset, size = offset + done, size - done


def _link(root: int, first: str, step: WalkEntry) -> None:
    directory, _, name = first.rpartition("/")
    with closing(open_deep(root, os.fsencode(directory), os.O_PATH | os.O_DIRECTORY)) as holder:
        os.link(name, step.name, src_dir_fd=holder, dst_dir_fd=step.parents[TARGET], follow_symlinks=False)


def _finish(step: WalkEntry) -> None:
    result = step.result[SOURCE]
    assert result is not None
    _attributes(named(step.parents[SOURCE], step.name), named(step.parents[TARGET], step.name), result)


def _attributes(one: str, other: str, result: os.stat_result) -> None:
    """Owner, then mode (a change of owner drops set-id bits), then extended attributes, then times."""
    os.chown(other, result.st_uid, result.st_gid, follow_symlinks=False)
    if not stat.S_ISLNK(result.st_mode):
        os.chmod(other, stat.S_IMODE(result.st_mode))
    for name in os.listxattr(one, follow_symlinks=False):
        try:
            os.setxattr(other, name, os.getxattr(one, name, follow_symlinks=False), follow_symlinks=False)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:  # the other file system has no such attributes
                raise
    os.utime(other, ns=(result.st_atime_ns, result.st_mtime_ns), follow_symlinks=False)


if __name__ == "__main__":
    try:
        copy(Path(sys.argv[1]), Path(sys.argv[2]))
    except OSError as failed:
        sys.exit(str(failed) if failed.filename is not None or not failed.strerror else failed.strerror)
