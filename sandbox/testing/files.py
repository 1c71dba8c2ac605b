"""The tree of a fake sandbox: a directory of this machine."""

from __future__ import annotations

import stat
from pathlib import Path, PurePosixPath
from typing import Literal

from blake3 import blake3

from sandbox.errors import Invalid
from sandbox.messages import FileInfo
from sandbox.names import native, reported

KINDS: dict[int, Literal["file", "directory", "symlink"]] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
}


class FakeFiles:
    """The tree of a fake sandbox, for effects of scripted commands and for assertions."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, name: str) -> Path:
        """Where `name` lies on this machine. ``..`` and links do not lead out."""
        if "\0" in name:
            raise Invalid(f"a path holds no NUL byte: {name!r}")
        result = self.root / PurePosixPath("/", native(name)).relative_to("/")
        if not result.parent.resolve().is_relative_to(self.root.resolve()):
            raise Invalid(f"{name} is not part of the sandbox's file tree")
        return result

    def read(self, name: str) -> bytes:
        return self.path(name).read_bytes()

    def write(self, name: str, data: bytes | str, *, append: bool = False, mode: int = 0o644) -> None:
        """Write a file; missing parents are made."""
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        with path.open("ab" if append else "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
        if new:
            path.chmod(mode)

    def exists(self, name: str) -> bool:
        return self.path(name).exists()

    def size(self) -> int:
        """Bytes of all files."""
        return sum(path.lstat().st_size for path in self.root.rglob("*") if path.is_file() and not path.is_symlink())

    def print(self) -> dict[str, str]:
        """A digest of each entry, by path."""
        result = {}
        for path in sorted(self.root.rglob("*")):
            status = path.lstat()
            content = b""
            if stat.S_ISREG(status.st_mode):
                content = path.read_bytes()
            elif stat.S_ISLNK(status.st_mode):
                content = str(path.readlink()).encode()
            result[f"/{path.relative_to(self.root)}"] = f"{status.st_mode:o} {blake3(content).hexdigest()}"
        return result


def described(path: Path) -> FileInfo:
    status = path.lstat()
    kind: Literal["file", "directory", "symlink", "other"] = KINDS.get(stat.S_IFMT(status.st_mode), "other")
    return FileInfo(
        name=reported(path.name),
        kind=kind,
        size=status.st_size,
        mode=stat.S_IMODE(status.st_mode),
        modified_at=status.st_mtime,
        target=reported(str(path.readlink())) if kind == "symlink" else None,
    )
