"""What a field of CRIU's images may say: the images of a sandbox's processes are an adversary's, field by field.

Owns: the table of image files that a restore may see, and for each the values that a sandbox of ours can have: names
of files, identities and references between images, namespaces, mounts, id ranges, capabilities, limits, sizes.
Does not own: whether a path leads to the right place in a tree (:mod:`sandbox.criu.gate`), what a refusal leads to.
Guarantee: pure (no I/O, no clock). :func:`check` returns what the gate must look up, or raises :class:`Refusal`; of an
image that it lets pass CRIU makes namespaces, ids and restrictions as our own shim does, never weaker.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError

from sandbox.criu import image_files, settings, waits
from sandbox.errors import CheckpointFailed

IDS = 65_536  # uids and gids of a sandbox
PIDS = 1 << 22
PATH_MOST = 4095  # bytes; CRIU holds paths in buffers of PATH_MAX
NAME_MOST = 255
FILES_MOST = 1 << 20
TASKS_MOST = 1 << 15
ADDRESS_MOST = (1 << 47) - 4096
PAGE = 4096
GHOST_MOST = 1 << 30
CAPABILITIES = 0xA80425FB  # native/confine.c: `kept`
PERSONALITIES = frozenset({0, 0x8, 0x20000, 0x20008})  # native/confine.c
POLICIES = frozenset({0, 3, 5})  # SCHED_OTHER, SCHED_BATCH, SCHED_IDLE: what needs no capability
GUARD = 1 << 16  # of the status of a mapping
RESET_ON_FORK = 0x40000000  # a flag beside them
SECCOMP_FILTER, TSYNC = 2, 1
LIMIT_CORE = 4  # its number; more than 1 would start the host's core_pattern
OPEN_FLAGS = 0o37776003  # what stays in the flags of an open file: neither O_CREAT, O_EXCL, O_NOCTTY nor O_TRUNC
O_NOFOLLOW, O_PATH = 0o400000, 0o10000000
S_IFMT, S_IFDIR, S_IFREG, S_IFIFO, S_IFLNK, S_IFSOCK = 0o170000, 0o40000, 0o100000, 0o10000, 0o120000, 0o140000
GHOST, LINKED, PROCFS = 1, 0, 2
REG, PIPE, FIFO, NS, FANOTIFY, TTY = 1, 2, 3, 14, 12, 11
DEAD = frozenset({2, 6})  # states of a task that will not run
CLONE_NEWNET = 0x40000000

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
#: Names of the image files that there may be.
FILES = re.compile(
    r"(?:core|fdinfo|fs|ids|mm|pagemap|pages|pagemap-shmem|mountpoints|userns|utsns|timens"
    r"|ipcns-(?:var|shm|msg|sem))-\d{1,10}\.img"
    r"|(?:ghost-file|tcp-stream)-[0-9a-f]{1,8}\.img"
    r"|(?:files|inventory|pstree|remap-fpath|seccomp|memfd|tty-info|filelocks|cgroup|pipes-data|fifo-data|sk-queues"
    r"|cpuinfo|waits|settings|tty-data)\.img"
)
#: Mount points below /proc that the shim covers (native/mounts.c).
MASKED = frozenset(
    f"/proc/{name}"
    for name in re.findall(
        r"\S+",
        "acpi asound interrupts kcore keys latency_stats sched_debug scsi timer_list timer_stats"
        " bus fs irq sys sysrq-trigger",
    )
)
COVERS = frozenset({"/dev/null", "/.pagurus/empty"})
PROC, DEVPTS, OVERLAY = 1, 6, 17  # fstype
MOUNT_FLAGS = 1 | 2 | 4 | 8 | 1024 | 2048 | (1 << 21)  # ro, nosuid, nodev, noexec, noatime, nodiratime, relatime
EXTERNAL_MOUNT = "pagurus-mount-"  # the key of a directory of the host in the images, before its number


class Refusal(Exception):
    """An image says what no sandbox of ours may. `remedy` says what the user may do."""

    def __init__(self, reason: str, remedy: str = ""):
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


@dataclass(frozen=True)
class Named:
    """A path of the images: where it lies and what it must be."""

    path: bytes  # in the sandbox: absolute, without "." or ".."
    mount: str  # mount point: "/", or the target of a directory of the host
    id: int  # of the file in files.img
    mode: int = 0  # of the file; 0: not known
    link: bool = False  # the file itself is a symbolic link


@dataclass
class Wanted:
    """What the gate must look up in the tree before these images are restored."""

    present: list[Named] = field(default_factory=list)  # opened by its path
    ghosts: list[Named] = field(default_factory=list)  # made there for a moment, by its path or a name beside it
    sockets: list[Named] = field(default_factory=list)  # bound from inside: links are followed, within the tree
    watched: list[Named] = field(default_factory=list)
    mounts: list[str] = field(default_factory=list)  # targets of directories of the host, by their number


class Images:
    """Images by file name, each parsed once. `read(name)` gives the bytes of one, `sizes` the names and sizes."""

    def __init__(self, sizes: Mapping[str, int], read: Callable[[str], bytes]):
        self.sizes = sizes
        self._read = read
        self._parsed: dict[str, list[Any]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.sizes

    def of(self, stem: str) -> Iterator[tuple[int, str]]:
        """Number and name of each image ``STEM-NUMBER.img``."""
        for name in self.sizes:
            head, _, tail = name.rpartition("-")
            if head == stem:
                yield int(tail.removesuffix(".img")), name

    def content(self, name: str) -> bytes:
        return self._read(name)

    def table(self, name: str, *kinds: str) -> list[Any]:
        """All records of an image that consists of nothing else; [] when it is not there."""
        if name not in self.sizes:
            return []
        found = self._parsed.get(name)
        if found is None:
            types = [getattr(image_files.messages(), kind) for kind in kinds]
            try:
                found = image_files.parse(self._read(name), *types).entries
            except (DecodeError, struct.error, CheckpointFailed, IndexError) as error:
                raise Refusal(f"{name} cannot be read: {error}") from None
            self._parsed[name] = found
        return found

    def one(self, name: str, kind: str) -> Any:
        """The only record of an image."""
        found = self.table(name, kind)
        _need(len(found) == 1, f"{name} has {len(found)} records instead of one")
        return found[0]

    def records(self, name: str, kind: str, extra: Callable[[Any], int]) -> Iterator[Any]:
        """Records that are followed by `extra` bytes each."""
        if name not in self.sizes:
            return
        content, at, message = self._read(name), 8, getattr(image_files.messages(), kind)
        try:
            while at < len(content):
                (size,) = struct.unpack_from("<I", content, at)
                _need(at + 4 + size <= len(content), f"{name} is cut short")
                record = message.FromString(content[at + 4 : at + 4 + size])
                at += 4 + size + extra(record)
                _need(at <= len(content), f"{name} is cut short")
                yield record
        except (DecodeError, struct.error) as error:
            raise Refusal(f"{name} cannot be read: {error}") from None


def check(images: Images) -> Wanted:
    """Refuse what no sandbox of ours may have; returns what is to be looked up in the tree."""
    for name in images.sizes:
        _need(FILES.fullmatch(name) is not None, f"an image of an unknown kind, {name[:80]!r}")
    if waits.NAME in images:
        _need(waits.parse(images.content(waits.NAME)) is not None, f"{waits.NAME} cannot be read")
    tasks = _tree(images)
    _namespaces(images, tasks)
    wanted = Wanted()
    mounts = _mounts(images, wanted)
    files = _files(images, mounts, wanted)
    for pid, threads in tasks.items():
        _task(images, pid, threads, files)
    _rest(images)
    return wanted


def deleted(images: Images) -> list[Named]:
    """The deleted files and directories of a dump that is not complete yet."""
    wanted = Wanted()
    _files(images, _mounts(images, wanted), wanted)
    return wanted.ghosts


def _need(truth: object, reason: str, remedy: str = "") -> None:
    if not truth:
        raise Refusal(reason, remedy)


def confined(images: Images, program: bytes) -> None:
    """Refuse processes that are not held by the system-call filter `program`, which each sandbox of ours begins with.

    What was dumped here cannot have lost it; images that come from elsewhere may say anything.
    """
    filters = [one for entry in images.table("seccomp.img", "seccomp_entry") for one in entry.seccomp_filters]
    for pid, threads in _tree(images).items():
        core = images.one(f"core-{pid}.img", "core_entry")
        if core.tc.task_state in DEAD:
            continue
        chain = _chain(core.thread_core, filters)
        _need(chain and bytes(chain[-1].filter) == program, f"process {pid} is not held by the filter of system calls")
        for thread in threads:
            own = _chain(images.one(f"core-{thread}.img", "core_entry").thread_core, filters)
            shared = all(one.flags & TSYNC for one in chain)  # CRIU gives the leader's filters to all threads
            good = bytes(own[-1].filter) == program if own else shared
            _need(good, f"thread {thread} is not held by the filter of system calls")


def _chain(core: Any, filters: list[Any]) -> list[Any]:
    """The filters of a thread, its first one last; [] when it has none of its own."""
    chain: list[Any] = []
    place = core.seccomp_filter if core.seccomp_mode == SECCOMP_FILTER else -1
    while 0 <= place < len(filters) and len(chain) <= len(filters):
        chain.append(filters[place])
        place = filters[place].prev if filters[place].HasField("prev") else -1
    return chain


# ---------------------------------------------------------------------------- processes


def _tree(images: Images) -> dict[int, list[int]]:
    """Processes and their threads."""
    entries = images.table("pstree.img", "pstree_entry")
    _need(0 < len(entries) <= TASKS_MOST, f"{len(entries)} processes")
    tasks: dict[int, list[int]] = {}
    seen: set[int] = set()
    for number, entry in enumerate(entries):
        threads = list(entry.threads)
        if f"mm-{entry.pid}.img" not in images and len(threads) <= 1:
            threads = [entry.pid]  # a zombie: CRIU writes any number
        _need(entry.pid in threads, f"process {entry.pid} has no thread of its own number")
        _need(all(0 < one < PIDS for one in threads), "a number of a thread that no kernel gives")
        _need(not seen.intersection(threads) and len(set(threads)) == len(threads), "two threads of one number")
        seen.update(threads)
        _need(entry.pgid < PIDS and entry.sid < PIDS, "a group or session that no kernel gives")
        first = number == 0
        _need((entry.pid == 1) == first, "the first process is not pid 1")
        _need(entry.ppid == 0 if first else entry.ppid in tasks, f"process {entry.pid} has no parent")
        tasks[entry.pid] = threads
    return tasks


def _namespaces(images: Images, tasks: Iterable[int]) -> None:
    """New namespaces of every kind but those of the network and of time, and one id range."""
    inventory = images.one("inventory.img", "inventory_entry")
    _need(inventory.img_version == 2, f"images of version {inventory.img_version}")
    _need(not inventory.plugins_entry.plugins, "images made with plugins of CRIU")
    _need(not inventory.lsmtype, "images of another security module")
    _need(inventory.fdinfo_per_id and inventory.ns_per_id, "images of an old CRIU")
    _need(not inventory.pre_dump_mode and not inventory.tcp_close, "images of another kind of dump")
    host = inventory.root_ids
    first = images.one("ids-1.img", "task_kobj_ids_entry")
    for kind in ("pid", "ipc", "uts", "mnt", "user", "cgroup"):
        own = getattr(first, f"{kind}_ns_id")
        _need(own and own != getattr(host, f"{kind}_ns_id"), f"processes without a {kind} namespace of their own")
    _need(first.net_ns_id == host.net_ns_id, "processes in a network namespace that is not the sandbox's")
    for pid in tasks:
        name = f"ids-{pid}.img"
        if name not in images:
            continue  # a zombie
        ids = images.one(name, "task_kobj_ids_entry")
        for kind in ("pid", "net", "ipc", "uts", "mnt", "user", "cgroup", "time"):
            field = f"{kind}_ns_id"
            _need(getattr(ids, field) == getattr(first, field), f"process {pid} in another {kind} namespace")
    _need({number for number, _ in images.of("userns")} == {first.user_ns_id}, "another user namespace")
    users = images.one(f"userns-{first.user_ns_id}.img", "userns_entry")
    ranges = [[(one.first, one.lower_first, one.count) for one in kind] for kind in (users.uid_map, users.gid_map)]
    lower = ranges[0][0][1] if ranges[0] else 0
    _need(ranges == [[(0, lower, IDS)]] * 2, "user ids beyond those of one sandbox")
    _need(IDS <= lower <= (1 << 32) - 2 * IDS, "user ids of the host")
    _need({number for number, _ in images.of("mountpoints")} == {first.mnt_ns_id}, "another mount namespace")
    for number, name in images.of("utsns"):
        names = images.one(name, "utsns_entry")
        _need(number == first.uts_ns_id and len(names.nodename) <= 64 and len(names.domainname) <= 64, "a host name")
    for stem in ("ipcns-var", "ipcns-shm", "ipcns-msg", "ipcns-sem"):
        _need(all(number == first.ipc_ns_id for number, _ in images.of(stem)), "another IPC namespace")


def _task(images: Images, pid: int, threads: list[int], files: Mapping[int, Any]) -> None:
    core = images.one(f"core-{pid}.img", "core_entry")
    _need(core.mtype == 1 and core.HasField("tc"), f"process {pid} is of another kind of machine")
    _need(core.tc.personality in PERSONALITIES, f"process {pid} has personality {core.tc.personality:#x}")
    _need(len(_raw(core.tc.comm)) <= 15, f"the name of process {pid}")
    if core.tc.task_state in DEAD:
        return
    _need(core.tc.oom_score_adj >= 0, f"process {pid} is spared by the OOM killer")
    limits = core.tc.rlimits.rlimits
    _need(len(limits) == 16 and all(one.cur <= one.max for one in limits), f"the limits of process {pid}")
    _need(limits[LIMIT_CORE].max <= 1, f"process {pid} may dump core to a program of the host")
    for thread in threads:
        one = core if thread == pid else images.one(f"core-{thread}.img", "core_entry")
        _need(one.HasField("thread_core"), f"thread {thread} has no state")
        _thread(thread, one.thread_core)
    memory = images.one(f"mm-{pid}.img", "mm_entry")
    _need(memory.exe_file_id in files, f"process {pid} runs no file")
    _memory(pid, memory, files)
    _pagemap(images, f"pagemap-{pid}.img", ADDRESS_MOST)
    place = images.one(f"fs-{pid}.img", "fs_entry")
    for number in (place.cwd_id, place.root_id):
        _need(number in files and files[number].type == REG, f"process {pid} is in no directory")
    ids = images.one(f"ids-{pid}.img", "task_kobj_ids_entry")
    for entry in images.table(f"fdinfo-{ids.files_id}.img", "fdinfo_entry"):
        file = files.get(entry.id)
        _need(file is not None and file.type == entry.type, f"process {pid} holds a file that there is not")
        _need(entry.fd < FILES_MOST, f"descriptor {entry.fd} of process {pid}")


def _thread(thread: int, core: Any) -> None:
    who = f"thread {thread}"
    _need(core.HasField("creds"), f"{who} has no credentials")
    creds = core.creds
    numbers = (creds.uid, creds.euid, creds.suid, creds.fsuid, creds.gid, creds.egid, creds.sgid, creds.fsgid)
    _need(max(numbers) < IDS and all(group < IDS for group in creds.groups), f"{who} has ids beyond its sandbox's")
    for kind in ("inh", "prm", "eff", "bnd", "amb"):
        held = sum(word << 32 * place for place, word in enumerate(getattr(creds, f"cap_{kind}")))
        _need(not held & ~CAPABILITIES, f"{who} has capabilities that no sandbox has")
    _need(creds.no_new_privs == 1, f"{who} may gain privileges")
    _need(not creds.lsm_profile and not creds.lsm_sockcreate and not creds.apparmor_data, f"{who} has a profile")
    _need(core.sched_nice >= 0 and core.sched_nice < 20, f"{who} goes before the host's")
    _need(core.sched_policy & ~RESET_ON_FORK in POLICIES and not core.sched_prio, f"{who} has real-time scheduling")


def _memory(pid: int, memory: Any, files: Mapping[int, Any]) -> None:
    end = 0
    for area in memory.vmas:
        start, status = area.start, area.status
        guard = bool(status & GUARD)  # lies inside another one
        good = (guard or end <= start) and start < area.end and not start % PAGE and not area.end % PAGE
        end = end if guard else area.end
        # The page of the vsyscall is where no process can have anything.
        _need(
            good and (area.end <= ADDRESS_MOST or status & 4), f"process {pid} has memory where no process can have it"
        )
        _need(not status >> 18, f"process {pid} has memory of an unknown kind")
        if status & 0xC0 and not status & (1 << 14):  # of a file that is not a memfd
            file = files.get(area.shmid)
            _need(file is not None and file.type == REG, f"process {pid} maps a file that there is not")
            _need(not area.fdflags & ~OPEN_FLAGS, f"process {pid} maps a file with flags {area.fdflags:#o}")


def _pagemap(images: Images, name: str, end: int) -> None:
    """The pages that a map says lie in the file of pages, page for page."""
    entries = images.table(name, "pagemap_head", "pagemap_entry")
    _need(entries, f"{name} is missing")
    pages = f"pages-{entries[0].pages_id}.img"
    total, above = 0, 0
    for entry in entries[1:]:
        count = entry.nr_pages or entry.compat_nr_pages
        _need(entry.vaddr >= above and not entry.vaddr % PAGE and count <= end // PAGE, f"{name} has no order")
        above = entry.vaddr + count * PAGE
        _need(above <= end, f"{name} reaches too far")
        _need(not entry.in_parent and not entry.flags & 1, f"{name} refers to other images")
        if not entry.HasField("flags") or entry.flags & 4:
            total += count
    _need(images.sizes.get(pages, 0) == total * PAGE, f"{pages} has not the pages of {name}")


# ---------------------------------------------------------------------------- files


def _raw(text: str | bytes) -> bytes:
    """A name as the kernel has it: protobuf gives one that is not UTF-8 as bytes."""
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")


def _path(text: str | bytes, what: str) -> bytes:
    """An absolute path without anything that could lead elsewhere."""
    path = _raw(text)
    _need(path[:1] == b"/" and b"\0" not in path and len(path) <= PATH_MOST, f"{what} has no path: {path[:80]!r}")
    if path != b"/":
        for part in path[1:].split(b"/"):
            _need(
                part not in (b"", b".", b"..") and len(part) <= NAME_MOST, f"{what} has a crooked path: {path[:80]!r}"
            )
    return path


def below(path: str | bytes, directory: str | bytes) -> bool:
    """Whether a path is `directory` or lies below it."""
    path, directory = _raw(path), _raw(directory)
    return directory == b"/" or path == directory or path.startswith(directory + b"/")


def _mounts(images: Images, wanted: Wanted) -> dict[int, str]:
    """Mount point of each mount: those that the shim makes, and no other."""
    ((_, name),) = images.of("mountpoints")
    entries = images.table(name, "mnt_entry")
    points = {entry.mnt_id: _raw(entry.mountpoint).decode("utf-8", "replace") for entry in entries}
    _need(len(points) == len(entries) == len(set(points.values())), "two mounts in one place")
    roots = {point: number for number, point in points.items()}
    _need({"/", "/proc", "/dev/pts"} <= set(roots), "a mount is missing")
    for entry in entries:
        point = points[entry.mnt_id]
        place = f"the mount at {point[:80]!r}"
        _path(entry.mountpoint, place)
        _need(not entry.shared_id and not entry.master_id and not entry.internal_sharing, f"{place} is shared")
        _need(not entry.deleted and not entry.with_plugin and not entry.ext_mount, f"{place} is of no sandbox")
        _need(not entry.flags & ~MOUNT_FLAGS and not entry.sb_flags, f"{place} has flags {entry.flags:#x}")
        root = _raw(entry.root).decode("utf-8", "replace")
        parent = roots["/proc" if point in MASKED else "/"]
        key = entry.ext_key
        if point == "/":
            good = entry.fstype == OVERLAY and root == "/" and not key
        elif point == "/proc":
            good = entry.fstype == PROC and root == "/" and entry.parent_mnt_id == parent and not key
        elif point == "/dev/pts":
            good = entry.fstype == DEVPTS and root == "/" and entry.parent_mnt_id == parent and not key
        elif point in MASKED:
            same = entry.fstype == PROC and root == point.removeprefix("/proc")
            good = (same or (entry.fstype == OVERLAY and root in COVERS)) and entry.parent_mnt_id == parent and not key
        else:
            good = isinstance(key, str) and re.fullmatch(EXTERNAL_MOUNT + r"\d{1,2}", key) is not None
            wanted.mounts.append(point)
        _need(good, f"{place} is of no sandbox")
    keys = [entry.ext_key for entry in entries if entry.ext_key]
    _need(sorted(keys) == sorted(f"{EXTERNAL_MOUNT}{number}" for number in range(len(keys))), "a mount of the host")
    by_key = {entry.ext_key: points[entry.mnt_id] for entry in entries if entry.ext_key}
    wanted.mounts = [by_key[f"{EXTERNAL_MOUNT}{number}"] for number in range(len(keys))]
    return points


def _files(images: Images, mounts: Mapping[int, str], wanted: Wanted) -> dict[int, Any]:
    """The table of open files, by id."""
    entries = images.table("files.img", "file_entry")
    _need(len(entries) <= FILES_MOST, f"{len(entries)} open files")
    files = {}
    for entry in entries:
        kind = KINDS.get(entry.type)
        if kind is None:
            raise Refusal(
                f"an open file of a kind that is not restored ({entry.type})",
                "close the fanotify group" if entry.type == FANOTIFY else "close it before the checkpoint",
            )
        _need(entry.HasField(kind) and getattr(entry, kind).id == entry.id, f"file {entry.id} is no {kind}")
        _need(entry.id and entry.id not in files, f"two files of the id {entry.id}")
        files[entry.id] = entry
    remaps = _remaps(images, files)
    for entry in entries:
        if entry.type == REG:
            _regular(entry.reg, mounts, remaps.get(entry.id), wanted)
        elif entry.HasField("usk"):
            _socket(entry.usk, mounts, wanted)
        elif entry.HasField("ify"):
            _watches(entry.ify, wanted)
        elif entry.type in (FIFO, TTY):
            holder = entry.fifo if entry.type == FIFO else entry.tty
            _need(
                not holder.HasField("regf_id") or _is(files, holder.regf_id, REG), "a FIFO or terminal without a file"
            )
        elif entry.type == NS:
            _need(entry.nsf.ns_cflag != CLONE_NEWNET, "a descriptor of a network namespace", "close it")
    _ghosts_apart(wanted)
    return files


def _is(files: Mapping[int, Any], number: int, kind: int) -> bool:
    return number in files and files[number].type == kind


def _remaps(images: Images, files: Mapping[int, Any]) -> dict[int, Any]:
    """What comes back in another way than by its path: file id -> (kind of remap, ghost's record)."""
    found: dict[int, Any] = {}
    for remap in images.table("remap-fpath.img", "remap_file_path_entry"):
        _need(_is(files, remap.orig_id, REG) and remap.orig_id not in found, "a deleted file that there is not")
        _need(remap.HasField("remap_type"), "images of an old CRIU")
        ghost = None
        if remap.remap_type == GHOST:
            ghost = _ghost(images, f"ghost-file-{remap.remap_id:x}.img")
        elif remap.remap_type == LINKED:
            _need(_is(files, remap.remap_id, REG) and remap.remap_id != remap.orig_id, "a link that there is not")
        else:
            _need(remap.remap_type == PROCFS and 0 < remap.remap_id < PIDS, "a file of /proc")
        found[remap.orig_id] = (remap.remap_type, ghost)
    return found


def _ghost(images: Images, name: str) -> Any:
    """A deleted file: its record, whose content is all there."""
    _need(name in images, f"{name} is missing")
    content = images.content(name)
    kinds = image_files.messages()
    try:
        (size,) = struct.unpack_from("<I", content, 8)
        _need(12 + size <= len(content), f"{name} is cut short")
        ghost = kinds.ghost_file_entry.FromString(content[12 : 12 + size])
        at = 12 + size
        form = ghost.mode & S_IFMT
        _need(form in (S_IFREG, S_IFDIR, S_IFIFO, S_IFLNK), "a deleted device node is open", "close it")
        _need(ghost.uid < IDS and ghost.gid < IDS, f"{name} belongs to nobody here")
        _need((form == S_IFLNK) == ghost.HasField("symlnk_target"), f"{name} is no link")
        _need(len(_raw(ghost.symlnk_target)) <= PATH_MOST and b"\0" not in _raw(ghost.symlnk_target), f"{name}: target")
        _need(not ghost.chunks or (ghost.HasField("size") and ghost.size < 1 << 62), f"{name} has no size")
        filled = 0
        while ghost.chunks and at < len(content):
            (size,) = struct.unpack_from("<I", content, at)
            chunk = kinds.ghost_chunk_entry.FromString(content[at + 4 : at + 4 + size])
            at += 4 + size + chunk.len
            filled += chunk.len
            _need(at <= len(content) and chunk.off + chunk.len <= ghost.size, f"{name} is cut short")
        _need(filled <= GHOST_MOST and (form == S_IFREG or at == len(content)), f"{name} is too large")
    except (DecodeError, struct.error) as error:
        raise Refusal(f"{name} cannot be read: {error}") from None
    return ghost


def _regular(file: Any, mounts: Mapping[int, str], remap: Any, wanted: Wanted) -> None:
    what = f"file {file.id}"
    path = _path(file.name, what)
    _need(not file.ext, f"{what} lies outside the sandbox", "close it")
    _need(not file.flags & ~OPEN_FLAGS, f"{what} is opened with flags {file.flags:#o}")
    mount = mounts.get(file.mnt_id if file.mnt_id != -1 else 0, "/" if file.mnt_id == -1 else "")
    _need(mount and below(path, mount), f"{path[:80]!r} lies on no mount of the sandbox")
    above = [point for point in mounts.values() if below(path, point) and len(point) > len(mount)]
    _need(not above or path == _raw(above[0]) or remap is not None, f"{path[:80]!r} lies below another mount")
    link = bool(file.flags & O_PATH and file.flags & O_NOFOLLOW)
    named = Named(path, mount, file.id, file.mode, link)
    kind, ghost = remap or (None, None)
    if mount == "/proc" or mount in MASKED or mount == "/dev/pts":
        _need(kind in (None, PROCFS), f"a deleted file below {mount} is open", "close it")
    elif ghost is not None:
        wanted.ghosts.append(Named(path, mount, file.id, ghost.mode))
    elif kind is None:
        wanted.present.append(named)
    else:
        _need(kind == LINKED, f"{path[:80]!r} is no file of /proc")
        wanted.ghosts.append(Named(path, mount, file.id, S_IFREG))


def _socket(socket: Any, mounts: Mapping[int, str], wanted: Wanted) -> None:
    name = bytes(socket.name)
    _need(not socket.uflags and len(name) <= 108, f"socket {socket.id} leads outside the sandbox", "close it")
    if not name.rstrip(b"\0") or name[:1] == b"\0":
        return
    path = name.rstrip(b"\0")
    if path[:1] != b"/":
        path = _path(socket.name_dir, f"the directory of socket {socket.id}").rstrip(b"/") + b"/" + path
    _need(b"\0" not in path, f"socket {socket.id} has no path")
    mount = mounts.get(socket.mnt_id, "/")
    _need(mount != "/proc" and mount not in MASKED, f"socket {socket.id} lies in /proc")
    if socket.HasField("file_perms"):
        _need(max(socket.file_perms.uid, socket.file_perms.gid) < IDS, f"socket {socket.id} belongs to nobody here")
    wanted.sockets.append(Named(path, mount, socket.id, S_IFSOCK))


def _watches(group: Any, wanted: Wanted) -> None:
    """By handle CRIU would open any file of a file system, also of the host's below a mount."""
    for watch in group.wd:
        handle = watch.f_handle
        _need(handle.bytes <= 128 and len(handle.handle) <= 16, "a watch on a file without a name")
        _need(handle.path, "a watched file has no path in the sandbox", "close the watch, or watch a copy of the file")
        path = b"/" + _raw(handle.path).lstrip(b"/")
        wanted.watched.append(Named(_path(path, "a watch"), "", group.id))


def _ghosts_apart(wanted: Wanted) -> None:
    """CRIU makes one deleted directory after the other and removes each: none may lie in another."""
    directories = [ghost for ghost in wanted.ghosts if ghost.mode & S_IFMT == S_IFDIR]
    for ghost in directories:
        for other in directories:
            _need(
                ghost.path == other.path or not below(ghost.path, other.path),
                f"the deleted directory {printable(ghost.path)} and the one above it are both held",
                "have the processes leave or close one of them (cd /), then checkpoint again",
            )


def printable(path: bytes) -> str:
    """A path in a message."""
    return repr(path.decode("utf-8", "replace"))[1:-1][:200]


# ---------------------------------------------------------------------------- the rest


def _rest(images: Images) -> None:
    """Images whose records need only be whole."""
    if settings.FILE in images:
        try:
            settings.decode(images.content(settings.FILE))
        except ValueError as error:
            raise Refusal(f"{settings.FILE} cannot be read: {error}") from None
    for name in ("pipes-data.img", "fifo-data.img"):
        for data in images.records(name, "pipe_data_entry", lambda one: int(one.bytes)):
            _need(data.size <= 1 << 31 and data.bytes <= 1 << 31, f"{name} has a pipe without end")
    if waits.NAME in images:
        _need(waits.parse(images.content(waits.NAME)) is not None, f"{waits.NAME} has another form")
    for entry in images.table("memfd.img", "memfd_inode_entry"):
        _need(max(entry.uid, entry.gid) < IDS and len(_raw(entry.name)) <= NAME_MOST, "a memfd of nobody here")
    for data in images.table("tty-data.img", "tty_data_entry"):
        _need(len(data.data) <= 1 << 20, "a terminal with more unread than it can hold")
    for entry in images.table("tty-info.img", "tty_info_entry"):
        _need(entry.type in (1, 4), "a terminal of a kind that no sandbox has", "run the program without a terminal")
        _need(max(entry.uid, entry.gid) < IDS, "a terminal of nobody here")
    for _, name in images.of("pagemap-shmem"):
        _pagemap(images, name, 1 << 62)
    for entry in images.table("seccomp.img", "seccomp_entry"):
        for number, one in enumerate(entry.seccomp_filters):
            _need(0 < len(one.filter) <= 4096 * 8 and not len(one.filter) % 8, "a filter of calls without a program")
            _need(not one.HasField("prev") or one.prev < number, "filters of calls without a first one")
