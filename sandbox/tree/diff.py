"""How two states of a sandbox's file tree differ: two overlay uppers over one lower."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from sandbox.descriptors import closing
from sandbox.errors import Invalid
from sandbox.messages import Change
from sandbox.messages.files import FileVersion, FileVersions
from sandbox.names import native, reported
from sandbox.tree import sparse
from sandbox.tree.safe_path import NO_LINKS, directory, named, openat2, refused, regular
from sandbox.tree.walk import WalkEntry, walk

RUNTIME = ".pagurus"  # ours: where attendants have their FIFOs
MAX_SHOWN = 256 << 10  # bytes of the beginning of a file
MAX_REPORTED = 64 << 20  # bytes of all paths that are reported
OLD, NEW, LOWER = range(3)
Form = Literal["json", "msgpack"]
Shown = tuple[int, os.stat_result]  # the directory that holds it, and what it is


def changes(old: Path, new: Path, lower: Path) -> list[Change]:
    """What differs in the merged views of two uppers over the same `lower`, by path. Raises Invalid for too much.

    A removed directory is named once, without its content. Metadata (type, mode, owner) counts;
    times alone do not.
    """
    result: list[Change] = []
    left = MAX_REPORTED
    hiding = [[False, False]]  # by depth: whether the lower layer does not show in the old one, in the new one
    with directory(old) as before, directory(new) as after, directory(lower) as below:
        for step in walk(before, after, below):
            if step.depth == 1 and step.name == RUNTIME:
                step.enter = [False] * 3
                continue
            del hiding[step.depth :]
            hidden = hiding[-1]
            was, now = (_shown(step, index, hidden[index]) for index in (OLD, NEW))
            step.enter[LOWER] &= (step.enter[OLD] or step.enter[NEW]) and not all(hidden)
            hiding.append([hidden[index] or _hides(step, index) for index in (OLD, NEW)])
            if now is None:
                step.enter = [False] * 3  # a removed directory is named once
            if (kind := _kind(was, now, step.name)) is not None:
                path = f"/{step.path}"
                result.append(Change(path=reported(path), kind=kind))
                left -= len(path)
                if left < 0:
                    raise Invalid(
                        f"more differs than can be listed: paths of {MAX_REPORTED >> 20} MiB",
                        hint="compare by a command in the sandbox and in a fork of the checkpoint",
                    )
    return result


def packed(old: Path, new: Path, lower: Path, why: Callable[[str], str] | None, form: Form) -> bytes:
    """The same as an answer of the API: made in one process, sent by another. `why`: explains a path."""
    result = changes(old, new, lower)
    if why is not None:
        result = [msgspec.structs.replace(change, why=why(change.path)) for change in result]
    return msgspec.json.encode(result) if form == "json" else msgspec.msgpack.encode(result)


def packed_versions(old: Path, new: Path, lower: Path, path: str, form: Form) -> bytes:
    """One path in the two states, as an answer of the API. No link is followed: paths are those that changes name."""
    names = [name for name in native(path).split("/") if name]
    if not names or {".", ".."} & set(names):
        raise Invalid(f"{path[:200]} is no path of a change", hint="write it as the diff does, such as /srv/file")
    try:
        with directory(old) as before, directory(new) as after, directory(lower) as below:
            result = FileVersions(before=_version(before, below, names), after=_version(after, below, names))
    except OSError as error:  # such as a name that is too long
        raise refused(error, path) from error
    return msgspec.json.encode(result) if form == "json" else msgspec.msgpack.encode(result)


def _version(upper: int, lower: int, names: list[str]) -> FileVersion:
    """What `upper` over `lower` shows at a path."""
    with contextlib.ExitStack() as held:
        layers = [upper, lower]
        for number, name in enumerate(names):
            holder, status = _over(layers, name)
            if status is None:
                break
            if number == len(names) - 1:
                return _content(holder, name, status)
            layers = [held.enter_context(item) for item in _into(layers, name)]
    return FileVersion(kind="absent")


def _over(layers: list[int], name: str) -> tuple[int, os.stat_result | None]:
    """What the layers, the uppermost first, show by this name, and the directory that holds it."""
    for holder in layers:
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=holder, follow_symlinks=False)
            whiteout = stat.S_ISCHR(status.st_mode) and status.st_rdev == 0
            return holder, None if whiteout else status
    return -1, None


def _into(layers: list[int], name: str) -> list[closing]:
    """The directory of this name in each layer that shows through those above it; none where it is no directory."""
    result = []
    for holder in layers:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISDIR(os.stat(name, dir_fd=holder, follow_symlinks=False).st_mode):
                break
            result.append(closing(openat2(holder, name, os.O_RDONLY | os.O_DIRECTORY, resolve=NO_LINKS)))
            if _opaque(named(holder, name)):
                break
    return result


def _content(holder: int, name: str, status: os.stat_result) -> FileVersion:
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISREG(status.st_mode):
        with regular(holder, name) as file:
            return FileVersion(kind="file", size=status.st_size, mode=mode, data=os.pread(file, MAX_SHOWN, 0))
    if stat.S_ISLNK(status.st_mode):
        return FileVersion(kind="symlink", data=os.fsencode(os.readlink(name, dir_fd=holder)))
    return FileVersion(kind="directory" if stat.S_ISDIR(status.st_mode) else "other", mode=mode)


def _kind(was: Shown | None, now: Shown | None, name: str) -> Literal["added", "modified", "removed"] | None:
    if was is None or now is None:
        return "removed" if was is not None else "added" if now is not None else None
    return None if was == now or _same(was, now, name) else "modified"


def _shown(step: WalkEntry, index: int, hidden: bool) -> Shown | None:
    """What an upper and the lower layer together show by this name."""
    if (status := step.result[index]) is not None:
        whiteout = stat.S_ISCHR(status.st_mode) and status.st_rdev == 0
        return None if whiteout else (step.parents[index], status)
    status = step.result[LOWER]
    return None if hidden or status is None else (step.parents[LOWER], status)


def _hides(step: WalkEntry, index: int) -> bool:
    """Whether below this name nothing of the lower layer shows in an upper."""
    status = step.result[index]
    if status is None:
        return False
    return not stat.S_ISDIR(status.st_mode) or _opaque(named(step.parents[index], step.name))


def _opaque(path: str) -> bool:
    for name in ("trusted.overlay.opaque", "user.overlay.opaque"):
        with contextlib.suppress(OSError):
            if os.getxattr(path, name, follow_symlinks=False) == b"y":
                return True
    return False


def _same(one: Shown, other: Shown, name: str) -> bool:
    (holder, first), (holder_now, second) = one, other
    if (first.st_mode, first.st_uid, first.st_gid) != (second.st_mode, second.st_uid, second.st_gid):
        return False
    if stat.S_ISDIR(first.st_mode):
        return True
    if stat.S_ISLNK(first.st_mode):
        return os.readlink(name, dir_fd=holder) == os.readlink(name, dir_fd=holder_now)
    if not stat.S_ISREG(first.st_mode):
        return first.st_rdev == second.st_rdev
    if first.st_size != second.st_size:
        return False
    if (first.st_ino, first.st_ctime_ns) == (second.st_ino, second.st_ctime_ns):
        return True  # a snapshot keeps both; any change moves the change time
    with regular(holder, name) as left, regular(holder_now, name) as right:
        return sparse.same(left, right)
