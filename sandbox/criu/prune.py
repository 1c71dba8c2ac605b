"""Take processes out of a finished dump: those of a sandbox that are its owner's (:mod:`sandbox.container.excluded`).

Guarantee: the images are those of a sandbox in which these processes had been killed at the instant of the dump, and
hold nothing of their memory. What only they held is closed; who was connected to them sees the end they leave:

- their children are pid 1's, as orphans are; dead children that they had not waited for are gone;
- sessions and groups that they led have lost their leader;
- a pipe that they read takes what is written and forgets it (a restore gives it a sink); one that they wrote has ended;
- a Unix socket that they held the other end of has lost it; a network connection to them is restored closed;
- a terminal whose other side they held is hung up (without the signal);
- locks of files that another process shares with them stay with it, the others are released.

CRIU leaves out no task below pid 1, and what it restores it wants to find unchanged: an open file of theirs that a
later checkpoint of the files alone has changed would make the restore fail. Hence here, and not when they are restored.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox.criu import Record, image_files, rpc
from sandbox.criu.carried import settings
from sandbox.criu.carried.socket_names import CONNECTED
from sandbox.errors import CheckpointFailed

INIT = 1
VMA_FILE = (1 << 6) | (1 << 7)  # private, shared: then `shmid` is the number of the file
POSIX = 1  # FL_POSIX: a lock of one process; others belong to the open file
SHUT_BOTH = 3
CLOSE = 7  # TCP_CLOSE, which CRIU uses for all sockets: not connected


@dataclass
class PrunedProcess:
    """What must be known of one process of the images."""

    pid: int
    threads: list[int]
    tables: set[int] = field(default_factory=set)  # descriptor tables
    files: set[int] = field(default_factory=set)  # files that it holds, works in or maps
    fds: dict[int, int] = field(default_factory=dict)  # descriptor -> file


def prune(directory: Path, numbers: Iterable[int]) -> None:
    """Remove the processes with these numbers (of the sandbox) from the images in `directory`. Blocks."""
    kinds = image_files.messages()
    tree = image_files.read(directory / "pstree.img", kinds.pstree_entry)
    target = frozenset(numbers) - {INIT}
    if tree is None or not target & {entry.pid for entry in tree.entries}:
        return
    gone = target | {
        entry.pid for entry in tree.entries if entry.ppid in target and not (directory / f"mm-{entry.pid}.img").exists()
    }
    removed = [_process(directory, entry) for entry in tree.entries if entry.pid in gone]
    retained = [_process(directory, entry) for entry in tree.entries if entry.pid not in gone]
    tree.entries = [entry for entry in tree.entries if entry.pid not in gone]
    for entry in tree.entries:
        if entry.ppid in gone:
            entry.ppid = INIT
    tree.write(directory / "pstree.img")
    held = set().union(*(process.files for process in retained), _in_flight(directory))
    closed = set().union(*(process.files for process in removed)) - held
    _files(directory, closed, gone)
    _locks(directory, gone, removed, retained)
    tables = set().union(*(process.tables for process in retained))
    for process in removed:
        _remove_images(directory, process, tables)


def _process(directory: Path, entry: Record) -> PrunedProcess:
    kinds = image_files.messages()
    pid = entry.pid
    result = PrunedProcess(pid, sorted({pid, *entry.threads}) if (directory / f"mm-{pid}.img").exists() else [pid])
    for ids in _entries(directory / f"ids-{pid}.img", kinds.task_kobj_ids_entry):
        result.tables.add(ids.files_id)
        for one in _entries(directory / f"fdinfo-{ids.files_id}.img", kinds.fdinfo_entry):
            result.fds[one.fd] = one.id
    for place in _entries(directory / f"fs-{pid}.img", kinds.fs_entry):
        result.files |= {place.cwd_id, place.root_id}
    for memory in _entries(directory / f"mm-{pid}.img", kinds.mm_entry):
        result.files.add(memory.exe_file_id)
        result.files |= {vma.shmid for vma in memory.vmas if vma.status & VMA_FILE}
    result.files |= set(result.fds.values())
    return result


def _entries(path: Path, kind: type[Record]) -> list[Record]:
    image = image_files.read(path, kind)
    return [] if image is None else image.entries


def _in_flight(directory: Path) -> set[int]:
    """Files that lie in the queue of a socket, on their way from one process to another."""
    path = directory / "sk-queues.img"
    if not path.exists():
        return set()
    with open(path, "rb") as file:
        packets = rpc.images().load(file, no_payload=True)["entries"]
    return {number for packet in packets for message in packet.get("scm", ()) for number in message.get("rights", ())}


# ---------------------------------------------------------------------------- files


def _files(directory: Path, closed: set[int], gone: frozenset[int]) -> None:
    """Drop the records of `closed` files, and what others know of them or of the processes that are `gone`."""
    kinds = image_files.messages()
    table = image_files.read(directory / "files.img", kinds.file_entry)
    if table is None:
        return
    names = {entry.id: _name(entry) for entry in table.entries}
    used = {name for number, name in names.items() if number not in closed}
    closed = closed | {names[number] for number in closed & names.keys()} - used
    lost = {entry.usk.ino for entry in table.entries if entry.id in closed and entry.HasField("usk")}
    for entry in table.entries:
        if entry.id in closed and entry.HasField("isk"):
            (directory / f"tcp-stream-{entry.isk.ino:x}.img").unlink(missing_ok=True)
    terminals = {entry.tty.tty_info_id for entry in table.entries if entry.id in closed and entry.HasField("tty")}
    table.entries = [entry for entry in table.entries if entry.id not in closed]
    for entry in table.entries:
        _forget(entry, lost, gone)
    table.write(directory / "files.img")
    pipes = [entry.pipe for entry in table.entries if entry.HasField("pipe")]
    readable = {pipe.pipe_id for pipe in pipes if pipe.flags & os.O_ACCMODE != os.O_WRONLY}
    fifos = {entry.fifo.pipe_id for entry in table.entries if entry.HasField("fifo")}
    _keep(directory / "pipes-data.img", lambda record: record["pipe_id"] in readable)
    _keep(directory / "fifo-data.img", lambda record: record["pipe_id"] in fifos)
    _keep(directory / "sk-queues.img", lambda record: record["id_for"] not in closed)
    _hang_up(directory, table.entries, terminals, gone)
    remaps = image_files.read(directory / "remap-fpath.img", kinds.remap_file_path_entry)
    if remaps is not None and any(remap.orig_id in closed for remap in remaps.entries):
        remaps.entries = [remap for remap in remaps.entries if remap.orig_id not in closed]
        remaps.write(directory / "remap-fpath.img")


def _name(entry: Record) -> int:
    """The record of the name by which a FIFO or a terminal was opened; 0: it is none."""
    one = entry.fifo if entry.HasField("fifo") else entry.tty if entry.HasField("tty") else None
    return 0 if one is None else int(one.regf_id)


def _forget(entry: Record, lost: set[int], gone: frozenset[int]) -> None:
    """Let the record of a file that stays know nothing of the sockets and processes that do not."""
    for _, one in entry.ListFields():
        owner = getattr(one, "fown", None)
        if owner is not None and owner.pid in gone:
            owner.pid = owner.signum = owner.pid_type = 0
    if entry.HasField("usk") and entry.usk.peer in lost:
        entry.usk.peer = entry.usk.backlog = 0
        if entry.usk.type in CONNECTED:
            entry.usk.shutdown = SHUT_BOTH  # as the kernel does when the other end goes
        else:
            entry.usk.state = CLOSE
    if entry.HasField("pidfd") and entry.pidfd.nspid in gone:
        raise CheckpointFailed(
            f"a process holds a pidfd of process {entry.pidfd.nspid}, which is no part of the checkpoint",
            hint="close it, or start that process without excluded=True",
        )
    if entry.HasField("reg") and (number := _process_of(image_files.text(entry.reg.name))) in gone:
        raise CheckpointFailed(
            f"a process holds {entry.reg.name} of process {number}, which is no part of the checkpoint",
            hint="close it, or start that process without excluded=True",
        )


def _keep(path: Path, target: Callable[[dict[str, Any]], bool]) -> None:
    """Of an image whose records have content behind them, keep those that are wanted."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        image = rpc.images().load(file)
    left = [record for record in image["entries"] if target(record)]
    if len(left) == len(image["entries"]):
        return
    path.unlink()
    with open(path, "wb") as file:
        rpc.images().dump({**image, "entries": left}, file)


