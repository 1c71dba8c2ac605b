"""The context of an image build: what COPY and ADD read, chosen, hashed and packed. Blocks.

Guarantee: nothing outside the root is read, whatever links say and even if they are exchanged; what is hashed is what
is sent: names, kinds, modes, contents and link targets. Times do not make it another, as with Docker. A file whose
size, times and inode are those of the last build is not read again (:class:`Hashes`).
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import stat
import tarfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec
from blake3 import blake3

from sandbox import paths
from sandbox.descriptors import closing
from sandbox.errors import Invalid, NotFound
from sandbox.patterns import PatternList, glob, ignore_lines, split_wildcards
from sandbox.tree import host_files
from sandbox.tree.safe_path import ON_HOST, open_kind, openat2

Observed = tuple[int, int, int, int, int, bytes]  # device, inode, size, mtime and ctime in ns, hash of the content
_READ = 1 << 20
_YOUNG = 2_000_000_000  # ns: a file changed so lately could change again without another time
MAX_TEXT = 4 << 20  # bytes of a Dockerfile, and of a .dockerignore
_MAX_LINKS = 255  # symbolic links on the way to one source
_XATTRS = ("user.", "security.capability")
_RETAINED = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO)


def read_dockerfile(context: Path, file: Path | None) -> str:
    """The text of the Dockerfile: `file`, or that of the context. A link in it is followed in its directory only."""
    place, name = (context, "Dockerfile") if file is None else (file.parent, file.name)
    return host_files.read(place, name, MAX_TEXT).decode("utf-8", "surrogateescape")


class Hashes:
    """Hashes of files, remembered from build to build: ``hashes.of(path, status)``, then ``hashes.save()``.

    A program that writes a file cannot set its ctime; who changes the clock of the machine and then a file without
    changing its size can fool it (`cache=False` of a build reads everything).
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._existing = _load(file) if file is not None else {}
        self._used: dict[str, Observed] = {}

    @classmethod
    def of_context(cls, root: Path) -> Hashes:
        """Those of a directory, below the user's cache."""
        name = blake3(os.fsencode(root.resolve())).hexdigest()[:32]
        return cls(paths.cache() / "contexts" / f"{name}.msgpack")

    def of(self, root: int, path: str, status: os.stat_result) -> bytes:
        """Of a regular file below the open directory `root`."""
        mark = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        observed = self._existing.get(path)
        if observed is None or observed[:5] != mark:
            began = time.time_ns()
            observed = (*mark, _hashed(root, path))
            if began - max(status.st_mtime_ns, status.st_ctime_ns) < _YOUNG:
                return observed[5]
        self._used[path] = observed
        return observed[5]

    def save(self) -> None:
        """Remember what this build has seen. Nothing depends on it: a full disk is no failure of a build."""
        if self._file is None or self._used == self._existing:
            return
        aside = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            aside.write_bytes(msgspec.msgpack.encode(self._used))
            aside.rename(self._file)
        except OSError:
            aside.unlink(missing_ok=True)


def _load(file: Path) -> dict[str, Observed]:
    try:
        return msgspec.msgpack.decode(file.read_bytes(), type=dict[str, Observed])
    except (OSError, msgspec.MsgspecError, UnicodeError):
        return {}


@dataclass(frozen=True)
class BuildContext:
    """A directory, and what of it counts as not there."""

    root: Path
    ignored: PatternList
    lasting: bool = True  # its files may be there at the next build

    @classmethod
    def of(cls, root: Path, dockerfile: Path | None = None, *, lasting: bool = True) -> BuildContext:
        """With the ``DOCKERFILE.dockerignore`` next to the Dockerfile, or the ``.dockerignore`` of the directory."""
        own = [dockerfile.with_name(f"{dockerfile.name}.dockerignore")] if dockerfile is not None else []
        for file in (*own, root / ".dockerignore"):
            try:
                text = host_files.read(file.parent, file.name, MAX_TEXT).decode("utf-8", "surrogateescape")
                return cls(root, PatternList(ignore_lines(text)), lasting)
            except NotFound:
                continue
            except ValueError as error:
                raise Invalid(f"{file.name}: {error}", hint="correct the pattern") from None
        return cls(root, PatternList([]), lasting)

    def select(self, sources: Iterable[str], line: int) -> Selection:
        """What the sources of an instruction reach. Raises Invalid with its line."""
        with _directory(self.root) as root, _reading():
            walk = _Walk(root, self.ignored, line)
            for source in sources:
                walk.source(source)
        return Selection(self.root, dict(sorted(walk.result.items())))


