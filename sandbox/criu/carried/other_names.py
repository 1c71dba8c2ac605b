"""Open files that lost one of several names: CRIU links them again for its dump, and a snapshot is to have no such
link.

Guarantee: a link is removed only where the same file has another name in the tree; otherwise it stays, and the snapshot
has it. Every path is resolved below the root of the sandbox, through real directories only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sandbox.criu import image_files
from sandbox.descriptors import closing
from sandbox.errors import RestoreFailed, SandboxDead
from sandbox.tree import hashing, safe_path

if TYPE_CHECKING:
    from sandbox.container.container import Container

FILE = "other-names.img"
LINKED = 0  # remap_type: found by a link
MAX_ENTRIES = 1 << 20
MAX_PATH = 4095

Names = dict[int, bytes]  # file id of the link in files.img -> another name of the same file, from the root


def decode(content: bytes) -> Names:
    """The names of an image, from wherever it came. Raises ValueError when no dump has written it."""
    try:
        result = msgspec.msgpack.decode(content, type=Names)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error
    if len(result) > MAX_ENTRIES or any(len(name) > MAX_PATH or b"\0" in name for name in result.values()):
        raise ValueError("a name that no file can have")
    return result


def take_away(container: Container, images: Path) -> bool:
    """Remove the links that CRIU has just made, and write next to its images what else leads to the files. Blocks.

    Returns whether there were any: a snapshot taken beside CRIU may have those that go, or lack one that stays.
    """
    links = _links(images)
    if not links:
        return False
    result: Names = {}
    with safe_path.directory(container.trees()[0]) as root, safe_path.directory(container.tree) as tree:
        made = set(links.values())
        for number, path in links.items():
            with contextlib.suppress(OSError):  # on a directory of the host, or in none that is there: it stays
                if (other := _another(root, tree, path, made)) is not None:
                    with _parent(root, path) as (parent, name):
                        os.unlink(name, dir_fd=parent)
                    result[number] = other
    if result:
        (images / FILE).write_bytes(msgspec.msgpack.encode(result))
    return True


def link_again(container: Container, images: Path) -> None:
    """Make the links again in the file tree of a container that has no processes yet. Blocks."""
    pending = _pending(images)
    if not pending:
        return
    root_id = container.spec.uid_base
    with safe_path.directory(container.trees()[0]) as root, safe_path.as_sandbox_root(root_id):
        for path, other in pending:
            try:
                with _parent(root, other) as (holder, old), _parent(root, path) as (parent, new):
                    os.link(old, new, src_dir_fd=holder, dst_dir_fd=parent, follow_symlinks=False)
            except OSError as error:
                raise RestoreFailed(
                    f"{os.fsdecode(other)}, which a process holds by a name that is gone, cannot be linked:"
                    f" {os.strerror(error.errno or 0)}",
                    hint="restore a checkpoint that captured files and processes together",
                    sandbox=container.spec.id,
                ) from error


def drop(container: Container, images: Path) -> None:
    """Remove what :func:`link_again` made for a restore that failed. Blocks."""
    pending = _pending(images)
    if not pending:
        return
    with contextlib.suppress(OSError, SandboxDead), safe_path.directory(container.trees()[0]) as root:
        for path, other in pending:
            with contextlib.suppress(OSError), _parent(root, path) as (parent, name):
                if _same(root, path, other):
                    os.unlink(name, dir_fd=parent)


def _pending(images: Path) -> list[tuple[bytes, bytes]]:
    """The path of each link that was taken away, and another name of its file."""
    try:
        names = decode((images / FILE).read_bytes())
    except FileNotFoundError:
        return []
    return [(path, names[number]) for number, path in _links(images).items() if number in names]


def _links(images: Path) -> dict[int, bytes]:
    """File id and path of each link that CRIU made, by its images."""
    kinds = image_files.messages()
    remaps = image_files.read(images / "remap-fpath.img", kinds.remap_file_path_entry)
    linked = {one.remap_id for one in remaps.entries if one.remap_type == LINKED} if remaps is not None else set()
    if not linked or (files := image_files.read(images / "files.img", kinds.file_entry)) is None:
        return {}
    return {one.id: os.fsencode(image_files.text(one.reg.name)) for one in files.entries if one.id in linked}


def _another(root: int, tree: int, link: bytes, made: set[bytes]) -> bytes | None:
    """Another name of the file behind a link, in the tree as the sandbox has it; None: there is none."""
    with _parent(tree, b"upper/" + link.lstrip(b"/")) as (parent, name):
        inode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_ino
    for path in hashing.paths_of(tree, inode):
        if path.startswith(b"upper/") and (other := path.removeprefix(b"upper")) not in made:
            with contextlib.suppress(OSError):  # hidden by something above it
                if _same(root, link, other):
                    return other
    return None


def _same(root: int, one: bytes, other: bytes) -> bool:
    with _parent(root, one) as (here, name), _parent(root, other) as (there, second):
        result = os.stat(name, dir_fd=here, follow_symlinks=False)
        return os.path.samestat(result, os.stat(second, dir_fd=there, follow_symlinks=False))


@contextlib.contextmanager
def _parent(root: int, path: bytes) -> Iterator[tuple[int, bytes]]:
    """The directory of `path` below `root`, by real directories of the same mount, and the last name."""
    above, _, name = path.lstrip(b"/").rpartition(b"/")
    if name in (b"", b".", b".."):
        raise FileNotFoundError(2, "no name of a file", os.fsdecode(path))
    flags = os.O_PATH | os.O_DIRECTORY
    with closing(safe_path.openat2(root, os.fsdecode(above) or ".", flags, resolve=safe_path.NO_LINKS)) as parent:
        yield parent, name
