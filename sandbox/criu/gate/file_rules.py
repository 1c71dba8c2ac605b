"""What the images of a sandbox's processes may say of files, mounts, sockets and watches.

Guarantee: pure.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping

from google.protobuf.message import DecodeError

from sandbox.container import kernel_views, namespaces, services
from sandbox.criu import Record, image_files
from sandbox.criu.carried import other_names
from sandbox.criu.gate.images import (
    EXTERNAL_MOUNT,
    FANOTIFY,
    FIFO,
    IDS,
    MAX_FILES,
    MAX_NAME,
    NS,
    OPEN_FLAGS,
    PIDS,
    REG,
    TTY,
    VIEW_MOUNT,
    CriuImages,
    GateLookups,
    ImagePath,
    ImageRefused,
    below,
    need,
    printable,
    raw,
)

MAX_PATH = 4095  # bytes; CRIU holds paths in buffers of PATH_MAX
MAX_GHOST = 1 << 30
O_NOFOLLOW, O_PATH = 0o400000, 0o10000000
S_IFMT, S_IFDIR, S_IFREG, S_IFIFO, S_IFLNK, S_IFSOCK = 0o170000, 0o40000, 0o100000, 0o10000, 0o120000, 0o140000
GHOST, LINKED, PROCFS = 1, 0, 2
#: fd_types -> the field of file_entry that holds it. What is missing here is refused.
KINDS = {
    1: "reg",
    2: "pipe",
    3: "fifo",
    4: "isk",
    5: "usk",
    6: "efd",
    7: "epfd",
    8: "ify",
    9: "sgfd",
    11: "tty",
    13: "nlsk",
    14: "nsf",
    17: "tfd",
    18: "memfd",
    20: "pidfd",
}
#: Mount points below /proc that the shim covers (native/mounts.c).
MASKED = frozenset(
    f"/proc/{name}"
    for name in re.findall(
        r"\S+",
        "acpi asound interrupts kcore keys latency_stats sched_debug scsi timer_list timer_stats"
        " bus fs irq sys sysrq-trigger",
    )
)
COVERED_VIEWS = frozenset(
    {"/sys/firmware", "/sys/fs/btrfs", "/sys/devices/virtual/block", "/sys/devices/virtual/powercap"}
)  # likewise, below /sys
VIEWS = {target: name for name, target in kernel_views.TARGETS.items()}
COVERS = frozenset({"/dev/null", "/.pagurus/empty"})
#: In which nothing can be made or removed, so that CRIU opens there what there is.
KERNEL_MOUNTS = {"/proc", "/dev/pts", *MASKED, *VIEWS, *COVERED_VIEWS}
PROC, DEVPTS, OVERLAY = 1, 6, 17  # fstype
VIEW_KINDS = {2, 5, 12, 23}  # likewise: sysfs, tmpfs, control groups of v1 and of v2
MOUNT_FLAGS = 1 | 2 | 4 | 8 | 1024 | 2048 | (1 << 21)  # ro, nosuid, nodev, noexec, noatime, nodiratime, relatime


def _path(text: str | bytes, what: str) -> bytes:
    """An absolute path without anything that could lead elsewhere."""
    path = raw(text)
    need(path[:1] == b"/" and b"\0" not in path and len(path) <= MAX_PATH, f"{what} has no path: {path[:80]!r}")
    if path != b"/":
        for part in path[1:].split(b"/"):
            need(part not in (b"", b".", b"..") and len(part) <= MAX_NAME, f"{what} has a crooked path: {path[:80]!r}")
    return path


def check_mounts(images: CriuImages, target: GateLookups) -> dict[int, str]:
    """Mount point of each mount: those that the shim makes, and no other."""
    ((_, name),) = images.of("mountpoints")
    entries = images.table(name, "mnt_entry")
    points = {entry.mnt_id: raw(entry.mountpoint).decode("utf-8", "replace") for entry in entries}
    need(len(points) == len(entries) == len(set(points.values())), "two mounts in one place")
    roots = {point: number for number, point in points.items()}
    need({"/", "/proc", "/dev/pts"} <= set(roots), "a mount is missing")
    by_key: dict[str, str] = {}
    for entry in entries:
        point = points[entry.mnt_id]
        place = f"the mount at {point[:80]!r}"
        _path(entry.mountpoint, place)
        need(not entry.shared_id and not entry.master_id and not entry.internal_sharing, f"{place} is shared")
        need(not entry.deleted and not entry.with_plugin and not entry.ext_mount, f"{place} is of no sandbox")
        need(not entry.flags & ~MOUNT_FLAGS and not entry.sb_flags, f"{place} has flags {entry.flags:#x}")
        key, top = entry.ext_key, _top(point, roots)
        inner = point.removeprefix(top) or "/"
        if isinstance(key, str) and re.fullmatch(EXTERNAL_MOUNT + r"\d{1,2}", key) is not None:
            need(point not in KERNEL_MOUNTS and point != "/" and key not in by_key, f"{place} is of no sandbox")
            by_key[key] = point
        elif inner in VIEWS or inner in COVERED_VIEWS:
            need(_is_view(entry, top, inner, roots), f"{place} is of no sandbox")
        elif inner in KERNEL_MOUNTS:
            need(_is_kernel(entry, top, inner, roots), f"{place} is of no sandbox")
        else:
            _path(entry.root, place)
            need(_is_tree(entry, top, inner, roots), f"{place} is of no sandbox")
            target.second[point] = raw(entry.root).decode("utf-8", "replace")
    _need_masks(roots)
    need(sorted(by_key) == sorted(f"{EXTERNAL_MOUNT}{number}" for number in range(len(by_key))), "a mount of the host")
    target.mounts = [by_key[f"{EXTERNAL_MOUNT}{number}"] for number in range(len(by_key))]
    return points


def _top(point: str, roots: Mapping[str, int]) -> str:
    """The root of the service in which a mount lies; "": of none."""
    service = services.owner(point)
    return services.root(service) if service is not None and services.root(service) in roots else ""


def _need_masks(roots: Mapping[str, int]) -> None:
    """What is hidden from the sandbox is hidden from its services."""
    hidden = {point for point in roots if point in MASKED or point in COVERED_VIEWS}
    for point in roots:
        if (top := _top(point, roots)) == point:
            need({top + mask for mask in hidden} <= roots.keys(), f"{top[:80]} shows more than its sandbox")


def _is_tree(entry: Record, top: str, inner: str, roots: Mapping[str, int]) -> bool:
    """Whether a mount is the root of the sandbox, or of a service, or what a service has of the sandbox's tree."""
    root = raw(entry.root).decode("utf-8", "replace")
    if entry.fstype != OVERLAY or entry.ext_key:
        return False
    if inner == "/":
        return root == (top or "/") and (not top or entry.parent_mnt_id == roots["/"])
    return bool(top and entry.parent_mnt_id in roots.values() and (inner != "/dev" or root == "/dev"))


