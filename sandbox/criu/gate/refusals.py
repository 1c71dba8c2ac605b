"""What CRIU would dump without a word and could not bring back: refused at the dump, with the hint.

Guarantee: what is said names the process, what it holds and what to do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import socket
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from sandbox import procfs
from sandbox.criu import Record, image_files
from sandbox.criu.carried import datagrams
from sandbox.criu.carried.settings import FrozenProcess
from sandbox.criu.gate.images import printable
from sandbox.criu.gate.signal_rules import owner_of, owns
from sandbox.errors import CheckpointFailed

_KCMP = 312
_KCMP_FILES, _KCMP_FS = 2, 3

_libc = ctypes.CDLL(None, use_errno=True)


def check_frozen(processes: Iterable[FrozenProcess], sandbox: str) -> None:
    """Raise CheckpointFailed for the first of these processes that holds what cannot be restored. Blocks."""
    for one in processes:
        for what, hint in _result(one):
            raise CheckpointFailed(f"process {one.inner} of the sandbox {what}", hint=hint, sandbox=sandbox)


def _result(one: FrozenProcess) -> Iterator[tuple[str, str]]:
    if _exit_signal(one.pid) != signal.SIGCHLD:
        yield "tells its parent of its end by another signal than SIGCHLD", "make it with SIGCHLD, as fork does"
    for pid, inner in one.threads.items():
        if pid == one.pid:
            continue
        if _personality(one.pid, pid):
            yield (
                f"has a thread, {inner}, with a personality of its own",
                "start it without setarch, linux32 and the like",
            )
        if _differ(one.pid, pid, _KCMP_FS):
            yield f"has a thread, {inner}, with a working directory of its own", "make the thread with CLONE_FS"
        if _differ(one.pid, pid, _KCMP_FILES):
            yield f"has a thread, {inner}, with descriptors of its own", "make the thread with CLONE_FILES"
    urgent = select.poll()
    with contextlib.ExitStack() as opened:
        polled = {}
        for number, link in one.links:
            if link == "anon_inode:[eventfd]" and _is_semaphore(one.pid, number):
                yield f"has an eventfd that is a semaphore, descriptor {number}", "use a POSIX semaphore or a pipe"
            if link.startswith("/proc/pressure/") and _is_writable(one.pid, number):
                yield f"has a trigger of {link}, descriptor {number}", "close it before the checkpoint"
            if link.startswith("/memfd:") and _attributes(one.pid, number):
                yield f"has a memfd with attributes, descriptor {number}", "remove them (removexattr), or use a file"
            if link.startswith("socket:["):
                with contextlib.suppress(OSError):
                    descriptor = one.descriptor(number)
                    opened.callback(os.close, descriptor)
                    urgent.register(descriptor, select.POLLPRI | select.POLLIN)
                    polled[descriptor] = number
        for descriptor, events in urgent.poll(0) if polled else ():
            if events & select.POLLPRI:
                yield f"has urgent data on a socket, descriptor {polled[descriptor]}", "read it first"
            if events & select.POLLIN and (name := _sender(descriptor)):
                what = f"has not read a datagram of {printable(name)}, whose name would be lost"
                yield f"{what}, descriptor {polled[descriptor]}", "read it first"


def _differ(first: int, second: int, what: int) -> bool:
    return int(_libc.syscall(_KCMP, first, second, what, 0, 0)) > 0


def _sender(descriptor: int) -> bytes:
    """The name of a Unix socket of which an unread datagram comes; b"" where none has one. Takes nothing out."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
        if one.family != socket.AF_UNIX or one.type != socket.SOCK_DGRAM:
            return b""
        for _, sender in datagrams.peeked(one):
            if sender:
                return os.fsencode(sender)
    return b""


def _exit_signal(pid: int) -> int:
    return int(procfs.stat(pid)[35])


def _personality(pid: int, thread: int) -> int:
    return int(procfs.read_bytes(f"/proc/{pid}/task/{thread}/personality"), 16)


