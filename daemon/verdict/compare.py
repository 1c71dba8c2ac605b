"""Did anything change in the files but what rules ignore? The tree now, against the snapshot that holds the last state.

A file is the same where the snapshot has the very inode with the same times: every change moves its change time, which
no program can set. One that changed shortly before the snapshot may have changed again in the same tick of the clock:
its attributes and bytes are compared. A directory's times move with each ignored name that is made in it. So of
directories mode, owner, attributes and flags are compared, and the modification time only where a program set times and
it is not the change time, or where a program set one to the present.

Guarantee: `equal` is said only when everything was compared. Too much, too large, changing or unreadable: `unknown`.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from daemon.verdict.ignore import IgnoreRuleSet
from sandbox.errors import Invalid
from sandbox.tree.holes import pieces, same_ranges
from sandbox.tree.safe_path import directory, named, open_deep, open_kind
from sandbox.tree.walk import WalkEntry, walk

FINALIZED = 0.1  # seconds by which a change time must precede the snapshot to prove that nothing followed it
_GETFLAGS = 0x80086601  # FS_IOC_GETFLAGS
_RETAINED_FLAGS = 0x8100FC  # those that a program sets; file systems keep notes of their own among the others
_ROOT = (0o40755, 0, 0)  # mode and owner of the root of a new upper
_VOLATILE = ("origin", "impure", "nlink", "uuid")  # overlay's own notes; they say nothing about what is seen
_OF_FILES = ("st_ino", "st_nlink", "st_rdev", "st_size", "st_mtime_ns", "st_ctime_ns")
BEFORE, NOW, LOWER = range(3)  # of the trees that are walked; more lower layers follow


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How much may be compared. Beyond, the answer is `unknown`."""

    entries: int = 4000
    content: int = 4 << 20  # bytes
    seconds: float = 0.1


