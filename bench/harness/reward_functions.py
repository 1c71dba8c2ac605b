"""What `pagurus bench branching` scores by: a test suite of some seconds, and functions that misbehave."""

from __future__ import annotations

import os
import time
from pathlib import Path

from rollout.rewards import Final, reward


@reward(longest=120.0)
async def tests_pass(final: Final, *, seconds: float) -> float:
    """Waits as a suite of tests would, and says 1 when it has found what the episode left."""
    done = await final.sandbox.exec(f"sleep {seconds}; test -s /serve.py", timeout=final.limit)
    return float(done.exit_code == 0)


@reward(forks=False, longest=8.0)
def unsure(final: Final, *, notes: str) -> float:
    """Right in the end: 1 for even numbers, 0 for odd ones. Of every twenty, the first tries of one hang, of one die,
    of one say nonsense; some say it with delay."""
    number = int(final.opening)
    tried = Path(notes) / str(number)
    first, kind = not tried.exists(), number % 20
    tried.touch()
    if first and kind == 3:
        time.sleep(1000)
    if first and kind == 7:
        os.abort()
    if first and kind == 11:
        return float("nan") if number % 40 == 11 else 17.0
    if kind == 13:
        time.sleep(0.2)
    return float(number % 2 == 0)
