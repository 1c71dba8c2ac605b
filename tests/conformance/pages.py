"""Does a capture have every page as it was, where only written pages are dumped?

::

    pagurus bench pages [--json] [--captures N] [--chain N] [--seed N] [--image DIR]

A program maps, moves, drops, protects and writes memory of all kinds at random, in threads and forked children, between
captures. Before each thaw all pages of all processes are read from outside; the completed capture must have the same
bytes (`wrong` counts pages that it has not). At the end of a chain all processes are killed and restored, from the raw
capture or the stored one in turn, two times in four compared, and the next chain begins. The program must find its
memory by a checksum of its own as it was (`silent` counts those that do not). The kernel's own words about threads
(rseq) are left out.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from bench.checkpoint import Ours
from bench.harness import aftermath, command
from sandbox import paths
from sandbox.container.container import Container
from sandbox.content import dumpfile, layers
from sandbox.criu.tracking import userfault
from sandbox.errors import Unsupported
from tests.support import frozen_memory
from tests.support.checkpoint_programs import CHECK
from tests.support.memory_program import changing

CHAIN = 25  # captures between two restores
CHAINS = 4  # of one sandbox


class Torture:
    """One sandbox after the other."""

    def __init__(self, ours: Ours):
        self.ours = ours
        self.result: Counter[str] = Counter()
        self.first: list[str] = []  # of what was wrong

    async def chains(self, seed: int, lengths: list[int]) -> None:
        """A sandbox, and chains of captures with a restore from the last one of each."""
        async with self.ours.sandbox(changing(seed)) as container:
            for length in lengths:
                await self.chain(container, length)

    async def chain(self, container: Container, length: int) -> None:
        retained: list[Path] = []
        for _ in range(length):
            await self.change(container, "captures")
            images, tree = await self.capture(container)
            retained.append(images)
            if len(retained) > 3:
                await asyncio.to_thread(shutil.rmtree, retained.pop(0))
        await self.restore(container, images, tree)
        for item in retained:
            await asyncio.to_thread(shutil.rmtree, item)

    async def change(self, container: Container, what: str) -> None:
        done = await container.exec(["/bin/sh", "-c", CHECK], timeout=120)
        if done.stdout != b"good\n":
            self.wrong("silent" if what == "restores" else "failed", f"{done.stdout!r} {done.stderr!r}")

    async def capture(self, container: Container) -> tuple[Path, Path]:
        truth: list[frozen_memory.Memory] = []
        trees: list[Path] = []

        def on_frozen() -> None:
            truth.append(frozen_memory.frozen(container.tasks()))
            trees.append(self.ours.snapshot(container.tree, readonly=True))

        into = self.ours.checkpointer.captures / f"c{next(self.ours.numbers)}"
        await self.ours.checkpointer.capture(container, into, on_frozen=on_frozen)
        wrong = await asyncio.to_thread(_compare, truth[-1], into)
        self.result["captures"] += 1
        self.result["pages"] += sum(map(len, truth[-1].values()))
        self.result["dumped"] += sum(path.stat().st_size for path in into.glob("pages-*.img")) // 4096
        self.result["deepest"] = max(
            self.result["deepest"], *(len(item.names) for item in layers.read(into).values()), 0
        )
        for item in wrong:
            self.wrong("wrong", item)
        return into, trees[-1]

    async def restore(self, container: Container, images: Path, tree: Path) -> None:
        source = images
        if self.result["restores"] % 2:
            source = self.ours.pool.state / "checkpoints" / f"{images.name}.dump"
            await asyncio.to_thread(dumpfile.pack, images, source, self.ours.checkpointer.pages)
        await self.ours.checkpointer.forget(container, restoring=True)
        await container.kill()
        await container.remount(self.ours.snapshot(tree, readonly=False))
        compared = self.result["restores"] % 4 < 2
        reference = tree if compared else None
        await self.ours.checkpointer.restore(container, source, verify=compared, reference=reference)
        self.result["restores"] += 1
        await self.change(container, "restores")

    def wrong(self, kind: str, what: str) -> None:
        self.result[kind] += 1
        self.first.append(what)
        print(kind, what, file=sys.stderr)


def _compare(truth: frozen_memory.Memory, images: Path) -> list[str]:
    scratch = images.with_name(images.name + "-scratch")
    try:
        return frozen_memory.differences(
            truth, frozen_memory.captured(images, scratch), frozen_memory.kernel_written(images)
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


async def run(image: Path, captures: int, chain: int, seed: int) -> dict[str, Any]:
    directory = aftermath.directory("pagurus-bench-", "/var/tmp")
    try:
        async with Ours(directory, image, track=True) as ours:
            torture = Torture(ours)
            while torture.result["captures"] < captures and len(torture.first) < 20:
                await torture.chains(seed, [chain] * CHAINS)
                seed += 1
            names = ("captures", "restores", "pages", "dumped", "deepest", "wrong", "silent", "failed")
            return {name: torture.result[name] for name in names} | {"first": torture.first[:20]}
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def main(arguments: list[str]) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--captures", type=int, default=1000)
    parser.add_argument("--chain", type=int, default=CHAIN, help="captures before a restore")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--image", type=Path, default=paths.state() / "images" / "debian")
    options = parser.parse_args(arguments)
    if why := userfault.missing():
        raise Unsupported(f"written pages are not known here: {why}", hint="use Linux 6.7 or later")
    result = asyncio.run(run(options.image, options.captures, options.chain, options.seed))
    result["load"] = os.getloadavg()[0]
    print(json.dumps(result) if options.json else "\n".join(f"{name}: {value}" for name, value in result.items()))
    return 1 if result["wrong"] or result["silent"] or result["failed"] else 0
