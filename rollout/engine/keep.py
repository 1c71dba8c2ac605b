"""A server that outlives who started it, though it cannot end by itself: kept by a small process that can.

::

    python keep.py --lock FILE --idle 900 -- SERVER ...

Guarantee: the server ends when no process has held a shared lock on FILE for `idle` seconds, when this process gets a
signal to end, and when it is killed; what the server leaves of its own group ends with it. Only the standard library:
it is run as a file, next to an environment that is not ours.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

POLL_INTERVAL = 1.0  # seconds between two looks at the lock
TIMEOUT = 10.0  # seconds between SIGTERM and SIGKILL
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def command(argv: list[str], lock: Path, idle: float) -> list[str]:
    """The command line that keeps `argv`."""
    return [sys.executable, str(Path(__file__)), "--lock", str(lock), "--idle", str(idle), "--", *argv]


def use(lock: Path) -> IO[str]:
    """While the returned file is open, what this lock keeps alive stays. Any number of processes."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    file = lock.open("a")
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


def used(lock: Path) -> bool:
    """Whether anybody holds it."""
    try:
        with lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:  # with its run directory
        return False
    return False


def die_with_parent() -> None:
    """In a child, before exec: a server must not outlive the process that would end it.

    SIGTERM, since vLLM's server then ends its own workers; killed, it would leave them behind.
    """
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def keep(argv: list[str], lock: Path, idle: float) -> int:
    """Until it ends, or it is no longer used; its exit status."""
    server = subprocess.Popen(argv, preexec_fn=die_with_parent)
    signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    last, reported = time.monotonic(), 0.0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return server.wait(POLL_INTERVAL)
        now = time.monotonic()
        if used(lock):
            last = now
        elif not reported and now - last > idle:
            reported = now
            server.terminate()
        elif reported and now - reported > TIMEOUT:
            server.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lock", type=Path, required=True)
    parser.add_argument("--idle", type=float, required=True)
    parser.add_argument("server", nargs="+")
    options = parser.parse_args()
    status = keep(options.server, options.lock, options.idle)
    if os.getpgrp() == os.getpid():  # our own group: what the server left of it, and then we
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
