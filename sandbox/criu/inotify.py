"""The paths of files that processes of a sandbox watch by inotify.

Guarantee: only paths whose inode is a watched one are returned. Symbolic links are never followed, and the search ends
after MAX_ENTRIES entries: the tree is the sandbox's, which may change it or make it as large as it likes.

The kernel names a watched file by its inode and by a file handle; overlayfs cannot open such a handle. So the file is
looked for, first below the working directories of the watching processes. This is done while the sandbox runs, once
CRIU has refused a watch, and what was found is remembered for the next dump.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandbox.descriptors import closing
from sandbox.errors import Conflict, SandboxDead
from sandbox.names import reported
from sandbox.tree.safe_path import ACROSS_MOUNTS, openat2

if TYPE_CHECKING:
    from sandbox.container.container import Container

MAX_ENTRIES = 300_000  # entries looked at
SKIPPED = frozenset({"/proc", "/sys", "/dev"})
_WATCH = re.compile(rb"^inotify wd:[0-9a-f]+ ino:([0-9a-f]+) ", re.M)


def find(container: Container) -> list[str]:
    """Paths in the sandbox of all watched files that can be found, in the order in which they were found. Blocks."""
    target, near = set(), []
    for pid in container.tasks():
        result = _watched(pid)
        if result:
            target |= result
            with contextlib.suppress(OSError):
                near.append(os.readlink(f"/proc/{pid}/cwd"))
    if not target:
        return []
    with contextlib.suppress(Conflict, SandboxDead), container.inside.opened() as root:
        # CRIU's request takes no other names; it refuses these watches then.
        return [path for path in _search(root, [*near, "/"], target) if reported(path) == path]
    return []


def watched(entries: Iterable[Any]) -> dict[str, int]:
    """Path in the sandbox -> inode number of what is watched by it, of the table of open files of a dump."""
    return {
        reported(os.path.normpath("/" + os.fsdecode(watch.f_handle.path).lstrip("/"))): watch.i_ino
        for entry in entries
        if entry.HasField("ify")
        for watch in entry.ify.wd
        if watch.f_handle.path
    }


def _watched(pid: int) -> set[int]:
    """Inode numbers that a process watches."""
    result: set[int] = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fdinfo"):
            with contextlib.suppress(OSError):
                content = Path(f"/proc/{pid}/fdinfo/{name}").read_bytes()
                result.update(int(number, 16) for number in _WATCH.findall(content))
    return result


def _search(root: int, starts: Iterable[str], target: set[int]) -> Iterator[str]:
    """Breadth first from each start, nearest first, until all are found or MAX_ENTRIES entries were seen."""
    observed = 0
    visited: set[int] = set()
    for start in starts:
        with contextlib.suppress(OSError):
            if (number := _inode(root, start)) in target:
                target.discard(number)
                yield start
        queue = deque([start.rstrip("/")])
        while queue and target:
            directory = queue.popleft()
            for path, result in _entries(root, directory):
                observed += 1
                if observed > MAX_ENTRIES:
                    return
                if result.st_ino in target:
                    target.discard(result.st_ino)
                    yield path
                if result.st_mode & 0o170000 == 0o040000 and result.st_ino not in visited and path not in SKIPPED:
                    visited.add(result.st_ino)
                    queue.append(path)


def _inode(root: int, path: str) -> int:
    with closing(openat2(root, path, os.O_PATH | os.O_NOFOLLOW, resolve=ACROSS_MOUNTS)) as result:
        return os.fstat(result).st_ino


def _entries(root: int, path: str) -> Iterator[tuple[str, os.stat_result]]:
    with (
        contextlib.suppress(OSError),
        closing(
            openat2(root, path or "/", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, resolve=ACROSS_MOUNTS)
        ) as directory,
        os.scandir(directory) as entries,
    ):
        for entry in entries:
            with contextlib.suppress(OSError):
                yield f"{path}/{entry.name}", entry.stat(follow_symlinks=False)
