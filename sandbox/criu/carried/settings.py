"""What programs have set for themselves and CRIU does not carry: read while they are frozen, put back before they run.

Guarantee: `read` changes nothing and sees only processes that still belong to the sandbox once a pidfd holds them.
`put_back` sets what `read` found, of the sandbox's own objects alone, sockets without any privilege of ours: settings
that came from another host set nothing that a program could not have set by itself.

The settings are an image file of their own next to CRIU's: they are stored, sent and compared like these.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import ipaddress
import os
import select
import socket
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from sandbox import procfs
from sandbox.container.alive import is_readable
from sandbox.container.pipes import own_thread
from sandbox.container.users import IDS
from sandbox.criu.carried import datagrams, socket_names
from sandbox.criu.carried.datagrams import Datagram
from sandbox.criu.carried.socket_options import differing, put_back
from sandbox.descriptors import closing
from sandbox.errors import CheckpointFailed
from sandbox.libc import descriptor_of
from sandbox.procfs import is_doomed

FILE = "settings.img"
_CAPGET, _CAPSET, _IOPRIO_SET, _IOPRIO_GET = 125, 126, 251, 252
_SETATTR, _GETATTR = 314, 315
_CAPABILITIES_3 = 0x20080522
_OF_PROCESS = 1  # ioprio: one task, by its number
_IDLE, _BEST_EFFORT = 3, 2  # classes of input and output that anybody may choose
_DEFAULT_HEADROOM = 50_000  # ns
_FIRST_TERMINAL = os.makedev(136, 0)  # /dev/pts/0
_KEEP_POLICY, _KEEP_PARAMS = 0x08, 0x10
_TIOCEXCL, _TIOCGEXCL = 0x540C, 0x80045440
_TIOCGPTN, _TIOCGPTPEER, _TIOCGPTLCK, _TIOCSPTLCK = 0x80045430, 0x5441, 0x80045439, 0x40045431  # of a master

_FRESH = {stat.S_IFIFO: 0o600, stat.S_IFSOCK: 0o777}  # the rights of what was just made

_libc = ctypes.CDLL(None, use_errno=True)


class TaskSettings(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Of one thread, by its number in the sandbox; None: as it is by default."""

    thread: int
    processors: list[int] | None = None
    io_priority: int | None = None
    headroom: int | None = None  # ns by which its timers may be late
    slice: int | None = None  # ns that it runs at a time
    nice: int | None = None  # where the first thread has another value, which CRIU gives all of them
    terminal: int = 0  # its process's controlling one, of the first thread: only compared (native/controlling.c)


