"""Faults on purpose: sandboxes killed outright, behind the daemon's back, at seeded random turns.

Guarantee: a kill goes through the operating system, SIGKILL to every process of the sandbox's control group, pid 1
first; the daemon learns of it as it would of any other death. The same seed chooses the same trajectories and turns.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal

from sandbox.container.cgroup import Cgroup

When = Literal["checkpoint", "between", "command"]
Kill = Callable[[str, float], Coroutine[Any, Any, int]]
KILL_ROUNDS = 50  # a process may fork between the listing and the signal


async def kill_sandbox(sandbox: str, delay: float = 0.0) -> int:
    """SIGKILL to all processes of a sandbox of this host; 1 when there was one to kill, else 0."""
    await asyncio.sleep(delay)
    return await asyncio.to_thread(_kill_all, Cgroup(sandbox))


def _kill_all(cgroup: Cgroup) -> int:
    hit = 0
    for _ in range(KILL_ROUNDS):
        pids = sorted(cgroup.pids())
        if not pids:
            break
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
                hit = 1
            except ProcessLookupError:
                continue
    return hit


@dataclass(frozen=True)
class Inject:
    """Kill the trajectory's sandbox in this turn."""

    turn: int
    when: When = "between"
    delay: float = 0.0  # seconds after the command began, for ``command``
    kill: Kill = kill_sandbox


@dataclass(kw_only=True)
class Faults:
    """Which trajectories get a fault, and when.

    Example: ``Faults(seed=1, share=0.05, turns=(2, 5))`` strikes every twentieth trajectory in its turn 2, 3, 4 or 5;
    the late turns are those where the service of an episode usually runs already.
    """

    seed: int = 0
    share: float = 0.05  # of the trajectories that start while active
    turns: tuple[int, int] = (1, 5)  # inclusive, counted from 0
    limit: int | None = None  # strikes in all
    active: bool = True  # the owner switches it, e.g. on in the second half of a run
    kill: Kill = kill_sandbox
    chosen: int = 0

    def choose(self, prompt: str, index: int, attempt: int = 0) -> Inject | None:
        """The strike for a trajectory, or None: while active, a function of the seed and the trajectory's names."""
        dice = random.Random(f"{self.seed}/{prompt}/{index}/{attempt}")
        if not self.active or dice.random() >= self.share or (self.limit is not None and self.chosen >= self.limit):
            return None
        self.chosen += 1
        turn = dice.randint(*self.turns)
        when: When = dice.choice(("between", "between", "command", "checkpoint"))
        return Inject(turn, when, delay=dice.uniform(0.0, 0.004), kill=self.kill)
