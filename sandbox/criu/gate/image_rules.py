"""What a field of CRIU's images may say: the images of a sandbox's processes are an adversary's, field by field.

Guarantee: pure (no I/O, no clock). :func:`check` returns what the gate must look up, or raises :class:`ImageRefused`;
of an image that it lets pass CRIU makes namespaces, ids and restrictions as our own shim does, never weaker.
"""

from __future__ import annotations

import re

from sandbox.criu.carried import settings, socket_files, waits
from sandbox.criu.gate.file_rules import check_files, check_mounts
from sandbox.criu.gate.images import IDS, MAX_NAME, CriuImages, GateLookups, ImagePath, ImageRefused, need, raw
from sandbox.criu.gate.processes import check_namespaces, check_pagemap, check_task, task_tree
from sandbox.criu.gate.signal_rules import check_signals

#: Names of the image files that there may be.
FILES = re.compile(
    r"(?:core|fdinfo|fs|ids|mm|pagemap|pages|pagemap-shmem|mountpoints|userns|utsns|timens"
    r"|ipcns-(?:var|shm|msg|sem))-\d{1,10}\.img"
    r"|(?:ghost-file|tcp-stream)-[0-9a-f]{1,8}\.img"
    r"|(?:files|inventory|pstree|remap-fpath|seccomp|memfd|tty-info|filelocks|cgroup|pipes-data|fifo-data|sk-queues"
    r"|cpuinfo|waits|settings|other-names|socket-files|tty-data)\.img"
)


def check(images: CriuImages) -> GateLookups:
    """Refuse what no sandbox of ours may have; returns what is to be looked up in the tree."""
    for name in images.sizes:
        need(FILES.fullmatch(name) is not None, f"an image of an unknown kind, {name[:80]!r}")
    if waits.NAME in images:
        need(waits.parse(images.content(waits.NAME)) is not None, f"{waits.NAME} cannot be read")
    tasks = task_tree(images)
    check_namespaces(images, tasks)
    target = GateLookups()
    mounts = check_mounts(images, target)
    files = check_files(images, mounts, target)
    for pid, threads in tasks.items():
        check_task(images, pid, threads, files)
    check_signals(images, tasks, files)
    check_rest(images)
    return target


def deleted(images: CriuImages) -> list[ImagePath]:
    """The deleted files and directories of a dump that is not complete yet."""
    target = GateLookups()
    check_files(images, check_mounts(images, target), target)
    return target.ghosts


def check_rest(images: CriuImages) -> None:
    """Images whose records need only be whole."""
    for part in (settings, socket_files):
        if part.FILE in images:
            try:
                part.decode(images.content(part.FILE))
            except ValueError as error:
                raise ImageRefused(f"{part.FILE} cannot be read: {error}") from None
    for name in ("pipes-data.img", "fifo-data.img"):
        for data in images.records(name, "pipe_data_entry", lambda one: int(one.bytes)):
            need(data.size <= 1 << 31 and data.bytes <= 1 << 31, f"{name} has a pipe without end")
    for entry in images.table("memfd.img", "memfd_inode_entry"):
        need(max(entry.uid, entry.gid) < IDS and len(raw(entry.name)) <= MAX_NAME, "a memfd of nobody here")
    for data in images.table("tty-data.img", "tty_data_entry"):
        need(len(data.data) <= 1 << 20, "a terminal with more unread than it can hold")
    for entry in images.table("tty-info.img", "tty_info_entry"):
        need(entry.type in (1, 4), "a terminal of a kind that no sandbox has", "run the program without a terminal")
        need(max(entry.uid, entry.gid) < IDS, "a terminal of nobody here")
    for _, name in images.of("pagemap-shmem"):
        check_pagemap(images, name, 1 << 62)
    for entry in images.table("seccomp.img", "seccomp_entry"):
        for number, one in enumerate(entry.seccomp_filters):
            need(0 < len(one.filter) <= 4096 * 8 and not len(one.filter) % 8, "a filter of calls without a program")
            need(not one.HasField("prev") or one.prev < number, "filters of calls without a first one")