def _is_kernel(entry: Record, top: str, inner: str, roots: Mapping[str, int]) -> bool:
    """Whether a mount is proc or the terminals, or covers a part of proc, in its place."""
    root = raw(entry.root).decode("utf-8", "replace")
    if entry.ext_key:
        return False
    if inner in MASKED:
        same = entry.fstype == PROC and root == inner.removeprefix("/proc")
        good = same or (entry.fstype == OVERLAY and root in COVERS)
        return bool(good and entry.parent_mnt_id == roots.get(f"{top}/proc"))
    above = f"{top}/dev" if top and inner == "/dev/pts" else top or "/"
    kind = PROC if inner == "/proc" else DEVPTS
    return bool(entry.fstype == kind and root == "/" and entry.parent_mnt_id == roots.get(above))


def _is_view(entry: Record, top: str, inner: str, roots: Mapping[str, int]) -> bool:
    """Whether a mount is a part of the kernel's that the shim shows, in its place; or what covers a part of /sys."""
    groups = inner.startswith("/sys/fs/cgroup/")
    above = top or "/" if inner == "/sys" else f"{top}/sys/fs/cgroup" if groups else f"{top}/sys"
    if entry.parent_mnt_id != roots.get(above):
        return False
    root = raw(entry.root).decode("utf-8", "replace")
    if inner in COVERED_VIEWS:
        return bool(entry.fstype == OVERLAY and root in COVERS and not entry.ext_key)
    if top:  # the sandbox's own view, at a second place
        return bool(root == "/" and not entry.ext_key and inner in roots and entry.fstype in VIEW_KINDS)
    return bool(entry.ext_key == VIEW_MOUNT + VIEWS[inner])


