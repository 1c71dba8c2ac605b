"""The context of an image build: what COPY and ADD read, chosen, gathered and hashed. Blocks.

Owns: patterns, ``.dockerignore``, which file is of which kind, the digest of what would be copied. Does not own:
copying into a sandbox (:mod:`sandbox.sdk.build`). Guarantee: nothing outside the root is read; what is hashed is what
is copied: names, kinds, modes, contents and link targets. Times and owners do not make it another, as with Docker. A
file whose size, times and inode are those of the last build is not read again (:class:`Hashes`).
"""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import msgspec
from blake3 import blake3

from sandbox import paths
from sandbox.errors import Invalid, NotFound
from sandbox.image.dockerfile import Instruction
from sandbox.tree import host_files

Ignored = Callable[[Path], bool]
Seen = tuple[int, int, int, int, int, bytes]  # device, inode, size, mtime and ctime in ns, hash of the content
DOCKERFILE = "Dockerfile"
MAX_TEXT = 4 << 20  # bytes of a Dockerfile, and of a .dockerignore
_READ = 1 << 20
_YOUNG = 2_000_000_000  # ns: a file changed so lately could change again without another time


class Hashes:
    """Hashes of files, remembered from build to build: ``hashes.of(path, status)``, then ``hashes.save()``.

    A program that writes a file cannot set its ctime; who changes the clock of the machine and then a file without
    changing its size can fool it (`cache=False` of a build reads everything).
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._known = _load(file) if file is not None else {}
        self._used: dict[str, Seen] = {}

    @classmethod
    def of_context(cls, root: Path) -> Hashes:
        """Those of a directory, below the user's cache."""
        name = blake3(os.fsencode(root.resolve())).hexdigest()[:32]
        return cls(paths.cache() / "contexts" / f"{name}.msgpack")

    def of(self, path: Path, status: os.stat_result) -> bytes:
        key = os.fspath(path)
        mark = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        seen = self._known.get(key)
        if seen is None or seen[:5] != mark:
            began = time.time_ns()
            seen = (*mark, _hashed(path))
            if began - max(status.st_mtime_ns, status.st_ctime_ns) < _YOUNG:
                return seen[5]
        self._used[key] = seen
        return seen[5]

    def save(self) -> None:
        """Remember what this build has seen. Nothing depends on it: a full disk is no failure of a build."""
        if self._file is None or self._used == self._known:
            return
        aside = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            aside.write_bytes(msgspec.msgpack.encode(self._used))
            aside.rename(self._file)
        except OSError:
            aside.unlink(missing_ok=True)


def _load(file: Path) -> dict[str, Seen]:
    try:
        return msgspec.msgpack.decode(file.read_bytes(), type=dict[str, Seen])
    except (OSError, msgspec.DecodeError):
        return {}


def dockerfile(context: Path, file: Path | None) -> str:
    """The text of the Dockerfile: `file`, or that of the context. A link in it is followed in its directory only."""
    place, name = (context, DOCKERFILE) if file is None else (file.parent, file.name)
    return host_files.read(place, name, MAX_TEXT).decode()


def ignored(context: Path) -> Ignored:
    """Whether a path below the context is left out by its .dockerignore."""
    try:
        text = host_files.read(context, ".dockerignore", MAX_TEXT).decode()
    except NotFound:
        text = ""
    lines = text.splitlines()
    patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not patterns:
        return lambda path: False
    from docker.utils.build import PatternMatcher  # half a second of import time

    matcher = PatternMatcher(patterns)
    return lambda path: bool(matcher.matches(str(path.relative_to(context))))


def matching(root: Path, sources: list[str], left_out: Ignored, instruction: Instruction) -> list[Path]:
    """The paths that the sources of an instruction name. Raises Invalid with its line."""
    found: list[Path] = []
    for source in sources:
        parts = PurePosixPath("/", source).parts[1:]
        if ".." in parts:
            raise Invalid(f"line {instruction.line}: {source} lies outside the context")
        pattern = "/".join(parts)
        matches = sorted(root.glob(pattern)) if pattern else [root]
        matches = [path for path in matches if path == root or not left_out(path)]
        if any(not path.resolve().is_relative_to(root.resolve()) for path in matches):
            raise Invalid(f"line {instruction.line}: {source} leads out of the context")
        if not matches:
            raise Invalid(f"line {instruction.line}: {source} is not in the context")
        found += matches
    return found


def kind(path: Path) -> str:
    """``"directory"``, ``"archive"`` or ``"file"``."""
    if path.is_dir():
        return "directory"
    if not path.is_file():
        raise Invalid(f"{path.name} is not a regular file")
    return "archive" if tarfile.is_tarfile(path) else "file"


def kept(path: Path, root: Path, left_out: Ignored) -> Iterator[Path]:
    """The directories, links and files of a directory that are copied, in order; links are not followed."""
    above = [each for each in (path, *path.parents) if each != root and each.is_relative_to(root)]
    if not any(left_out(each) for each in above):
        yield from _below(path, left_out)


def _below(path: Path, left_out: Ignored) -> Iterator[Path]:
    with os.scandir(path) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        here = path / entry.name
        if left_out(here):
            continue
        if entry.is_symlink() or entry.is_file(follow_symlinks=False):
            yield here
        elif entry.is_dir(follow_symlinks=False):
            yield here
            yield from _below(here, left_out)


def gather(path: Path, root: Path, left_out: Ignored, chosen: Path) -> list[str]:
    """Copy a directory's content but for what is left out; the relative names."""
    names = []
    for entry in kept(path, root, left_out):
        target = chosen / entry.relative_to(path)
        if entry.is_dir() and not entry.is_symlink():
            target.mkdir(parents=True, exist_ok=True)
            shutil.copystat(entry, target)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(entry, target, follow_symlinks=False)
        names.append(str(entry.relative_to(path)))
    return names


def digest(root: Path, paths: list[Path], left_out: Ignored, hashes: Hashes | None = None) -> str:
    """Of what would be copied from these paths, hexadecimal blake3."""
    seen, hashes = blake3(), hashes or Hashes(None)
    for path in paths:
        _feed(seen, path.name, path.resolve() if path.is_symlink() else path, hashes)
        if path.is_dir():
            for entry in kept(path, root, left_out):
                _feed(seen, str(entry.relative_to(path)), entry, hashes)
    return seen.hexdigest()


def _feed(seen: blake3, name: str, path: Path, hashes: Hashes) -> None:
    """One entry: its name, its mode and its content or target, each behind its length."""
    status = path.lstat()
    content = b""
    if stat.S_ISLNK(status.st_mode):
        content = os.fsencode(os.readlink(path))
    elif stat.S_ISREG(status.st_mode):
        content = hashes.of(path, status)
    for part in (os.fsencode(name), f"{status.st_mode:o}".encode(), content):
        seen.update(len(part).to_bytes(8, "big") + part)


def _hashed(path: Path) -> bytes:
    found = blake3()
    with open(path, "rb", buffering=0) as file:
        while part := file.read(_READ):
            found.update(part)
    return found.digest()
