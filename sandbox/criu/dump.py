"""Dump the processes of a running sandbox with CRIU and leave them running.

Guarantee: :func:`dump` returns a complete image directory, `on_stopped` ran while every task of the sandbox was frozen,
and `on_frozen` ran exactly once after it, when the dump was already good; or it raises CheckpointFailed and the sandbox
runs on. Neither runs once :func:`dump` has returned or raised.

::

    syncfs ▸ freeze ┬▸ CRIU reads every task ┬▸ post-dump: on_frozen() ▸ thaw ▸ compare with the cgroup's tasks
                    └▸ on_stopped()          ┘
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import functools
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sandbox import paths
from sandbox.container.binds import need_in_place
from sandbox.container.shim import ShimError, going_first
from sandbox.container.spawn import no_process_left
from sandbox.container.unstoppable import StallDetector, Unstoppable, refusal, refused_traced, traced
from sandbox.criu import image_files, inotify, rpc
from sandbox.criu.carried import other_names, settings, socket_files
from sandbox.criu.carried.frozen import thaw
from sandbox.criu.carried.limits import RaisedLimits
from sandbox.criu.gate import gate, refusals, shared_memory
from sandbox.criu.gate.hints import hint_for
from sandbox.criu.gate.images import EXTERNAL_MOUNT, VIEW_MOUNT
from sandbox.criu.inside import Inside, poll
from sandbox.criu.open_files import OpenFiles, held_files
from sandbox.descriptors import closing
from sandbox.errors import CheckpointFailed, PagurusError, SandboxDead
from sandbox.procfs import descriptors, inner_pid, status
from sandbox.tree.safe_path import ACROSS_MOUNTS, openat2

if TYPE_CHECKING:
    from sandbox.container.container import Container
    from sandbox.criu.tracking.tracker import Tracker

TIMEOUT = 120.0  # seconds
MAX_SEIZE = 3  # seconds after which CRIU itself gives up freezing
ATTENTION = 0.05  # seconds between looks at whether the sandbox still lives, and its tasks stop
LAST_WORDS = 1.0  # seconds that CRIU has to notice that it was killed
GHOST_LIMIT = 1 << 30  # deleted-but-open files up to this size travel in the images (CRIU's default is 1 MiB)
LOG = "dump.log"
_CONCURRENT = concurrent.futures.ThreadPoolExecutor(16, "on-stopped")  # more than dump at once


class CapturesFull(CheckpointFailed):
    """The memory in which captures are held is full."""


class UnknownWatch(CheckpointFailed):
    """CRIU does not know the path of a file that is watched: try again with the paths of
    :mod:`sandbox.criu.inotify`.
    """


class NewObjects(CheckpointFailed):
    """System V objects that were not there when CRIU started, inside their namespace: try again with another CRIU."""


class TransientState(CheckpointFailed):
    """A state that CRIU does not dump and that passes by itself: try again, after a pause."""


class TasksEnded(TransientState):
    """Processes or threads ended while CRIU stopped them all, one after the other."""


class UnacceptedConnection(TransientState):
    """A connection waits to be accepted, which a server does as soon as it runs."""


class PartlyAcknowledged(TransientState):
    """A peer has acknowledged a part of a buffer, of which the kernel shows all: it soon does so with the rest."""


#: A pattern of CRIU's words -> an error of its own, where the caller can do something about it.
KINDS: tuple[tuple[str, type[CheckpointFailed]], ...] = (
    ("Can't dump that handle", UnknownWatch),
    ("doesn't live in IPC ns", NewObjects),
    ("No space left", CapturesFull),
    (r"Zombies with threads|Can't open \d+(/\S+)?( on procfs)?: No such (file|process)", TasksEnded),
    (r"In-flight connection|write queue on an in-flight", UnacceptedConnection),
    (r"soccr.*recv failed \(\d+, want \d+\)", PartlyAcknowledged),
)


@dataclass
class Dump:
    """A finished dump in `dir`."""

    dir: Path
    frozen_ms: float
    total_ms: float
    tasks: int
    raw_bytes: int
    held: OpenFiles = field(default_factory=OpenFiles)
    excluded: frozenset[int] = frozenset()  # numbers in the sandbox of the processes that are to be taken out of it


@dataclass(frozen=True)
class Ready:
    """A CRIU process for one dump of a container, which waits right before it stops the first task, the directory it
    will write to, and what it will leave out.
    """

    worker: rpc.CriuWorker
    request: bytes
    inside: Inside
    images: Path
    holds: bool = False  # it leaves the container frozen
    tracks: bool = False  # it can leave out pages that were not written

    def fits(self, container: Container, watched: Sequence[str]) -> bool:
        """Whether it can dump the container as that is now."""
        if container.init_pid is None or not self.worker.alive() or _unseen(self.inside):
            return False
        return self.request == _request(container, watched)

    def close(self) -> None:
        """A process that waits ends by itself; what it has written goes. Idempotent."""
        self.worker.close()
        self.inside.close()
        shutil.rmtree(self.images, ignore_errors=True)


async def ready(
    container: Container,
    cache: Path,
    images: Path,
    *,
    outside: bool = False,
    notes: int | None = None,
    freezer: int | None = None,
    mappings: int | None = None,
    watched: Sequence[str] = (),
    tracks: bool = False,
) -> Ready:
    """Start CRIU for one dump of this container, in its namespaces where it can be (:mod:`sandbox.criu.inside`).

    It will write to `images`, an empty directory on a tmpfs, which is its own from now on. `outside`: not in that of
    IPC, though there are no System V objects now; they come and go. `notes`: the inspector's map of waits. `freezer`:
    the file of the freezer, by which the sandbox is frozen at the end. `mappings`: the inspector's program that
    lists mappings. `watched`: paths of files that processes watch by inotify. `tracks`: a
    :class:`sandbox.criu.tracking.tracker.Tracker` may be given to :func:`dump`.
    """
    inside = await asyncio.to_thread(_poll, container)
    if outside:
        inside.joined = tuple(name for name in inside.joined if name != "ipc")

    with contextlib.ExitStack() as undo:
        undo.callback(inside.close)
        request = _request(container, watched)
        root = rpc.Root(cache, images, result=[notes, freezer, mappings], preload=paths.written())
        async with rpc.CriuStart.prepare(root, cgroup_namespace=False) as it:
            worker = it.worker(await _started(container, it, ("net", *inside.joined), notes))
        undo.callback(worker.close)
        try:
            await worker.start(request)
        except rpc.CriuError as error:
            raise _failed(container, error) from None
        undo.pop_all()
    return Ready(worker, request, inside, images, tracks=tracks)


async def _started(container: Container, it: rpc.CriuStart, join: tuple[str, ...], notes: int | None) -> int:
    """Start CRIU; its pid. A sandbox that has as many processes as it may is frozen while there is one more."""
    try:
        try:
            return await container.outside.start(it.argv, fds=it.fds, in_cgroup=False, join=join)
        except ShimError as error:
            if error.errno != errno.EAGAIN:
                raise
        async with container.cgroup.capacity(container.spec.limits, functools.partial(thaw, container, notes)):
            return await container.outside.start(it.argv, fds=it.fds, in_cgroup=False, join=join)
    except ShimError as error:
        if error.errno == errno.EAGAIN:
            why = no_process_left(container)
            raise CheckpointFailed(f"CRIU: {why.message}", hint=why.hint, sandbox=why.sandbox) from error
        raise _killed_concurrently(container, f"cannot enter its namespaces: {error}") from error


@going_first()
def _poll(container: Container) -> Inside:
    try:
        with closing(container.pidfd()) as pidfd:
            return poll(pidfd)
    except (ProcessLookupError, SandboxDead) as error:
        raise _killed_concurrently(container, f"cannot look into its namespaces: {error}") from error
    except OSError as error:
        raise CheckpointFailed(
            f"cannot look into its namespaces: {error}",
            hint="the sandbox keeps running; if files are the trouble, raise the daemon's LimitNOFILE",
            sandbox=container.spec.id,
        ) from error


def _unseen(inside: Inside) -> bool:
    """Whether there is what a CRIU in these namespaces would leave out."""
    return "ipc" in inside.joined and inside.has_objects()


async def dump(
    container: Container,
    directory: Path,
    process: Ready,
    *,
    on_frozen: Callable[[], None] | None = None,
    on_stopped: Callable[[], None] | None = None,
    steps: rpc.Notify | None = None,
    tracker: Tracker | None = None,
) -> Dump:
    """Dump into `directory` (exists, empty, on the file system of `process.images`). See the module.

    `on_stopped` runs on a thread of its own beside CRIU, and once more after it if CRIU has made links in the tree.
    `steps`: more to do at CRIU's notifications. `tracker`: has prepared this dump, and finishes it.
    """
    began = time.monotonic()
    frozen = FrozenWindow(container, process, on_stopped, on_frozen, (steps or {}).get("post-dump"), tracker)
    begin = (steps or {}).get("query-ext-files", frozen.begin)
    supervisor = asyncio.ensure_future(_attend(container, process.worker))
    try:
        await process.worker.call(
            process.request,
            notify={**(steps or {}), "query-ext-files": functools.partial(frozen.stopped, begin), "post-dump": frozen},
            timeout=TIMEOUT,
            log=process.images / LOG,
            kill_on_cancel=False,
        )
        finishing = asyncio.ensure_future(asyncio.to_thread(_finish, container, directory, process, frozen, began))
        try:
            return await asyncio.shield(finishing)
        finally:
            await asyncio.wait([finishing])  # cancelled or not: the directory is the caller's again
    except rpc.CriuError as error:
        if supervisor.done() and not supervisor.cancelled() and (why := supervisor.result()) is not None:
            raise why from None
        raise _failed(container, error) from None
    finally:
        supervisor.cancel()
        process.close()
        await asyncio.shield(asyncio.to_thread(frozen.settle))


@going_first()
def _finish(container: Container, directory: Path, process: Ready, frozen: FrozenWindow, began: float) -> Dump:
    """Complete and check what CRIU has written."""
    process.images.rename(directory)
    tasks = _check_complete(container, directory, frozen.pids)
    files = image_files.read(directory / "files.img", image_files.messages().file_entry)
    entries = files.entries if files is not None else []
    if files is not None and _check_terminals(container, directory, entries):
        files.write(directory / "files.img")
    if (wrong := frozen.held.unbindable()) is not None:
        raise CheckpointFailed(wrong[0], hint=wrong[1], sandbox=container.spec.id)
    refusals.check_images(directory, entries, container.spec.id)
    process.inside.complete(directory)
    settings.write(directory, frozen.settings)
    times = stats(directory)
    return Dump(
        dir=directory,
        frozen_ms=(times.get("freezing_time", 0) + times.get("frozen_time", 0)) / 1e3,  # since the first stood still
        total_ms=(time.monotonic() - began) * 1e3,
        tasks=tasks,
        raw_bytes=sum(entry.stat().st_size for entry in os.scandir(directory)),
        held=msgspec.structs.replace(frozen.held, watched=inotify.watched(entries)),
        excluded=frozen.excluded,
    )


async def _attend(container: Container, process: rpc.CriuWorker) -> Unstoppable | None:
    """End CRIU when the sandbox was killed under its hands, or when a task does not stop; then this says why.

    It may wait for a dead process until the time-out, and as the tracer of the dead keeps them from going. While it
    waits for a task to stop, nothing of it is in any task yet: killed then, it leaves them as they were.
    """
    watch = StallDetector(container, process.pid)
    while container.alive:
        if (task := watch.poll()) is not None:
            process.kill()
            return refusal(container, task)
        await asyncio.sleep(ATTENTION)
    await asyncio.sleep(LAST_WORDS)
    process.kill()
    return None


def _target(container: Container) -> int:
    """Pid 1's host pid."""
    pid = container.init_pid
    if pid is None:
        raise CheckpointFailed("the sandbox has no processes", hint="restore or start it", sandbox=container.spec.id)
    return int(pid)


