"""The lease of a host in a cluster: when it is over, its sandboxes are frozen.

Guarantee: while a lease is over, no process of a sandbox runs, whether the daemon lives, hangs or is dead: a process of
its own (:mod:`daemon.fence`) freezes them, `MARGIN` before the end, so that there is time to do so. A host that never
had a lease has none to lose.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

from sandbox import durable
from sandbox.errors import Conflict

MARGIN = 0.4  # seconds before the end of a lease at which sandboxes are frozen
FILE, LOCK = "lease", "lease.lock"
HELD = "held"  # file in the run directory of a sandbox that is frozen because it leaves, or may arrive


class LeaseOver(Conflict):
    """On the wire a ``conflict`` with its own status: nothing was carried out, and another caller may."""

    status = 503


def clock() -> float:
    """Seconds since the host started, those in which it slept too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot() -> str:
    """Another one after each start of the host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def read(run: Path) -> float | None:
    """When the lease ends that lies in a run directory; None: there never was one."""
    try:
        return float((run / FILE).read_text())
    except FileNotFoundError:
        return None


class HostFence:
    """The lease that lies in the run directory, which outlives the daemon and not the host's start."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._until = read(run)

    @property
    def leased(self) -> bool:
        """Whether this host belongs to a cluster whose sandboxes may continue elsewhere."""
        return self._until is not None

    def grant(self, until: float, of: str) -> None:
        """The lease ends then, and not before. A grant that comes late takes nothing back."""
        if of != boot() or (self._until is not None and until <= self._until):
            return
        durable.publish(self._run / FILE, repr(until).encode(), mode=0o600, durable=False)
        self._until = until
        self.watch()

    def watch(self) -> None:
        """Let a process look at the lease, if there is one. Also of a daemon that begins: with the former it may have
        ended, and sandboxes that have been frozen since then wait for their release."""
        if self._until is not None and not self._watched():
            subprocess.Popen(
                [sys.executable, "-m", "daemon.fence", str(self._run)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # it outlives the daemon
            )

    def release(self) -> None:
        """This host needs no lease any more: what is frozen is released."""
        self._until = None
        (self._run / FILE).unlink(missing_ok=True)

    def over(self) -> bool:
        return self._until is not None and clock() >= self._until - MARGIN

    def need_lease(self) -> None:
        """Raises LeaseOver while nothing may act here."""
        if self.over():
            raise LeaseOver(
                "this host has lost its coordinator: its sandboxes are frozen, and may continue elsewhere",
                hint="ask the cluster",
            )

    def _watched(self) -> bool:
        """Whether a process looks at the lease: it holds the lock for as long as it lives."""
        handle = os.open(self._run / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
        return False
