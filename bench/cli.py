"""How long the program takes to start.

Each round starts, in turns, a Python that does nothing, ``pagurus --help``, ``--version``, the help of a verb, and
``pagurus ls`` against a fake daemon that answers at once. Needs no root and no daemon.

For each one `*_s`, the median wall time; `*_least_s`, the shortest, which other programs of the machine disturb least;
`*_cpu_s`, the median of its own processor time.
"""

from __future__ import annotations

import asyncio
import os
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench.harness import command
from sandbox.testing import FakeHost
from trainer.machine import processor

PROGRAM = (sys.executable, "-m", "pagurus")
STARTS: dict[str, Sequence[str]] = {
    "python": (sys.executable, "-c", "pass"),
    "help": (*PROGRAM, "--help"),
    "version": (*PROGRAM, "--version"),
    "verb_help": (*PROGRAM, "exec", "--help"),
    "ls": (*PROGRAM, "ls"),
}


async def started(command: Sequence[str], host: str) -> tuple[float, float]:
    """Wall and processor seconds of a command that has to succeed."""
    existing = {**os.environ, "PAGURUS_HOST": host}
    existing.pop("PYTHONDONTWRITEBYTECODE", None)  # compiled modules are kept, as they are where it is installed
    before, began = _used(), time.monotonic()
    nothing = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, env=existing, stdin=nothing, stdout=nothing)
    if await process.wait():
        raise RuntimeError(f"{command} failed")
    return time.monotonic() - began, _used() - before


def _used() -> float:
    """Processor seconds of the children that have ended."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


async def measured(rounds: int) -> dict[str, Any]:
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in STARTS}
    async with FakeHost() as fake:
        for number in range(rounds + 1):
            for name, command in STARTS.items():
                took = await started(command, fake.address)
                if number:  # the first round compiles, and reads the files
                    taken[name].append(took)
    metrics: dict[str, Any] = {}
    for name, pairs in taken.items():
        walls, used = [wall for wall, _ in pairs], [cpu for _, cpu in pairs]
        metrics |= {f"{name}_s": statistics.median(walls), f"{name}_least_s": min(walls)}
        metrics[f"{name}_cpu_s"] = statistics.median(used)
    return {name: round(value, 4) for name, value in metrics.items()}


def main(argv: list[str] | None = None) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args(argv)
    result: dict[str, Any] = {"cpu": processor(), "load": round(os.getloadavg()[0], 1), "rounds": options.rounds}
    result |= asyncio.run(measured(options.rounds))
    command.show(result, options)
    return 0
