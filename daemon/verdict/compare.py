"""Did anything come of what was done to the files? The tree now, against the snapshot that holds the last state.

Owns: the comparison of two overlay uppers over one lower, bounded. Does not own: when it is made
(:mod:`daemon.verdict.assess`), or what else a turn did.

A file rewritten with the same bytes, a name made and removed, a mode changed and changed back: the kernel counts
them, but nothing is left to capture. Equal means: the same names, and under each the same type, mode, owner,
attributes, flags, links, holes and bytes. Times matter only where a program set them on purpose (`strict`), else a file
rewritten with the same bytes could never be equal. Those of directories, FIFOs, sockets and devices move with their use
as well: both of them, to the same present. So one that differs from the time of the change was set; and any that moved
may have been, where a program set one to the present (`set_to_now`).

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
from dataclasses import dataclass, field, replace
from pathlib import Path

from daemon.verdict.ignore import NOTHING, Rules
from sandbox.errors import Invalid
from sandbox.tree.safe_path import directory, named, open_deep, open_kind
from sandbox.tree.sparse import pieces, same_ranges
from sandbox.tree.walk import Step, walk

SETTLED = 0.1  # seconds by which a change time must precede the snapshot to prove that nothing followed it
_GETFLAGS = 0x80086601  # FS_IOC_GETFLAGS
_KEPT_FLAGS = 0x8100FC  # those that a program sets; file systems keep notes of their own among the others
_ROOT = (0o40755, 0, 0)  # mode and owner of the root of a new upper
_VOLATILE = ("origin", "impure", "nlink", "uuid")  # overlay's own notes; they say nothing about what is seen
BEFORE, NOW, LOWER = range(3)  # of the trees that are walked; more lower layers follow


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How much may be compared. Beyond, the answer is `unknown`."""

    entries: int = 400
    content: int = 1 << 20  # bytes
    seconds: float = 0.02


@dataclass(frozen=True)
class Outcome:
    """`equal`, or the first difference, or why nothing can be said."""

    equal: bool
    difference: str = ""
    unknown: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What stat says of one name, as far as it matters."""

    inode: int
    mode: int
    uid: int
    gid: int
    device: int
    size: int
    links: int
    blocks: int
    modified: int  # ns
    changed: int  # ns

    @classmethod
    def of(cls, status: os.stat_result) -> Facts:
        return cls(
            inode=status.st_ino,
            mode=status.st_mode,
            uid=status.st_uid,
            gid=status.st_gid,
            device=status.st_rdev,
            size=status.st_size,
            links=status.st_nlink,
            blocks=status.st_blocks,
            modified=status.st_mtime_ns,
            changed=status.st_ctime_ns,
        )

    @property
    def directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def moves(self) -> bool:
        """Whether its times move when names are made in it, or bytes go through it."""
        return not (stat.S_ISREG(self.mode) or stat.S_ISLNK(self.mode))

    @property
    def hides(self) -> bool:
        """A whiteout: what the lower layer has by this name is removed."""
        return stat.S_ISCHR(self.mode) and self.device == 0


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a comparison must know. `replaced`: another inode with the same content is the same file."""

    strict: bool = False
    set_to_now: bool = False  # a program set times to the present, maybe of a directory
    replaced: bool = True
    taken_at: float = 0.0  # seconds since the epoch: when the snapshot was made


def compare(before: Facts, now: Facts, case: Case) -> str:
    """Pure: "same", "look" (at attributes and bytes), or how they differ.

    >>> one = Facts(inode=7, mode=0o100644, uid=0, gid=0, device=0, size=5, links=1, blocks=8, modified=1, changed=1)
    >>> compare(one, one, Case(taken_at=9.0))
    'same'
    """
    if before.mode != now.mode or (before.uid, before.gid) != (now.uid, now.gid):
        return "another mode or owner" if stat.S_IFMT(before.mode) == stat.S_IFMT(now.mode) else "another type"
    if now.moves and before.modified != now.modified and (case.set_to_now or _chosen(now, case)):
        return "another time"
    if now.directory:
        return "look"
    if (before.device, before.links) != (now.device, now.links):
        return "another number of links"
    if before.inode != now.inode and (not case.replaced or now.links > 1):
        return "another file"
    if not stat.S_ISREG(now.mode):
        return "another time" if case.strict and not now.moves and before.modified != now.modified else "look"
    if before.size != now.size:
        return "another length"
    if case.strict and (before.modified, before.blocks) != (now.modified, now.blocks):
        return "another time or allocation"
    unmoved = before.inode == now.inode and before.changed == now.changed and before.modified == now.modified
    # A change in the same tick of the clock leaves the change time as it was: an old one proves more.
    return "same" if unmoved and now.changed < 1e9 * (case.taken_at - SETTLED) else "look"


