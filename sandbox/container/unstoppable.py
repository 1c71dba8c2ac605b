"""Tasks that will not stop when they have to, or that a debugger holds, found before they delay others.

Guarantee: what is reported of a process was read through one open directory of ``/proc``, which leads to that process
or to nothing; a number that the kernel has reused is never taken for it.

The kernel stops a task on its way out of a system call. A task in an uninterruptible wait (state D) does not come to
that. Most such waits end by themselves, since they wait for a disk. One that may last for ever is at everybody's
command: the parent of a ``vfork`` waits until its child executes a program or ends, and the child need not.

A task that another one of the sandbox traces cannot be dumped, since the kernel allows one tracer. While it is
stopped by its tracer (state t) it is waited for: LeakSanitizer traces a program for the moment of its last look.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sandbox import procfs
from sandbox.descriptors import closing
from sandbox.errors import CheckpointFailed

if TYPE_CHECKING:
    from sandbox.container.container import Container

CLONE, VFORK, CLONE3 = 56, 58, 435  # system calls of x86-64
CLONE_VFORK = 0x4000
WAITS_FOR_CHILD = "kernel_clone"  # the function of the kernel in which a vfork parent waits
WAIT4 = 61
STEP = 0.02  # seconds between two looks
CHILD_TIMEOUT = 1.0  # seconds that a vfork child has to execute, while no other job waits
DISK_TIMEOUT = 10.0  # seconds for any other wait
TRACED_TIMEOUT = 1.0  # seconds for a tracer to let go
HELD_TIMEOUT = 0.1  # seconds for a vfork child, while a slot is held


class Unstoppable(CheckpointFailed):
    """A process of the sandbox does not stop, so its state cannot be read."""


@dataclass(frozen=True)
class Stuck:
    """A task in an uninterruptible wait, or stopped by its tracer. Equal only while it is the same wait of the same
    task.
    """

    pid: int
    tid: int
    name: str
    born: str  # start time, in the kernel's words
    call: str  # number of the system call and its arguments; "" when it is not known
    switches: str  # how often it has given up the processor
    place: str  # function of the kernel in which it waits; "0" when it is unknown
    tracer: int = 0  # pid of the process that has stopped it

    @property
    def vforked(self) -> bool:
        """Whether it waits for a vfork child, and not for a lock on the way to make one."""
        words = self.call.split()
        if self.tracer or self.place not in (WAITS_FOR_CHILD, "0", "") or not words or not words[0].isdigit():
            return False
        number = int(words[0])
        return number in (VFORK, CLONE3) or (number == CLONE and bool(int(words[1], 16) & CLONE_VFORK))


def stuck(pids: Iterable[int]) -> set[Stuck]:
    """Those tasks of these processes that cannot be stopped now. Blocks, for some microseconds a task."""
    result: set[Stuck] = set()
    for pid in pids:
        with contextlib.suppress(OSError), _threads_of(pid) as directory:  # it has ended
            for tid in os.listdir(directory):
                with contextlib.suppress(OSError):
                    result |= _looked(directory, tid)
    return result


def stuck_task(tid: int) -> set[Stuck]:
    """This task alone, if it cannot be stopped now. Blocks, for some microseconds."""
    with contextlib.suppress(OSError), _threads_of(tid) as directory:  # it has ended
        return _looked(directory, str(tid))
    return set()


def _threads_of(pid: int) -> closing:
    return closing(os.open(f"/proc/{pid}/task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def _looked(directory: int, tid: str) -> set[Stuck]:
    fields = procfs.stat(f"{tid}/stat", directory)
    if fields[procfs.STATE] not in (b"D", b"t"):
        return set()
    call = place = ""
    with contextlib.suppress(PermissionError):
        call = procfs.read_bytes(f"{tid}/syscall", directory).decode().strip()
        place = procfs.read_bytes(f"{tid}/wchan", directory).decode().strip()
    text = procfs.read_bytes(f"{tid}/status", directory).decode(errors="replace")
    status = dict(line.split(":", 1) for line in text.split("\n") if ":" in line)
    switches = " ".join(value.strip() for key, value in status.items() if key.endswith("_ctxt_switches"))
    return {
        Stuck(
            int(status["Tgid"]),
            int(tid),
            status["Name"].strip(),
            fields[procfs.STARTED].decode(),
            call,
            switches,
            place,
            int(status["TracerPid"]) if fields[procfs.STATE] == b"t" else 0,
        )
    }


def traced(pids: Iterable[int]) -> tuple[int, int] | None:
    """(task, tracer) of the first task of these processes that is traced; None when none is. Blocks."""
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for thread in procfs.threads(pid):
                if tracer := int(procfs.status(f"{pid}/task/{thread}", "TracerPid") or 0):
                    return thread, tracer
    return None


def awaited(waiter: int) -> int | None:
    """The process for whose change of state `waiter` waits now; None when it does something else."""
    with contextlib.suppress(OSError):
        with open(f"/proc/{waiter}/syscall") as file:
            words = file.read().split()
        if words[:1] == [str(WAIT4)]:
            return int(words[1], 16)
    return None


async def need_stoppable(container: Container) -> None:
    """Return when every task of the sandbox can be stopped, as far as is visible. Raises Unstoppable.

    Holds nothing: a sandbox may delay itself, and no other.
    """
    observed = await asyncio.to_thread(stuck, container.tasks())
    began = time.monotonic()
    while observed:
        passed = time.monotonic() - began
        if passed > CHILD_TIMEOUT and (parents := [item for item in observed if item.vforked]):
            raise refusal(container, parents[0])
        if passed > TRACED_TIMEOUT and (held := [item for item in observed if item.tracer]):
            raise refused_traced(container, held[0].tid, held[0].tracer)
        if passed > DISK_TIMEOUT:
            raise refusal(container, next(iter(observed)))
        await asyncio.sleep(STEP)
        observed &= await asyncio.to_thread(stuck, container.tasks())


def blamed(container: Container, tasks: Iterable[Stuck]) -> Unstoppable:
    """The refusal for the first of these; also when there is none, for something holds the others."""
    for task in tasks:
        return refusal(container, task)
    return Unstoppable("its processes did not stop in time", hint="try again", sandbox=container.spec.id)


def refusal(container: Container, task: Stuck) -> Unstoppable:
    """Why a checkpoint is not possible while this task waits, and what to do."""
    who = f"{task.pid} [{task.name}]"
    if task.vforked:
        return Unstoppable(
            f"process {who} cannot be stopped: it waits for a vfork child that neither executes a program nor ends",
            hint="end that child; let it execute a program at once, or start it with fork",
            sandbox=container.spec.id,
        )
    return Unstoppable(
        f"process {who} cannot be stopped: it is in an uninterruptible wait, probably for a disk",
        hint="try again when that has ended",
        sandbox=container.spec.id,
    )


def refused_traced(container: Container, task: int, tracer: int) -> CheckpointFailed:
    """Why a checkpoint is not possible while one process traces another, and what to do."""
    who = _named(task)
    # A tracer on the host is nothing that the sandbox may hear of.
    within = int(procfs.status(tracer, "Tgid") or 0) in container.tasks()  # a tracer may be any thread of a process
    by = _named(tracer) if within else "a program outside of it"
    return CheckpointFailed(
        f"process {who} of the sandbox is traced by {by}",
        hint="detach the debugger, or end the command that traces (gdb, strace)",
        sandbox=container.spec.id,
    )


def _named(task: int) -> str:
    inner = procfs.inner_pid(task)
    return f"{inner} [{procfs.status(task, 'Name')}]" if inner else "one that has ended"


class StallDetector:
    """Notices that `waiter` (a CRIU that stops the tasks one after another) waits for one that will not stop."""

    def __init__(self, container: Container, waiter: int) -> None:
        self._container = container
        self._waiter = waiter
        self._last: set[Stuck] = set()
        self._since = 0.0

    def poll(self) -> Stuck | None:
        """The task for which it waits in vain, once that has lasted. Blocks for some microseconds."""
        tid = awaited(self._waiter)
        now = {item for item in stuck_task(tid) if item.vforked} if tid is not None else set()
        if not now or not (now & self._last):
            self._last, self._since = now, time.monotonic()
            return None
        result = next(iter(now))
        if result.pid not in self._container.tasks() or awaited(self._waiter) != tid:
            return None
        return result if time.monotonic() - self._since > HELD_TIMEOUT else None
