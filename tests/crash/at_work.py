"""A sandbox at work as an agent's is: a model that thinks, a process with memory, answers that tell all that was done.

Each turn appends a number to a file and to the memory of a process that lives since the start, and is answered with
both. Thinking lasts as a lognormal law says: in public recordings of agents at work half of all thoughts last 3.2 s,
and the logarithms of their lengths have a deviation of 0.73.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from dataclasses import dataclass, field

from sandbox import Sandbox
from sandbox.errors import PagurusError

THINK = 3.2  # seconds, the median
THINK_SPREAD = 0.73  # deviation of the logarithm
# Keeps what it is told in memory, beside bytes that do not compress, and tells all of it.
KEEPER = r"""cat > /keeper.py <<'E'
import os
held, told = os.urandom({bytes}), []
os.mkfifo("/in")
os.mkfifo("/out")
while True:
    with open("/in") as words:
        told.append(words.read().strip())
    with open("/out", "w") as answer:
        print(*told, file=answer)
E
setsid python3 /keeper.py > /dev/null 2>&1 < /dev/null & while [ ! -p /out ]; do sleep 0.05; done"""
TURN = "echo {n} >> /log; echo {n} > /in; cat /out; tr '\\n' ' ' < /log"


@dataclass
class Player:
    """One sandbox at work."""

    sandbox: Sandbox
    think: float = THINK
    turns: int = 0
    wrong: list[str] = field(default_factory=list)
    requested_at: float = 0.0
    answered_at: float = 0.0
    durations: list[float] = field(default_factory=list)
    lost: str = ""

    @property
    def waits(self) -> bool:
        """Whether it was asked and has not answered."""
        return self.requested_at > self.answered_at

    async def start(self, megabytes: int) -> None:
        await self.sandbox.exec(KEEPER.format(bytes=megabytes << 20), timeout=120)

    async def play(self, stop: asyncio.Event, chance: random.Random) -> None:
        while not stop.is_set():
            self.requested_at = time.monotonic()
            try:
                result = await self.sandbox.exec(TURN.format(n=self.turns))
            except PagurusError as error:
                self.lost = str(error)
                return
            lines = result.text.splitlines()
            expected = [str(number) for number in range(self.turns + 1)]
            if [line.split() for line in lines] != [expected, expected]:
                self.wrong.append(f"turn {self.turns}: {result.text[:200]!r} {result.stderr[:200]!r}")
            self.turns += 1
            self.answered_at = time.monotonic()
            self.durations.append(self.answered_at - self.requested_at)
            await asyncio.sleep(chance.lognormvariate(math.log(self.think), THINK_SPREAD) if self.think else 0)
