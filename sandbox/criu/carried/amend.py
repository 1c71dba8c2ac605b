"""What CRIU leaves different in a restored tree, set right before its first instruction.

Guarantee: called while nothing of the tree runs. Paths of images are resolved below the root of the sandbox.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sandbox.container import namespaces, services
from sandbox.descriptors import closing
from sandbox.errors import RestoreFailed
from sandbox.procfs import inner_pid
from sandbox.tree import safe_path

if TYPE_CHECKING:
    from sandbox.container.container import Container

Times = list[tuple[str, int, int]]  # path in the sandbox, atime, mtime in ns
IPC_RMID = 0
WAY = safe_path.ACROSS_MOUNTS  # to the root of a service, which is mounted


def times(container: Container, paths: list[str]) -> Times:
    """Times of these paths in the file tree of a container that has no processes yet. Blocks."""
    result = []
    with safe_path.directory(container.trees()[0]) as root:
        for path in paths:
            with contextlib.suppress(OSError), _parent(root, path) as (parent, name):
                status = os.stat(name, dir_fd=parent, follow_symlinks=False)
                result.append((path, status.st_atime_ns, status.st_mtime_ns))
    return result


def set_times(init: int, pending: Times) -> None:
    """Give them back in the file tree of the process `init`. Blocks."""
    if not pending:
        return
    with safe_path.root_of(init) as root:
        for path, accessed, modified in pending:
            with contextlib.suppress(FileNotFoundError), _parent(root, path) as (parent, name):
                os.utime(name, ns=(accessed, modified), dir_fd=parent, follow_symlinks=False)


def remove_segments(init: int, numbers: list[int]) -> None:
    """Mark System V shared memory of the process `init` as removed: it goes with its last user. Blocks."""
    if not numbers:
        return
    with closing(os.open(f"/proc/{init}/ns/ipc", os.O_RDONLY | os.O_CLOEXEC)) as fd:
        namespaces.inside(fd, namespaces.IDS["ipc"], lambda: _remove(numbers))


def _remove(numbers: list[int]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for number in numbers:
        if libc.shmctl(number, IPC_RMID, None):
            raise RestoreFailed(
                f"shared memory {number} cannot be removed: {os.strerror(ctypes.get_errno())}",
                hint="restore it again, or an older checkpoint",
            )


def numbers(container: Container) -> dict[int, int]:
    """Host pid of each process by its number in the sandbox. Blocks."""
    result = {}
    for pid in container.tasks():
        if (inside := inner_pid(pid)) is not None and inside != pid:
            result[inside] = pid
    return result


def stop(container: Container, stopped: dict[int, int]) -> None:
    """Send the processes of a held tree the signals that had stopped them (by pid in the sandbox). Blocks.

    They take them before anything else when they are let go. The tree was restored as if they ran: CRIU stops them by
    a signal as well, which a held task has not taken yet, and a tracer that seizes it then waits in vain for it to be
    taken.
    """
    existing = numbers(container) if stopped else {}
    for number, sent in stopped.items():
        with closing(os.pidfd_open(existing[number])) as pidfd:
            if inner_pid(existing[number]) == number:
                signal.pidfd_send_signal(pidfd, sent)


@contextlib.contextmanager
def _parent(root: int, path: str) -> Iterator[tuple[int, str]]:
    """The directory of `path` below `root`, whatever links lie on the way, and the last name.

    Links in ``/services/NAME/./PATH`` lead from the root of the service.
    """
    directory, _, name = path.rpartition("/")
    service = services.owner(path)
    with contextlib.ExitStack() as stack:
        if service is not None and path.startswith(f"{services.root(service)}/./"):
            top, directory = services.root(service), directory.removeprefix(services.root(service))
            root = stack.enter_context(closing(safe_path.openat2(root, top, os.O_PATH | os.O_DIRECTORY, resolve=WAY)))
        resolve = safe_path.ACROSS_MOUNTS if service is not None else safe_path.IN_ROOT
        yield (
            stack.enter_context(
                closing(safe_path.openat2(root, directory or "/", os.O_PATH | os.O_DIRECTORY, resolve=resolve))
            ),
            name or ".",
        )
