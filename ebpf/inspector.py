"""What the tasks of a sandbox did to the operating system since its mark.

::

    inspector = Inspector.load()
    inspector.watch(cgroup_id)             tasks of this cgroup and of all cgroups below it count from now on
    inspector.mark(cgroup_id)              everything up to now is captured
    inspector.read(cgroup_id)              Effects since the mark: a read of mapped memory
    inspector.taint(cgroup_id, "why")      this half must be captured whatever is seen, until its next mark
    inspector.exclude(cgroup_id, pid)      this process is the agent's own, and no survivor
    inspector.tasks(cgroup_id)             what each survivor counts for

The caller marks the file half before it snapshots the tree (an effect in between is counted once more), the process
half while the sandbox is frozen for its dump, and taints the half whose capture failed.

The hooks are attached while at least one sandbox is watched, and some seconds longer: a host without any pays nothing.

Guarantee: an effect is in the counts, or the Effects say `overflow` or `unknown`. The counts are a read of mapped
memory. Under a lock, a read also empties the ring of explanations, which may be lost, and are counted when they are;
no verdict depends on one. Where IPC objects were changed and none was there at the mark, it walks over the tasks of the
host; where an excluded process wrote to pipes, it looks at what waits in those that older processes have open.

Nothing is pinned: the programs end with the daemon. Its successor watches what it adopts, whose tasks then count as
new, and taints both halves, so that the gap gets the safest verdict.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import stat
import termios
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from ebpf import explain, layout, libbpf, probe
from sandbox import hints, paths
from sandbox.descriptors import closing
from sandbox.errors import NotFound, Unsupported
from sandbox.libc import descriptor_of
from sandbox.messages import Effects

_TAINT_FILES, _TAINT_PROCESSES = 1, 2
_IPC_UNKNOWN = layout.IPC_UNKNOWN
_ITERATORS = ("sweep", "tell")
_RETAINED_REASONS = 16
LINGER = 10.0  # seconds: attaching and detaching take milliseconds, which the next sandbox need not wait for
_SWEEPS = 8  # tries to find all threads of an agent; one that is not found counts


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much the maps hold. Too small costs precision or explanations, never an effect."""

    sandboxes: int = 1024  # watched at once; one more is refused, and read() then says `unknown`
    inodes: int = 65536  # touched since the marks; the least recently used lose the netting of temporary files
    numbers: int = 16384  # of tasks, and of their ports, whose age is known; what is done to others counts
    explanations: int = 1 << 20  # bytes of the ring buffer: a power of two, at least a page


@dataclass(frozen=True)
class SurvivorObserved:
    """A task that lives in a sandbox, and what it counts for."""

    pid: int  # of its process, as the daemon numbers it
    tid: int
    name: str  # of its process
    new: bool  # born since the mark
    ran: bool  # older than the mark and made progress since, or is on a processor
    spoke: bool = False  # wrote to a pipe or socket that another process may hold


