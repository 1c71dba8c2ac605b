"""What does a sandbox feel of neighbours who want to starve it?

::

    pagurus bench neighbours [--json] [--turns N] [--rounds R] [--attacks WORD,WORD] [--image NAME]

A neighbour takes turns: a command that changes a file and replaces a process, then its checkpoint, until that is
captured. It does so beside each attack of :mod:`bench.hostile.starving` and without it, in rounds (without, with, with,
without), so that what else the machine does falls on both. All sandboxes belong to the same owner, which is the
hardest case: no quota of a token separates them.

Of each attack: `without` and `with` (p50, p95, p99 and the longest turn in milliseconds, and how many), `ratio_p99`,
`failed` (turns of the neighbour that were not captured), and what the attack saw. `worst_ratio_p99` is the largest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.harness.own_daemon import IMAGE, BenchHost, image
from bench.hostile.starving import ATTACKS, Attack, Ground, free_port
from daemon.checkpoints.queue import quantile
from sandbox import Limits
from sandbox.errors import PagurusError

LIMITS = Limits(memory="512MiB", processes=64, disk="512MiB")
TURN = "kill $(cat /run/job) 2>/dev/null; sleep 9999 >/dev/null 2>&1 & echo $! > /run/job; date > /root/now"
PAUSE = 0.02  # seconds between turns: a model thinks longer
SETTLED = 1.0  # seconds after an attack
PATIENCE = 120.0  # seconds for one turn; as long as this counts one that failed


class Times:
    """Turns of the neighbour, in milliseconds."""

    def __init__(self) -> None:
        self.ms: list[float] = []
        self.failures: list[str] = []

    async def take(self, host: BenchHost, neighbour: str, turns: int) -> None:
        for _ in range(turns):
            began, failed = time.monotonic(), len(self.failures)
            try:
                async with asyncio.timeout(PATIENCE), host.client() as client:  # connects anew, as a program does
                    sandbox = await client.get(neighbour)
                    made = await sandbox.captured(await sandbox.exec(TURN, timeout=60))
                    if made.error:
                        self.failures.append(made.error)
            except (PagurusError, TimeoutError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
            took = time.monotonic() - began if len(self.failures) == failed else PATIENCE
            self.ms.append(1000 * took)
            await asyncio.sleep(PAUSE)

    def summary(self) -> dict[str, float]:
        found = {f"p{n}": round(quantile(self.ms, n / 100), 1) for n in (50, 95, 99)}
        return {**found, "max": round(max(self.ms), 1), "turns": len(self.ms)}


async def measure(host: BenchHost, attack: Attack, ground: Ground, neighbour: str, turns: int, rounds: int) -> Any:
    """The neighbour's turns with and without one attack, interleaved."""
    times = {False: Times(), True: Times()}
    began = time.monotonic()
    await Times().take(host, neighbour, 5)  # the first are slower
    for _ in range(rounds):
        await times[False].take(host, neighbour, turns)
        async with attack(ground):
            await times[True].take(host, neighbour, 2 * turns)
        await asyncio.sleep(SETTLED)  # what the attack leaves to do is not the neighbour's quiet
        await times[False].take(host, neighbour, turns)
    quiet, under = times[False].summary(), times[True].summary()
    return {
        "without": quiet,
        "with": under,
        "ratio_p99": round(under["p99"] / quiet["p99"], 2),
        "failed": times[False].failures + times[True].failures,
        "saw": ground.saw,
        "seconds": round(time.monotonic() - began, 1),
    }


async def everything(options: argparse.Namespace) -> dict[str, Any]:
    words = options.attacks.split(",") if options.attacks else [""]
    chosen = {name: one for name, one in ATTACKS.items() if any(word in name for word in words)}
    tree = await asyncio.to_thread(image, options.image)
    host = BenchHost(Path(tempfile.mkdtemp(prefix="pagurus-neighbours-", dir="/var/tmp")), tree)
    port, load, results = free_port(), os.getloadavg()[0], {}
    try:
        await asyncio.to_thread(host.start, "--listen", f"127.0.0.1:{port}", "--plain")
        print("   ratio   p99 with   without", file=sys.stderr)
        for name, attack in chosen.items():
            async with host.client() as client, client.create(IMAGE, limits=LIMITS) as neighbour:
                ground = Ground(client, IMAGE, port)
                found = await measure(host, attack, ground, neighbour.id, options.turns, options.rounds)
            print(_line(name, found), file=sys.stderr, flush=True)
            results[name] = found
        complaints = await asyncio.to_thread(host.complaints)
    except BaseException:  # the daemon's own words tell why, whatever it was
        print(*host.complaints()[-8:], sep="\n", file=sys.stderr)
        raise
    finally:
        await asyncio.to_thread(host.clean)
    return {
        "attacks": results,
        "worst_ratio_p99": max(found["ratio_p99"] for found in results.values()),
        "failed": sum(len(found["failed"]) for found in results.values()),
        "cores": os.cpu_count(),
        "load_before": round(load, 2),
        "complaints": len(complaints),
    }


def _line(name: str, found: dict[str, Any]) -> str:
    return f"{found['ratio_p99']:8.2f} {found['with']['p99']:9.1f} {found['without']['p99']:9.1f}  {name}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="pagurus bench neighbours", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--turns", type=int, default=50, help="of the neighbour in a quarter of a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--attacks", default="", help="only those whose name holds one of these words (commas between)")
    parser.add_argument("--image", default="debian")
    options = parser.parse_args(arguments)
    result = asyncio.run(everything(options))
    if options.json:
        print(json.dumps(result))
    else:
        print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
