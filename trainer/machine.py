"""The machine that a run finds: its cores, and how many of them others keep busy. Blocks while it measures.

Owns: reading ``/proc/stat``, what this process tells its C library. Does not own: what follows from the load
(:mod:`trainer.sizing`).
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

MEASURED = 0.5  # seconds
MODEL = "model name"
M_MMAP_THRESHOLD = -3  # of glibc's mallopt
MAPPED = 1 << 20  # bytes; blocks from this size on are mapped one by one


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


def busy(seconds: float = MEASURED) -> float:
    """Cores that others keep busy now; this process sleeps meanwhile."""
    before = _ticks()
    time.sleep(seconds)
    after = _ticks()
    total, idle = after[0] - before[0], after[1] - before[1]
    return cores() * (1 - idle / total) if total > 0 else 0.0


def processor() -> str:
    """Its name, as the kernel has it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == MODEL:
            return value.strip()
    return "unknown"


def return_freed_memory() -> bool:
    """Large blocks go back to the system when they are freed, in this process. Else glibc raises its own threshold and
    keeps what was freed between micro-batches: a peak of 1.13 to 1.43 of what the tensors need was seen.

    Whether the C library knows that; others than glibc may not.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(M_MMAP_THRESHOLD, MAPPED))


def _ticks() -> tuple[int, int]:
    """Ticks of all cores since the start: all of them, and the idle ones."""
    fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(fields), fields[3] + fields[4]