class FrozenWindow:
    """What is done while the tasks are frozen: beside CRIU's dump, and between its end and the thaw."""

    def __init__(
        self,
        container: Container,
        process: Ready,
        on_stopped: Callable[[], None] | None,
        on_frozen: Callable[[], None] | None,
        last: Callable[[int], None] | None,
        tracker: Tracker | None = None,
    ):
        self._container = container
        self._inside = process.inside
        self._images = process.images
        self._last = last
        self._on_stopped = on_stopped
        self._concurrent: concurrent.futures.Future[None] | None = None
        self._on_frozen = on_frozen
        self._tracker = tracker
        self._criu = process.worker.pidfd
        self.pids: list[int] = []
        self.held = OpenFiles()
        self.settings = settings.KernelSettings()
        self.excluded: frozenset[int] = frozenset()
        self._limits = RaisedLimits()

    def stopped(self, begin: Callable[[int], None], pid: int) -> None:
        """All tasks are stopped, and CRIU has done nothing to any yet."""
        self._limits.lift(self._container.tasks)
        begin(pid)

    def begin(self, _pid: int) -> None:
        """All tasks are stopped, and nothing was read yet."""
        need_in_place(self._container)
        if self._on_stopped is not None:
            self._concurrent = _CONCURRENT.submit(going_first()(self._on_stopped))
        shared_memory.check(self._container.tasks(), self._inside, self._container.spec.id)
        if self._tracker is not None:
            self._tracker.begin(self._images, self._criu)

    def __call__(self, pid: int) -> None:
        if self._tracker is not None:
            self._tracker.check(self._images)
        if _unseen(self._inside):
            raise NewObjects("System V objects were made since", hint="try again", sandbox=self._container.spec.id)
        self.pids = self._container.tasks()
        self.excluded = frozenset(filter(None, map(inner_pid, self._container.excluded.pids())))
        _check_deleted(self._container, self._images, self.excluded)
        linked = other_names.take_away(self._container, self._images)
        if self._concurrent is not None:
            self._concurrent.result()
            if linked and self._on_stopped is not None:
                self._on_stopped()
        if self._on_frozen is not None:
            self._on_frozen()
        self.held = held_files(self._container)
        socket_files.write(self._images, self.held.sockets)
        retained = sorted(set(self.pids) - self._container.excluded.pids())
        with settings.looking_at(retained, self._container.tasks) as processes:
            refusals.check_frozen(processes, self._container.spec.id)
            self.settings = settings.read(processes)
        self._limits.amend(self._images)
        self._limits.put_back()
        if self._last is not None:
            self._last(pid)

    def settle(self) -> None:
        """Wait until nothing of it runs any more. Blocks."""
        self._limits.put_back()
        if self._concurrent is not None:
            concurrent.futures.wait([self._concurrent])