class _Walk:
    """Names below the root, links on the way followed as if the root were that of the file system."""

    def __init__(self, root: int, ignored: PatternList, line: int) -> None:
        self.result: dict[str, os.stat_result] = {}
        self._root, self._ignored, self._line = root, ignored, line

    def source(self, source: str) -> None:
        clean = posixpath.normpath(posixpath.join("/", source))  # ".." stops at the root, as with Docker
        fixed, pattern = split_wildcards(clean)
        if not pattern:
            self._add(self._reach(fixed, source))
            return
        try:
            above = self._reach(fixed, source)
        except Invalid:
            return  # a pattern may match nothing
        try:
            target = glob(pattern)
        except ValueError as error:
            raise Invalid(
                f"line {self._line}: {source}: {error}", hint="name a path below the directory of the build"
            ) from None
        self._matching(above, above, target)

    def _matching(self, above: str, directory: str, target: re.Pattern[str]) -> None:
        for path, status in self._entries(directory):
            relative = path[len(above) + 1 :] if above else path
            if target.fullmatch(relative) is not None:
                self._add(path)
            elif stat.S_ISDIR(status.st_mode):
                self._matching(above, path, target)

    def _reach(self, path: str, source: str) -> str:
        """Where a path leads, relative to the root; what is passed on the way is found."""
        pending, here, links = [part for part in reversed(path.split("/")) if part], "", 0
        while pending:
            part = pending.pop()
            if part == "..":
                here = here.rpartition("/")[0]
                continue
            here = f"{here}/{part}" if here else part
            status = self._decide(here, _status(self._root, here))
            if status is None:
                left_out = self._ignored.matches(here) and _status(self._root, here) is not None
                raise Invalid(
                    f"line {self._line}: {source} is not in the context",
                    hint="its .dockerignore leaves it out" if left_out else "",
                )
            self._pass(here, status)
            if stat.S_ISLNK(status.st_mode):
                links += 1
                target = _link(self._root, here)
                if links > _MAX_LINKS:
                    raise Invalid(
                        f"line {self._line}: {source} leads in circles", hint="remove the links that lead to each other"
                    )
                here = "" if target.startswith("/") else here.rpartition("/")[0]
                pending += [part for part in reversed(target.split("/")) if part not in ("", ".")]
        return here

    def _pass(self, path: str, status: os.stat_result | None = None) -> None:
        """An entry and the directories above it."""
        while path and path not in self.result:
            status = status or _status(self._root, path)
            if status is None:
                raise Invalid(f"{path} of the context has gone while it was read", hint="build again")
            self.result[path], status = status, None
            path = path.rpartition("/")[0]

    def _decide(self, path: str, status: os.stat_result | None) -> os.stat_result | None:
        """Of what is there and not left out; of a directory also where only something in it is not."""
        if status is None or not self._ignored.matches(path):
            return status
        inside = stat.S_ISDIR(status.st_mode) and self._ignored.has_exceptions and any(self._entries(path))
        return status if inside else None

    def _entries(self, directory: str) -> list[tuple[str, os.stat_result]]:
        existing = [(path, self._decide(path, status)) for path, status in sorted(_listed(self._root, directory))]
        return [(name, status) for name, status in existing if status and stat.S_IFMT(status.st_mode) in _RETAINED]

    def _add(self, path: str) -> None:
        """An entry with all that is in it."""
        self._pass(path)
        pending = [path] if not path or stat.S_ISDIR(self.result[path].st_mode) else []
        by = {path: self._decided(path)}
        while pending:
            directory = pending.pop()
            for here, status in _listed(self._root, directory):
                if stat.S_IFMT(status.st_mode) not in _RETAINED:
                    continue
                left_out, matched = self._ignored.decide(here, by[directory])
                if not left_out:
                    self._pass(here, status)
                if stat.S_ISDIR(status.st_mode) and not (left_out and not self._ignored.has_exceptions):
                    by[here] = matched
                    pending.append(here)

    def _decided(self, path: str) -> tuple[bool, ...]:
        by: tuple[bool, ...] = ()
        parts = path.split("/") if path else []
        for count in range(1, len(parts) + 1):
            _, by = self._ignored.decide("/".join(parts[:count]), by)
        return by