def check_files(images: CriuImages, mounts: Mapping[int, str], target: GateLookups) -> dict[int, Record]:
    """The table of open files, by id."""
    entries = images.table("files.img", "file_entry")
    need(len(entries) <= MAX_FILES, f"{len(entries)} open files")
    files = {}
    for entry in entries:
        kind = KINDS.get(entry.type)
        if kind is None:
            raise ImageRefused(
                f"an open file of a kind that is not restored ({entry.type})",
                "close the fanotify group" if entry.type == FANOTIFY else "close it before the checkpoint",
            )
        need(entry.HasField(kind) and getattr(entry, kind).id == entry.id, f"file {entry.id} is no {kind}")
        need(entry.id and entry.id not in files, f"two files of the id {entry.id}")
        files[entry.id] = entry
    remaps = _remaps(images, files)
    others = _others(images)
    for entry in entries:
        if entry.type == REG:
            _regular(entry.reg, mounts, remaps.get(entry.id), target, others.get(entry.id))
        elif entry.HasField("usk"):
            _socket(entry.usk, mounts, target)
        elif entry.HasField("ify"):
            _watches(entry.ify, target)
        elif entry.type in (FIFO, TTY):
            holder = entry.fifo if entry.type == FIFO else entry.tty
            need(not holder.HasField("regf_id") or _is(files, holder.regf_id, REG), "a FIFO or terminal without a file")
        elif entry.type == NS:
            need(entry.nsf.ns_cflag != namespaces.IDS["net"], "a descriptor of a network namespace", "close it")
    _ghosts_apart(target)
    return files


def _is(files: Mapping[int, Record], number: int, kind: int) -> bool:
    return number in files and files[number].type == kind


#: How a file is restored in another way than by its path: kind of remap, ghost's record, CRIU's number of it.
Remap = tuple[int, Record | None, int]


def _remaps(images: CriuImages, files: Mapping[int, Record]) -> dict[int, Remap]:
    """What is restored in another way than by its path, by the id of the file."""
    result: dict[int, Remap] = {}
    for remap in images.table("remap-fpath.img", "remap_file_path_entry"):
        need(_is(files, remap.orig_id, REG) and remap.orig_id not in result, "a deleted file that there is not")
        need(remap.HasField("remap_type"), "images of an old CRIU")
        ghost = None
        if remap.remap_type == GHOST:
            ghost = _ghost(images, f"ghost-file-{remap.remap_id:x}.img")
        elif remap.remap_type == LINKED:
            need(_is(files, remap.remap_id, REG) and remap.remap_id != remap.orig_id, "a link that there is not")
        else:
            need(remap.remap_type == PROCFS and 0 < remap.remap_id < PIDS, "a file of /proc")
        result[remap.orig_id] = (remap.remap_type, ghost, remap.remap_id)
    return result


def _ghost(images: CriuImages, name: str) -> Record:
    """A deleted file: its record, whose content is all there."""
    need(name in images, f"{name} is missing")
    content = images.content(name)
    kinds = image_files.messages()
    try:
        (size,) = struct.unpack_from("<I", content, 8)
        need(12 + size <= len(content), f"{name} is cut short")
        ghost: Record = kinds.ghost_file_entry.FromString(content[12 : 12 + size])
        at = 12 + size
        form = ghost.mode & S_IFMT
        need(form in (S_IFREG, S_IFDIR, S_IFIFO, S_IFLNK), "a deleted device node is open", "close it")
        need(ghost.uid < IDS and ghost.gid < IDS, f"{name} belongs to nobody here")
        need((form == S_IFLNK) == ghost.HasField("symlnk_target"), f"{name} is no link")
        need(len(raw(ghost.symlnk_target)) <= MAX_PATH and b"\0" not in raw(ghost.symlnk_target), f"{name}: target")
        need(not ghost.chunks or (ghost.HasField("size") and ghost.size < 1 << 62), f"{name} has no size")
        filled = 0
        while ghost.chunks and at < len(content):
            (size,) = struct.unpack_from("<I", content, at)
            chunk = kinds.ghost_chunk_entry.FromString(content[at + 4 : at + 4 + size])
            at += 4 + size + chunk.len
            filled += chunk.len
            need(at <= len(content) and chunk.off + chunk.len <= ghost.size, f"{name} is cut short")
        need(filled <= MAX_GHOST and (form == S_IFREG or at == len(content)), f"{name} is too large")
    except (DecodeError, struct.error) as error:
        raise ImageRefused(f"{name} cannot be read: {error}") from None
    return ghost


def _others(images: CriuImages) -> dict[int, bytes]:
    """Links that will be made for the restore: file id -> another name of the file, from which each is made."""
    if other_names.FILE not in images:
        return {}
    try:
        names = other_names.decode(images.content(other_names.FILE))
    except ValueError as error:
        raise ImageRefused(f"{other_names.FILE} cannot be read: {error}") from None
    remaps = images.table("remap-fpath.img", "remap_file_path_entry")
    return {one.remap_id: names[one.remap_id] for one in remaps if one.remap_type == LINKED and one.remap_id in names}


