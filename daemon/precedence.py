"""The daemon's place among what competes for the processors: its event loop runs before sandboxes and trainers.

Imports next to nothing: it is called before the daemon's own code is loaded.
"""

from __future__ import annotations

import contextlib
import os
import threading

PRECEDENCE = -10  # nice value of the event loop
GROUP_PRECEDENCE = -5  # of the whole daemon, where the kernel shares processors out by session first (sched(7))


def hurry() -> bool:
    """This thread runs before others on a busy host; False where the daemon may not ask for that."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), PRECEDENCE)
        if os.getsid(0) == os.getpid():  # else the group has other processes too
            try:
                with open("/proc/self/autogroup", "w") as group:
                    group.write(str(GROUP_PRECEDENCE))
            except FileNotFoundError:  # a kernel without such groups
                pass
    except PermissionError:
        return False
    return True


def ordinary() -> None:
    """This thread competes like any other; one that gives way already and may not ask for more keeps doing so."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 0)
