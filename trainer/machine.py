"""The machine that a run finds: its cores, and how many of them others keep busy. Blocks while it measures.

Owns: reading ``/proc/stat``. Does not own: what follows from it (:mod:`trainer.sizing`).
"""

from __future__ import annotations

import os
import time
from pathlib import Path

MEASURED = 0.5  # seconds
MODEL = "model name"


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


def _ticks() -> tuple[int, int]:
    """Ticks of all cores since the start: all of them, and the idle ones."""
    fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(fields), fields[3] + fields[4]