def _is_kernels(mount: str, mounts: Mapping[int, str]) -> bool:
    """Whether nothing can be made or removed in a mount."""
    return mount.removeprefix(_top(mount, {point: number for number, point in mounts.items()})) in KERNEL_MOUNTS


def _regular(
    file: Record, mounts: Mapping[int, str], remap: Remap | None, target: GateLookups, other: bytes | None
) -> None:
    what = f"file {file.id}"
    path = _path(file.name, what)
    need(not file.ext, f"{what} lies outside the sandbox", "close it")
    need(not file.flags & ~OPEN_FLAGS, f"{what} is opened with flags {file.flags:#o}")
    mount = mounts.get(file.mnt_id if file.mnt_id != -1 else 0, "/" if file.mnt_id == -1 else "")
    need(mount and below(path, mount), f"{path[:80]!r} lies on no mount of the sandbox")
    above = [point for point in mounts.values() if below(path, point) and len(point) > len(mount)]
    need(not above or path == raw(above[0]) or remap is not None, f"{path[:80]!r} lies below another mount")
    link = bool(file.flags & O_PATH and file.flags & O_NOFOLLOW)
    kernel = _is_kernels(mount, mounts)
    path, mount = target.in_tree(path, mount)
    named = ImagePath(path, mount, file.id, file.mode, link)
    kind, ghost, number = remap or (None, None, 0)
    if kernel:
        need(kind in (None, PROCFS), f"a deleted file below {mount} is open", "close it")
    elif ghost is not None:
        target.ghosts.append(ImagePath(path, mount, file.id, ghost.mode, ghost=number))
    elif other is not None:
        need(kind is None and mount == "/", f"{path[:80]!r} is linked to a file elsewhere")
        target.present.append(ImagePath(_path(other, f"another name of {what}"), mount, file.id))
        target.ghosts.append(ImagePath(path, mount, file.id, S_IFREG))
    elif kind is None:
        target.present.append(named)
    else:
        need(kind == LINKED, f"{path[:80]!r} is no file of /proc")
        target.ghosts.append(ImagePath(path, mount, file.id, S_IFREG))


def _socket(socket: Record, mounts: Mapping[int, str], target: GateLookups) -> None:
    name = bytes(socket.name)
    need(not socket.uflags and len(name) <= 108, f"socket {socket.id} leads outside the sandbox", "close it")
    if not name.rstrip(b"\0") or name[:1] == b"\0":
        return
    path = name.rstrip(b"\0")
    if path[:1] != b"/":
        path = _path(socket.name_dir, f"the directory of socket {socket.id}").rstrip(b"/") + b"/" + path
    need(b"\0" not in path, f"socket {socket.id} has no path")
    mount = mounts.get(socket.mnt_id, "/")
    need(not _is_kernels(mount, mounts), f"socket {socket.id} lies in /proc")
    if socket.HasField("file_perms"):
        need(max(socket.file_perms.uid, socket.file_perms.gid) < IDS, f"socket {socket.id} belongs to nobody here")
    root = _top(mount, {point: number for number, point in mounts.items()})
    if root and name[:1] == b"/":
        target.sockets.append(ImagePath(path, "/", socket.id, S_IFSOCK, root=root))
        return
    path, mount = target.in_tree(path, mount)
    target.sockets.append(ImagePath(path, mount, socket.id, S_IFSOCK))


def _watches(group: Record, target: GateLookups) -> None:
    """By handle CRIU would open any file of a file system, also of the host's below a mount."""
    for watch in group.wd:
        handle = watch.f_handle
        need(handle.bytes <= 128 and len(handle.handle) <= 16, "a watch on a file without a name")
        need(handle.path, "a watched file has no path in the sandbox", "close the watch, or watch a copy of the file")
        path = b"/" + raw(handle.path).lstrip(b"/")
        path = b"/" if path == b"/." else path  # as CRIU writes the root
        target.watched.append(ImagePath(_path(path, "a watch"), "", group.id))


def _ghosts_apart(target: GateLookups) -> None:
    """CRIU makes one deleted directory after the other and removes each: none may lie in another."""
    directories = [ghost for ghost in target.ghosts if ghost.mode & S_IFMT == S_IFDIR]
    for ghost in directories:
        for other in directories:
            need(
                ghost.path == other.path or not below(ghost.path, other.path),
                f"the deleted directory {printable(ghost.path)} and the one above it are both held",
                "have the processes leave or close one of them (cd /), then checkpoint again",
            )
