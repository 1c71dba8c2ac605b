"""Files held by the processes of a sandbox: open, mapped or worked in, on the persistent tree.

Owns: the fingerprint of those files. Does not own: the verdict.
Guarantee: two fingerprints are equal only when every file that a process holds has the same identity, size,
mode and modification time, every directory the same identity and mode, and their paths still lead to them. CRIU
refuses to restore a process whose open file changed its size or whose working directory is gone, and restores one
silently whose file was replaced; so a turn that only changed files, but one of these, must capture the processes too.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from sandbox.errors import Conflict, SandboxDead
from sandbox.tree.safe_path import ACROSS_MOUNTS, SandboxRoot, openat2

Identity = tuple[int, int, int, int, int]  # inode, mode, size, mtime in ns, links


class Tasks(Protocol):
    """The part of a container that is needed here."""

    @property
    def inside(self) -> SandboxRoot: ...

    def kept_tasks(self) -> list[int]: ...


@dataclass(frozen=True)
class Held:
    """Fingerprint: path in the sandbox -> identity of the file held, and of what the path leads to now."""

    files: dict[str, tuple[Identity, Identity | None]] = field(default_factory=dict)

    def changes(self, later: Held) -> list[str]:
        """Readable differences; empty when equal."""
        changed = []
        for path in sorted(self.files.keys() | later.files.keys()):
            before, after = self.files.get(path), later.files.get(path)
            if before == after:
                continue
            what = "newly held" if before is None else "no longer held" if after is None else "changed while held"
            changed.append(f"{path}: {what}")
        return changed


def held_files(container: Tasks) -> Held:
    """Fingerprint of the regular files and directories that the sandbox's processes hold now. Blocks, below 1 ms."""
    with contextlib.suppress(Conflict, SandboxDead), container.inside.opened() as root:
        return Held(_held(container.kept_tasks(), root))
    return Held()


def _held(tasks: list[int], root: int) -> dict[str, tuple[Identity, Identity | None]]:
    files: dict[str, tuple[Identity, Identity | None]] = {}
    mapped: set[bytes] = set()
    for pid in tasks:
        for link in _links(pid, mapped):
            with contextlib.suppress(OSError):  # the process or the descriptor went away meanwhile
                target = os.readlink(link)
                if target in files or not target.startswith("/"):
                    continue
                found = os.stat(link)
                if stat.S_ISREG(found.st_mode) or stat.S_ISFIFO(found.st_mode) or stat.S_ISDIR(found.st_mode):
                    files[target] = (_identity(found), _at(root, target))
    return files


def _links(pid: int, mapped: set[bytes]) -> Iterator[str]:
    """What the kernel links to all that a process holds, but for mapped files that were seen before."""
    base = f"/proc/{pid}"
    yield f"{base}/cwd"
    with contextlib.suppress(OSError):
        for name in os.listdir(f"{base}/fd"):
            yield f"{base}/fd/{name}"
    with contextlib.suppress(OSError):
        with open(f"{base}/maps", "rb", buffering=1 << 16) as maps:
            lines = maps.read().splitlines()
        for line in lines:
            addresses, _, _, device, inode, *path = line.split(None, 5)
            # A library has a handful of mappings in each process: one link tells as much as all.
            if path and inode != b"0" and (file := b" ".join((device, inode, *path))) not in mapped:
                mapped.add(file)
                first, _, last = addresses.partition(b"-")
                yield f"{base}/map_files/{int(first, 16):x}-{int(last, 16):x}"


def _at(root: int, path: str) -> Identity | None:
    try:
        found = openat2(root, path, os.O_PATH | os.O_NOFOLLOW, resolve=ACROSS_MOUNTS)
    except OSError:
        return None
    try:
        return _identity(os.fstat(found))
    finally:
        os.close(found)


def _identity(found: os.stat_result) -> Identity:
    if stat.S_ISDIR(found.st_mode):  # what happens in a directory does not change that it is held
        return (found.st_ino, found.st_mode, 0, 0, 0)
    return (found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns, found.st_nlink)
