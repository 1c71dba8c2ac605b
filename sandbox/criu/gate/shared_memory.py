"""How much shared memory the processes of a sandbox name, counted before CRIU looks through it.

CRIU looks at each page of such memory, touched or not, for about a second for each tebibyte, and all that time the
sandbox is frozen and holds its place among the dumps. Guarantee: counted while every task is frozen, each memory once,
by whatever it is held: a descriptor, a mapping, the list of System V segments. Not counted: descriptors on their way
through a socket.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from sandbox.criu.inside import Inside
from sandbox.errors import CheckpointFailed

MAX_BYTES = 256 << 30  # bytes
_MEMFD, _ANONYMOUS = "/memfd:", "/dev/zero (deleted)"
_CHUNK = 1 << 16


def check(pids: Iterable[int], inside: Inside, sandbox: str) -> None:
    """Raise CheckpointFailed where there is more than MAX_BYTES. Blocks, some 0.1 ms for each process."""
    sizes: dict[tuple[int, int], int] = {}
    for pid in pids:
        _descriptors(pid, sizes)
        _mappings(pid, sizes)
    total = sum(sizes.values()) + sum(_segments(inside))
    if total > MAX_BYTES:
        raise CheckpointFailed(
            f"its processes name {total >> 30} GiB of shared memory, used or not; {MAX_BYTES >> 30} GiB are the most",
            hint="make memfds, shared mappings and System V segments only as large as they are used",
            sandbox=sandbox,
        )


def _descriptors(pid: int, sizes: dict[tuple[int, int], int]) -> None:
    base = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):  # a zombie has none
        for name in os.listdir(base):
            if os.readlink(f"{base}/{name}").startswith(_MEMFD):
                _note(f"{base}/{name}", sizes)


def _mappings(pid: int, sizes: dict[tuple[int, int], int]) -> None:
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/maps", "rb", buffering=_CHUNK) as maps:
            content = maps.read()
        if _MEMFD.encode() not in content and _ANONYMOUS.encode() not in content:
            return
        for line in content.splitlines():
            addresses, rights, _, _, _, *path = line.split(None, 5)
            if path and (
                path[0].startswith(_MEMFD.encode()) or (path[0] == _ANONYMOUS.encode() and rights[3:] == b"s")
            ):
                first, _, last = addresses.partition(b"-")
                _note(f"/proc/{pid}/map_files/{int(first, 16):x}-{int(last, 16):x}", sizes)


def _note(link: str, sizes: dict[tuple[int, int], int]) -> None:
    result = os.stat(link)
    sizes[result.st_dev, result.st_ino] = result.st_size


def _segments(inside: Inside) -> list[int]:
    """Sizes of the System V segments."""
    content = b""
    while inside.objects and (chunk := os.pread(inside.objects[0], _CHUNK, len(content))):
        content += chunk
    return [int(line.split()[3]) for line in content.splitlines()[1:]]
