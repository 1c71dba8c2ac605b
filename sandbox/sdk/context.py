"""The context of an image build: what COPY and ADD read, chosen, gathered and hashed. Blocks.

Owns: patterns, ``.dockerignore``, which file is of which kind, the digest of what would be copied. Does not own:
copying into a sandbox (:mod:`sandbox.sdk.build`). Guarantee: nothing outside the root is read; what is hashed is what
is copied: names, kinds, modes, contents and link targets. Times and owners do not make it another, as with Docker.
"""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from blake3 import blake3

from sandbox.errors import Invalid
from sandbox.image.dockerfile import Instruction

Ignored = Callable[[Path], bool]
_READ = 1 << 20


def ignored(context: Path) -> Ignored:
    """Whether a path below the context is left out by its .dockerignore."""
    from docker.utils.build import PatternMatcher

    file = context / ".dockerignore"
    lines = file.read_text().splitlines() if file.is_file() else []
    matcher = PatternMatcher([line.strip() for line in lines if line.strip() and not line.startswith("#")])
    return lambda path: bool(lines) and matcher.matches(str(path.relative_to(context)))


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
    return "archive" if tarfile.is_tarfile(path) else "file"


def kept(path: Path, root: Path, left_out: Ignored) -> Iterator[Path]:
    """The directories, links and files of a directory that are copied, in order."""
    for entry in sorted(path.rglob("*")):
        if any(
            left_out(parent) for parent in (entry, *entry.parents) if parent != root and parent.is_relative_to(root)
        ):
            continue
        if entry.is_dir() or entry.is_symlink() or entry.is_file():
            yield entry


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


def digest(root: Path, paths: list[Path], left_out: Ignored) -> str:
    """Of what would be copied from these paths, hexadecimal blake3."""
    seen = blake3()
    for path in paths:
        _feed(seen, path.name, path.resolve() if path.is_symlink() else path)
        if path.is_dir():
            for entry in kept(path, root, left_out):
                _feed(seen, str(entry.relative_to(path)), entry)
    return seen.hexdigest()


def _feed(seen: blake3, name: str, path: Path) -> None:
    """One entry: its name, its mode and its content or target, each behind its length."""
    status = path.lstat()
    content = b""
    if stat.S_ISLNK(status.st_mode):
        content = os.fsencode(os.readlink(path))
    elif stat.S_ISREG(status.st_mode):
        content = _hashed(path)
    for part in (os.fsencode(name), f"{status.st_mode:o}".encode(), content):
        seen.update(len(part).to_bytes(8, "big") + part)


def _hashed(path: Path) -> bytes:
    found = blake3()
    with open(path, "rb", buffering=0) as file:
        while part := file.read(_READ):
            found.update(part)
    return found.digest()
