"""``python -m daemon.fence RUN``: freezes the sandboxes of a host whose lease is over, and thaws them afterwards.

One for each run directory; it ends with the lease's file. Small on purpose: it acts when the daemon does not.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import sys
import time
from pathlib import Path

from daemon.host.fence import HELD, LOCK, MARGIN, clock, read
from sandbox.container.cgroup import PARENT, hierarchy, pids_in
from sandbox.criu.carried.frozen import continue_calls

POLL_INTERVAL = 0.02  # seconds between two looks
URGENT = -15  # nice value, where it may not be scheduled in real time: it must run when it is time, on a busy host too


def freeze(run: Path, frozen: bool) -> None:
    """All sandboxes of this host, those that are only now made or taken over too. None that is held is thawed."""
    groups = hierarchy().unified / PARENT
    for name in os.listdir(run / "sandboxes"):
        if not frozen and (run / "sandboxes" / name / HELD).exists():
            continue  # it is frozen because it leaves, or may arrive
        with contextlib.suppress(OSError):  # it ends, or has no group yet: looked at again
            switch = groups / name / "cgroup.freeze"
            if switch.read_text().strip() == str(int(frozen)):
                continue
            if frozen:
                switch.write_text("1")
            else:  # the daemon has the inspector's notes and may be dead: waits restart in full, and none returns early
                continue_calls(pids_in(groups / name), None, functools.partial(switch.write_text, "0"))


def main(run: Path) -> int:
    lock = os.open(run / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0  # there is one
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:  # not allowed; it may still go before others of its own session
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, URGENT)
    held = False
    while (until := read(run)) is not None:
        over = clock() >= until - MARGIN
        if over or held:
            freeze(run, over)
        held = over
        time.sleep(POLL_INTERVAL if over else max(0.001, min(POLL_INTERVAL, until - MARGIN - clock())))
    if held:
        freeze(run, False)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
