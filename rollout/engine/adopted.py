"""A process that another process started: known by its pid and the time of its start, watched by its pidfd.

Guarantee: a pid that was given to another process since is never taken for the one that was written down.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
from pathlib import Path

import msgspec

from sandbox import durable

PIDFD_SIGNAL_PROCESS_GROUP = 4  # linux/pidfd.h; not in Python's signal


class RoleRecord(msgspec.Struct, kw_only=True):
    """One role of a run, as it was last started. In ``roles/NAME.json`` of the run directory."""

    name: str
    pid: int
    started: int  # ticks of the kernel's clock, see proc(5)
    at: float  # seconds since the epoch
    generation: int = 1  # how often it was started in this run
    url: str = ""
    log: str = ""
    host: str = msgspec.field(default_factory=socket.gethostname)


def started(pid: int) -> int | None:
    """When a process was started, in the kernel's ticks; None when there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def write(directory: Path, role: RoleRecord) -> None:
    """Whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    durable.publish(directory / f"{role.name}.json", msgspec.json.encode(role), durable=False)


def read(directory: Path, name: str) -> RoleRecord | None:
    """What was written down of a role; None when it was never started, or the file is no such thing."""
    try:
        return msgspec.json.decode((directory / f"{name}.json").read_bytes(), type=RoleRecord)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def here(role: RoleRecord) -> bool:
    """Whether it was started on this machine."""
    return role.host == socket.gethostname()


def hold(role: RoleRecord) -> int | None:
    """A pidfd of the process if it still is the one that was written down, else None. The caller closes it."""
    if not here(role):
        return None
    try:
        descriptor = os.pidfd_open(role.pid)
    except ProcessLookupError:
        return None
    ended, _, _ = select.select([descriptor], [], [], 0)  # also of one that was not reaped yet
    if not ended and started(role.pid) == role.started:
        return descriptor
    os.close(descriptor)
    return None


class AdoptedProcess:
    """Like `asyncio.subprocess.Process`, of a process that is not our child: its exit status is unknown.

    It leads a process group, which ends with it: a vLLM server has processes of its own, and one that was stopped hears
    of no death.
    """

    def __init__(self, pid: int, descriptor: int):
        self.pid, self.returncode = pid, None
        self._descriptor = descriptor
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(descriptor, self._end)

    returncode: int | None

    async def wait(self) -> int:
        await self._ended.wait()
        return -1

    def kill(self) -> None:
        if self.returncode is None:
            self._kill_group()
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def _kill_group(self) -> None:
        """By the descriptor: a group's number may be another one's as soon as its last process has ended."""
        with contextlib.suppress(OSError):  # none is left; or Linux before 6.9, where only the leader is killed
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL, None, PIDFD_SIGNAL_PROCESS_GROUP)

    def _end(self) -> None:
        self._kill_group()
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.returncode = -1
        self._ended.set()
