"""Bring the processes of a checkpoint back with CRIU, in place or under another identity.

Guarantee: :func:`restore` returns the host pid of a complete, attached, held process tree, or raises RestoreFailed and
leaves no process of it behind. The images given are never changed.

CRIU runs inside the sandbox's cgroups and in a cgroup namespace rooted there, so the restored tasks need no move, but
for those of services with groups of their own: CRIU moves each before it makes its memory (service_groups.py). One
may wait next to a living sandbox for its next restore: outside the groups, so that it is no part of the sandbox, but in
its cgroup namespace, and it sees what is mounted at the root later (native/mounts.c).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sandbox import paths
from sandbox.container import namespaces
from sandbox.container.cgroup import hierarchy
from sandbox.container.shim import going_first
from sandbox.criu import lingering, rpc
from sandbox.criu.carried import amend, memory, other_names, settings, socket_files, sysv
from sandbox.criu.gate.images import EXTERNAL_MOUNT, VIEW_MOUNT
from sandbox.criu.rewrite import AdaptedImages
from sandbox.descriptors import closing
from sandbox.errors import RestoreFailed

if TYPE_CHECKING:
    from sandbox.container.container import Container

TIMEOUT = 120.0
LOG = "restore.log"
STANDBY_SINKS = 2  # pipes to the outside that a waiting CRIU can restore: two outputs
IFF_UP = 1

HINTS: tuple[tuple[str, str], ...] = (
    (
        r"bad size|bad mode|build-id|Can't open file|can't open file",
        "a file that a process holds differs from the checkpoint's: restore a checkpoint that captured both",
    ),
    (r"Can't bind|Address already in use", "a port or socket path is taken: a port may be free again in a minute"),
    (r"fork|pids|Resource temporarily", "the sandbox's limits are too low for its processes"),
    (r"No space left|Cannot allocate", "not enough memory on the host"),
)


@dataclass(frozen=True)
class RestoreProcess:
    """CRIU, and the number in it of each descriptor that it inherited, by CRIU's key."""

    worker: rpc.CriuWorker
    inherited: dict[str, int]


@dataclass(frozen=True)
class WarmCriu:
    """A CRIU process for one restore of a container, in its network namespace, with `sinks` pipes in hand."""

    worker: rpc.CriuWorker
    sinks: int
    images: Path  # the directory with the directories of images that it can restore

    def process(self, pipes: list[int]) -> RestoreProcess:
        """`pipes` are the ones of :func:`sandbox.criu.rewrite.outside_pipes`, no more than there are sinks."""
        return RestoreProcess(self.worker, {f"pipe:[{pipe}]": rpc.FIRST_FD + index for index, pipe in enumerate(pipes)})

    def fits(self, container: Container, images: Path, pipes: list[int]) -> bool:
        """Whether it can restore: it lives, has the pipes, sees the images and what is mounted at the root. Blocks."""
        own = f"/proc/{self.worker.pid}/root"
        with contextlib.suppress(OSError):
            return (
                len(pipes) <= self.sinks
                and self.worker.alive()
                and os.path.samestat(os.stat(own + rpc.IMAGES), os.stat(images))
                and os.stat(own + rpc.SANDBOX).st_dev == os.stat(container.trees()[0]).st_dev
            )
        return False


async def wait(container: Container, cache: Path, images: Path, notes: int | None = None) -> WarmCriu:
    """A CRIU process next to the living container, for its next restore. Raises Refused where the shim is too old.

    It will find directories of images in `images`, which exists. `notes`: the map in which the inspector notes when
    waits end (:mod:`sandbox.criu.carried.waits`).
    """
    return await _spawn(container, cache, images, STANDBY_SINKS, notes, waits=True)


@contextlib.asynccontextmanager
async def worker(
    container: Container,
    cache: Path,
    images: Path,
    pipes: list[int],
    waiting: WarmCriu | None,
    notes: int | None = None,
) -> AsyncIterator[RestoreProcess]:
    """A CRIU process inside the container's cgroups, with what the restored processes need from outside in hand.

    The `waiting` one where it will do, else one that starts up while the caller writes the images.
    """
    if waiting is not None and not await asyncio.to_thread(_joined, waiting, container, images, pipes):
        waiting.worker.close()
        waiting = None
    if waiting is None:
        waiting = await _spawn(container, cache, images, len(pipes), notes, waits=False)
    try:
        yield waiting.process(pipes)
    finally:
        waiting.worker.close()


@going_first()
def _joined(waiting: WarmCriu, container: Container, images: Path, pipes: list[int]) -> bool:
    """Whether the process fits, and is in the container's groups now."""
    if not waiting.fits(container, images, pipes):
        return False
    try:
        container.cgroup.join(waiting.worker.pid)
    except OSError:  # it has died
        return False
    return True


async def _spawn(
    container: Container, cache: Path, images: Path, sinks: int, notes: int | None, *, waits: bool
) -> WarmCriu:
    fds: list[int] = []
    try:
        for _ in range(sinks):
            fds.append(await container.outside.sink())
        composed = container.spec.composition is not None
        preload, onward = paths.rooted() if composed else paths.terminals(), container.groups.onward()
        groups = container.groups.places() if composed or onward else {}
        root = rpc.Root(cache, images, container.root, _mounted(container), [notes], preload, groups, onward)
        if not waits:
            await asyncio.to_thread(container.groups.gather)
        async with rpc.CriuStart.prepare(root, fds, cgroup_namespace=not waits) as it:
            # One that waits is outside the group, whose namespace it must have: pid 1's.
            join = ("cgroup",) if waits else ()
            pid = await container.outside.start(it.argv, fds=it.fds, in_cgroup=True, join=join, waits=waits)
            worker = it.worker(pid)
        return WarmCriu(worker, sinks, images)
    finally:
        for fd in fds:
            os.close(fd)


