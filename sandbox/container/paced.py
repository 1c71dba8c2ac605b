"""Descriptors that a sandbox fills, read on the daemon's event loop at a bounded pace.

Guarantee: a program that fills descriptors in tiny pieces without a pause wakes the event loop RATE times a second,
after BURST at once; what has come in between is read at one go. Reads of LARGE and more cost who writes about as much
as who reads, and are not slowed down.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

RATE, BURST = 400.0, 400.0  # small reads: a second in the long run, and at once
LARGE = 16 << 10  # bytes


class Allowance:
    """What is left of a pace. One for all descriptors that share it."""

    def __init__(self) -> None:
        self._left = BURST
        self._at = time.monotonic()

    def spend(self, size: int) -> float:
        """After a read of `size` bytes: the seconds until the next one."""
        if size >= LARGE:
            return 0.0
        now = time.monotonic()
        self._left = min(BURST, self._left + RATE * (now - self._at)) - 1
        self._at = now
        return max(0.0, -self._left / RATE)


class PacedReader:
    """Calls `read`, which reads once and returns how many bytes, whenever there is something, at a pace."""

    def __init__(self, fd: int, read: Callable[[], int], allowance: Allowance | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._fd = fd
        self._read = read
        self._allowance = allowance or Allowance()
        self._timer: asyncio.TimerHandle | None = None
        self._on = False
        self.start()

    def start(self) -> None:
        """Listen, if it does not already."""
        if not self._on:
            self._on = True
            self._arm()

    def stop(self) -> None:
        """Listen no more; before the descriptor is closed. Idempotent."""
        if self._on:
            self._on = False
            self._loop.remove_reader(self._fd)
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _arm(self) -> None:
        self._timer = None
        self._loop.add_reader(self._fd, self._readable)

    def _readable(self) -> None:
        wait = self._allowance.spend(self._read())
        if wait and self._on:
            self._loop.remove_reader(self._fd)
            self._timer = self._loop.call_later(wait, self._arm)