def _check_deleted(container: Container, directory: Path, excluded: frozenset[int]) -> None:
    """Refuse what is deleted and held in a way that a restore could not bring back. Only now nothing can change it."""
    images = gate.of_directory(directory)
    if "remap-fpath.img" not in images:
        return
    try:
        with gate.trees(*container.trees()) as opened:
            gate.refuse_lost(images, opened, excluded)
    except gate.ImageRefused as refusal:
        raise CheckpointFailed(refusal.reason, hint=refusal.hint, sandbox=container.spec.id) from None


def _request(container: Container, watched: Sequence[str]) -> bytes:
    protobuf = rpc.messages()
    options = rpc.options(
        images_dir=rpc.IMAGES,
        pid=_target(container),
        leave_running=True,
        ghost_limit=GHOST_LIMIT,
        network_lock=protobuf.SKIP,  # only loopback inside one sandbox: nothing outside could send
        external=[
            *(f"mnt[{target}]:{EXTERNAL_MOUNT}{number}" for number, (target, _) in enumerate(container.binds)),
            *(f"mnt[{target}]:{VIEW_MOUNT}{name}" for name, target, _ in container.views),
        ],
        irmap_scan_paths=watched,
        timeout=MAX_SEIZE,
        log_file=LOG,
    )
    return bytes(protobuf.criu_req(type=protobuf.DUMP, opts=options).SerializeToString())