class DescriptorSettings(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Of what is behind one descriptor of a process, by its number in the sandbox."""

    process: int
    number: int
    options: dict[str, bytes] = {}
    exclusive: bool = False  # a terminal that no other may open
    hung_up: bool = False  # the master of a terminal that no process has open any more: it reads EIO
    groups: list[tuple[int, str]] = []  # multicast groups that it joined, with the number of the interface
    unread: list[Datagram] = []
    owner: tuple[int, int] | None = None  # user and group in the sandbox, of a pipe or socket
    mode: int | None = None  # the rights of a pipe or socket, where a fresh one has others
    name: bytes = b""  # that the kernel gave a connected Unix stream socket


class KernelSettings(msgspec.Struct, kw_only=True, omit_defaults=True):
    """dump -> restore, on this host or another: what is set."""

    tasks: list[TaskSettings] = []
    descriptors: list[DescriptorSettings] = []

    def __bool__(self) -> bool:
        return bool(self.tasks or self.descriptors)


# ---------------------------------------------------------------------------- while frozen


class ProcessVanished(CheckpointFailed):
    """A process was killed while it was looked at: what was read may not be all."""

    def __init__(self) -> None:
        super().__init__("the processes were killed while they were dumped", hint="restore an older checkpoint")


@dataclass
class FrozenProcess:
    """A process of the sandbox that is frozen, and what it holds that may matter here."""

    pid: int  # on the host
    inner: int  # in the sandbox
    pidfd: int
    threads: dict[int, int] = field(default_factory=dict)  # number on the host -> in the sandbox
    links: list[tuple[int, str]] = field(default_factory=list)  # its descriptors and where they lead

    @functools.cached_property
    def first_id(self) -> int:
        """The user of the host that is root in its sandbox."""
        return first_id(self.pid)

    def descriptor(self, number: int) -> int:
        """A descriptor of ours of what is behind one of its. Raises OSError when it is gone."""
        return descriptor_of(self.pidfd, number)


def first_id(pid: int) -> int:
    """The user of the host that is user 0 where this process is."""
    with open(f"/proc/{pid}/uid_map", "rb") as file:
        return int(file.read().split()[1])


@contextlib.contextmanager
def looking_at(pids: list[int], tasks: Callable[[], list[int]]) -> Iterator[list[FrozenProcess]]:
    """The processes with these numbers on the host, each held by a pidfd and among `tasks` after that. Blocks.

    Raises Gone when one of them does not live, or did not live to the end.
    """
    with contextlib.ExitStack() as opened:
        held = {}
        try:
            for pid in pids:
                held[pid] = os.pidfd_open(pid)
                opened.callback(os.close, held[pid])
            if not set(pids) <= set(tasks()):  # whose number may be reused
                raise ProcessVanished
            yield sorted((_frozen(pid, pidfd) for pid, pidfd in held.items()), key=lambda one: one.inner)
        except ProcessLookupError as error:
            raise ProcessVanished from error
        for pid, pidfd in held.items():
            if is_readable(pidfd) or is_doomed(pid):
                raise ProcessVanished


def _frozen(pid: int, pidfd: int) -> FrozenProcess:
    threads = dict(_threads(pid))
    if pid not in threads:
        raise ProcessVanished
    return FrozenProcess(pid, threads[pid], pidfd, threads, procfs.descriptors(pid))


def read(processes: Iterable[FrozenProcess]) -> KernelSettings:
    """What is set in these processes. Blocks; some 10 µs a thread and 50 µs a socket."""
    processes = list(processes)
    terminals = any("/pts/" in link for one in processes for _, link in one.links)
    result = KernelSettings()
    usual = _Usual()
    observed: set[str] = set()
    groups: list[datagrams.Group] | None = None
    for one in processes:
        if groups is None:
            groups = datagrams.groups_of(one.pid)
        nice = os.getpriority(os.PRIO_PROCESS, one.pid)
        for pid, inner in one.threads.items():
            with contextlib.suppress(OSError):
                terminal = int(procfs.stat(pid)[procfs.TERMINAL]) if terminals and pid == one.pid else 0
                if (task := usual.differing(pid, inner, nice, terminal)) is not None:
                    result.tasks.append(task)
        for number, link in one.links:
            if link in observed or not link.startswith(("socket:[", "pipe:[", "/dev/pts/", "/dev/ptmx")):
                continue
            if not link.endswith("/ptmx"):  # which all masters have
                observed.add(link)
            with contextlib.suppress(OSError):
                settings = DescriptorSettings(process=one.inner, number=number)
                plain = msgspec.structs.replace(settings)
                if link.startswith("/dev/"):
                    with closing(one.descriptor(number)) as descriptor:
                        settings.exclusive = _exclusive(descriptor)
                        settings.hung_up = _is_master(descriptor) and _hung_up(descriptor)
                else:
                    _poll_at_owner(one, number, settings)
                if link.startswith("socket:["):
                    _poll(one.descriptor(number), settings, groups)
                if settings != plain:
                    result.descriptors.append(settings)
    return result


def _poll_at_owner(one: FrozenProcess, number: int, settings: DescriptorSettings) -> None:
    """Of a pipe or socket, where they differ from those of one that the sandbox's root has just made."""
    status = os.stat(f"/proc/{one.pid}/fd/{number}")
    first = one.first_id
    owner = (status.st_uid - first, status.st_gid - first)
    if not all(0 <= item < IDS for item in owner):
        return  # it is the host's: the output of a command
    if owner != (0, 0):
        settings.owner = owner
    if (mode := status.st_mode & 0o777) != _FRESH[stat.S_IFMT(status.st_mode)]:
        settings.mode = mode


def _poll(descriptor: int, settings: DescriptorSettings, groups: list[datagrams.Group]) -> None:
    with socket.socket(fileno=descriptor) as opened:
        settings.options = differing(opened)
        settings.name = socket_names.read(opened)
        if opened.family in datagrams.Levels and opened.type == socket.SOCK_DGRAM:
            settings.groups = datagrams.joined(opened, groups)
            if opened.proto == socket.IPPROTO_UDP:
                settings.unread = datagrams.unread(opened)


class _Usual:
    """What a task has with default settings: what our main thread has."""

    def __init__(self) -> None:
        self._processors = os.sched_getaffinity(os.getpid())
        self._slice = _schedule(os.getpid()).runtime  # of our main thread: others take short ones to be quick

    def differing(self, pid: int, inner: int, nice: int, terminal: int) -> TaskSettings | None:
        """`nice`: of the first thread of its process. `terminal`: of that, in it."""
        task = TaskSettings(thread=inner, terminal=terminal)
        if (own := os.getpriority(os.PRIO_PROCESS, pid)) != nice:
            task.nice = own
        processors = os.sched_getaffinity(pid)
        if processors != self._processors:
            task.processors = sorted(processors)
        if priority := _called(_IOPRIO_GET, _OF_PROCESS, pid):
            task.io_priority = priority
        headroom = int(procfs.read_bytes(f"/proc/{pid}/timerslack_ns"))
        if headroom not in (_DEFAULT_HEADROOM, 0):
            task.headroom = headroom
        schedule = _schedule(pid)
        if schedule.policy in (os.SCHED_OTHER, os.SCHED_BATCH) and schedule.runtime != self._slice:
            task.slice = schedule.runtime
        return task if task != TaskSettings(thread=inner) else None


class _Schedule(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_uint32), ("policy", ctypes.c_uint32), ("flags", ctypes.c_uint64), ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32), ("runtime", ctypes.c_uint64), ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64), ("least", ctypes.c_uint32), ("most", ctypes.c_uint32),
    ]  # fmt: skip


