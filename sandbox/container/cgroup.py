"""The control groups of one sandbox, on hosts with v1 controllers and on pure v2 ones.

Guarantee: every sandbox has exactly one v2 group, whose id is what eBPF sees, perhaps with groups of its services below
(:mod:`sandbox.container.service_groups`); limits lie where the controllers are. Groups lie below ``pagurus`` in each
hierarchy.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import os
import re
import select
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sandbox import procfs
from sandbox.container.limits import cpu_quota, set_v1, set_v2, write
from sandbox.errors import Invalid, Unsupported
from sandbox.libc import checked, library
from sandbox.messages import Limits

PARENT = os.environ.get("PAGURUS_CGROUP", "pagurus")  # another one where hosts of a cluster share a kernel, in tests
SHIMS = "_shims"
MAIN = "main"  # on v2, below the group of a sandbox with groups of services: what is in none of these
#: Of the host's own long work for sandboxes. It lies next to their parent, not in it: there it would use up the
#: parent's part of the processors, and a sandbox that wakes up for a moment would wait for its turn among all others.
ASIDE = "pagurus-aside"
ASIDE_WEIGHT = 50  # of its processor time; an ordinary process has 100, all sandboxes together at least as much
_SHARES = 1024  # what the kernel gives a group of v1, and an ordinary process
#: Of v1. A JVM looks at its limits only where it sees a group of cpuset and of cpuacct, too.
CONTROLLERS = ("memory", "cpu", "cpuacct", "cpuset", "pids", "devices")
V2_CONTROLLERS = ("memory", "cpu", "pids")
_MS_REMOUNT = 32
HELPERS = 8  # tasks of the host that work for a sandbox which is full
FREEZING = 40  # looks at whether it is frozen
SOCKET_PART = 4  # a sandbox's sockets may hold as much as this part of its memory, in addition
SHIM_TASKS = 1  # the shim itself counts in the v1 pids group that it has joined

# What Docker's default allows: making nodes (the user namespace refuses that anyway), the harmless devices, terminals.
DEVICES = (
    "c *:* m",
    "b *:* m",
    "c 1:3 rwm",  # null
    "c 1:5 rwm",  # zero
    "c 1:7 rwm",  # full
    "c 1:8 rwm",  # random
    "c 1:9 rwm",  # urandom
    "c 5:0 rwm",  # tty
    "c 5:2 rwm",  # ptmx
    "c 136:* rwm",  # pts
)

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "kib": 1 << 10, "m": 1 << 20, "mib": 1 << 20, "g": 1 << 30, "gib": 1 << 30}


AT_ONCE = 256  # processes that are killed at a time, and held by descriptors
MAX_SIZE = 1 << 62  # bytes; the kernel's own limits end there


def parse_bytes(value: str | int) -> int:
    """Bytes of ``"512MiB"``, ``"1GiB"`` or a number.

    >>> parse_bytes("1.5KiB")
    1536
    """
    if isinstance(value, int):
        size = value
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2].lower() not in _UNITS:
            raise Invalid(f"not a size: {value!r}", hint="write it like 512MiB or 1GiB")
        size = int(float(match[1]) * _UNITS[match[2].lower()])
    if not 0 < size < MAX_SIZE:
        raise Invalid(f"not a size: {value!r}", hint="write it like 512MiB or 1GiB")
    return size


class Standstill:
    """Whether all sandboxes of this host are to be frozen. The caller thaws them afterwards."""

    def __init__(self) -> None:
        self.holds: Callable[[], bool] = lambda: False


STANDSTILL = Standstill()


@dataclass(frozen=True)
class Hierarchy:
    """Where the host has mounted its control groups."""

    unified: Path
    v1: dict[str, Path] = field(default_factory=dict)  # controller -> mount point

    @property
    def pure(self) -> bool:
        return not self.v1


@functools.cache
def hierarchy() -> Hierarchy:
    """The host's control group mounts, read once."""
    unified: Path | None = None
    v1: dict[str, Path] = {}
    for _, point, kind, options in procfs.mounts():
        if kind == "cgroup2" and unified is None:
            unified = Path(point)
        elif kind == "cgroup":
            for name in options.split(","):  # the first wins: CRIU mounts others for a moment elsewhere
                if name in CONTROLLERS:
                    v1.setdefault(name, Path(point))
    if unified is None:
        raise Unsupported("no cgroup v2 hierarchy is mounted", hint="mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified")
    return Hierarchy(unified, v1)


def _weight(cpus: float | None) -> float:
    """What a sandbox weighs where processors are short: as much as it may use, in ordinary processes."""
    cores = os.cpu_count() or 1
    return min(cpus or cores, cores)


