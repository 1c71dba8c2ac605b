"""Files that get the inode numbers which they had on another host.

Programs know again by its number what they hold open: SQLite writes to a database no more whose path has another one.

The file system gives a new file the next number of its subvolume, so numbers in between are used up by files that are
removed at once; that is done for the first `MAX_SPENT` of them, and files beyond get the number that comes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from sandbox.descriptors import closing

MAX_SPENT = 20_000  # numbers, about 20 microseconds each
TRIED, MADE = "tried", "{}.made"  # names in the directory


def make(directory: int, target: Mapping[int, int]) -> None:
    """Empty files in a fresh subvolume, of these inode numbers by the number of their entry; those that can be had."""
    came = spent = 0
    for entry in sorted(target, key=lambda entry: target[entry]):
        while came < target[entry] and spent < MAX_SPENT:
            if came:
                os.unlink(TRIED, dir_fd=directory)
                spent += 1
            came = _next(directory)
        if came == target[entry]:
            os.rename(TRIED, MADE.format(entry), src_dir_fd=directory, dst_dir_fd=directory)
            came = 0
    if came:
        os.unlink(TRIED, dir_fd=directory)


def _next(directory: int) -> int:
    with closing(os.open(TRIED, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory)) as fd:
        return os.fstat(fd).st_ino


def move(directory: int, entry: int, parent: int, name: str) -> bool:
    """The file that was made for an entry to its place. False: there is none."""
    try:
        os.rename(MADE.format(entry), name, src_dir_fd=directory, dst_dir_fd=parent)
    except FileNotFoundError:
        return False
    return True