def _chosen(now: Facts, case: Case) -> bool:
    """A time that does not follow from the use of a directory or FIFO."""
    return case.strict and now.modified != now.changed


class _Stop(Exception):
    """The comparison has its answer."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


def trees(
    before: Path | None,
    now: Path,
    lower: Path | Sequence[Path],
    case: Case,
    *,
    rules: Rules = NOTHING,
    bounds: Bounds | None = None,
    hints: Sequence[str] = (),
) -> Outcome:
    """Compare the upper `now` with the upper `before` (None: an empty one) over the same `lower`. Blocks.

    Of several lower layers the first is the topmost.
    `hints` are paths where a difference is likely. They may be wrong: they can only end the comparison early.
    """
    places = [before, now, *((lower,) if isinstance(lower, Path) else lower)]
    try:
        with contextlib.ExitStack() as stack:
            roots = [None if place is None else stack.enter_context(directory(place)) for place in places]
            for path in hints:
                if (found := _at_once(roots, path, case)) and not (rules and rules.path(path)):
                    return Outcome(False, difference=f"{path}: {found}")
            return _Comparison(case, rules, bounds or Bounds()).run(roots)
    except OSError as error:  # a sandbox that is removed, or changes its tree under our feet
        return Outcome(False, unknown=f"it cannot be compared: {error}")


def _at_once(roots: Sequence[int | None], path: str, case: Case) -> str:
    """How this one path differs, as far as its own entry shows; "" when it may be the same."""
    was, is_now, *lowers = (None if root is None else _facts(root, path.strip("/")) for root in roots)
    if was is not None and is_now is not None:
        found = compare(was, is_now, case)
        return "" if found in ("same", "look") or (was.hides and is_now.hides) else found
    if was is None and is_now is None:
        return ""
    if is_now is None:
        return "gone"
    return "" if any(lowers) else "new"


def _facts(root: int, path: str) -> Facts | None:
    try:
        found = open_deep(root, os.fsencode(path), os.O_PATH)
    except (OSError, ValueError, Invalid):  # not there; or a name that a program chose, which no path can hold
        return None
    try:
        return Facts.of(os.fstat(found))
    finally:
        os.close(found)


@dataclass
class _Comparison:
    case: Case
    rules: Rules
    bounds: Bounds
    entries: int = 0
    content: int = 0
    deadline: float = field(default=0.0)

    def run(self, roots: Sequence[int | None]) -> Outcome:
        self.deadline = time.monotonic() + self.bounds.seconds
        try:
            before, now = roots[BEFORE], roots[NOW]
            assert now is not None
            self._roots(before, now)
            for step in walk(*roots, naming=LOWER):
                self._step(step)
        except _Stop as stop:
            return stop.outcome
        return Outcome(True)

    def _roots(self, before: int | None, now: int) -> None:
        status = os.fstat(now)
        shown = (status.st_mode, status.st_uid, status.st_gid)
        if before is None:
            if shown != _ROOT or _attributes(now) or _flags(now):
                self._differs("/", "another mode, owner or attribute")
            if self.case.set_to_now or _chosen(Facts.of(status), self.case):
                self._differs("/", "another time")  # than it had when it was made, which nobody noted
            return
        found = compare(Facts.of(os.fstat(before)), Facts.of(status), self.case)
        if found not in ("same", "look"):
            self._differs("/", found)
        self._same_attributes(before, now, "/")

    def _step(self, step: Step) -> None:
        was, is_now, *shown = (None if each is None else Facts.of(each) for each in step.found)
        if was is None and is_now is None:  # it went while we looked
            step.enter = [False] * len(step.enter)
            return
        path = f"/{step.path}"
        self._account(path)
        if self.rules and self.rules.path(path):
            step.enter = [False] * len(step.enter)
        elif is_now is None:
            self._differs(path, "gone")
        elif was is not None:
            self._both(step, was, is_now, path)
        else:
            self._added(step, is_now, shown, path)

    def _both(self, step: Step, was: Facts, is_now: Facts, path: str) -> None:
        found = compare(was, is_now, self.case)
        if found == "same" or (was.hides and is_now.hides):
            step.enter = [False] * len(step.enter)
            return
        if found != "look":
            self._differs(path, found)
        if self._same_entries(step, BEFORE, was, is_now, path):
            step.enter[LOWER:] = [False] * (len(step.enter) - LOWER)

    def _added(self, step: Step, is_now: Facts, lowers: Sequence[Facts | None], path: str) -> None:
        """A name that the upper did not have. It may have been copied up from the lower layer, and be as it was."""
        layer, shown = next(((index, facts) for index, facts in enumerate(lowers, LOWER) if facts), (0, None))
        # A process that lives on may hold the file of the lower layer: then the one in the upper is another.
        held = not self.case.replaced and not is_now.directory
        if shown is None or is_now.hides or held:
            self._differs(path, "new")
            return
        found = compare(shown, is_now, replace(self.case, replaced=True, taken_at=0.0))
        if found not in ("same", "look") or (is_now.links > 1 and not is_now.directory):
            self._differs(path, found)
        if self._same_entries(step, layer, shown, is_now, path):
            self._differs(path, "new")

    # ----------------------------------------------------------------- parts

    def _same_entries(self, step: Step, other: int, was: Facts, is_now: Facts, path: str) -> bool:
        """Compare attributes, bytes, targets. Returns whether it is a directory that hides the lower layers."""
        holder, holder_now = step.parents[other], step.parents[NOW]
        with _opened(holder, step.name, was) as old, _opened(holder_now, step.name, is_now) as new:
            self._same_attributes(_named(holder, step.name, old), _named(holder_now, step.name, new), path)
            if is_now.directory:
                assert new is not None
                return _opaque(new)
            if stat.S_ISREG(is_now.mode):
                self._same_bytes(old, new, path)
            elif stat.S_ISLNK(is_now.mode) and _target(holder, step.name) != _target(holder_now, step.name):
                self._differs(path, "another target")
        return False

    def _account(self, path: str) -> None:
        self.entries += 1
        if self.entries > self.bounds.entries:
            raise _Stop(Outcome(False, unknown=f"more than {self.bounds.entries} files"))
        if time.monotonic() > self.deadline:
            raise _Stop(Outcome(False, unknown=f"it takes too long at {path}"))

    def _differs(self, path: str, how: str) -> None:
        raise _Stop(Outcome(False, difference=f"{path}: {how}"))

    def _same_attributes(self, old: int | str, new: int | str, path: str) -> None:
        if _attributes(old) != _attributes(new):
            self._differs(path, "other attributes")
        if isinstance(old, int) and isinstance(new, int) and _flags(old) != _flags(new):
            self._differs(path, "other flags")

    def _same_bytes(self, old: int | None, new: int | None, path: str) -> None:
        assert old is not None and new is not None
        if not same_ranges(old, new):
            self._differs(path, "other holes")
        for offset, size in pieces(old):
            self.content += size
            if self.content > self.bounds.content:
                raise _Stop(Outcome(False, unknown=f"more than {self.bounds.content} bytes"))
            if os.pread(old, size, offset) != os.pread(new, size, offset):
                self._differs(path, "other bytes")


@contextlib.contextmanager
def _opened(holder: int, name: str, facts: Facts) -> Iterator[int | None]:
    """A regular file or a directory, opened; None for all else. Raises OSError when it is another one by now."""
    kind = stat.S_IFMT(facts.mode)
    if kind not in (stat.S_IFREG, stat.S_IFDIR):
        yield None
        return
    try:
        descriptor = open_kind(holder, name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NOATIME, (kind,))
    except Invalid as error:
        raise OSError(errno.ESTALE, f"{name} was replaced") from error
    try:
        if os.fstat(descriptor).st_ino != facts.inode:
            raise OSError(errno.ESTALE, f"{name} was replaced")
        yield descriptor
    finally:
        os.close(descriptor)


def _named(holder: int, name: str, descriptor: int | None) -> int | str:
    """What was opened, or a path to what cannot be: a symbolic link, a FIFO, a socket, a device. Flagless."""
    return named(holder, name) if descriptor is None else descriptor


def _target(holder: int, name: str) -> str:
    return os.readlink(name, dir_fd=holder)


def _attributes(of: int | str) -> list[tuple[str, bytes]]:
    """Extended attributes, but for overlay's volatile ones. A path is not followed."""
    found = []
    follow = isinstance(of, int)
    for name in sorted(os.listxattr(of, follow_symlinks=follow)):
        space, _, rest = name.partition(".")
        if space in ("trusted", "user") and rest.startswith("overlay.") and rest[8:] in _VOLATILE:
            continue
        found.append((name, os.getxattr(of, name, follow_symlinks=follow)))
    return found


def _opaque(directory: int) -> bool:
    return any(name.endswith("overlay.opaque") and value == b"y" for name, value in _attributes(directory))


def _flags(descriptor: int) -> int:
    value = array.array("l", [0])
    try:
        fcntl.ioctl(descriptor, _GETFLAGS, value)
    except OSError as error:
        if error.errno in (errno.ENOTTY, errno.EOPNOTSUPP):  # a file system without flags
            return 0
        raise
    return value[0] & _KEPT_FLAGS
