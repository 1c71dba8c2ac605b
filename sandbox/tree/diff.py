"""How two states of a sandbox's file tree differ: two overlay uppers over one lower.

Owns: the comparison. Does not own: which states are compared (the daemon), equality of everything else
(:mod:`sandbox.criu.equality`).
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from sandbox.messages import Change
from sandbox.names import told

RUNTIME = "/.pagurus/"  # ours: where attendants have their FIFOs


def changes(old: Path, new: Path, lower: Path) -> list[Change]:
    """What differs between the merged views of two uppers over the same `lower`, by path.

    A removed directory is named once, without its content. Metadata (type, mode, owner) counts;
    times alone do not.
    """
    before, after = _Upper(old, lower), _Upper(new, lower)
    found: list[Change] = []
    removed: list[str] = []
    for path in sorted(before.paths | after.paths):
        if f"{path}/".startswith(RUNTIME):
            continue
        was, now = before.find(path), after.find(path)
        if was is None and now is None:
            continue
        if now is None:
            if not any(path.startswith(f"{parent}/") for parent in removed):
                removed.append(path)
                found.append(Change(path=told(path), kind="removed"))
        elif was is None:
            found.append(Change(path=told(path), kind="added"))
        elif was != now and not _same(was, now):
            found.append(Change(path=told(path), kind="modified"))
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
