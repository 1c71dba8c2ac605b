"""What the processes of a sandbox hold in its file tree, by any name: the fingerprint of it.

Guarantee: where :func:`changed` is empty, process images that hold the one are restored over the files as they are.

=======================  ====================================================================================
held                     the same as long as
=======================  ====================================================================================
a file, FIFO             it has its identity, size, mode, modification time and number of names
a directory              it has its identity and mode: what happens in it changes nothing
a link, device, socket   it has its identity and mode
each of these            its path leads to it; if it has no path any more, what is there now is there still
a watched path           it leads to what is watched
=======================  ====================================================================================

Held is what is open (O_PATH too), mapped, executed, worked in, what is the root of a process, what a socket is bound
to, and what is watched. CRIU finds all of it by path. It refuses to restore a process whose open file changed its size
or whose working directory is gone, and restores one silently whose file was replaced. So a turn that only changed
files, but one of these, must capture the processes too. A file that lost one of several names must be captured each
time: the images name it by another of its names (:mod:`sandbox.criu.carried.other_names`), which a turn may move.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sandbox.criu import bound
from sandbox.criu.carried import socket_files
from sandbox.descriptors import closing
from sandbox.errors import Conflict, Invalid, SandboxDead
from sandbox.names import native, reported
from sandbox.tree.safe_path import ACROSS_MOUNTS, directory, openat2, root_of

if TYPE_CHECKING:
    from sandbox.container.container import Container

Identity = tuple[int, int, int, int, int]  # inode, mode, size or device, mtime in ns, names
GONE = " (deleted)"
BOUND_AS = " (bound as "
OTHER_NAMES = " (with other names)"
NO_DIRECTORY = " (no directory)"
_UNBINDABLE = (
    (
        BOUND_AS,
        "was moved, and its former name is another file's or outside the tree, or too many were",
        "move it back, or bind the socket where it is wanted",
    ),
    (OTHER_NAMES, "has several names, and not all of them can be restored (64 at most)", "remove the others"),
    (
        NO_DIRECTORY,
        "is gone with its directory, which would be restored",
        "make the directory again, or close the socket",
    ),
)


class OpenFiles(msgspec.Struct, frozen=True):
    """The fingerprint: path in the sandbox, as it is shown -> identity of what is held, and of what the path leads to.

    Without a path (those end in ``(deleted)`` and an inode number) the second is of the nearest that is there.
    `watched`: path in the sandbox -> inode number of what is watched by it. `sockets`: name that a Unix socket was
    bound by -> the names that its file has, where those are others.
    """

    files: dict[str, tuple[Identity, Identity | None]] = {}
    watched: dict[str, int] = {}
    sockets: dict[bytes, socket_files.SocketFile] = {}

    def changes(self, later: OpenFiles) -> list[str]:
        """Readable differences of files; empty when equal."""
        changed = []
        for path in sorted(self.files.keys() | later.files.keys()):
            before, after = self.files.get(path), later.files.get(path)
            if before == after:
                continue
            what = "newly held" if before is None else "no longer held" if after is None else "changed while held"
            changed.append(f"{path}: {what}")
        for name in sorted(self.sockets.keys() | later.sockets.keys()):
            if self.sockets.get(name) != later.sockets.get(name):
                changed.append(f"{reported(os.fsdecode(name))}: its file has other names")
        return changed

    def half_named(self) -> list[str]:
        """Paths of the files that have lost the name by which they are held, and have another one."""
        return [
            path
            for path, ((_, mode, _, _, names), _) in sorted(self.files.items())
            if names and GONE in path and stat.S_ISREG(mode)
        ]

    def unbindable(self) -> tuple[str, str] | None:
        """How files of Unix sockets would not be restored as they are, and what to do about it."""
        for mark, what, hint in _UNBINDABLE:
            if paths := sorted(path for path in self.files if mark in path):
                return f"the file of a Unix socket {what}: {', '.join(paths)}", hint
        return None


def held_files(container: Container) -> OpenFiles:
    """The fingerprint now, but for what is watched, which only images contain. Blocks, below 1 ms."""
    with contextlib.suppress(Conflict, SandboxDead), container.inside.opened() as root:
        sockets: socket_files.Files = {}
        files = _held(container.retained_tasks(), root, container.tree, sockets)
        return OpenFiles(files, sockets=sockets)
    return OpenFiles()


def changed(container: Container, held: OpenFiles | None) -> list[str]:
    """Why images of processes that hold this cannot be restored over the files as they are. Blocks, below 1 ms."""
    if held is None:
        return ["what the processes hold is not known"]
    result = held.changes(held_files(container)) + [f"{path}: has another name" for path in held.half_named()]
    if held.watched:
        with container.inside.opened() as root:
            for path, inode in sorted(held.watched.items()):
                if (at := _at(root, native(path))) is None or at[0] != inode:
                    result.append(f"{path}: changed while watched")
    return result


def _held(
    tasks: list[int], root: int, tree: Path, moved: socket_files.Files
) -> dict[str, tuple[Identity, Identity | None]]:
    """`moved` is filled with the files of sockets that have other names than these were bound by."""
    files: dict[str, tuple[Identity, Identity | None]] = {}
    mapped: set[bytes] = set()
    sockets = bound.named(tasks[0]) if tasks else {}
    for pid in tasks:
        for link in _links(pid, mapped):
            with contextlib.suppress(OSError):  # the process or the descriptor went away
                target = os.readlink(link)
                if target.startswith("/"):
                    _add(files, root, target, link)
                elif sockets and target.startswith("socket:[") and int(target[8:-1]) in sockets:
                    with (
                        root_of(pid) as own,  # a service has its own, in which its names are names
                        _process(pid) as pidfd,
                        bound.file_of(pidfd, int(link.rpartition("/")[2])) as file,
                    ):
                        result, name = f"/proc/self/fd/{file}", sockets[int(target[8:-1])]
                        remark = _remark(own, name, file)
                        if remark and remark != NO_DIRECTORY and os.path.sameopenfile(own, root):
                            remark = "" if _noted(root, tree, name, file, moved) else remark
                        _add(files, root, os.readlink(result), result, remark)
    return files


def _add(
    files: dict[str, tuple[Identity, Identity | None]], root: int, target: str, link: str, remark: str = ""
) -> None:
    """Note what `link` leads to, whose path is `target`."""
    if reported(target) in files:
        return
    result = os.stat(link)
    if target.endswith(GONE) or not result.st_nlink:
        path = target.removesuffix(GONE)
        files[f"{reported(path)}{GONE} {result.st_ino}{remark}"] = (_identity(result), _nearest(root, path))
    else:
        files[reported(target + remark)] = (_identity(result), _at(root, target))


def _remark(root: int, name: str, file: int) -> str:
    """What keeps the socket that was bound as `name` to `file` from coming back as it is; "" where nothing does."""
    result = os.fstat(file)
    if not result.st_nlink:
        path = name if name.startswith("/") else os.readlink(f"/proc/self/fd/{file}")
        try:
            os.close(openat2(root, os.path.dirname(path), os.O_PATH | os.O_DIRECTORY, resolve=ACROSS_MOUNTS))
        except (OSError, Invalid):
            return NO_DIRECTORY
    elif name.startswith("/") and not _leads(root, name, result):
        return f"{BOUND_AS}{name})"
    return OTHER_NAMES if result.st_nlink > 1 else ""


def _noted(root: int, tree: Path, name: str, file: int, moved: socket_files.Files) -> bool:
    """Whether the names of the file of a socket can be given back after a restore; then they are in `moved`."""
    if len(moved) >= socket_files.MAX_FILES:
        return False
    with directory(tree) as top:
        result = socket_files.find(root, top, name, file)
    if result is not None and moved.setdefault(os.fsencode(name), result) == result:
        return True
    moved.pop(os.fsencode(name), None)  # of two sockets
    return False


@contextlib.contextmanager
def _process(pid: int) -> Iterator[int]:
    with closing(os.pidfd_open(pid)) as pidfd:
        yield pidfd


def _links(pid: int, mapped: set[bytes]) -> Iterator[str]:
    """What the kernel links to all that a process holds, but for mapped files that were seen before."""
    base = f"/proc/{pid}"
    yield from (f"{base}/cwd", f"{base}/root", f"{base}/exe")
    with contextlib.suppress(OSError):
        for name in os.listdir(f"{base}/fd"):
            yield f"{base}/fd/{name}"
    with contextlib.suppress(OSError):
        with open(f"{base}/maps", "rb", buffering=1 << 16) as maps:
            lines = maps.read().split(b"\n")  # the one character that the kernel escapes in names
        for line in filter(None, lines):
            addresses, _, _, device, inode, *path = line.split(None, 5)
            # A library has a handful of mappings in each process: one link shows as much as all.
            if path and inode != b"0" and (file := b" ".join((device, inode, *path))) not in mapped:
                mapped.add(file)
                first, _, last = addresses.partition(b"-")
                yield f"{base}/map_files/{int(first, 16):x}-{int(last, 16):x}"


def _nearest(root: int, path: str) -> Identity | None:
    """What lies at a path, or above it when there is nothing."""
    while (result := _at(root, path)) is None and path != "/":
        path = os.path.dirname(path)
    return result


def _leads(root: int, name: str, file: os.stat_result) -> bool:
    """Whether a name leads to this file, by links too."""
    try:
        result = openat2(root, name, os.O_PATH, resolve=ACROSS_MOUNTS)
    except (OSError, Invalid):
        return False
    try:
        return os.fstat(result).st_ino == file.st_ino
    finally:
        os.close(result)


def _at(root: int, path: str) -> Identity | None:
    try:
        result = openat2(root, path, os.O_PATH | os.O_NOFOLLOW, resolve=ACROSS_MOUNTS)
    except (OSError, Invalid):
        return None
    try:
        return _identity(os.fstat(result))
    finally:
        os.close(result)


def _identity(result: os.stat_result) -> Identity:
    if stat.S_ISREG(result.st_mode) or stat.S_ISFIFO(result.st_mode):
        return (result.st_ino, result.st_mode, result.st_size, result.st_mtime_ns, result.st_nlink)
    if stat.S_ISDIR(result.st_mode):  # what happens in a directory does not change that it is held
        return (result.st_ino, result.st_mode, 0, 0, 0)
    return (result.st_ino, result.st_mode, result.st_rdev, 0, result.st_nlink)