def _hang_up(directory: Path, files: list[Record], closed: set[int], gone: frozenset[int]) -> None:
    """Forget terminals without a user: the other side of one is then known as hung up, and it controls no process."""
    table = image_files.read(directory / "tty-info.img", image_files.messages().tty_info_entry)
    if table is None:
        return
    used = {entry.tty.tty_info_id for entry in files if entry.HasField("tty")}
    left = used | ({info.id for info in table.entries} - closed)
    controlling = {info.pty.index for info in table.entries if info.id not in left or info.sid in gone}
    if controlling:
        settings.without_terminals(directory, controlling)
    if closed:
        table.entries = [info for info in table.entries if info.id in left]
        table.write(directory / "tty-info.img")


def _process_of(path: str) -> int:
    """The process whose file below /proc this is; 0: of none."""
    parts = path.strip("/").split("/")
    return int(parts[1]) if len(parts) > 1 and parts[0] == "proc" and parts[1].isdigit() else 0


def _locks(directory: Path, gone: frozenset[int], removed: list[PrunedProcess], retained: list[PrunedProcess]) -> None:
    kinds = image_files.messages()
    locks = image_files.read(directory / "filelocks.img", kinds.file_lock_entry)
    if locks is None or not any(lock.pid in gone for lock in locks.entries):
        return
    files = {process.pid: process.fds for process in removed}
    left = []
    for lock in locks.entries:
        if lock.pid not in gone:
            left.append(lock)
        elif (other := next(_holders(retained, files[lock.pid].get(lock.fd)), None)) and not lock.flag & POSIX:
            lock.pid, lock.fd = other
            left.append(lock)
    locks.entries = left
    if left:
        locks.write(directory / "filelocks.img")
    else:
        (directory / "filelocks.img").unlink()


def _holders(processes: list[PrunedProcess], file: int | None) -> Iterator[tuple[int, int]]:
    """(pid, descriptor) of those who hold a file."""
    for process in processes:
        for fd, number in process.fds.items():
            if number == file:
                yield process.pid, fd


def _remove_images(directory: Path, process: PrunedProcess, tables: set[int]) -> None:
    """What only this process has: memory first of all."""
    kinds = image_files.messages()
    head = image_files.read(directory / f"pagemap-{process.pid}.img", kinds.pagemap_head, kinds.pagemap_entry)
    if head is not None and head.entries:
        (directory / f"pages-{head.entries[0].pages_id}.img").unlink(missing_ok=True)
    for name in ("mm", "pagemap", "fs", "ids", "sigacts"):
        (directory / f"{name}-{process.pid}.img").unlink(missing_ok=True)
    for thread in process.threads:
        (directory / f"core-{thread}.img").unlink(missing_ok=True)
    for table in process.tables - tables:
        (directory / f"fdinfo-{table}.img").unlink(missing_ok=True)
