"""Waits of a sandbox that is frozen without CRIU: none of its calls returns because of that.

Guarantee: :func:`continue_calls` thaws, whatever else fails. Only threads in one of the calls of CALLS, or in a call on
a socket, are traced, and only while they are frozen.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from sandbox import hints, paths, procfs
from sandbox.errors import Unsupported

if TYPE_CHECKING:
    from sandbox.container.container import Container

#: semop, rt_sigtimedwait, io_getevents, semtimedop, epoll_wait, epoll_pwait, io_pgetevents, epoll_pwait2
CALLS = frozenset({65, 128, 208, 220, 232, 281, 333, 441})
#: read, write, readv, writev, connect, accept, sendto, recvfrom, sendmsg, recvmsg, accept4
SOCKET_CALLS = frozenset({0, 1, 19, 20, 42, 43, 44, 45, 46, 47, 288})
_one_at_a_time = threading.Lock()  # the library holds the time-outs of one sandbox's sockets


def thaw(container: Container, notes: int | None) -> None:
    """Let a frozen sandbox continue. `notes`: the inspector's map of waits. Blocks; on one thread, the tracer's."""
    if container.cgroup.frozen:
        continue_calls(container.tasks(), notes, container.cgroup.thaw)


def continue_calls(pids: list[int], notes: int | None, thaw: Callable[[], object]) -> None:
    """The same for the processes of any frozen group, which `thaw` lets run."""
    try:
        threads = list(interrupted(pids))
        library = _library() if threads else None
    except BaseException:
        thaw()
        raise
    if library is None:
        thaw()
        return
    with _one_at_a_time:
        try:
            numbers = (ctypes.c_int * (2 * len(threads)))(*(number for pair in threads for number in pair))
            library.pagurus_continue_calls(-1 if notes is None else notes, numbers, ctypes.c_size_t(len(threads)))
        finally:
            thaw()
        library.pagurus_after_thaw()


def interrupted(pids: list[int]) -> Iterator[tuple[int, int]]:
    """(process, thread) of the threads of frozen processes whose calls the kernel would end."""
    for pid in pids:
        with contextlib.suppress(OSError):
            for thread in procfs.threads(pid):
                with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/task/{thread}/syscall") as file:
                    number, first, *_ = file.read().split()
                    if int(number) in CALLS or (int(number) in SOCKET_CALLS and _is_socket(pid, int(first, 16))):
                        yield pid, thread


def _is_socket(pid: int, descriptor: int) -> bool:
    return os.readlink(f"/proc/{pid}/fd/{descriptor & 0xFFFFFFFF}").startswith("socket:")


@functools.cache
def _library() -> ctypes.CDLL:
    if not paths.frozen().exists():
        raise Unsupported(f"{paths.frozen()} is missing", hint=hints.parts("native"))
    return ctypes.CDLL(os.fspath(paths.frozen()))
