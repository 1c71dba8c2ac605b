"""What does a sandbox feel of neighbours who want to starve it?

::

    pagurus bench neighbours [--json] [--turns N] [--rounds R] [--attacks WORD,WORD] [--image NAME]

A neighbour takes turns: a command that changes a file and replaces a process, then its checkpoint, until that is
captured. It does so beside each attack of :mod:`tests.hostile.starving` and without it, in rounds (without, with, with,
without), so that what else the machine does falls on both. The attacker is a process of its own: what its program does
with answers is not taken for what the neighbour waits for. All sandboxes belong to the same owner, which is the
hardest case: no quota of a token separates them.

Of each attack: `without` and `with` (p50, p95, p99 and the longest turn in milliseconds, and how many), `ratio_p99`,
`failed` (turns of the neighbour that were not captured), how often the attack did something (`acts`) and what it
`saw`. `worst_ratio_p99` is the largest.
`phases` says where the turns went, the mean of all and of the slowest tenth: `find` (connect, and look the sandbox up),
`request` (the answer's way and the daemon's own), `gate` (for the last turn), `command`, `verdict`, `queue` (for a
slot),
`capture` (of which `frozen`), `reported` (until the neighbour knew that it was captured).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from bench.harness import aftermath, command
from bench.harness.own_daemon import IMAGE, BenchHost, image
from daemon.checkpoints.queue import quantile
from sandbox import Limits
from sandbox.errors import PagurusError
from sandbox.messages import CheckpointInfo, ExecResult
from tests.hostile.starving import ATTACKS, BEGUN, free_port

LIMITS = Limits(memory="512MiB", processes=64, disk="512MiB")
TURN = "kill $(cat /run/job) 2>/dev/null; sleep 9999 >/dev/null 2>&1 & echo $! > /run/job; date > /root/now"
PAUSE = 0.02  # seconds between turns: a model thinks longer
FINALIZED = 1.0  # seconds after an attack
ACTS = ""  # among what was seen: how often the attack did something
TIMEOUT = 120.0  # seconds for one turn; as long as this counts one that failed


class Times:
    """Turns of the neighbour, in milliseconds."""

    def __init__(self) -> None:
        self.ms: list[float] = []
        self.failures: list[str] = []
        self.phases: list[tuple[float, dict[str, float]]] = []  # of turns that were captured, with the whole

    async def take(self, host: BenchHost, neighbour: str, turns: int) -> None:
        for _ in range(turns):
            began, failed = time.monotonic(), len(self.failures)
            try:
                async with asyncio.timeout(TIMEOUT), host.client() as client:  # connects anew, as a program does
                    sandbox = await client.get(neighbour)
                    result = time.monotonic()
                    done = await sandbox.exec(TURN, timeout=60)
                    answered = time.monotonic()
                    made = await sandbox.captured(done)
                    if made.error:
                        self.failures.append(made.error)
                    else:
                        existing = time.time()
                        phases = _phases(1000 * (result - began), 1000 * (answered - result), done, made, existing)
                        self.phases.append((1000 * (time.monotonic() - began), phases))
            except (PagurusError, TimeoutError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
            took = time.monotonic() - began if len(self.failures) == failed else TIMEOUT
            self.ms.append(1000 * took)
            await asyncio.sleep(PAUSE)

    def summary(self) -> dict[str, float]:
        result = {f"p{n}": round(quantile(self.ms, n / 100), 1) for n in (50, 95, 99)}
        return {**result, "max": round(max(self.ms), 1), "turns": len(self.ms)}

    def where(self) -> dict[str, dict[str, float]]:
        """Mean milliseconds of each phase: of all turns, and of the slowest tenth."""
        ordered = [phases for _, phases in sorted(self.phases, key=lambda item: item[0])]
        chosen = {"all": ordered, "slowest": ordered[-max(1, len(ordered) // 10) :]}
        return {
            name: {phase: round(sum(item[phase] for item in turns) / len(turns), 1) for phase in turns[0]}
            for name, turns in chosen.items()
            if turns
        }


def _phases(find: float, request: float, done: ExecResult, made: CheckpointInfo, existing: float) -> dict[str, float]:
    """Where one turn went. The daemon's clock and ours are the same."""
    inside = 1000 * done.duration + done.waited_ms + (done.verdict_ms or 0.0)
    return {
        "find": find,
        "ask": request - inside,
        "gate": done.waited_ms,
        "command": 1000 * done.duration,
        "verdict": done.verdict_ms or 0.0,
        "queue": 1000 * ((made.started_at or 0.0) - made.created_at),
        "capture": made.total_ms,
        "frozen": made.frozen_ms,
        "told": 1000 * (existing - (made.captured_at or existing)),
    }


