"""Processes of a sandbox that are its owner's and no part of its checkpoints: an agent that is started again.

Guarantee: a number is in `pids` only as long as the process that was added lives.
"""

from __future__ import annotations

import os
import threading

from sandbox.container.alive import is_readable
from sandbox.procfs import task_of


class ExclusionGroup:
    """Those of one sandbox."""

    def __init__(self) -> None:
        self._pidfds: dict[int, int] = {}  # by host pid
        self._lock = threading.Lock()  # checkpoints ask from threads of their own

    def add(self, pid: int, started: int) -> bool:
        """`pid` (of the host) is one, if it is still the process that started then; returns whether it is."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        result = task_of(pid)  # after the pidfd was opened: it is of this very process
        if result is None or result.started != started:
            os.close(pidfd)
            return False
        with self._lock:
            if (before := self._pidfds.get(pid)) is not None:
                os.close(before)
            self._pidfds[pid] = pidfd
        return True

    def pids(self) -> frozenset[int]:
        """Host pids of those that live. One that has ended is forgotten."""
        with self._lock:
            for pid in [pid for pid, pidfd in self._pidfds.items() if is_readable(pidfd)]:
                os.close(self._pidfds.pop(pid))
            return frozenset(self._pidfds)

    def clear(self) -> None:
        """Forget all of them. Idempotent."""
        with self._lock:
            while self._pidfds:
                os.close(self._pidfds.popitem()[1])