def _schedule(pid: int) -> Any:
    result = _Schedule()
    _called(_GETATTR, pid, ctypes.byref(result), ctypes.sizeof(result), 0)
    return result


def _exclusive(descriptor: int) -> bool:
    value = ctypes.c_int()
    return _libc.ioctl(descriptor, ctypes.c_ulong(_TIOCGEXCL), ctypes.byref(value)) == 0 and value.value != 0


def _is_master(descriptor: int) -> bool:
    number = ctypes.c_int()
    return int(_libc.ioctl(descriptor, ctypes.c_ulong(_TIOCGPTN), ctypes.byref(number))) == 0


def _hung_up(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & select.POLLHUP for _, events in poll.poll(0))


def _hang_up(master: int) -> None:
    """Open the other side of a restored master and close it, which has the kernel note that it is closed."""
    locked, unlocked = ctypes.c_int(), ctypes.c_int(0)
    _libc.ioctl(master, ctypes.c_ulong(_TIOCGPTLCK), ctypes.byref(locked))
    _libc.ioctl(master, ctypes.c_ulong(_TIOCSPTLCK), ctypes.byref(unlocked))
    peer = int(_libc.ioctl(master, ctypes.c_ulong(_TIOCGPTPEER), os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    if peer >= 0:
        os.close(peer)
    _libc.ioctl(master, ctypes.c_ulong(_TIOCSPTLCK), ctypes.byref(locked))


def _called(*arguments: Any) -> int:
    result = int(_libc.syscall(*(ctypes.c_long(one) if isinstance(one, int) else one for one in arguments)))
    if result == -1 and (error := ctypes.get_errno()):
        raise OSError(error, os.strerror(error))
    return result


# ---------------------------------------------------------------------------- next to the images


def write(directory: Path, settings: KernelSettings) -> None:
    """Put them next to the images; nothing where nothing is set."""
    if settings:
        (directory / FILE).write_bytes(msgspec.msgpack.encode(settings))


def without_terminals(directory: Path, numbers: set[int]) -> None:
    """No process has one of these terminals any more, by their numbers."""
    settings = load(directory)
    for task in settings.tasks:
        if task.terminal - _FIRST_TERMINAL in numbers:
            task.terminal = 0
    settings.tasks = [task for task in settings.tasks if task != TaskSettings(thread=task.thread)]
    (directory / FILE).unlink(missing_ok=True)
    write(directory, settings)


def load(directory: Path) -> KernelSettings:
    """What stands next to these images; none in those of an older version."""
    try:
        return decode((directory / FILE).read_bytes())
    except FileNotFoundError:
        return KernelSettings()
    except ValueError as error:
        raise CheckpointFailed(f"{FILE} is damaged: {error}", hint="the checkpoint is damaged") from error


def decode(content: bytes) -> KernelSettings:
    """The settings of an image, from wherever it came. Raises ValueError when no dump has written it."""
    try:
        result = msgspec.msgpack.decode(content, type=KernelSettings)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error
    for one in result.descriptors:
        if one.owner is not None and not all(0 <= item < IDS for item in one.owner):
            raise ValueError("an owner that no sandbox has")
        if one.mode is not None and one.mode & ~0o777:
            raise ValueError("rights that no pipe has")
        for index, name in one.groups:
            if not 0 <= index < 1 << 31 or not ipaddress.ip_address(name).is_multicast:
                raise ValueError("a group that cannot be joined")
        if one.name and not socket_names.is_autobound(one.name):
            raise ValueError("a name that no dump keeps")
        for datagram in one.unread:
            ipaddress.ip_address(datagram.sender)
            if not 0 <= datagram.port < 1 << 16 or len(datagram.content) > 1 << 16:
                raise ValueError("a datagram that cannot be sent")
    return result


def facts(directory: Path) -> dict[str, Any]:
    """The same for a comparison."""
    result = load(directory)
    listed: dict[str, Any] = {f"thread {task.thread} settings": msgspec.to_builtins(task) for task in result.tasks}
    for one in result.descriptors:
        listed[f"process {one.process} descriptor {one.number} settings"] = msgspec.to_builtins(one)
    return listed


# ---------------------------------------------------------------------------- before they run


def put_all_back(directory: Path, numbers: dict[int, int]) -> list[str]:
    """Set again what stands next to these images, in restored processes that do not run yet. Blocks.

    `numbers`: that of each process on the host, by its number in the sandbox. Returns what could not be set, in words.
    """
    settings = load(directory)
    if not settings:
        return []
    packets: list[datagrams.Packet] = []
    failed = own_thread(lambda: _put_back(settings, numbers, packets))
    if packets:
        datagrams.deliver(next(iter(numbers.values())), packets)
    return failed


def _put_back(settings: KernelSettings, numbers: dict[int, int], packets: list[datagrams.Packet]) -> list[str]:
    threads = {inner: pid for process in numbers.values() for pid, inner in _threads(process)} if settings.tasks else {}
    for task in settings.tasks:
        if task.thread in threads:
            _set_task(threads[task.thread], task)
    failed: list[str] = []
    with contextlib.ExitStack() as opened:
        descriptors = []
        for one in settings.descriptors:
            if one.process not in numbers:
                continue
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(numbers[one.process])
                opened.callback(os.close, pidfd)
                descriptors.append((one, descriptor_of(pidfd, one.number)))
                opened.callback(os.close, descriptors[-1][1])
        for one, descriptor in descriptors:
            if one.owner is not None or one.mode is not None:
                _own(one, descriptor, first_id(numbers[one.process]))
        _give_up_rights()
        for one, descriptor in descriptors:
            failed += [f"{name} of descriptor {one.number} of {one.process}" for name in _set(one, descriptor, packets)]
    return failed


def _threads(pid: int) -> list[tuple[int, int]]:
    """(number, number in the sandbox) of each; none when it is gone."""
    with contextlib.suppress(OSError):
        result = [(thread, procfs.inner_pid(f"{pid}/task/{thread}")) for thread in procfs.threads(pid)]
        return [(thread, inner) for thread, inner in result if inner is not None]
    return []


def _set_task(pid: int, task: TaskSettings) -> None:
    if task.nice is not None and 0 <= task.nice < 20:  # CRIU may not lower it in a user namespace
        os.setpriority(os.PRIO_PROCESS, pid, task.nice)
    if task.processors is not None and (there := os.sched_getaffinity(pid).intersection(task.processors)):
        os.sched_setaffinity(pid, there)
    if task.io_priority is not None and task.io_priority >> 13 in (_BEST_EFFORT, _IDLE):
        _called(_IOPRIO_SET, _OF_PROCESS, pid, task.io_priority & 0xFFFF)
    if task.headroom is not None and 0 < task.headroom < 1 << 63:
        with open(f"/proc/{pid}/timerslack_ns", "wb", buffering=0) as file:
            file.write(str(task.headroom).encode())
    if task.slice is not None and 0 < task.slice < 1 << 63:
        schedule = _schedule(pid)
        if schedule.policy in (os.SCHED_OTHER, os.SCHED_BATCH):
            schedule.size, schedule.runtime = ctypes.sizeof(schedule), task.slice
            schedule.flags &= 1  # reset on fork; what else is set stays
            _called(_SETATTR, pid, ctypes.byref(schedule), 0)


def _set(one: DescriptorSettings, descriptor: int, packets: list[datagrams.Packet]) -> list[str]:
    if one.exclusive and os.isatty(descriptor):
        _libc.ioctl(descriptor, ctypes.c_ulong(_TIOCEXCL), 0)
    if one.hung_up and _is_master(descriptor) and not _hung_up(descriptor):
        _hang_up(descriptor)
    if not one.options and not one.groups and not one.unread and not one.name:
        return []
    try:
        with socket.socket(fileno=os.dup(descriptor)) as opened:
            failed = put_back(opened, one.options) + socket_names.put_back(opened, one.name)
            if opened.family in datagrams.Levels and opened.type == socket.SOCK_DGRAM:
                failed += datagrams.join(opened, one.groups)
                packets += datagrams.packets(opened, one.unread)
            return failed
    except OSError:  # no socket any more: it was closed on the way
        return []


def _own(one: DescriptorSettings, descriptor: int, first: int) -> None:
    """Owner and rights of a pipe or socket that is the sandbox's, and not the host's."""
    status = os.fstat(descriptor)
    if stat.S_IFMT(status.st_mode) not in _FRESH or not first <= status.st_uid < first + IDS:
        return
    if one.owner is not None:
        os.fchown(descriptor, first + one.owner[0], first + one.owner[1])
    if one.mode is not None:
        os.fchmod(descriptor, one.mode)


def _give_up_rights() -> None:
    """Of this thread, which ends soon: what it sets then, a program could have set."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0)
    sets = (ctypes.c_uint32 * 6)()
    _called(_CAPGET, header, sets)
    sets[0] = sets[3] = 0  # the effective ones
    _called(_CAPSET, header, sets)