def _check_complete(container: Container, directory: Path, pids: list[int]) -> int:
    """Compare the images with the cgroup as it was while frozen. Returns the number of processes.

    CRIU silently leaves out a process that is not below pid 1, and may report success when the processes were killed
    while it read them.
    """
    existing, alive = set(), 0
    written = set(os.listdir(directory))
    for entry in rpc.load(directory / "pstree.img"):
        pid = entry["pid"]
        existing.add(pid)
        if f"mm-{pid}.img" not in written:
            continue  # a zombie has no memory
        alive += 1
        needed = [f"core-{thread}" for thread in entry.get("threads", [pid])]
        for name in (*needed, f"pagemap-{pid}", f"fs-{pid}", f"ids-{pid}"):
            if f"{name}.img" not in written:
                raise _killed_concurrently(container, f"{name}.img is missing")
    if len(pids) < alive or not alive:
        raise _killed_concurrently(container, f"{len(pids)} of {alive} lived to the end")
    if len(pids) == alive:
        return alive
    outside = [f"pid {pid} ({name})" for pid in pids for number, name in [_identify(pid)] if number not in existing]
    raise CheckpointFailed(
        f"{len(pids) - alive} of {len(pids)} processes are not below pid 1 and would be lost: "
        + (", ".join(outside) or "they have ended"),
        hint="wait for them to end, then checkpoint again",
        sandbox=container.spec.id,
    )


