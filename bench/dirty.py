"""What does a checkpoint cost in a sandbox of some size that has written to a part of its memory?

::

    pagurus bench dirty [--json] [--sizes 50,200,800] [--percents 0,1,5] [--rounds N] [--no-track] [--image DIR]

A Python process holds so many MiB of random bytes and, before each checkpoint, writes to that percentage of its pages,
drawn at random. Medians of each combination: `frozen_ms` is CRIU's own measure of the frozen window with our work in
it, `total_ms` is the whole capture. `processor_ms` is the processor time of this process and of CRIU up to the thaw,
`criu_ms` that of CRIU alone; `hash_ms` is the time of hashing the pages afterwards, which storing a checkpoint begins
with. `raw_mib` is what the capture holds of its own; `freezing_ms`, `memdump_ms` and `memwrite_ms` are parts of CRIU's
work as CRIU states them.
`first` is the first capture of the sandbox, to which the others are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from bench.checkpoint import Ours
from bench.harness import aftermath, command
from sandbox import paths, procfs
from sandbox.container.container import Container
from sandbox.container.shim import short_slice
from sandbox.content import dumpfile
from sandbox.criu import dump
from sandbox.messages import Limits

PAGE = 4096
#: Writes to a page of every 100/percent when it reads a percentage, and answers by the name of a file.
HOLDER = """
import os, random
held = bytearray({size} << 20)
for at in range({size}):
    held[at << 20:(at + 1) << 20] = os.urandom(1 << 20)
pages = len(held) // 4096
os.mkfifo("/tmp/orders")
open("/tmp/ready", "w").close()
while True:
    with open("/tmp/orders") as orders:
        for order in orders:
            number, percent = order.split()
            for page in random.sample(range(pages), int(pages * float(percent) / 100)):
                held[page * 4096 + 64] = (held[page * 4096 + 64] + 1) % 256
            open("/tmp/done-" + number, "w").close()
"""
WAIT = "while [ ! -e {path} ]; do sleep 0.005; done"


class Holder:
    """A sandbox whose process holds memory and writes to it on request."""

    def __init__(self, ours: Ours, container: Container):
        self.ours, self.container = ours, container
        self.number = 0

    async def write(self, percent: float) -> None:
        self.number += 1
        done = f"/tmp/done-{self.number}"
        script = f"echo {self.number} {percent} >/tmp/orders; {WAIT.format(path=done)}; rm {done}"
        await self.container.exec(["/bin/sh", "-c", script], timeout=60)

    async def capture(self) -> dict[str, float]:
        taken: list[Path] = []
        used: list[int] = []
        await asyncio.to_thread(os.sync)
        await self.ours.checkpointer.warm(self.container)

        before = time.process_time()
        capture = await self.ours.checkpointer.capture(
            self.container,
            self.ours.checkpointer.captures / f"c{next(self.ours.numbers)}",
            on_stopped=lambda: taken.append(self.ours.snapshot(self.container.tree, readonly=True)),
            on_frozen=lambda: used.append(_used_by_criu(self.container)),
        )
        processor = (time.process_time() - before) * 1e3 + used[0] / 1e6
        began = time.perf_counter()
        await asyncio.to_thread(dumpfile.hashed, capture.dir, cache=self.ours.checkpointer.pages.lists)
        took = (time.perf_counter() - began) * 1e3
        times = dump.stats(capture.dir)
        metrics = {
            "total_ms": capture.total_ms,
            "frozen_ms": capture.frozen_ms,
            "processor_ms": processor,
            "criu_ms": used[0] / 1e6,
            "hash_ms": took,
            "raw_mib": sum(path.stat().st_size for path in capture.dir.glob("pages-*.img")) / (1 << 20),
            **{f"{name}_ms": times.get(f"{name}_time", 0) / 1e3 for name in ("freezing", "memdump", "memwrite")},
        }
        await asyncio.to_thread(shutil.rmtree, capture.dir)
        return metrics


def _used_by_criu(container: Container) -> int:
    """Nanoseconds of processor time of the CRIU that traces the sandbox."""
    assert container.init_pid is not None
    tracer = procfs.status(container.init_pid, "TracerPid")
    return int(Path(f"/proc/{tracer}/schedstat").read_text().split()[0])


async def measure(ours: Ours, size: int, percents: list[float], rounds: int) -> dict[str, Any]:
    script = f"rm -f /tmp/ready; python3 -c '{HOLDER.format(size=size)}' </dev/null >/dev/null 2>&1 &"
    result: dict[str, Any] = {}
    async with ours.sandbox(f"{script} {WAIT.format(path='/tmp/ready')}") as container:
        holder = Holder(ours, container)
        result["first"] = _rounded(await holder.capture())
        for percent in percents:
            runs = []
            for _ in range(rounds):
                await holder.write(percent)
                runs.append(await holder.capture())
            result[f"{percent:g}"] = _rounded({key: statistics.median(run[key] for run in runs) for key in runs[0]})
    return result


def _rounded(metrics: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 2) for key, value in metrics.items()}


async def everything(options: argparse.Namespace) -> dict[str, Any]:
    directory = aftermath.directory("pagurus-bench-", "/var/tmp")
    percents = [float(item) for item in options.percents.split(",")]
    sizes = [int(item) for item in options.sizes.split(",")]
    limits = Limits(memory=(max(sizes) << 20) + (1 << 30))
    try:
        async with Ours(directory, options.image, track=options.track, limits=limits) as ours:
            result: dict[str, Any] = {"sizes": {}, "load": [os.getloadavg()[0]]}
            for size in sizes:
                collected = await measure(ours, size, percents, options.rounds)
                print(size, json.dumps(collected), file=sys.stderr)
                result["sizes"][str(size)] = collected
            result["load"].append(os.getloadavg()[0])
            return result
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def main(arguments: list[str]) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--sizes", default="50,200,800")
    parser.add_argument("--percents", default="0,1,5")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--image", type=Path, default=paths.state() / "images" / "debian")
    parser.add_argument(
        "--track", action=argparse.BooleanOptionalAction, default=True, help="captures hold only what was written"
    )
    options = parser.parse_args(arguments)
    short_slice()
    gc.collect()
    gc.freeze()  # as the daemon does
    result = asyncio.run(everything(options))
    if options.json:
        print(json.dumps(result))
        return 0
    for size, metrics in result["sizes"].items():
        for percent, collected in metrics.items():
            print(size, percent, *(f"{key} {value}" for key, value in collected.items()))
    return 0
