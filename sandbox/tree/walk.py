"""Walks through whole file trees, one alone or several side by side.

Guarantee: links are not followed, mounts are not entered, nothing but directories is opened. No recursion, no path that
the kernel must resolve, and a bounded number of open directories: a tree may be as deep as it likes. A tree that is
changed during it ends the walk with ESTALE, and leads it nowhere else: the way up is taken only where it leads to the
very directory that the walk came from.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from sandbox.descriptors import closing
from sandbox.tree.safe_path import NO_LINKS, UPWARDS, directory, openat2

MAX_OPEN = 32  # directories of each tree that are open at a time
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class _Level:
    """One directory, in each tree that has it."""

    def __init__(self, name: str, fds: list[int], naming: int | None) -> None:
        self.name = name
        self.fds = fds  # -1: not in this tree, or let go until the walk returns
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self.ids = [None if fd < 0 else _identity(os.fstat(fd)) for fd in fds]
            self.names = sorted(set().union(*(os.listdir(fd) for fd in fds[:naming] if fd >= 0)), reverse=True)
            undo.pop_all()

    def let_go(self, following: _Level) -> None:
        """Close what can be found again from the next level."""
        for index, result in enumerate(following.ids):
            if result is not None and self.fds[index] >= 0:
                os.close(self.fds[index])
                self.fds[index] = -1

    def come_back(self, following: _Level) -> None:
        for index, existing in enumerate(self.ids):
            if existing is not None and self.fds[index] < 0:
                above = openat2(following.fds[index], "..", _DIRECTORY, resolve=UPWARDS)
                self.fds[index] = above
                if _identity(os.fstat(above)) != existing:
                    raise OSError(errno.ESTALE, "a directory was moved during the walk", self.name)

    def close(self) -> None:
        for fd in self.fds:
            if fd >= 0:
                os.close(fd)


class WalkEntry:
    """One name, in each of the trees. Valid until the next step."""

    def __init__(self, above: list[_Level], name: str, result: list[os.stat_result | None]) -> None:
        self._above = above
        self.name = name
        self.depth = len(above)  # 1: in the root
        self.parents = above[-1].fds  # descriptors of the directories that hold it; -1 where there is none
        self.result = result
        self.enter = [item is not None and stat.S_ISDIR(item.st_mode) for item in result]  # may be changed

    @property
    def path(self) -> str:
        """Below the root, without a leading slash. As long as the tree is deep: use it only for what is shown."""
        return "/".join([*(level.name for level in self._above[1:]), self.name])


def walk(
    *roots: int | None, naming: int | None = None, leave: Callable[[WalkEntry], None] | None = None
) -> Iterator[WalkEntry]:
    """Every name below these open directories, parents first, by name. The roots stay open.

    A step enters each of its directories, but for those of which the caller has set `enter` to False. Names come from
    the first `naming` trees; in the others it is only looked for these. `leave` is called with the step of an entered
    directory when all below it has been seen. Raises OSError.
    """
    levels: list[_Level] = []
    steps: list[WalkEntry] = []
    try:
        levels.append(_Level("", [-1 if root is None else os.dup(root) for root in roots], naming))
        while True:
            level = levels[-1]
            if level.names:
                name = level.names.pop()
                step = WalkEntry(levels, name, [_status(name, fd) for fd in level.fds])
                yield step
                if any(step.enter):
                    steps.append(step)
                    levels.append(_Level(name, _entered(step), naming))
                    if len(levels) > MAX_OPEN:
                        levels[-MAX_OPEN - 1].let_go(levels[-MAX_OPEN])
                continue
            if len(levels) == 1:
                return
            levels[-2].come_back(level)
            levels.pop().close()
            step = steps.pop()
            if leave is not None:
                leave(step)
    finally:
        for level in levels:
            level.close()


def _entered(step: WalkEntry) -> list[int]:
    fds: list[int] = []
    with contextlib.ExitStack() as undo:
        for parent, enter, result in zip(step.parents, step.enter, step.result, strict=True):
            fds.append(openat2(parent, step.name, _DIRECTORY, resolve=NO_LINKS) if enter else -1)
            if enter:
                undo.callback(os.close, fds[-1])
            if enter and result is not None and _identity(os.fstat(fds[-1])) != _identity(result):
                raise OSError(errno.ESTALE, "a directory was replaced during the walk", step.name)
        undo.pop_all()
    return fds


def _status(name: str, parent: int) -> os.stat_result | None:
    if parent >= 0:
        with contextlib.suppress(FileNotFoundError):
            return os.stat(name, dir_fd=parent, follow_symlinks=False)
    return None


def _identity(result: os.stat_result) -> tuple[int, int]:
    return result.st_dev, result.st_ino


def remove(parent: int, name: str) -> None:
    """Remove an entry of an open directory; a directory with all that is in it. Raises OSError."""
    if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
        os.close(openat2(parent, name, os.O_PATH | os.O_NOFOLLOW))  # what is mounted there is refused
        os.unlink(name, dir_fd=parent)
        return
    with closing(openat2(parent, name, _DIRECTORY, resolve=NO_LINKS)) as top:
        for step in walk(top, leave=_remove_directory):
            if not step.enter[0]:
                with contextlib.suppress(FileNotFoundError):  # another process removed it
                    os.unlink(step.name, dir_fd=step.parents[0])
    os.rmdir(name, dir_fd=parent)


def _remove_directory(step: WalkEntry) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(step.name, dir_fd=step.parents[0])


def remove_path(path: Path) -> None:
    """Remove what lies at a path of the host's own, if anything does, however deep. Raises OSError."""
    with contextlib.suppress(FileNotFoundError), directory(path.parent) as parent:
        remove(parent, path.name)