def process_budget() -> int:
    """Processes and threads that all sandboxes may have together: three quarters of what this host can have."""
    kernel = Path("/proc/sys/kernel")
    return 3 * min(int((kernel / name).read_text()) for name in ("pid_max", "threads-max")) // 4


@functools.cache
def prepare_host() -> None:
    """Make the parents of all sandboxes' groups, once per process.

    Joining a group, and entering one by clone, otherwise wait for an RCU grace period (up to 20 ms) with the lock of
    all groups held, so that one sandbox's creation delays every other's commands. The mount option costs each fork
    and exit on the host an atomic operation instead. Where the mount may not be changed, it stays slow.
    """
    host = hierarchy()
    with contextlib.suppress(OSError):
        _remount(host.unified, "favordynmods")
    for mount in (host.unified, *host.v1.values()):
        (mount / PARENT).mkdir(exist_ok=True)
    if "cpuset" in host.v1:  # of no use before it has processors and memory, which its children then begin with
        parent = host.v1["cpuset"] / PARENT
        for name in ("cpuset.cpus", "cpuset.mems"):
            write(parent / name, (parent.parent / name).read_text().strip())
        write(parent / "cgroup.clone_children", 1)
    if "pids" in host.v1:
        write(host.v1["pids"] / PARENT / "pids.max", process_budget())
    if "cpu" in host.v1:  # as much as an ordinary process on each processor: v1 gives it as much as one on all
        write(host.v1["cpu"] / PARENT / "cpu.shares", _SHARES * (os.cpu_count() or 1))
        (host.v1["cpu"] / ASIDE).mkdir(exist_ok=True)
        write(host.v1["cpu"] / ASIDE / "cpu.shares", _SHARES * ASIDE_WEIGHT // 100)
    if host.pure:
        target = set(V2_CONTROLLERS)
        for group in (host.unified, host.unified / PARENT):
            available = set((group / "cgroup.controllers").read_text().split())
            enabled = set((group / "cgroup.subtree_control").read_text().split())
            if missing := target - available:
                raise Unsupported(
                    f"cgroup controllers {', '.join(sorted(missing))} are not available in {group}",
                    hint="enable them in cgroup.subtree_control above it; `pagurus doctor` tries them",
                )
            if target - enabled:
                write(group / "cgroup.subtree_control", " ".join(f"+{name}" for name in sorted(target)))
        if "pids" in target:
            write(host.unified / PARENT / "pids.max", process_budget())
        for group in (host.unified / PARENT / SHIMS, host.unified / ASIDE):
            group.mkdir(exist_ok=True)
        if "cpu" in target:
            write(host.unified / ASIDE / "cpu.weight", ASIDE_WEIGHT)


def step_aside() -> None:
    """From now on this process has half of an ordinary one's part, where processors are short."""
    host = hierarchy()
    prepare_host()
    write((host.unified if host.pure else host.v1["cpu"]) / ASIDE / "cgroup.procs", os.getpid())


def _remount(point: Path, options: str) -> None:
    flags = ctypes.c_ulong(_MS_REMOUNT)
    checked(library.mount(None, os.fsencode(point), None, flags, options.encode()), str(point))


class Cgroup:
    """The control groups of one sandbox. `name` is unique on the host."""

    def __init__(self, name: str):
        self.name = name
        host = hierarchy()
        self.pure = host.pure
        self.path = host.unified / PARENT / name
        self.v1 = {controller: mount / PARENT / name for controller, mount in host.v1.items()}
        self._id: int | None = None
        self._unlimited = False  # known to have no limits

    # ---------------------------------------------------------------- lifetime

    def create(self) -> None:
        """Make all groups, with no limit yet but the list of devices. Fails if one exists."""
        prepare_host()
        made: list[Path] = []
        try:
            for path in (self.path, *dict.fromkeys(self.v1.values())):
                path.mkdir()
                made.append(path)
            self._limit_devices()
            if (sockets := self._sockets()) is not None:
                write(
                    sockets, -1
                )  # they are counted from now on, also those that a restore makes before it limits them
            self._unlimited = True
        except OSError:
            for path in made:
                path.rmdir()
            raise

    def exists(self) -> bool:
        return self.path.is_dir()

    @property
    def leaf(self) -> Path:
        """The v2 group that processes join which have no group of a service."""
        return self.path / MAIN if (self.path / MAIN).is_dir() else self.path

    def joined(self) -> list[Path]:
        """Groups that the shim joins: v1 groups of the sandbox; on a pure v2 host the shims' own one."""
        if self.pure:
            return [self.path.parent / SHIMS]
        return list(dict.fromkeys(self.v1.values()))

    async def remove(self) -> None:
        """Remove all groups once their last task is gone. Idempotent."""
        for path in (self.path, *dict.fromkeys(self.v1.values())):
            for attempt in range(200):
                try:
                    _remove_tree(path)
                    break
                except OSError:
                    if attempt == 199:
                        raise
                    await asyncio.sleep(0.001 * min(attempt + 1, 20))  # exiting tasks leave their group late

    # ---------------------------------------------------------------- limits

    def apply(self, limits: Limits) -> None:
        """Set all limits. After a restore, never before: CRIU needs more than the sandbox."""
        self._unlimited = False
        memory = None if limits.memory is None else parse_bytes(limits.memory)
        quota, weight = cpu_quota(limits.cpus), _weight(limits.cpus)
        if self.pure:
            set_v2(self.path, memory=memory, quota=quota, processes=limits.processes)
            write(self.path / "cpu.weight", min(max(1, int(100 * weight)), 10_000))
            return
        processes = None if limits.processes is None else limits.processes + SHIM_TASKS
        set_v1(self.v1, memory=memory, quota=quota, processes=processes)
        if (sockets := self._sockets()) is not None:
            used = int(sockets.with_name("memory.kmem.tcp.usage_in_bytes").read_text())
            write(sockets, -1 if memory is None else max(memory // SOCKET_PART, used))
        if path := self.v1.get("cpu"):
            write(path / "cpu.shares", min(max(2, int(_SHARES * weight)), 1 << 18))

    def _sockets(self) -> Path | None:
        """On v1 the buffers of TCP and UDP have a limit of their own, and none at first. On v2 they are memory."""
        path = self.v1.get("memory")
        limit = path / "memory.kmem.tcp.limit_in_bytes" if path else None
        return limit if limit is not None and limit.exists() else None

    def _limit_devices(self) -> None:
        if path := self.v1.get("devices"):
            write(path / "devices.deny", "a")
            for rule in DEVICES:
                write(path / "devices.allow", rule)

    def lift(self) -> None:
        """Remove the limits of `apply` (before a restore)."""
        if not self._unlimited:
            self.apply(Limits(cpus=None, memory=None, processes=None))
            self._unlimited = True

    # ---------------------------------------------------------------- observation

    @property
    def id(self) -> int:
        """The v2 group's inode number, which eBPF reports as cgroup id."""
        if self._id is None:
            self._id = self.path.stat().st_ino
        return self._id

    def cpu_usage_usec(self) -> int:
        """Stays exactly still while nothing in the sandbox runs."""
        text = (self.path / "cpu.stat").read_text()
        return int(text[text.index("usage_usec") + 11 :].split(None, 1)[0])

    def host_is_full(self) -> bool:
        """Whether all sandboxes together have as many processes as they may."""
        parent = (self.path if self.pure else self.v1.get("pids", self.path)).parent
        try:
            limit = (parent / "pids.max").read_text().strip()
            return limit != "max" and int((parent / "pids.current").read_text()) >= int(limit)
        except FileNotFoundError:  # no such controller
            return False

    def pids(self) -> list[int]:
        """Host pids of all processes, those of child groups included."""
        return pids_in(self.path)

    def tasks(self) -> int:
        """How many processes and threads it has, its shim included; 0 where the kernel does not count them."""
        path = self.path if self.pure else self.v1.get("pids", self.path)
        try:
            return int((path / "pids.current").read_text())
        except OSError:  # no such controller, or the sandbox is gone
            return 0

    def stragglers(self) -> list[int]:
        """Host pids of what joined on behalf of the sandbox: its shim, and what that started outside the v2 group."""
        result: set[int] = set()
        for group in self.joined():
            with contextlib.suppress(FileNotFoundError):
                result.update(map(int, (group / "cgroup.procs").read_text().split()))
        return sorted(pid for pid in result if not self.pure or _started_for(pid, self.path))

    def anonymous(self) -> int:
        """Bytes that its processes hold and no file has, which a dump has to copy; 0 where that is not counted."""
        path, name = (self.path, b"anon ") if self.pure else (self.v1.get("memory", self.path), b"total_rss ")
        with contextlib.suppress(OSError):  # no such controller, or the sandbox is gone
            result = (b"\n" + procfs.read_bytes(f"{path}/memory.stat")).partition(b"\n" + name)[2]
            return int(result.split(None, 1)[0]) if result else 0
        return 0

    def oom_kills(self) -> int:
        """Processes that the OOM killer has ended in this sandbox so far."""
        path = self.path if self.pure else self.v1.get("memory")
        return 0 if path is None else oom_kills_in(path)

    # ---------------------------------------------------------------- control

    def kill(self) -> None:
        """SIGKILL to every process, again and again until none is left that was not killed.

        Not by ``cgroup.kill``: on Linux 6.14 to 6.18 every process that is later cloned into a group by
        CLONE_INTO_CGROUP dies at once if that file was ever written (the fork compares the kill counters of two
        different groups).
        """
        killed: set[int] = set()
        while fresh := [pid for pid in self.pids() if pid not in killed][:AT_ONCE]:
            self._kill(fresh)
            killed.update(fresh)

    def _kill(self, pids: list[int]) -> None:
        with contextlib.ExitStack() as opened:
            handles = {}
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    handles[pid] = os.pidfd_open(pid)
                    opened.callback(os.close, handles[pid])
            # Another process that has got such a number in between is not listed again.
            for pid in handles.keys() & set(self.pids()):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handles[pid], signal.SIGKILL)

    def freeze(self) -> None:
        write(self.path / "cgroup.freeze", 1)

    @property
    def frozen(self) -> bool:
        """Whether its processes are frozen, or will be as soon as they leave the kernel."""
        return (self.path / "cgroup.freeze").read_text().strip() == "1"

    @contextlib.asynccontextmanager
    async def capacity(self, limits: Limits, thaw: Callable[[], None]) -> AsyncIterator[None]:
        """Within it a helper that counts against the limit finds room, though the sandbox has all its processes.

        They are frozen, so that none of them takes it, until `thaw`, which may block. What was frozen before stays so:
        a restore may hold them.
        """
        path = self.v1.get("pids")
        if path is None or limits.processes is None:
            yield
            return
        held = self.frozen
        self.freeze()
        try:
            for _ in range(FREEZING):  # one that does not stop may take it
                if "frozen 1" in (self.path / "cgroup.events").read_text():
                    break
                await asyncio.sleep(0.005)
            write(path / "pids.max", limits.processes + SHIM_TASKS + HELPERS)
            yield
        finally:
            write(path / "pids.max", limits.processes + SHIM_TASKS)
            if not held:
                await asyncio.shield(asyncio.to_thread(thaw))

    def join(self, pid: int) -> None:
        """Take a process of the host into all groups that the sandbox's processes are in."""
        for path in dict.fromkeys((self.leaf, *self.v1.values())):
            if path.is_dir():  # a sandbox that an older version made is in fewer
                write(path / "cgroup.procs", pid)

    def thaw(self) -> None:
        """Thaw it, unless everything on this host is to be frozen."""
        if not STANDSTILL.holds():
            write(self.path / "cgroup.freeze", 0)

    async def wait_empty(self) -> None:
        """Returns when no process is left."""
        fd = os.open(self.path / "cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
        watcher = select.epoll()
        try:
            watcher.register(fd, select.EPOLLPRI)
            changed = asyncio.Event()
            loop = asyncio.get_running_loop()
            while b"populated 1" in os.pread(fd, 4096, 0):
                changed.clear()
                loop.add_reader(watcher.fileno(), _take, watcher, changed)
                await changed.wait()
                loop.remove_reader(watcher.fileno())
        finally:
            asyncio.get_running_loop().remove_reader(watcher.fileno())
            watcher.close()
            os.close(fd)


def pids_in(group: Path) -> list[int]:
    """Host pids of the processes of a group and of all below it."""
    result: list[int] = []
    for one in _tree(group):
        try:
            with open(f"{one}/cgroup.procs", "rb") as procs:
                result += map(int, procs.read().split())
        except OSError:  # removed by the sandbox's end while we looked
            continue
    return result


def oom_kills_in(group: Path) -> int:
    """Processes that the OOM killer has ended in a group of the controller of memory and in all below it."""
    if hierarchy().pure:
        files = [f"{group}/memory.events"]  # it counts those below
    else:
        files = [f"{one}/memory.oom_control" for one in _tree(group)]
    rests = [procfs.read_bytes(file).partition(b"oom_kill ")[2] for file in files]
    return sum(int(rest.split(None, 1)[0]) for rest in rests if rest)


def _take(watcher: select.epoll, changed: asyncio.Event) -> None:
    watcher.poll(0)
    changed.set()


def _started_for(pid: int, group: Path) -> bool:
    """Whether `pid` is the shim of the sandbox with the v2 group `group`. All shims share one group on a v2 host."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return os.fsencode(group) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return False


def _tree(path: Path) -> Iterator[Path]:
    """This group and all below it, parents first."""
    yield path
    try:
        if os.stat(path).st_nlink == 2:  # of a group: two and its children
            return
        children = [entry.path for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return
    for child in children:
        yield from _tree(Path(child))


def _remove_tree(path: Path) -> None:
    for group in reversed(list(_tree(path))):
        try:
            group.rmdir()
        except FileNotFoundError:
            continue