class Inspector:
    """The kernel half, loaded. One per host daemon; safe to use from several threads."""

    def __init__(
        self,
        loaded: libbpf.Object,
        sizes: Sizes,
        missing: dict[str, str],
        iterators: dict[str, int],
        linger: float = LINGER,
    ):
        self._object = loaded
        self._sizes = sizes
        self.missing = missing  # programs that this kernel did not take, with what is lost without them
        self._iterators = iterators
        self._lock = threading.Lock()
        self._linger = linger
        self._detaching: threading.Timer | None = None
        self._slots: dict[int, int] = {}
        self._reasons: dict[int, deque[str]] = {}
        self._why: dict[int, dict[int, str]] = {}
        stride = (ctypes.sizeof(layout.SandboxLayout) + 7) & ~7
        length = -(-(stride * (sizes.sandboxes + 1)) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = mmap.mmap(loaded.map_fd("sandboxes"), length, mmap.MAP_SHARED)
        self._table = [
            layout.SandboxLayout.from_buffer(self._memory, stride * slot) for slot in range(sizes.sandboxes + 1)
        ]
        self._slots_fd = loaded.map_fd("slots")
        self._callback = libbpf.RING_CALLBACK(self._explained)
        self._ring: int | None = libbpf.library().ring_buffer__new(
            loaded.map_fd("explanations"), self._callback, None, None
        )

    # ------------------------------------------------------------------ life

    @classmethod
    def load(cls, *, sizes: Sizes | None = None, path: Path | None = None, linger: float = LINGER) -> Inspector:
        """Load, and attach for a moment. Raises Unsupported, with the verifier's words, where the kernel refuses.

        `linger`: seconds for which the hooks stay attached after the last sandbox.
        """
        sizes = sizes or Sizes()
        try:
            loaded, missing = probe.load(path or paths.inspector_object(), lambda new: _resize(new, sizes))
        except (OSError, FileNotFoundError) as error:
            raise Unsupported(
                f"the inspector does not load: {error}",
                hint="run `pagurus doctor`; it needs root, BTF (/sys/kernel/btf/vmlinux) and libbpf 1.x",
            ) from error
        size = loaded.map_shape("sandboxes")[1]
        if size != ctypes.sizeof(layout.SandboxLayout):
            raise Unsupported(
                f"the inspector object is of another version ({size} bytes a sandbox, "
                f"not {ctypes.sizeof(layout.SandboxLayout)})",
                hint=hints.parts("native"),
            )
        inspector = cls(loaded, sizes, missing, {name: loaded.attach_iterator(name) for name in _ITERATORS}, linger)
        inspector._attach()  # a kernel that refuses says so now
        inspector._detach()
        inspector._sweep()  # notes how deep in pid namespaces we are
        return inspector

    def close(self) -> None:
        """Detach and unload. Idempotent."""
        with self._lock:
            if self._detaching is not None:
                self._detaching.cancel()
                self._detaching = None
            if self._ring:
                libbpf.library().ring_buffer__free(self._ring)
                self._ring = None
            self._slots.clear()
            self._table = []
            self._object.close()

    def __enter__(self) -> Inspector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def notes(self) -> int:
        """Descriptor of the map that says when waits end, to restart them after a dump."""
        return self._object.map_fd("waits")

    @property
    def mappings(self) -> int:
        """Descriptor of the iterator program that lists the mappings of a process, for its dump."""
        return self._object.program_fd("tell_mappings")

    # ------------------------------------------------------------------ sandboxes

    def watch(self, cgroup_id: int, *, contained: bool = True) -> None:
        """Count what tasks of this cgroup, or of one below it, do. Tasks already in it count as new.

        `contained`: the sandbox has a pid namespace one below ours. Its pid 1 is not a survivor, and tasks of the
        cgroup that have not entered it, or have not executed a program in it yet, are the host's own helpers.
        """
        with self._lock:
            if cgroup_id in self._slots:
                return
            taken = set(self._slots.values())
            slot = next((n for n in range(1, len(self._table)) if n not in taken), None)
            if slot is None:
                raise Unsupported(
                    f"{self._sizes.sandboxes} sandboxes are watched already", hint="raise Sizes.sandboxes"
                )
            if not self._slots:
                self._attach()  # before there is anything that they could miss
            state = self._table[slot]
            files_epoch, procs_epoch = state.files_epoch + 1, state.procs_epoch + 1
            ctypes.memset(ctypes.addressof(state), 0, ctypes.sizeof(state))
            state.files[files_epoch % layout.BUCKETS].epoch = state.files_epoch = files_epoch
            state.procs[procs_epoch % layout.BUCKETS].epoch = state.procs_epoch = procs_epoch
            state.init_level = self._table[0].init_level if contained else 0
            state.ipc_before = _IPC_UNKNOWN
            state.cgroup_id = cgroup_id
            libbpf.update(self._slots_fd, cgroup_id, slot)
            self._slots[cgroup_id] = slot
            self._reasons[cgroup_id] = deque(maxlen=_RETAINED_REASONS)
            self._why[cgroup_id] = {}
            self._sweep()

    def unwatch(self, cgroup_id: int) -> None:
        """Stop counting. Unknown cgroups are fine."""
        with self._lock:
            slot = self._slots.pop(cgroup_id, None)
            self._reasons.pop(cgroup_id, None)
            self._why.pop(cgroup_id, None)
            if slot is not None:
                libbpf.delete(self._slots_fd, cgroup_id)
                self._table[slot].cgroup_id = 0
                if not self._slots and self._detaching is None:
                    self._detaching = threading.Timer(self._linger, self._detach_unused)
                    self._detaching.daemon = True
                    self._detaching.start()

    def mark(self, cgroup_id: int, files: bool = True, processes: bool = True) -> None:
        """Everything up to now is captured, or is being captured and taint() follows when that fails."""
        with self._lock:
            state = self._state(cgroup_id)
            if state is None:
                return
            if processes and state.untracked:
                state.untracked = 0
                self._sweep()
            if files:
                state.tainted &= ~_TAINT_FILES
                following = state.files_epoch + 1
                _clear(state.files[following % layout.BUCKETS], following)
                state.files_epoch = following
            if processes:
                state.tainted &= ~_TAINT_PROCESSES
                ended = state.procs[state.procs_epoch % layout.BUCKETS]
                following = state.procs_epoch + 1
                _clear(state.procs[following % layout.BUCKETS], following)
                state.procs_epoch = following
                if ended.ipc or state.ipc_before == _IPC_UNKNOWN:
                    state.ipc_before = self._census(cgroup_id)[1]
            self._drain()
            self._reasons[cgroup_id].clear()

    def taint(self, cgroup_id: int, reason: str, files: bool = True, processes: bool = True) -> None:
        """The given halves must be captured whatever is seen, until they are marked again."""
        with self._lock:
            state = self._state(cgroup_id)
            if state is None:
                return
            for target, bit in ((files, _TAINT_FILES), (processes, _TAINT_PROCESSES)):
                if target:
                    state.tainted |= bit
                    self._why[cgroup_id][bit] = reason

    def report(self, cgroup_id: int, line: str) -> None:
        """An explanation of what no program of the sandbox did."""
        with self._lock:
            if cgroup_id in self._reasons:
                self._drain()  # what came before it stands before it
                self._reasons[cgroup_id].append(line)

    def exclude(self, cgroup_id: int, pid: int) -> None:
        """This process is the agent's own: none of its threads, of now or later, is a survivor.

        What it does to files, to IPC objects and to other processes still counts, and so do the processes that it
        starts. Of its sockets only those of the network do not: their other end is not in a
        checkpoint that leaves the agent out. It lasts as long as the process, also when that executes another program.
        """
        with self._lock:
            slot = self._slots.get(cgroup_id)
            if slot is None:
                raise NotFound(f"no sandbox with cgroup {cgroup_id} is watched", hint="watch() it first")
            host = self._table[0]
            host.target_slot, host.target_pid = slot, pid
            try:
                for _ in range(_SWEEPS):  # one of its threads may start another behind the sweep's back
                    self._sweep()
                    if all(observed.pid != pid for observed in self._census(cgroup_id)[0]):
                        break
            finally:
                host.target_pid = 0

    def tasks(self, cgroup_id: int) -> list[SurvivorObserved]:
        """All tasks that count, one by one. Costs a walk over the tasks of the host."""
        with self._lock:
            return self._census(cgroup_id)[0]

    def ipc_objects(self, cgroup_id: int) -> int:
        """How many System V objects and message queues there are now; -1 when that is unknown."""
        with self._lock:
            result = self._census(cgroup_id)[1]
        return -1 if result == _IPC_UNKNOWN else result

    def read(self, cgroup_id: int) -> Effects:
        """What was done since the mark. Never raises for a cgroup that is not watched: it is `unknown`."""
        state = self._state(cgroup_id)
        if state is None:
            return Effects(unknown=True, reasons=["this sandbox is not watched"])
        files = state.files[state.files_epoch % layout.BUCKETS]
        procs = state.procs[state.procs_epoch % layout.BUCKETS]
        with self._lock:
            self._drain()
            reasons = list(self._reasons.get(cgroup_id, ()))
            ipc_gone = bool(procs.ipc) and state.ipc_before == 0 and self._census(cgroup_id)[1] == 0
            last_seen = self._last_seen(cgroup_id, state, procs)
        return self._effects(state, files, procs, self._why.get(cgroup_id, {}), reasons, ipc_gone, last_seen)

    def statistics(self) -> dict[str, int]:
        """Sandboxes watched, tasks seen in them, explanations lost."""
        states = [self._table[slot] for slot in list(self._slots.values())]
        return {
            "sandboxes": len(states),
            "tasks": sum(state.alive for state in states),
            "lost_events": sum(state.lost for state in states),
        }

    # ------------------------------------------------------------------ parts

    def _state(self, cgroup_id: int) -> layout.SandboxLayout | None:
        slot = self._slots.get(cgroup_id)
        return None if slot is None else self._table[slot]

    @staticmethod
    def _effects(  # type: ignore[no-untyped-def]
        state, files, procs, why: dict[int, str], reasons: list[str], ipc_gone: bool, last_seen: int
    ) -> Effects:
        temporary = files.temporary
        fresh, alive = _signed(procs.fresh), max(0, _signed(state.alive))
        older = max(0, alive - max(0, fresh))
        # Tasks on a processor now cannot be distinguished by age; where none is new they are all older than the mark.
        running = max(0, _signed(state.running)) if fresh <= 0 else 0
        return Effects(
            data_writes=max(0, _signed(files.data)),
            name_changes=max(0, files.creates - temporary) + max(0, files.removes - temporary) + files.renames,
            metadata_changes=max(0, _signed(files.metadata)),
            mounts=procs.mounts,
            forks=procs.forks,
            execs=procs.execs,
            exits=procs.exits,
            ipc_changes=(0 if ipc_gone else procs.ipc) + procs.keys,
            listens=procs.listens,
            foreign_writes=procs.foreign,
            signals=procs.signals,
            survivors=alive,
            survivors_new=max(0, fresh),
            survivors_ran=min(older, max(0, _signed(procs.ran)) + running),
            survivors_gone=procs.gone,
            temporary=temporary,
            overflow=state.untracked > 0,
            unknown=files.unknown > 0 or procs.unknown > 0,
            lost_events=state.lost,
            reasons=reasons,
            channels=procs.channels + last_seen,
            tmpfs_writes=procs.tmpfs,
            uring_requests=files.uring,
            must_files=why.get(_TAINT_FILES, "marked before a restart") if state.tainted & _TAINT_FILES else "",
            must_processes=(
                why.get(_TAINT_PROCESSES, "marked before a restart") if state.tainted & _TAINT_PROCESSES else ""
            ),
            times_set=files.hidden,
            times_now=files.touched,
            excluded=max(0, _signed(state.excluded)),
        )

    def _last_seen(self, cgroup_id: int, state, procs) -> int:  # type: ignore[no-untyped-def]
        """How many of the pipes and sockets that excluded processes wrote to hold something for a survivor."""
        reported = set(procs.reported) - {0}
        if not reported or _signed(state.alive) <= max(0, _signed(procs.fresh)):  # no older one lives
            return 0
        held: set[int] = set()
        for pid in {observed.pid for observed in self._census(cgroup_id)[0]}:
            with contextlib.suppress(OSError):  # it ended since, which counts by itself
                held |= _waiting(pid, reported)
        return len(held)

    def _attach(self) -> None:
        for program in self._object.programs:
            if program not in _ITERATORS:
                self._object.attach(program)

    def _detach(self) -> None:
        for program in self._object.programs:
            if program not in _ITERATORS:
                self._object.detach(program)

    def _detach_unused(self) -> None:
        with self._lock:
            if self._detaching is not None:  # it was not closed since
                self._detaching = None
                if not self._slots:
                    self._detach()

    def _sweep(self) -> None:
        libbpf.run_iterator(self._iterators["sweep"])

    def _census(self, cgroup_id: int) -> tuple[list[SurvivorObserved], int]:
        """The tasks that count, and how many IPC objects there are (or _IPC_UNKNOWN). With the lock held."""
        slot = self._slots.get(cgroup_id)
        if slot is None:
            return [], _IPC_UNKNOWN
        state = self._table[slot]
        self._table[0].target_slot = slot
        state.ipc_space = state.ipc_now = 0
        written = libbpf.run_iterator(self._iterators["tell"])
        size = ctypes.sizeof(layout.CensusLayout)
        result = [layout.CensusLayout.from_buffer_copy(written, at) for at in range(0, len(written) - size + 1, size)]
        observed = [
            SurvivorObserved(
                one.pid, one.tid, one.comm.decode(errors="replace"), bool(one.fresh), bool(one.ran), bool(one.spoke)
            )
            for one in result
        ]
        return observed, state.ipc_now if state.ipc_space else _IPC_UNKNOWN

    def _drain(self) -> None:
        if self._ring:
            libbpf.library().ring_buffer__consume(self._ring)

    def _explained(self, _context: object, data: int, _size: int) -> int:
        event = layout.ExplanationLayout.from_address(data)
        retained = self._reasons.get(event.cgroup_id)
        if retained is not None:
            retained.append(explain.line(event))
        return 0


def _waiting(pid: int, reported: set[int]) -> set[int]:
    """Which of these inodes of pipes and sockets a process has open, with bytes waiting in them."""
    result = set()
    with closing(os.pidfd_open(pid)) as process, os.scandir(f"/proc/{pid}/fd") as descriptors:
        for entry in descriptors:
            with contextlib.suppress(OSError):  # closed since
                status = os.stat(entry.path)
                talks = stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode)
                if talks and status.st_ino in reported and _holds_bytes(process, int(entry.name)):
                    result.add(status.st_ino)
    return result


def _holds_bytes(process: int, number: int) -> bool:
    """Whether bytes wait in this descriptor of a process, or that is unknown."""
    try:
        with closing(descriptor_of(process, number)) as descriptor:
            return any(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
    except OSError:
        return True


def _clear(bucket: ctypes.Structure, epoch: int) -> None:
    ctypes.memset(ctypes.addressof(bucket), 0, ctypes.sizeof(bucket))
    bucket.epoch = epoch


def _signed(value: int) -> int:
    """A gauge of the kernel half: unsigned there, may dip below zero for an instant."""
    return value - (1 << 64) if value >> 63 else value


def _resize(new: libbpf.Object, sizes: Sizes) -> None:
    new.resize("sandboxes", sizes.sandboxes + 1)  # slot 0 is the host's
    new.resize("slots", sizes.sandboxes)
    new.resize("inodes", sizes.inodes)
    new.resize("births", sizes.numbers)
    new.resize("ports", sizes.numbers)
    new.resize("explanations", sizes.explanations)