def _attributes(pid: int, descriptor: int) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listxattr(f"/proc/{pid}/fd/{descriptor}")
    return []


def _is_semaphore(pid: int, descriptor: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/fdinfo/{descriptor}", "rb") as file:
        return re.search(rb"eventfd-semaphore:\s*1", file.read()) is not None
    return False


def _is_writable(pid: int, descriptor: int) -> bool:
    """Only by writing is a trigger made, and it is invisible whether there is one."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/fdinfo/{descriptor}", "rb") as file:
        result = re.search(rb"flags:\s*(\d+)", file.read())
        return result is not None and int(result[1], 8) & os.O_ACCMODE != os.O_RDONLY
    return False


# ---------------------------------------------------------------------------- in the images


def check_images(directory: Path, entries: Sequence[Record], sandbox: str) -> None:
    """Likewise for what the images contain, after the thaw; `entries` are those of files.img. Blocks."""
    for what, hint in _reported(directory, entries):
        raise CheckpointFailed(what, hint=hint, sandbox=sandbox)


def _reported(directory: Path, entries: Sequence[Record]) -> Iterator[tuple[str, str]]:
    kinds = image_files.messages()
    tree = image_files.read(directory / "pstree.img", kinds.pstree_entry)
    processes = [entry.pid for entry in tree.entries] if tree is not None else []
    groups = {entry.pgid for entry in tree.entries} if tree is not None else set()
    for pid in processes:
        core = image_files.read(directory / f"core-{pid}.img", kinds.core_entry)
        if core is not None and core.entries[0].tc.personality:
            yield f"process {pid} of the sandbox has a personality", "start it without setarch, linux32 and the like"
    for entry in entries:
        if entry.HasField("pipe") and entry.pipe.flags & os.O_ACCMODE == os.O_RDWR:
            yield (
                "a pipe of the sandbox is open for reading and writing at once",
                "open /proc/self/fd/N for one of them, or use a FIFO",
            )
        owner = owner_of(entry)
        if owner is not None and not owns(owner, processes, groups):
            yield (
                f"signals about a descriptor go to {owner.pid} of the sandbox: a single thread, or gone",
                "set the owner to a process with F_SETOWN",
            )
    yield from _of_others(directory, entries, processes)
    yield from _too_large(directory)


def _too_large(directory: Path) -> Iterator[tuple[str, str]]:
    """System V segments that were made with SHM_NORESERVE, which CRIU makes without: the kernel would refuse them."""
    swap = procfs.memory().get("SwapTotal", 0)
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + swap
    for path in directory.glob("ipcns-shm-*.img"):
        image = image_files.read(path, image_files.messages().ipc_shm_entry)
        for one in image.entries if image is not None else ():
            if one.size > limit:
                yield (
                    f"a System V segment of the sandbox (key {one.desc.key:#x}) is larger than the memory of the host",
                    "make it smaller, or remove it (ipcrm)",
                )


def _of_others(directory: Path, entries: Sequence[Record], processes: list[int]) -> Iterator[tuple[str, str]]:
    """Files below /proc/PID that another process than that one holds: at a restore they may not be there yet."""
    kinds = image_files.messages()
    result = {}
    for entry in entries:
        if entry.HasField("reg") and (match := re.match(r"/?proc/(\d+)(/|$)", image_files.text(entry.reg.name))):
            result[entry.id] = int(match[1])
    for pid in processes if result else ():
        ids = image_files.read(directory / f"ids-{pid}.img", kinds.task_kobj_ids_entry)
        if ids is None:
            continue
        held = image_files.read(directory / f"fdinfo-{ids.entries[0].files_id}.img", kinds.fdinfo_entry)
        for one in held.entries if held is not None else ():
            if result.get(one.id, pid) != pid:
                yield (
                    f"process {pid} of the sandbox holds /proc/{result[one.id]}, descriptor {one.fd}",
                    "close it, or hold a pidfd",
                )
