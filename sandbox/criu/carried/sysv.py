"""What CRIU does not restore of System V objects, though its images say it: locked memory, the limits of queues."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

from sandbox.container import namespaces
from sandbox.criu import image_files
from sandbox.descriptors import closing

_LOCKED = 0o2000  # in the mode of a segment
_IPC_SET, _IPC_STAT, _SHM_LOCK = 1, 2, 11
_QBYTES = 88  # offset of msg_qbytes in msqid_ds

_libc = ctypes.CDLL(None, use_errno=True)


def put_back(directory: Path, init: int) -> None:
    """Set it again, where there is any, in the namespace of pid 1 (its number on the host). Blocks."""
    segments, queues = _locked(directory), _limits(directory)
    if not segments and not queues:
        return
    with closing(os.open(f"/proc/{init}/ns/ipc", os.O_RDONLY | os.O_CLOEXEC)) as descriptor:
        namespaces.inside(descriptor, namespaces.IDS["ipc"], lambda: _set(segments, queues))


def _locked(directory: Path) -> list[int]:
    kind = image_files.messages().ipc_shm_entry
    images = [image_files.read(path, kind) for path in directory.glob("ipcns-shm-*.img")]
    return [one.desc.id for image in images if image is not None for one in image.entries if one.desc.mode & _LOCKED]


def _limits(directory: Path) -> dict[int, int]:
    """Bytes that each message queue may hold, by its id. In the image, messages stand between the queues."""
    kinds = image_files.messages()
    result = {}
    for path in directory.glob("ipcns-msg-*.img"):
        content, at = path.read_bytes(), 8
        while at + 4 <= len(content):
            size = int.from_bytes(content[at : at + 4], "little")
            queue = kinds.ipc_msg_entry.FromString(content[at + 4 : at + 4 + size])
            at += 4 + size
            result[queue.desc.id] = queue.qbytes
            for _ in range(queue.qnum):
                size = int.from_bytes(content[at : at + 4], "little")
                message = kinds.ipc_msg.FromString(content[at + 4 : at + 4 + size])
                at += 4 + size + (message.msize + 7) // 8 * 8
    return result


def _set(segments: list[int], queues: dict[int, int]) -> None:
    for identity in segments:
        _libc.shmctl(identity, _SHM_LOCK, None)
    for identity, limit in queues.items():
        state = ctypes.create_string_buffer(256)
        if _libc.msgctl(identity, _IPC_STAT, state) == 0 and struct.unpack_from("<Q", state, _QBYTES)[0] != limit:
            struct.pack_into("<Q", state, _QBYTES, limit)
            _libc.msgctl(identity, _IPC_SET, state)