@dataclass(frozen=True)
class FileComparison:
    """`equal`, or the first difference, or why nothing can be said."""

    equal: bool
    difference: str = ""
    unknown: str = ""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a comparison must know."""

    times_set: bool = False  # a program set times
    set_to_now: bool = False  # to the present, maybe those of a directory
    taken_at: float = 0.0  # seconds since the epoch: when the snapshot was made


def compare(before: os.stat_result, now: os.stat_result, case: Case) -> str:
    """Pure: "same", "look" (at attributes and bytes), or how they differ."""
    if any(getattr(before, name) != getattr(now, name) for name in ("st_mode", "st_uid", "st_gid")):
        return "another type, mode or owner"
    if stat.S_ISDIR(now.st_mode):
        chosen = case.set_to_now or (case.times_set and now.st_mtime_ns != now.st_ctime_ns)
        return "another time" if chosen and before.st_mtime_ns != now.st_mtime_ns else "look"
    if stat.S_ISCHR(now.st_mode) and not before.st_rdev and not now.st_rdev:
        return "same"  # marks of overlayfs for what is removed from the lower layer; all of them may be one inode
    if any(getattr(before, name) != getattr(now, name) for name in _OF_FILES):
        return "changed"
    return "same" if now.st_ctime_ns < 1e9 * (case.taken_at - FINALIZED) else "look"


class _Stop(Exception):
    """The comparison has its answer."""

    def __init__(self, outcome: FileComparison) -> None:
        super().__init__(outcome)
        self.outcome = outcome


def trees(
    before: Path | None,
    now: Path,
    lower: Sequence[Path],
    case: Case,
    *,
    rules: IgnoreRuleSet,
    bounds: Bounds | None = None,
    hints: Sequence[str] = (),
) -> FileComparison:
    """Compare the upper `now` with the upper `before` (None: an empty one) over the same lower layers. Blocks.

    The first lower layer is the topmost. `hints` are paths where a difference is likely. They may be wrong: they can
    only end the comparison early.
    """
    try:
        with contextlib.ExitStack() as stack:
            roots = [
                None if place is None else stack.enter_context(directory(place)) for place in (before, now, *lower)
            ]
            for path in hints:
                if not rules.path(path) and _moved(roots[NOW], path, case):
                    return FileComparison(False, difference=f"{path}: changed")
            return _Comparison(case, rules, bounds or Bounds()).run(roots)
    except OSError as error:  # a sandbox that is removed, or changes its tree under our feet
        return FileComparison(False, unknown=f"it cannot be compared: {error}")


def _moved(root: int | None, path: str, case: Case) -> bool:
    """Whether a file, not a directory, changed since the snapshot was made."""
    assert root is not None
    try:
        result = open_deep(root, os.fsencode(path.strip("/")), os.O_PATH)
    except (OSError, ValueError, Invalid):  # not there; or a name that a program chose, which no path can hold
        return False
    try:
        status = os.fstat(result)
        return not stat.S_ISDIR(status.st_mode) and status.st_ctime_ns > 1e9 * case.taken_at
    finally:
        os.close(result)


class _Comparison:
    def __init__(self, case: Case, rules: IgnoreRuleSet, bounds: Bounds) -> None:
        self.case, self.rules, self.bounds = case, rules, bounds
        self.entries = self.content = 0
        self.deadline = time.monotonic() + bounds.seconds

    def run(self, roots: Sequence[int | None]) -> FileComparison:
        try:
            before, now = roots[BEFORE], roots[NOW]
            assert now is not None
            self._roots(before, now)
            for step in walk(*roots, naming=LOWER):
                self._step(step)
        except _Stop as stop:
            return stop.outcome
        return FileComparison(True)

    def _roots(self, before: int | None, now: int) -> None:
        status = os.fstat(now)
        if before is not None:
            self._need(compare(os.fstat(before), status, self.case), "/")
            self._same_attributes(before, now, "/")
            return
        if (status.st_mode, status.st_uid, status.st_gid) != _ROOT or _attributes(now) or _flags(now):
            self._differs("/", "another mode, owner or attribute")
        if self.case.set_to_now or (self.case.times_set and status.st_mtime_ns != status.st_ctime_ns):
            self._differs("/", "another time")  # than it had when it was made, which was not recorded

    def _step(self, step: WalkEntry) -> None:
        was, now, *shown = step.result
        if was is None and now is None:  # it went while we looked
            step.enter = [False] * len(step.enter)
            return
        path = f"/{step.path}"
        self._account(path)
        if self.rules.path(path):
            step.enter = [False] * len(step.enter)
            return
        if now is None:
            self._differs(path, "gone")
        other = (
            BEFORE if was is not None else next((at for at, item in enumerate(shown, LOWER) if item is not None), -1)
        )
        # A directory that the upper did not have may have been copied up from the lower layer, and be as it was.
        if other < 0 or (other != BEFORE and not stat.S_ISDIR(now.st_mode)):
            self._differs(path, "new")
        old = step.result[other]
        assert old is not None
        if self._need(compare(old, now, self.case), path) == "same":
            return
        with _opened(step.parents[other], step.name, old) as one, _opened(step.parents[NOW], step.name, now) as two:
            self._same_attributes(one, two, path)
            if stat.S_ISREG(now.st_mode):
                self._same_bytes(one, two, path)
            elif stat.S_ISDIR(now.st_mode) and _opaque(two):
                if other != BEFORE:
                    self._differs(path, "new")
                step.enter[LOWER:] = [False] * (len(step.enter) - LOWER)

    # ----------------------------------------------------------------- parts

    def _account(self, path: str) -> None:
        self.entries += 1
        if self.entries > self.bounds.entries:
            raise _Stop(FileComparison(False, unknown=f"more than {self.bounds.entries} files"))
        if time.monotonic() > self.deadline:
            raise _Stop(FileComparison(False, unknown=f"it takes too long at {path}"))

    def _differs(self, path: str, how: str) -> NoReturn:
        raise _Stop(FileComparison(False, difference=f"{path}: {how}"))

    def _need(self, result: str, path: str) -> str:
        return result if result in ("same", "look") else self._differs(path, result)

    def _same_attributes(self, old: int | str, new: int | str, path: str) -> None:
        if _attributes(old) != _attributes(new):
            self._differs(path, "other attributes")
        if isinstance(old, int) and isinstance(new, int) and _flags(old) != _flags(new):
            self._differs(path, "other flags")

    def _same_bytes(self, old: int | str, new: int | str, path: str) -> None:
        assert isinstance(old, int) and isinstance(new, int)
        if not same_ranges(old, new):
            self._differs(path, "other holes")
        for offset, size in pieces(old):
            self.content += size
            if self.content > self.bounds.content:
                raise _Stop(FileComparison(False, unknown=f"more than {self.bounds.content} bytes"))
            if os.pread(old, size, offset) != os.pread(new, size, offset):
                self._differs(path, "other bytes")


@contextlib.contextmanager
def _opened(holder: int, name: str, facts: os.stat_result) -> Iterator[int | str]:
    """A regular file or a directory, opened; a path to all else. Raises OSError when it is another one by now."""
    kind = stat.S_IFMT(facts.st_mode)
    if kind not in (stat.S_IFREG, stat.S_IFDIR):
        yield named(holder, name)
        return
    try:
        descriptor = open_kind(holder, name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NOATIME, (kind,))
    except Invalid as error:
        raise OSError(errno.ESTALE, f"{name} was replaced") from error
    try:
        if os.fstat(descriptor).st_ino != facts.st_ino:
            raise OSError(errno.ESTALE, f"{name} was replaced")
        yield descriptor
    finally:
        os.close(descriptor)


def _attributes(of: int | str) -> list[tuple[str, bytes]]:
    """Extended attributes, but for overlay's volatile ones. A path is not followed."""
    result = []
    follow = isinstance(of, int)
    for name in sorted(os.listxattr(of, follow_symlinks=follow)):
        space, _, rest = name.partition(".")
        if space in ("trusted", "user") and rest.startswith("overlay.") and rest[8:] in _VOLATILE:
            continue
        result.append((name, os.getxattr(of, name, follow_symlinks=follow)))
    return result


def _opaque(directory: int | str) -> bool:
    return any(name.endswith("overlay.opaque") and value == b"y" for name, value in _attributes(directory))


def _flags(descriptor: int) -> int:
    value = array.array("l", [0])
    try:
        fcntl.ioctl(descriptor, _GETFLAGS, value)
    except OSError as error:
        if error.errno in (errno.ENOTTY, errno.EOPNOTSUPP):  # a file system without flags
            return 0
        raise
    return value[0] & _RETAINED_FLAGS
