"""The garbage collector of a process whose event loop must answer soon.

A look goes through every token of every list that is young; thousands of trajectories are millions of tokens, and
nearly nothing of them is garbage with cycles.
"""

from __future__ import annotations

import gc

YOUNG = 50_000  # objects that came and stayed, until the next look; Python's own figure is 700


def calm() -> None:
    """What there is now stays, and is not looked at again; what comes is looked at seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 20, 100)