async def measure(host: BenchHost, attack: str, port: int, neighbour: str, turns: int, rounds: int) -> Any:
    """The neighbour's turns with and without one attack, interleaved."""
    times, saw = {False: Times(), True: Times()}, Counter[str]()
    began = time.monotonic()
    await Times().take(host, neighbour, 5)  # the first are slower
    for _ in range(rounds):
        await times[False].take(host, neighbour, turns)
        async with attacked(host, attack, port, saw):
            await times[True].take(host, neighbour, 2 * turns)
        await asyncio.sleep(FINALIZED)  # what the attack leaves to do is not the neighbour's quiet
        await times[False].take(host, neighbour, turns)
    quiet, under = times[False].summary(), times[True].summary()
    return {
        "without": quiet,
        "with": under,
        "ratio_p99": round(under["p99"] / quiet["p99"], 2),
        "failed": times[False].failures + times[True].failures,
        "phases": {"without": times[False].where(), "with": times[True].where()},
        "acts": saw.pop(ACTS),
        "saw": sorted(saw),
        "seconds": round(time.monotonic() - began, 1),
    }


@contextlib.asynccontextmanager
async def attacked(host: BenchHost, attack: str, port: int, saw: Counter[str]) -> AsyncIterator[None]:
    """While the block runs, a process of its own attacks the host."""
    program = [sys.executable, "-m", "tests.hostile.starving", str(host.socket), IMAGE, str(port), attack]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*program, stdin=pipe, stdout=pipe, start_new_session=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        if await process.stdout.readline() != BEGUN:
            raise RuntimeError(f"the attack {attack!r} does not begin")
        yield
        process.stdin.close()
        acts, reported = json.loads(await process.stdout.readline())
        saw.update({ACTS: acts, **dict.fromkeys(reported, 1)})
    finally:
        process.stdin.close()
        await process.wait()


async def everything(options: argparse.Namespace) -> dict[str, Any]:
    words = options.attacks.split(",") if options.attacks else [""]
    chosen = [name for name in ATTACKS if any(word in name for word in words)]
    tree = await asyncio.to_thread(image, options.image)
    host = BenchHost(aftermath.directory("pagurus-neighbours-", "/var/tmp"), tree)
    port, load, results = free_port(), os.getloadavg()[0], {}
    try:
        await asyncio.to_thread(host.start, "--listen", f"127.0.0.1:{port}", "--plain")
        print("   ratio   p99 with   without", file=sys.stderr)
        for name in chosen:
            async with host.client() as client, client.create(IMAGE, limits=LIMITS) as neighbour:
                result = await measure(host, name, port, neighbour.id, options.turns, options.rounds)
            print(_line(name, result), file=sys.stderr, flush=True)
            results[name] = result
        complaints = await asyncio.to_thread(host.complaints)
    except BaseException:  # the daemon's own words tell why, whatever it was
        print(*host.complaints()[-8:], sep="\n", file=sys.stderr)
        raise
    finally:
        await asyncio.to_thread(host.clean)
    return {
        "attacks": results,
        "worst_ratio_p99": max(result["ratio_p99"] for result in results.values()),
        "failed": sum(len(result["failed"]) for result in results.values()),
        "cores": os.cpu_count(),
        "load_before": round(load, 2),
        "complaints": len(complaints),
    }


def _line(name: str, result: dict[str, Any]) -> str:
    return f"{result['ratio_p99']:8.2f} {result['with']['p99']:9.1f} {result['without']['p99']:9.1f}  {name}"


def main(arguments: list[str]) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--turns", type=int, default=50, help="of the neighbour in a quarter of a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--attacks", default="", help="only those whose name holds one of these words (commas between)")
    parser.add_argument("--image", default="debian")
    options = parser.parse_args(arguments)
    result = asyncio.run(everything(options))
    command.show(result, options)
    return 0
