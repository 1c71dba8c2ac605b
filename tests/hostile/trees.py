"""The host's own hands on a sandbox's file tree, while the sandbox changes it, dies, or makes it strange."""

from __future__ import annotations

import asyncio
import ctypes
import io
import os
import signal
import struct

from sandbox.errors import PagurusError
from sandbox.tree import files
from tests.hostile.act import Scene, act, judge, run

_CLONE3 = 435


def taken(pid: int) -> int:
    """Start a process of the host's that has this number, which must be free. Returns its pidfd."""
    libc = ctypes.PyDLL(None, use_errno=True)  # it keeps the interpreter's lock, which the child finds held by itself
    number, pidfd = ctypes.c_int(pid), ctypes.c_int(-1)
    # struct clone_args: flags (CLONE_PIDFD), pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls,
    # set_tid, set_tid_size
    args = struct.pack(
        "=10Q", 0x1000, ctypes.addressof(pidfd), 0, 0, signal.SIGCHLD, 0, 0, 0, ctypes.addressof(number), 1
    )
    child = libc.syscall(_CLONE3, args, len(args))
    if child == 0:
        os.execv("/bin/sleep", ["sleep", "1000"])
    if child < 0:
        raise OSError(ctypes.get_errno(), f"cannot start a process {pid}")
    return pidfd.value


def end(pidfd: int) -> None:
    """Kill what `taken` has started."""
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    os.close(pidfd)


@act("meet the host's files through a number that pid 1 had before")
async def _number(scene: Scene) -> str:
    if said := judge(await run(scene, "print('tried')")):
        return said
    inside, pid = scene.attacker.inside, scene.attacker.init_pid or 0
    base = scene.attacker.spec.uid_base
    await scene.attacker.kill()
    pidfd = taken(pid)
    try:
        for attempt in (
            lambda: files.read(inside, str(scene.secret), limit=100),
            lambda: files.write(inside, base, str(scene.secret), io.BytesIO(b"overwritten")),
            lambda: files.move(inside, base, str(scene.secret), f"{scene.secret}.moved"),
            lambda: files.entries(inside, base, str(scene.secret.parent)),
        ):
            try:
                result = await asyncio.to_thread(attempt)
            except PagurusError:
                continue
            return f"the host's files were met: {result!r}"
    finally:
        await asyncio.to_thread(end, pidfd)
    return "" if scene.secret.read_bytes() == b"secret" else "the host's file was written"
