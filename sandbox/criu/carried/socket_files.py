"""Files of Unix sockets with other names than the sockets were bound by: servers bind a temporary name, then rename or
link it to the one that clients know (a JVM, haproxy, supervisord, ssh). CRIU binds by the first name alone.

Guarantee: before a restored process runs, the file of each such socket has the names that it had, and no other. Every
path is resolved below the root of the sandbox, through real directories of its tree, and only sockets are replaced.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sandbox.criu import image_files
from sandbox.descriptors import closing
from sandbox.errors import Invalid, RestoreFailed
from sandbox.tree import hashing, safe_path

FILE = "socket-files.img"
MAX_FILES, MAX_NAMES = 1024, 64  # of a sandbox, and of each: they are searched for while it is frozen
MAX_PATH = 4095


class SocketFile(msgspec.Struct, frozen=True):
    """Paths from the root, without links on the way."""

    bound: bytes  # where the socket was bound
    names: list[bytes]  # all that lead to its file now
    at: bytes = b""  # the name that the socket knows; empty: the kernel counts the socket's own name as deleted

    def __post_init__(self) -> None:
        paths = [self.bound, *self.names]
        if not 0 < len(self.names) <= MAX_NAMES or (self.at and self.at not in self.names):
            raise ValueError("a file without a name, or with too many")
        if any(not 1 < len(path) <= MAX_PATH or path[:1] != b"/" or b"\0" in path for path in paths):
            raise ValueError("a name that no file can have")


Files = dict[bytes, SocketFile]  # name that a socket was bound by -> its file


def find(root: int, tree: int, name: str, file: int) -> SocketFile | None:
    """The names of `file`, a path descriptor of what the socket `name` was bound to; None: they cannot be made again.

    `tree`: the subvolume of the sandbox whose root is `root`.
    """
    status = os.fstat(file)
    if status.st_nlink > MAX_NAMES:
        return None
    try:
        above = safe_path.openat2(root, os.path.dirname(name), os.O_PATH | os.O_DIRECTORY, resolve=safe_path.IN_ROOT)
        with closing(above):
            bound = os.fsencode(os.path.join(os.readlink(f"/proc/self/fd/{above}"), os.path.basename(name)))
            with contextlib.suppress(FileNotFoundError):
                if not os.path.samestat(os.stat(os.path.basename(name), dir_fd=above, follow_symlinks=False), status):
                    return None  # CRIU would remove what has the name now
        names = sorted(path for path in _named(tree, status.st_ino) if _leads(root, path, status))
        shown = os.fsencode(os.readlink(f"/proc/self/fd/{file}"))
        if len(names) != status.st_nlink or (shown not in names and not shown.endswith(b" (deleted)")):
            return None
        return SocketFile(bound, names, shown if shown in names else b"")
    except (OSError, ValueError, Invalid):
        return None


def _named(tree: int, inode: int) -> list[bytes]:
    return [path.removeprefix(b"upper") for path in hashing.paths_of(tree, inode) if path.startswith(b"upper/")]


def _leads(root: int, path: bytes, status: os.stat_result) -> bool:
    with contextlib.suppress(OSError), _parent(root, path) as (above, name):
        return os.path.samestat(os.stat(name, dir_fd=above, follow_symlinks=False), status)
    return False


def write(images: Path, files: Files) -> None:
    """Put them next to the images; nothing where there are none."""
    if files:
        (images / FILE).write_bytes(msgspec.msgpack.encode(files))


def decode(content: bytes) -> Files:
    """The names of an image, from wherever it came. Raises ValueError when no dump has written it."""
    try:
        result = msgspec.msgpack.decode(content, type=Files)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error
    if len(result) > MAX_FILES:
        raise ValueError("more files than a dump writes down")
    return result


def load(images: Path) -> Files:
    """What stands next to these images."""
    try:
        return decode((images / FILE).read_bytes())
    except FileNotFoundError:
        return {}


def facts(images: Path) -> dict[str, object]:
    """The same for a comparison."""
    return {f"file of socket {name!r}": msgspec.to_builtins(one) for name, one in load(images).items()}


def keep(images: Path, table: image_files.CriuImageFile) -> bool:
    """Have CRIU bind these sockets and leave their files, also where it takes them for deleted. Whether it changed."""
    files = load(images)
    result = [entry.usk for entry in table.entries if entry.HasField("usk") and entry.usk.deleted]
    changed = [one for one in result if bytes(one.name).rstrip(b"\0") in files]
    for one in changed:
        one.ClearField("deleted")
    return bool(changed)


def put_back(images: Path, init: int, uid_base: int) -> None:
    """Give the files their names in the tree of the process `init`, as its root would. Blocks."""
    files = load(images)
    if not files:
        return
    with safe_path.root_of(init) as root, safe_path.as_sandbox_root(uid_base):
        for one in files.values():
            try:
                _rename(root, one)
            except (OSError, Invalid) as error:
                raise RestoreFailed(
                    f"the file of the Unix socket {os.fsdecode(one.bound)} cannot get its names: {error}",
                    hint="restore a checkpoint that captured files and processes together",
                ) from error


def _rename(root: int, one: SocketFile) -> None:
    with _parent(root, one.bound) as (here, bound):
        if not _is_socket(here, bound):
            return  # of a connection whose listener has gone, which CRIU does not bind
        for path in sorted(one.names, key=one.at.__eq__):  # the socket's own last: then `bound` goes
            if path == one.bound:
                continue
            with _parent(root, path) as (there, name):
                if _is_socket(there, name):
                    os.unlink(name, dir_fd=there)
                if path == one.at:
                    os.rename(bound, name, src_dir_fd=here, dst_dir_fd=there)
                else:
                    os.link(bound, name, src_dir_fd=here, dst_dir_fd=there, follow_symlinks=False)
        if not one.at:
            os.unlink(bound, dir_fd=here)


def _is_socket(above: int, name: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
            raise FileExistsError(17, "another file is there", name)
        return True
    return False


@contextlib.contextmanager
def _parent(root: int, path: bytes) -> Iterator[tuple[int, str]]:
    """The directory of `path` below `root`, by real directories of the same mount, and the last name."""
    above, _, name = os.fsdecode(path).lstrip("/").rpartition("/")
    if name in ("", ".", ".."):
        raise FileNotFoundError(2, "no name of a file", os.fsdecode(path))
    flags = os.O_PATH | os.O_DIRECTORY
    with closing(safe_path.openat2(root, above or ".", flags, resolve=safe_path.NO_LINKS)) as parent:
        yield parent, name