def _mounted(container: Container) -> list[Path]:
    """What the shim has of the host that CRIU is to mount: the binds, then the views of the kernel."""
    return [*(place for _, place in container.binds), *(place for _, _, place in container.views)]


async def restore(
    container: Container,
    images: AdaptedImages,
    process: RestoreProcess,
    hold: RestoreHold,
    before_hold: Callable[[], None] | None = None,
) -> int:
    """Restore the adapted images; returns pid 1's pid after `container.attach`. Nothing runs until `hold` lets it.

    `before_hold` is called on a worker thread right before it holds.
    """
    protobuf = rpc.messages()
    own_network = images.own_network
    images_dir = f"{rpc.IMAGES}/{images.directory.name}"
    options = rpc.options(images_dir=images_dir, root=rpc.SANDBOX, rst_sibling=True, log_file=LOG)
    keys = [f"{EXTERNAL_MOUNT}{number}" for number in range(len(container.binds))]
    keys += [f"{VIEW_MOUNT}{name}" for name, _, _ in container.views]
    options.external.extend(f"mnt[{key}]:{rpc.MOUNTS}/{number}" for number, key in enumerate(keys))
    if images.grouped:
        options.manage_cgroups_mode, options.cgroup_yard = protobuf.CG_NONE, rpc.GROUPS
    if own_network:
        options.empty_ns = namespaces.IDS["net"]
    for key, number in process.inherited.items():
        options.inherit_fd.add(key=key, fd=number)
    try:
        if images.ports and not own_network:
            await asyncio.to_thread(lingering.end, container.netns, images.ports)
        response = await process.worker.call(
            protobuf.criu_req(type=protobuf.RESTORE, opts=options).SerializeToString(),
            notify=_notify(container, images, process, hold, before_hold),
            timeout=TIMEOUT,
            log=images.directory / LOG,
            kill_on_cancel=True,
        )
        pid = int(response.restore.pid)
        await container.attach(pid)
    except rpc.CriuError as error:
        await _end(container, images)
        text = f"{error.words} {error.log}"
        hint = next((hint for pattern, hint in HINTS if re.search(pattern, text)), "")
        raise RestoreFailed(
            f"CRIU could not restore the processes: {error}", hint=hint, sandbox=container.spec.id
        ) from None
    except BaseException:
        await _end(container, images)
        raise
    return pid


async def _end(container: Container, images: AdaptedImages) -> None:
    """Nothing of a restore that failed stays."""
    await container.kill()
    await asyncio.to_thread(other_names.drop, container, images.directory)


def _notify(
    container: Container,
    images: AdaptedImages,
    process: RestoreProcess,
    hold: RestoreHold,
    before_hold: Callable[[], None] | None,
) -> dict[str, Callable[[int], None]]:
    init, times = 0, amend.Times()
    loop = asyncio.get_running_loop()

    def namespaces(pid: int) -> None:
        nonlocal init, times
        init, times = pid, amend.times(container, images.recreated)
        other_names.link_again(container, images.directory)
        if images.own_network:
            _loopback(pid)
            moving = asyncio.run_coroutine_threadsafe(container.move_network(pid), loop)
            moving.result(TIMEOUT)
            for follow in container.followers.values():
                follow(container.netns)

    def finish(_pid: int) -> None:
        socket_files.put_back(images.directory, init, container.spec.uid_base)
        amend.set_times(init, times)
        amend.remove_segments(init, images.removed_segments)
        numbers = amend.numbers(container)
        if images.fill is not None:
            memory.write(images.fill, numbers, container.spec.id)
        sysv.put_back(images.directory, init)
        settings.put_all_back(images.directory, numbers)
        hold.leave(process.worker.pid)
        if before_hold is not None:
            before_hold()
        hold.hold()

    return {"setup-namespaces": namespaces, "pre-resume": finish}


class RestoreHold:
    """Holds a restored tree before its first instruction, so that it runs as a whole, and can be dumped again.

    CRIU lets go of one task after another, and would give up where one of them has just ended the next.

    The v2 freezer, not SIGSTOP: a stop would send SIGCHLD to every parent, and the handlers would run. Frozen tasks
    let CRIU seize them, but not run its parasite; so it is thawed once all are seized (`seized`) and frozen again
    before they are let go (`hold`; in a dump by native/waits.c, by way of `file`, once the calls are taken up again).
    """

    def __init__(self, container: Container):
        self._file = container.cgroup.path / "cgroup.freeze"

    @contextlib.contextmanager
    def file(self) -> Iterator[int]:
        """A descriptor for who holds the tree instead."""
        with closing(os.open(self._file, os.O_WRONLY | os.O_CLOEXEC)) as fd:
            yield fd

    def leave(self, criu_pid: int) -> None:
        """Take CRIU itself out of the group that is about to be frozen."""
        (hierarchy().unified / "cgroup.procs").write_text(str(criu_pid))

    def hold(self, _pid: int = 0) -> None:
        self._file.write_text("1")

    def seized(self, _pid: int = 0) -> None:
        self._file.write_text("0")

    release = seized


def _loopback(pid: int) -> None:
    """Set up the new network namespace of `pid` as the container's pool does: loopback up, low ports allowed."""
    with closing(os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)) as fd:
        namespaces.inside(fd, namespaces.IDS["net"], _configure)


def _configure() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh22x", b"lo", IFF_UP)
        fcntl.ioctl(control, 0x8914, request)  # SIOCSIFFLAGS
    Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").write_text("0")
    Path("/proc/sys/net/ipv4/ping_group_range").write_text("0 4294967294")
