"""Copies parts of one file tree into another, as COPY and ADD of a Dockerfile do. Blocks.

Guarantee: both trees may be changed by their owners at the same time; every path is resolved below its root, and
nothing of either is run. The caller has the file-system identity of the sandbox's root
(:func:`sandbox.tree.safe_path.as_sandbox_root`).
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import stat
from collections.abc import Callable
from dataclasses import dataclass

from sandbox.descriptors import closing
from sandbox.errors import Invalid, NotFound
from sandbox.messages import CopyRequest, CopyResult
from sandbox.patterns import PatternList, glob, split_wildcards
from sandbox.tree import archive, compressed, modes
from sandbox.tree.copy import copy_data
from sandbox.tree.safe_path import IDS, NO_LINKS, named, open_deep, openat2, opened, pinned, refused, regular
from sandbox.tree.walk import WalkEntry, walk

SOURCE, TARGET = 0, 1
MAX_LINKS = 255  # symbolic links on the way to one path
MAX_FILE = 4 << 20  # bytes of /etc/passwd and /etc/group
ALWAYS_THERE = ("run", "tmp", "root")  # in every image, also in what begins with nothing
_POLL = os.O_PATH | os.O_NOFOLLOW


@dataclass(frozen=True)
class TargetTree:
    """The tree that is written to: its root, and the number that its owner 0 is on the host."""

    root: int
    uid_base: int


def copy_into(source: int | None, place: TargetTree, request: CopyRequest, *, limit: int) -> CopyResult:
    """Do what a request says; at most `limit` bytes. Raises Invalid, NotFound, NoSpace."""
    try:
        copier = _Copier(source, place, request, limit)
        if request.make_directory:
            copier.directories(request.target)
        for item in request.sources:
            copier.source(item)
    except OSError as error:
        raise refused(error, str(error.filename or request.target)) from error
    except ValueError as error:
        raise Invalid(str(error)) from error
    return copier.copied


def canonical(root: int, path: str, *, missing: bool = False) -> str:
    """Where a path leads below a root, without links and without a leading slash.

    `missing`: what is not there is taken for a directory to be. Raises NotFound otherwise.
    """
    pending, here, links = [part for part in reversed(path.split("/")) if part not in ("", ".")], "", 0
    while pending:
        part = pending.pop()
        if part == "..":
            here = posixpath.dirname(here)
            continue
        here = posixpath.join(here, part)
        try:
            with closing(openat2(root, here, _POLL, resolve=NO_LINKS)) as result:
                if not stat.S_ISLNK(os.fstat(result).st_mode):
                    continue
                target = os.readlink("", dir_fd=result)
        except (FileNotFoundError, NotADirectoryError) as error:
            if missing and isinstance(error, FileNotFoundError):
                continue
            raise NotFound(
                f"no such file or directory: {path}",
                hint="check the path: it begins at the root of the context or stage",
            ) from error
        links += 1
        if links > MAX_LINKS:
            raise Invalid(f"{path} leads in circles", hint="remove one of the links")
        here = "" if target.startswith("/") else posixpath.dirname(here)
        pending += [part for part in reversed(target.split("/")) if part not in ("", ".")]
    return here


class _Copier:
    def __init__(self, source: int | None, place: TargetTree, request: CopyRequest, limit: int) -> None:
        self.copied = CopyResult()
        self._source, self._root, self._base = source, place.root, place.uid_base
        self._request, self._limit = request, limit
        self._owner = owner_of(place.root, request.owner) if request.owner else None
        self._directory_owner = self._owner  # None: that of the sandbox's root, and the group of a set-group-ID parent
        if request.directory_owner:
            self._directory_owner = owner_of(place.root, request.directory_owner)
        self._mode = modes.change(request.mode) if request.mode else None
        octal = request.mode.isdigit()
        self._directory_mode = int(request.mode, 8) & 0o755 if octal else 0o755  # as BuildKit makes them
        self._exclude = PatternList(request.exclude)
        self._linked: dict[tuple[int, int], str] = {}

    # ----------------------------------------------------------------- sources and targets

    def source(self, path: str) -> None:
        """One source: a path or a pattern."""
        assert self._source is not None
        if self._request.parents:
            self._parents(path)
            return
        fixed, pattern = split_wildcards(posixpath.join("/", path))
        if not pattern:
            self._copy(fixed)
            return
        try:
            above = canonical(self._source, fixed)
        except NotFound:
            return  # a pattern may match nothing
        for name in self._matching(above, glob(pattern).fullmatch):
            self._copy(posixpath.join("/", above, name))

    def _matching(self, above: str, matches: Callable[[str], object]) -> list[str]:
        result = []
        with self._opened(self._source, above) as directory:
            for step in walk(directory):
                if matches(step.path):
                    result.append(step.path)
                    step.enter = [False]
        return result

    def _parents(self, path: str) -> None:
        """``COPY --parents``: the directories behind the pivot ``/./``, or all of them."""
        assert self._source is not None
        pivot, dot, pattern = posixpath.join("/", path).partition("/./")
        pivot, pattern = (pivot, pattern) if dot else ("/", path)
        pattern = posixpath.normpath(posixpath.join("/", pattern)).lstrip("/")
        above = canonical(self._source, pivot)
        target = PatternList([pattern])
        included = self._included(above, target)
        if not included and not split_wildcards(pattern)[1]:
            raise NotFound(
                f"no such file or directory: {path}",
                hint="check the path: it begins at the root of the context or stage",
            )
        into = self.directories(self._request.target)
        self._tree(above, into, included)

    def _copy(self, path: str) -> None:
        """One file or directory of the source to the target."""
        assert self._source is not None
        real = canonical(self._source, path)
        with closing(openat2(self._source, real or ".", os.O_PATH, resolve=NO_LINKS)) as result:
            status = os.fstat(result)
        target = self._request.target
        if stat.S_ISREG(status.st_mode) and self._request.unpack and self._unpacked(real, target):
            return
        if target.endswith("/"):
            self.directories(target)
        into = canonical(self._root, target, missing=True)
        there = self._status(into)
        if stat.S_ISDIR(status.st_mode):
            if there is not None and not stat.S_ISDIR(there.st_mode):
                raise Invalid(f"{target} is not a directory", hint="end the target with / only if it is a directory")
            self.directories(into)
            self._linked.clear()
            self._tree(real, into, self._included(real, None) if self._exclude else None)
            if _is_direct(path):
                with self._opened(self._root, into) as other:
                    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
            return
        if there is not None and stat.S_ISDIR(there.st_mode):
            into = posixpath.join(into, posixpath.basename(path))
        self.directories(posixpath.dirname(into))
        with (
            self._opened(self._source, posixpath.dirname(real)) as parent,
            self._opened(self._root, posixpath.dirname(into)) as holder,
        ):
            name = posixpath.basename(into)
            self._clear(holder, name)
            self._make(parent, posixpath.basename(real), status, holder, name)
            self._finish(parent, posixpath.basename(real), status, holder, name)

    def directories(self, path: str, mode: int | None = None) -> str:
        """Make a directory and what is missing above it; where it is, without links."""
        into = canonical(self._root, path, missing=True)
        missing: list[str] = []
        here = into
        while here and self._status(here) is None:
            missing.append(here)
            here = posixpath.dirname(here)
        for item in reversed(missing):
            with self._opened(self._root, posixpath.dirname(item)) as parent:
                name = posixpath.basename(item)
                os.mkdir(name, 0o700, dir_fd=parent)
                inherited = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode & stat.S_ISGID
                if self._directory_owner is not None:
                    self._chown(parent, name, *self._directory_owner)
                with pinned(parent, name, stat.S_IFDIR) as made:
                    os.chmod(made, inherited | (self._directory_mode if mode is None else mode))
            self.copied.entries += 1
        result = self._status(into) if into else os.fstat(self._root)
        if result is None or not stat.S_ISDIR(result.st_mode):
            raise Invalid(f"{path} is not a directory", hint="end the target with / only if it is a directory")
        return into

    def _status(self, path: str) -> os.stat_result | None:
        try:
            with closing(openat2(self._root, path or ".", _POLL, resolve=NO_LINKS)) as result:
                return os.fstat(result)
        except FileNotFoundError:
            return None

    def _opened(self, root: int | None, path: str) -> closing:
        assert root is not None
        return closing(open_deep(root, os.fsencode(path), os.O_RDONLY | os.O_DIRECTORY))

    # ----------------------------------------------------------------- whole directories

    def _included(self, above: str, target: PatternList | None) -> set[str]:
        """The names below a directory that are copied, with the directories above them."""
        result: set[str] = set()
        by: dict[str, tuple[tuple[bool, ...], tuple[bool, ...]]] = {"": ((), ())}
        with self._opened(self._source, above) as directory:
            for step in walk(directory):
                path, parent = step.path, posixpath.dirname(step.path)
                take, with_target = target.decide(path, by[parent][0]) if target is not None else (True, ())
                left_out, with_exclude = self._exclude.decide(path, by[parent][1])
                by[path] = with_target, with_exclude
                if not take or left_out:
                    continue
                while path and path not in result:
                    result.add(path)
                    path = posixpath.dirname(path)
        return result

    def _tree(self, above: str, into: str, included: set[str] | None) -> None:
        """What is in a directory. The target keeps its owner and mode, as with BuildKit."""
        with self._opened(self._source, above) as one, self._opened(self._root, into) as other:
            for step in walk(one, other, naming=TARGET, leave=self._leave):
                if included is not None and step.path not in included:
                    step.enter = [False, False]
                    continue
                self._step(step, into)

    def _step(self, step: WalkEntry, into: str) -> None:
        result, there = step.result
        assert result is not None
        parent, holder = step.parents
        if stat.S_ISDIR(result.st_mode):
            if there is None:
                os.mkdir(step.name, 0o700, dir_fd=holder)
                step.result[TARGET] = os.stat(step.name, dir_fd=holder, follow_symlinks=False)
                step.enter[TARGET] = True
                self.copied.entries += 1
            elif not stat.S_ISDIR(there.st_mode):
                raise Invalid(
                    f"{step.path} is a directory in the source and none in the target",
                    hint="remove it first, or choose another target",
                )
            elif there.st_dev != os.fstat(holder).st_dev:
                self._leave_mount(parent, step)
            return
        step.enter = [False, False]
        self._clear(holder, step.name)
        if result.st_nlink > 1 and stat.S_ISREG(result.st_mode):
            key = result.st_dev, result.st_ino
            here = posixpath.join(into, step.path)
            first = self._linked.setdefault(key, here)
            if first != here:
                with self._opened(self._root, posixpath.dirname(first)) as where:
                    os.link(
                        posixpath.basename(first), step.name, src_dir_fd=where, dst_dir_fd=holder, follow_symlinks=False
                    )
                return
        if self._make(parent, step.name, result, holder, step.name):
            self._finish(parent, step.name, result, holder, step.name)

    def _leave_mount(self, parent: int, step: WalkEntry) -> None:
        """What is mounted in the sandbox (/proc) is there in every image: only a source without content fits it."""
        with closing(openat2(parent, step.name, os.O_RDONLY | os.O_DIRECTORY, resolve=NO_LINKS)) as directory:
            if os.listdir(directory):
                raise Invalid(
                    f"{step.path} is mounted in every sandbox: nothing can be copied into it",
                    hint="copy to another directory",
                )
        step.enter = [False, False]

    def _leave(self, step: WalkEntry) -> None:
        result = step.result[SOURCE]
        if result is not None and step.parents[TARGET] >= 0:
            self._finish(step.parents[SOURCE], step.name, result, step.parents[TARGET], step.name)

    # ----------------------------------------------------------------- single entries

    def _clear(self, holder: int, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(os.stat(name, dir_fd=holder, follow_symlinks=False).st_mode):
                if name in ALWAYS_THERE and os.path.samestat(os.fstat(holder), os.fstat(self._root)):
                    with contextlib.suppress(OSError):  # not empty
                        os.rmdir(name, dir_fd=holder)
                        return
                raise Invalid(
                    f"{name} is a directory in the target and none in the source",
                    hint="remove it first, or choose another target",
                )
            os.close(openat2(holder, name, _POLL))  # a mount point is refused
            os.unlink(name, dir_fd=holder)

    def _make(self, parent: int, name: str, result: os.stat_result, holder: int, target: str) -> bool:
        """Anything but a directory; False: sockets are left out."""
        kind = stat.S_IFMT(result.st_mode)
        if kind == stat.S_IFREG:
            self._take(min(result.st_size, result.st_blocks * 512))
            with regular(parent, name) as one:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                with closing(os.open(target, flags, 0o600, dir_fd=holder)) as other:
                    os.ftruncate(other, result.st_size)
                    copy_data(one, other)
        elif kind == stat.S_IFLNK:
            os.symlink(os.readlink(name, dir_fd=parent), target, dir_fd=holder)
        elif kind == stat.S_IFIFO:
            os.mkfifo(target, 0o600, dir_fd=holder)
        elif kind in (stat.S_IFCHR, stat.S_IFBLK):
            os.mknod(target, kind | 0o600, result.st_rdev, dir_fd=holder)
        else:
            return False
        self.copied.entries += 1
        return True

    def _take(self, size: int) -> None:
        self.copied.bytes += size
        if self.copied.bytes > self._limit:
            raise Invalid(f"more than {self._limit} bytes would be copied", hint="raise the limit disk of the sandbox")

    def _finish(self, parent: int, name: str, result: os.stat_result, holder: int, target: str) -> None:
        self._attributes(named(parent, name), result, holder, target)

    def _attributes(self, one: str, result: os.stat_result, holder: int, name: str) -> None:
        """Owner, then mode (a change of owner drops set-id bits), then extended attributes, then times."""
        self._chown(holder, name, *(self._owner or (result.st_uid, result.st_gid)))
        if not stat.S_ISLNK(result.st_mode):
            mode = stat.S_IMODE(result.st_mode)
            if self._mode is not None:
                mode = self._mode(mode, stat.S_ISDIR(result.st_mode))
            with pinned(holder, name, stat.S_IFMT(result.st_mode)) as other:
                os.chmod(other, mode)
                for key in os.listxattr(one, follow_symlinks=False):
                    if key.startswith(("user.", "security.capability")):
                        with contextlib.suppress(OSError):  # a kind of file that has none; as with Docker
                            value = os.getxattr(one, key, follow_symlinks=False)
                            os.setxattr(other, key, archive.mapped(key, value, self._base))
        os.utime(name, ns=(result.st_atime_ns, result.st_mtime_ns), dir_fd=holder, follow_symlinks=False)

    def _chown(self, holder: int, name: str, uid: int, gid: int) -> None:
        if not (0 <= uid < IDS and 0 <= gid < IDS):
            raise Invalid(
                f"{name} belongs to {uid}:{gid}: a sandbox has the owners 0 to {IDS - 1}",
                hint="choose an owner from 0 to 65535",
            )
        os.chown(name, self._base + uid, self._base + gid, dir_fd=holder, follow_symlinks=False)

    # ----------------------------------------------------------------- archives

    def _unpacked(self, real: str, target: str) -> bool:
        assert self._source is not None
        with (
            self._opened(self._source, posixpath.dirname(real)) as parent,
            regular(parent, posixpath.basename(real)) as file,
            compressed.archive(file) as stream,
        ):
            if stream is None:
                return False
            into, left = self.directories(target, 0o755), self._limit - self.copied.bytes  # --chmod is for copies
            rules = archive.Rules(owners=True, uid_base=self._base, owner=self._owner)
            with self._opened(self._root, into) as directory:
                self.copied.bytes += archive.unpack(stream, directory, limit=left, rules=rules)
        return True


def _is_direct(path: str) -> bool:
    """Whether the target of a directory gets its time, as with BuildKit: not that of ``name/.``."""
    above, name = posixpath.split(path.rstrip("/"))
    return name != "." or above in ("", "/")


def owner_of(root: int, text: str) -> tuple[int, int]:
    """The numbers of ``user[:group]``. As with Docker, a name that is not known is root."""
    user, _, group = text.partition(":")
    uid, gid = 0, 0
    if user.isdecimal():
        uid = gid = int(user)
    elif user:
        existing = _lines(root, "/etc/passwd", 7)
        if existing is None:
            raise Invalid(f"there is no /etc/passwd that would know {user}", hint="write the owner as a number")
        for name, _, number, own, *_ in existing:
            if name == user and number.isdecimal() and own.isdecimal():
                uid, gid = int(number), int(own)
                break
    if group.isdecimal():
        gid = int(group)
    elif group:
        groups = _lines(root, "/etc/group", 4) or []
        gid = next((int(item[2]) for item in groups if item[0] == group and item[2].isdecimal()), gid)
    return uid, gid


def _lines(root: int, path: str, fields: int) -> list[list[str]] | None:
    try:
        with opened(root, path, os.O_RDONLY) as file:
            text = os.read(file, MAX_FILE).decode("utf-8", "replace")
    except NotFound:
        return None
    except Invalid:
        return []
    return [line.split(":") for line in text.splitlines() if line.count(":") >= fields - 1]