def _check_terminals(container: Container, directory: Path, entries: list[Any]) -> bool:
    """CRIU takes a terminal of another devpts for one of the sandbox's, and then cannot restore it.

    Returns whether one was held as /dev/tty (native/current.c): it lies where its name does, then.
    """
    kinds = image_files.messages()
    terminals = {entry.tty.regf_id for entry in entries if entry.HasField("tty")}
    if not terminals:
        return False
    mounts: dict[int, str] = {}
    for path in directory.glob("mountpoints-*.img"):
        image = image_files.read(path, kinds.mnt_entry)
        mounts |= {entry.mnt_id: image_files.text(entry.mountpoint) for entry in (image.entries if image else ())}
    files = [entry.reg for entry in entries if entry.HasField("reg") and entry.id in terminals]
    if any(image_files.text(file.name) == "/dev/tty" for file in files):
        raise CheckpointFailed(
            f"{_holding(container, '/dev/tty')} is of a terminal that is closed",
            hint="end that process, or have it close the descriptor",
            sandbox=container.spec.id,
        )
    own = next((number for number, point in mounts.items() if point == "/dev/pts"), 0)
    current = [
        file for file in files
        if image_files.text(file.name).startswith("/dev/pts/") and not mounts.get(file.mnt_id, "/pts").endswith("/pts")
    ]  # fmt: skip
    for file in current:
        file.mnt_id = own
    if any(file.mnt_id > 0 and file.mnt_id not in mounts for file in files):
        raise CheckpointFailed(
            f"a terminal lies outside the sandbox: {_holding(container, '/dev/pts/')}",
            hint="run the program without a terminal, or with one of the sandbox's own",
            sandbox=container.spec.id,
        )
    return bool(current)


