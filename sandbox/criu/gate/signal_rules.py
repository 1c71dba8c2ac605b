"""What the images of a sandbox's processes may say of signals: who sends them, who gets them, what waits for delivery.

Guarantee: pure. Every number to which CRIU, or later the kernel, sends a signal because of an image that passes is that
of a process, thread or group of the same images. CRIU uses these numbers in the sandbox's own pid namespace, where no
other process has one: these rules keep it so wherever a later CRIU uses them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sandbox.criu import Record
from sandbox.criu.gate.images import IDS, PIDS, CriuImages, need

SIGNALS = 64
STOPS = frozenset({0, 19, 20, 21, 22})  # SIGSTOP, SIGTSTP, SIGTTIN, SIGTTOU; 0: it is not known
SIGINFO = 128  # bytes of what came with a queued signal: CRIU copies as many, whatever the image has
OWNER_PROCESS, OWNER_GROUP = 1, 2  # F_OWNER_PID, F_OWNER_PGRP
TO_PROCESS, TO_NOBODY, BY_THREAD, TO_THREAD = 0, 1, 2, 4  # sigev_notify
DEAD_PROCESS = -1  # of a pidfd


def check_signals(images: CriuImages, tasks: Mapping[int, list[int]], files: Mapping[int, Record]) -> None:
    """Refuse numbers that are of no process of these images."""
    groups, sessions = _sessions(images)
    for file in files.values():
        _owner(file, tasks, groups)
        if file.HasField("pidfd"):
            existing = file.pidfd.nspid == DEAD_PROCESS or file.pidfd.nspid in tasks
            need(existing, f"file {file.id} is a pidfd of {file.pidfd.nspid}, which there is not")
    for terminal in images.table("tty-info.img", "tty_info_entry"):
        need(terminal.sid in sessions | {0}, f"a terminal of session {terminal.sid}, which there is not")
        need(terminal.pgrp < PIDS, "a terminal whose signals go to a group that no kernel gives")
    for pid, threads in tasks.items():
        core = images.one(f"core-{pid}.img", "core_entry")
        need(core.tc.stop_signo in STOPS, f"process {pid} is stopped by signal {core.tc.stop_signo}")
        need(core.tc.exit_code < 1 << 16, f"process {pid} ended with {core.tc.exit_code}")
        _queue(core.tc.signals_s.signals, f"process {pid}")
        for timer in core.tc.timers.posix:
            _timer(timer, pid, threads)
        for thread in threads:
            name = f"core-{thread}.img"
            if name in images:
                own = images.one(name, "core_entry").thread_core
                need(own.pdeath_sig <= SIGNALS, f"thread {thread} gets signal {own.pdeath_sig} at its parent's death")
                _queue(own.signals_p.signals, f"thread {thread}")


def _sessions(images: CriuImages) -> tuple[set[int], set[int]]:
    """Groups and sessions. CRIU makes those of which only the number is left, below pid 1, which leads its own."""
    first, *others = images.table("pstree.img", "pstree_entry")
    need(first.sid == first.pgid == first.pid, "pid 1 leads no session: it would be restored in one of the host")
    need(all(one.sid and one.pgid for one in others), "a process in a session or group of the host")
    return {one.pgid for one in (first, *others)}, {one.sid for one in (first, *others)}


def owner_of(file: Record) -> Record | None:
    """Whom the kernel signals about an open file, of whatever kind it is."""
    for descriptor, value in file.ListFields():
        if descriptor.message_type is not None and "fown" in descriptor.message_type.fields_by_name:
            owner: Record = value.fown
            return owner
    return None


def owns(owner: Record, processes: Iterable[int], groups: Iterable[int]) -> bool:
    """Whether it is one of these processes or groups, or none. A single thread cannot be restored as an owner."""
    existing = {OWNER_PROCESS: processes, OWNER_GROUP: groups}.get(owner.pid_type, ())
    return not owner.pid or owner.pid in existing


def _owner(file: Record, tasks: Mapping[int, list[int]], groups: set[int]) -> None:
    owner = owner_of(file)
    if owner is None:
        return
    need(owns(owner, tasks, groups), f"signals about file {file.id} go to {owner.pid}, which there is not")
    need(owner.signum <= SIGNALS, f"signals about file {file.id} have the number {owner.signum}")
    need(not owner.pid or max(owner.uid, owner.euid) < IDS, f"the owner of file {file.id} is nobody here")


def _timer(timer: Record, pid: int, threads: list[int]) -> None:
    kind = timer.it_sigev_notify
    need(kind in (TO_PROCESS, TO_NOBODY, BY_THREAD, TO_THREAD), f"a timer of process {pid} tells in no known way")
    need(timer.si_signo <= SIGNALS, f"a timer of process {pid} sends signal {timer.si_signo}")
    reported = kind != TO_THREAD or timer.notify_thread_id in threads
    need(reported, f"a timer of process {pid} signals {timer.notify_thread_id}, which is no thread of it")


def _queue(signals: Iterable[Record], who: str) -> None:
    need(all(len(one.siginfo) == SIGINFO for one in signals), f"a signal that waits for {who} is no signal")
