"""The canonical form of a file tree.

Owns: what "equal" means of two trees. Does not own: reading the difference out
(:func:`sandbox.criu.equality.differences`). Guarantee: equal trees give equal facts. Not compared: ctime and atime, and
the bookkeeping xattrs of overlayfs.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blake3 import blake3


def tree(upper: Path) -> dict[str, Any]:
    """The canonical form of the upper directory of a sandbox. Blocks; reads every file."""
    facts: dict[str, Any] = {}
    linked: dict[int, str] = {}
    for path, name in _walk(upper, ""):
        found = os.lstat(path)
        fact: dict[str, Any] = {"mode": oct(found.st_mode), "owner": (found.st_uid, found.st_gid)}
        fact["xattrs"] = _xattrs(path)
        if stat.S_ISREG(found.st_mode):
            fact.update(size=found.st_size, mtime=found.st_mtime_ns, content=_content(path), data=_layout(path))
            if found.st_nlink > 1:
                fact["same file as"] = linked.setdefault(found.st_ino, name)
        elif stat.S_ISLNK(found.st_mode):
            fact.update(target=os.readlink(path), mtime=found.st_mtime_ns)
        elif stat.S_ISDIR(found.st_mode):
            fact.update(mtime=found.st_mtime_ns)
        elif stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode):
            fact.update(device=found.st_rdev)  # 0 is overlayfs' mark of a deleted lower file
        else:
            fact.update(mtime=found.st_mtime_ns)
        facts[f"file {name or '/'}"] = fact
    return facts


def _walk(path: Path, name: str) -> Iterator[tuple[Path, str]]:
    yield path, name
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        below = f"{name}/{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path), below)
        else:
            yield Path(entry.path), below


def _content(path: Path) -> str:
    return blake3(max_threads=1).update_mmap(path).hexdigest()


def _layout(path: Path) -> list[tuple[int, int]]:
    """Where a file holds data: (first byte, behind the last) of each range. Between them are holes."""
    ranges = []
    with open(path, "rb", buffering=0) as file:
        end = 0
        with contextlib.suppress(OSError):  # ENXIO: no data behind here
            while True:
                start = os.lseek(file.fileno(), end, os.SEEK_DATA)
                end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
                ranges.append((start, end))
    return ranges


def _xattrs(path: Path) -> dict[str, str]:
    kept = {}
    for name in os.listxattr(path, follow_symlinks=False):
        if name.startswith("trusted.overlay.") and name.rpartition(".")[2] in ("origin", "impure", "uuid", "nlink"):
            continue
        kept[name] = os.getxattr(path, name, follow_symlinks=False).hex()
    return kept