def _holding(container: Container, path: str) -> str:
    """The descriptors of terminals whose names begin so and that are not in the sandbox."""
    holders = [
        f"descriptor {fd} ({target}) of {pid} [{name}, pid {inside} in the sandbox]"
        for pid in container.tasks()
        for inside, name in [_identify(pid)]
        for fd, target in descriptors(pid)
        if target.startswith(path) and (target == path or not _is_there(container, target))
    ]
    return ", ".join(holders) or "its holder has ended"


def _is_there(container: Container, path: str) -> bool:
    with contextlib.suppress(OSError, PagurusError), container.inside.opened() as root:
        os.close(openat2(root, path, os.O_PATH, resolve=ACROSS_MOUNTS))
        return True
    return False


def _killed_concurrently(container: Container, what: str) -> CheckpointFailed:
    return CheckpointFailed(
        f"the processes were killed while they were dumped: {what}",
        hint="restore an older checkpoint",
        sandbox=container.spec.id,
    )


def _identify(pid: int) -> tuple[int, str]:
    """Pid inside the sandbox and name of a host pid; (0, "ended") when it is gone."""
    inner, name = inner_pid(pid), status(pid, "Name")
    return (0, "ended") if inner is None or name is None else (inner, name)


def _failed(container: Container, error: rpc.CriuError) -> CheckpointFailed:
    text = f"{error.words} {error.log}"
    if "Timeout reached" in text:
        return Unstoppable(
            f"its {len(container.tasks())} processes did not all stop within {MAX_SEIZE} s: "
            "they keep its processors busy, or start others again and again",
            hint="end some, or raise Limits.cpus; a sandbox that can start nothing any more is helped by a restore",
            sandbox=container.spec.id,
        )
    if re.search("[Uu]n?seiz", text) and (result := traced(container.tasks())) is not None:
        return refused_traced(container, *result)
    hint = hint_for(text)
    words = _with_names(str(error), container.tasks())
    return kind_of(text)(f"CRIU could not dump the processes: {words}", hint=hint, sandbox=container.spec.id)


def _with_names(text: str, pids: list[int]) -> str:
    """CRIU's message, with names behind the first mention of each process and object of this sandbox."""
    for number, holder in _holders(pids, set(re.findall(r"\b\d{3,}\b", text))).items():
        text = _behind(text, number, holder)
    for pid in pids:
        inside, name = _identify(pid)
        text = _behind(text, str(pid), f"{name}, pid {inside} in the sandbox")
    if "fsnotify" in text:
        watching = [f"descriptor {fd} of {name}" for pid in pids for fd, name in _watches(pid)]
        text += f" | watches: {', '.join(watching) or 'gone'}"
    return text


def _behind(text: str, number: str, reported: str) -> str:
    """`reported` behind the first mention of a number. It may hold what a program calls itself."""
    return re.sub(rf"\b{number}\b", lambda result: f"{result[0]} [{reported}]", text, count=1)


def _holders(pids: list[int], numbers: set[str]) -> dict[str, str]:
    """Who holds the sockets and pipes with these inode numbers."""
    result = {}
    for pid in pids:
        for fd, target in descriptors(pid):
            kind, _, rest = target.partition(":[")
            if (number := rest.rstrip("]")) in numbers and kind in ("socket", "pipe"):
                result[number] = f"{kind}, descriptor {fd} of {_identify(pid)[1]}"
    return result


def _watches(pid: int) -> list[tuple[int, str]]:
    name = _identify(pid)[1]
    return [(fd, name) for fd, target in descriptors(pid) if target == "anon_inode:inotify"]


def stats(directory: Path) -> dict[str, int]:
    """CRIU's own measurements of a dump, in microseconds."""
    try:
        return dict(rpc.load(directory / "stats-dump")[0]["dump"])
    except (OSError, KeyError, IndexError):
        return {}


def kind_of(words: str) -> type[CheckpointFailed]:
    """The error for what CRIU and its log say."""
    return next((kind for pattern, kind in KINDS if re.search(pattern, words)), CheckpointFailed)