@dataclass(frozen=True)
class Selection:
    """Entries of a context, by their path, the directories above them included."""

    root: Path
    entries: dict[str, os.stat_result]

    def digest(self, hashes: Hashes | None = None) -> str:
        """Of what would be copied, hexadecimal blake3."""
        observed, hashes = blake3(), hashes or Hashes(None)
        with _directory(self.root) as root, _reading():
            for path, status in self.entries.items():
                content = b""
                if stat.S_ISLNK(status.st_mode):
                    content = os.fsencode(_link(root, path))
                elif stat.S_ISREG(status.st_mode):
                    content = hashes.of(root, path, status)
                for part in (os.fsencode(path), f"{status.st_mode:o}".encode(), content):
                    observed.update(len(part).to_bytes(8, "big") + part)
        return observed.hexdigest()

    def pack(self, out: IO[bytes]) -> None:
        """Write them as a tar archive. They belong to root, as with Docker."""
        linked: dict[tuple[int, int], str] = {}
        with (
            _directory(self.root) as root,
            _reading(),
            tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar,
        ):
            for path, status in self.entries.items():
                header = tarfile.TarInfo(path)
                when = status.st_mtime_ns
                header.mode, header.mtime = stat.S_IMODE(status.st_mode), when / 1e9
                header.pax_headers = {"mtime": f"{when // 10**9}.{when % 10**9:09}"}
                if not stat.S_ISLNK(status.st_mode):
                    header.pax_headers |= _xattrs(root, path)
                if stat.S_ISREG(status.st_mode):
                    first = linked.setdefault((status.st_dev, status.st_ino), path) if status.st_nlink > 1 else path
                    if first == path:
                        _add_file(tar, header, root, path)
                        continue
                    header.type, header.linkname = tarfile.LNKTYPE, first
                elif stat.S_ISLNK(status.st_mode):
                    header.type, header.linkname = tarfile.SYMTYPE, _link(root, path)
                else:
                    header.type = tarfile.DIRTYPE if stat.S_ISDIR(status.st_mode) else tarfile.FIFOTYPE
                tar.addfile(header)


def _add_file(tar: tarfile.TarFile, header: tarfile.TarInfo, root: int, path: str) -> None:
    with _regular(root, path) as file:
        header.size = os.fstat(file).st_size
        with os.fdopen(os.dup(file), "rb") as content:
            try:
                tar.addfile(header, content)
            except OSError as error:
                raise Invalid(
                    f"{path} of the context changes while it is read: {error}",
                    hint="build again when nothing writes there",
                ) from error


def _xattrs(root: int, path: str) -> dict[str, str]:
    result = {}
    with _entry(root, path) as entry, contextlib.suppress(OSError):  # a file system without any
        for name in os.listxattr(f"/proc/self/fd/{entry}"):
            if name.startswith(_XATTRS):
                value = os.getxattr(f"/proc/self/fd/{entry}", name)
                result[f"SCHILY.xattr.{name}"] = value.decode("utf-8", "surrogateescape")
    return result


def _directory(root: Path) -> closing:
    try:
        return closing(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    except OSError as error:
        raise Invalid(f"the context {root}: {error.strerror}", hint="name a readable directory") from None


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """What cannot be read of a context, or changes while it is read, is the context's fault."""
    try:
        yield
    except BrokenPipeError:  # of the receiver of the archive
        raise
    except OSError as error:
        text = f"{str(error.filename)[:160]} of the context cannot be read: {error.strerror}"
        raise Invalid(text, hint="see that nothing changes the context while it is built") from error


def _entry(root: int, path: str) -> closing:
    """An entry, whatever it is, to be looked at."""
    return closing(openat2(root, path, os.O_PATH | os.O_NOFOLLOW, resolve=ON_HOST))


def _status(root: int, path: str) -> os.stat_result | None:
    try:
        with _entry(root, path) as entry:
            return os.fstat(entry)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _link(root: int, path: str) -> str:
    with _entry(root, path) as entry:
        return os.readlink("", dir_fd=entry)


def _listed(root: int, dir_path: str) -> Iterator[tuple[str, os.stat_result]]:
    with _opened(root, dir_path) as directory:
        for name in os.listdir(directory):
            with contextlib.suppress(FileNotFoundError):  # removed while we look
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                yield f"{dir_path}/{name}" if dir_path else name, status


def _opened(root: int, directory: str) -> closing:
    return closing(openat2(root, directory or ".", os.O_RDONLY | os.O_DIRECTORY, resolve=ON_HOST))


def _regular(root: int, path: str) -> closing:
    with _opened(root, posixpath.dirname(path)) as parent:
        return closing(open_kind(parent, posixpath.basename(path), os.O_RDONLY | os.O_NOFOLLOW, (stat.S_IFREG,)))


def _hashed(root: int, path: str) -> bytes:
    result = blake3()
    with _regular(root, path) as file:
        while part := os.read(file, _READ):
            result.update(part)
    return result.digest()
