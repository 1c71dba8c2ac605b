"""Which process is to have which terminal before its children are made (native/controlling.c)."""

from __future__ import annotations

import os
import struct
from collections import Counter
from pathlib import Path

from sandbox.criu import image_files

FILE = "terminals.log"
_ENTRY = struct.Struct("=iii4H236s")  # struct entry
_LIMIT = 256  # terminals, as native/mounts.c allows
_APART = 2048  # descriptors between those of the process and ours: CRIU's own lie there


def prepare(directory: Path, table: image_files.CriuImageFile) -> bool:
    """Name the controlling terminals of these images whose masters are in them, and spell the paths of these so that
    CRIU's library knows them. Returns whether there are some. Blocks.
    """
    kinds = image_files.messages()
    infos = image_files.read(directory / "tty-info.img", kinds.tty_info_entry)
    if infos is None or (tree := image_files.read(directory / "pstree.img", kinds.pstree_entry)) is None:
        return False
    leaders = _leaders(directory, {process.pid: process.sid for process in tree.entries})
    controlling = {
        info.id: info for info in infos.entries
        if info.HasField("pty") and info.sid in leaders and info.HasField("termios") and info.pty.index < _LIMIT
    }  # fmt: skip
    paths = {entry.id: entry.reg for entry in table.entries if entry.HasField("reg")}
    packed = []
    for entry in table.entries:
        info = controlling.get(entry.tty.tty_info_id) if entry.HasField("tty") else None
        path = paths.get(entry.tty.regf_id)
        if info is None or path is None or entry.tty.flags & os.O_ACCMODE != os.O_RDWR:
            continue
        name = image_files.text(path.name)
        if name.endswith("/dev/pts/ptmx") and len(name.encode()) < 236:
            size = info.winsize
            window = (size.ws_row, size.ws_col, size.ws_xpixel, size.ws_ypixel)
            held = leaders[info.sid] + _APART
            packed.append(_ENTRY.pack(info.sid, info.pty.index, held, *window, name.encode()))
            path.name = "/." * (info.pty.index + 1) + name
    if packed:
        (directory / FILE).write_bytes(b"".join(packed))
    return bool(packed)


def _leaders(directory: Path, processes: dict[int, int]) -> dict[int, int]:
    """The greatest descriptor of each leader of a session that shares its descriptors with no other process.

    `processes`: the session of each.
    """
    kinds = image_files.messages()
    tables = {}
    for process in processes:
        ids = image_files.read(directory / f"ids-{process}.img", kinds.task_kobj_ids_entry)
        if ids is not None:
            tables[process] = ids.entries[0].files_id
    shared = Counter(tables.values())
    result = {}
    for process, number in tables.items():
        if process == processes[process] and shared[number] == 1:
            files = image_files.read(directory / f"fdinfo-{number}.img", kinds.fdinfo_entry)
            result[process] = max((entry.fd for entry in (files.entries if files else ())), default=0)
    return result
