"""The gate before each restore and fork: images are let through only if nothing in them leads out of the sandbox.

Guarantee: of images that pass, every path is reached below the sandbox's root (``openat2`` with RESOLVE_BENEATH and
RESOLVE_NO_SYMLINKS, so through real directories only) at a time when nothing of the sandbox runs that could change it.
It is the same gate for images of this host, imported ones, restores in place and forks.

::

    files.img ▸ path of each open, deleted, mapped, watched file    the tree, or a directory of the host
              ▸ name of each socket                                 likewise; links are followed inside, as bind(2) does
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
import subprocess
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from sandbox import paths
from sandbox.content import dumpfile, layers
from sandbox.criu.gate.image_rules import check, deleted
from sandbox.criu.gate.images import PAGE, CriuImages, GateLookups, ImagePath, ImageRefused, below, printable
from sandbox.criu.gate.processes import confined, unprivileged
from sandbox.descriptors import closing
from sandbox.libc import file_system
from sandbox.tree.safe_path import openat2

__all__ = [
    "CriuImages",
    "ImageRefused",
    "checked",
    "imported",
    "look_up",
    "of_directory",
    "passes",
    "refuse_lost",
    "trees",
]

_NO_XDEV, _NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH, _IN_ROOT = 0x01, 0x02, 0x04, 0x08, 0x10
_REAL = _BENEATH | _NO_SYMLINKS | _NO_MAGICLINKS | _NO_XDEV
_BOUND = _IN_ROOT | _NO_MAGICLINKS | _NO_XDEV
_OVERLAY_MAGIC = 0x794C7630

CHANGED = "restore a checkpoint that captured files and processes together"
LEAVE = "have the process leave it (cd) or close it, then checkpoint again"


def of_directory(directory: Path) -> CriuImages:
    """The images in a directory. No image is written to once it is complete: copies are links, changed ones new files.

    Of a capture with earlier pages they are those that a restore makes of it. Of pages only the number is checked.
    Blocks.
    """
    layered = {
        name: (pagemap, count)
        for name, (pagemap, count) in layers.sizes(directory).items()
        if (directory / pagemap).exists()  # else the process was taken out of the images
    }
    places = {pagemap: f"{directory}/{layers.BELOW}/{pagemap}" for pagemap, _ in layered.values()}
    sizes: dict[str, int] = {name: count * PAGE for name, (_, count) in layered.items()}
    files: set[object] = set(sizes.items())
    with os.scandir(directory) as entries:
        for entry in entries:
            name = entry.name
            if name.endswith(".log") or name.startswith("stats-") or name in layered:
                continue
            if name == layers.BELOW:
                continue  # no image: what a capture has of earlier ones
            result = os.stat(places[name]) if name in places else entry.stat(follow_symlinks=False)
            if not stat.S_ISREG(result.st_mode):
                raise ImageRefused(f"{name[:80]!r} is no image")
            sizes[name] = result.st_size
            if name.startswith("pages-"):
                files.add((name, result.st_size))
            else:
                files.add((name, result.st_dev, result.st_ino, result.st_mtime_ns, result.st_size))
    return CriuImages(sizes, lambda name: dumpfile.complete(places.get(name, f"{directory}/{name}")), frozenset(files))


@contextlib.contextmanager
def trees(root: Path, mounts: Mapping[str, Path]) -> Iterator[dict[str, int]]:
    """A descriptor for each mount point of a sandbox: "/" is the overlay at `root`. Blocks."""
    opened: dict[str, int] = {}
    try:
        for point, place in {"/": root, **mounts}.items():
            opened[point] = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        if file_system(opened["/"]) != _OVERLAY_MAGIC:
            raise ImageRefused("the sandbox's file tree is not mounted", "restore it again")
        yield opened
    except OSError as error:
        raise ImageRefused(
            f"the sandbox's file tree is gone: {os.strerror(error.errno or 0)}", "restore it again"
        ) from error
    finally:
        for fd in opened.values():
            os.close(fd)


MAX_CHECKED = 64
MAX_REMEMBERED = 2048  # files and paths of one of them: a hostile sandbox may have a million
_checked: dict[frozenset[object], GateLookups] = {}  # of images that were let pass, the oldest first
CORE_PATTERN = Path("/proc/sys/kernel/core_pattern")


def passes(images: CriuImages, opened: Mapping[str, int], *, no_new_privs: bool = False) -> None:
    """Whether images may be restored over these trees, of a sandbox that has `no_new_privs`. Raises Refusal. Blocks."""
    if no_new_privs:
        unprivileged(images)
    look_up(checked(images), opened)


def checked(images: CriuImages) -> GateLookups:
    """:func:`check`, once for the same images: those of a dump that ends, and of each restore and fork from it."""
    if images.identity is None:
        return check(images)
    target = _checked.get(images.identity) or check(images)
    if len(images.identity) + target.paths > MAX_REMEMBERED:
        return target
    _checked[images.identity] = target
    while len(_checked) > MAX_CHECKED:
        _checked.pop(next(iter(_checked)), None)
    return target


def imported(files: Mapping[str, bytes], pages: Mapping[str, int]) -> None:
    """Images that come from elsewhere, by name; `pages`: how many pages each file of pages has. Raises Refusal. Blocks.

    The paths are looked up when they are restored.
    """
    sizes = {name: len(content) for name, content in files.items()}
    images = CriuImages({**sizes, **{name: count * PAGE for name, count in pages.items()}}, files.__getitem__)
    check(images)
    confined(images, _filter(), piped=CORE_PATTERN.read_text().startswith("|"))


@functools.cache
def _filter() -> bytes:
    """The filter of system calls that sandboxes of this version begin with."""
    return subprocess.run([paths.shim(), "--filter"], check=True, capture_output=True).stdout


def look_up(target: GateLookups, opened: Mapping[str, int]) -> None:
    """Look every path up, in the trees that CRIU will see. Raises Refusal. Blocks, some microseconds for each path."""
    if any(point not in opened for point in target.mounts) or len(target.mounts) != len(opened) - 1:
        raise ImageRefused("its mounts are not those of the sandbox", "restore it into a sandbox with the same mounts")
    observed: set[tuple[str, bytes, int, bool]] = set()
    for named in target.present:
        key = (named.mount, named.path, named.mode, named.link)
        if key not in observed:
            observed.add(key)
            _present(named, opened)
    for point, root in target.second.items():
        try:
            os.close(openat2(opened["/"], root.lstrip("/") or ".", os.O_PATH, resolve=_REAL))
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise ImageRefused(f"what is mounted at {point[:80]!r} is not there: {reason}") from None
    for named in target.ghosts:
        _ghost(named, opened)
    for named in target.sockets:
        _socket(named, opened)
    for named in target.watched:
        mount = max((point for point in opened if below(named.path, point)), key=len)
        _present(ImagePath(named.path, mount, named.id), opened)


def refuse_lost(images: CriuImages, opened: Mapping[str, int], excluded: Collection[int]) -> None:
    """While a dump is frozen: refuse deleted files and directories that could not be restored to where they were.

    What only processes of the numbers `excluded` hold will not be restored. Raises Refusal. Blocks.
    """
    for ghost in deleted(images):
        try:
            _ghost(ghost, opened)
        except ImageRefused as refusal:
            held_by = _holders(images, ghost.id)
            if held_by.keys() - excluded:
                names = ", ".join(f"pid {pid} in the sandbox ({name})" for pid, name in held_by.items())
                raise ImageRefused(f"{refusal.reason}: held by {names}", refusal.hint) from None


def _holders(images: CriuImages, file: int) -> dict[int, str]:
    """Numbers and names of the processes that hold a file, work in it, map it or run it."""
    result = {}
    for task in images.table("pstree.img", "pstree_entry"):
        pid = task.pid
        if f"ids-{pid}.img" not in images:
            continue
        place = images.one(f"fs-{pid}.img", "fs_entry")
        memory = images.one(f"mm-{pid}.img", "mm_entry")
        files = images.one(f"ids-{pid}.img", "task_kobj_ids_entry").files_id
        held = {
            place.cwd_id,
            place.root_id,
            memory.exe_file_id,
            *(area.shmid for area in memory.vmas if area.status & 0xC0),
        }
        held |= {entry.id for entry in images.table(f"fdinfo-{files}.img", "fdinfo_entry")}
        if file in held:
            result[pid] = str(images.one(f"core-{pid}.img", "core_entry").tc.comm)
    return result


# ---------------------------------------------------------------------------- one path


def _below(named: ImagePath, opened: Mapping[str, int]) -> tuple[int, bytes]:
    """The tree in which a path lies, and the path relative to it."""
    fd = opened.get(named.mount)
    if fd is None:
        raise ImageRefused(f"{printable(named.path)} lies on no mount of the sandbox")
    prefix = 0 if named.mount == "/" else len(named.mount.encode())
    return fd, named.path[prefix:].lstrip(b"/") or b"."


def _present(named: ImagePath, opened: Mapping[str, int]) -> None:
    fd, path = _below(named, opened)
    try:
        result = _mode(fd, path, _REAL)
    except OSError as error:
        raise _refusal(named, error) from None
    if stat.S_ISLNK(result) and not named.link:
        raise ImageRefused(f"a symbolic link stands at {printable(named.path)}, which a process holds", CHANGED)
    if named.mode and stat.S_IFMT(result) != stat.S_IFMT(named.mode):
        raise ImageRefused(f"{printable(named.path)}, which a process holds, is another kind of file now", CHANGED)


def _ghost(named: ImagePath, opened: Mapping[str, int]) -> None:
    """CRIU makes it where it was, or, if directories above are gone, in the next one that is there."""
    fd, path = _below(named, opened)
    parent, _, _ = path.rpartition(b"/")
    directory = stat.S_ISDIR(named.mode)
    while True:
        try:
            result = _mode(fd, parent or b".", _REAL)
            break
        except FileNotFoundError as error:
            if directory:
                reason = f"the directory above {printable(named.path)}, which is deleted and held, is deleted too"
                raise ImageRefused(reason, LEAVE) from error
            parent, _, _ = parent.rpartition(b"/")
        except OSError as error:
            raise _refusal(named, error) from None
    if not stat.S_ISDIR(result):
        raise ImageRefused(f"what is above the deleted {printable(named.path)} is no directory now", LEAVE)
    if directory:
        if _there(fd, path, named):
            raise ImageRefused(f"the directory {printable(named.path)} was deleted and made again", LEAVE)
        return
    # Names that CRIU gives the file for a moment: it ends where another file has one of them.
    taken = [b".cr.%x.ghost" % named.ghost] if named.ghost else []
    for end in [*taken, b".cr_link"] if _there(fd, path, named) else taken:
        if _there(fd, path + end, named):
            here = printable(named.path + end)
            raise ImageRefused(
                f"{here} is in the way of the deleted {printable(named.path)}", "remove it, or close the file"
            )


def _there(fd: int, path: bytes, named: ImagePath) -> bool:
    try:
        _mode(fd, path, _REAL)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _refusal(named, error) from None
    return True


def _socket(named: ImagePath, opened: Mapping[str, int]) -> None:
    """Bound by a task whose root is the sandbox's, or a service's: links in the tree lead nowhere else."""
    fd = opened["/"]
    parent, _, _ = named.path.rpartition(b"/")
    for point, other in opened.items():
        if point != "/" and not named.root and below(named.path, point):
            fd, parent = other, parent[len(point.encode()) :]
    try:
        with contextlib.ExitStack() as stack:
            if named.root:
                way = named.root.lstrip("/")
                fd = stack.enter_context(closing(openat2(fd, way, os.O_PATH | os.O_DIRECTORY, resolve=_REAL)))
            _mode(fd, parent.lstrip(b"/") or b".", _BOUND)
    except FileNotFoundError:
        pass  # the name of a socket whose directory is gone
    except OSError as error:
        raise _refusal(named, error) from None


def _refusal(named: ImagePath, error: OSError) -> ImageRefused:
    where = printable(named.path)
    if error.errno == errno.ENOENT:
        return ImageRefused(f"{where}, which a process holds, is not in the file tree", CHANGED)
    if error.errno in (errno.ELOOP, errno.EXDEV):
        return ImageRefused(f"the way to {where} leads through a link, or out of the sandbox", CHANGED)
    return ImageRefused(f"{where}: {os.strerror(error.errno or 0)}", CHANGED)


def _mode(root: int, path: bytes, resolve: int) -> int:
    """Type and mode of what a path leads to; a link at its end is not followed unless `resolve` follows links."""
    flags = os.O_PATH | os.O_CLOEXEC | (os.O_NOFOLLOW if resolve & _NO_SYMLINKS else 0)
    with closing(openat2(root, os.fsdecode(path), flags, resolve=resolve)) as fd:
        return os.fstat(fd).st_mode
