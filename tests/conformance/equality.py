"""Does a restored sandbox equal its checkpoint, every time? Hundreds of restores, each verified.

::

    pagurus bench equality [--json] [--rounds N] [--programs idle,http,listener,...] [--states NAME,...] [--image DIR]

Each program runs in a sandbox of its own. A round captures it, kills it and restores it from the raw images or, every
second time, from the stored dump, with `verify`: the restored tree is held, dumped again and compared in every point
that :mod:`sandbox.criu.equality` lists, and its files with the snapshot. Then the program must answer, where it can.
Programs are the workloads of `pagurus bench checkpoint` and those of the tests, which hold one kind of kernel object
each.

`restores` is the number of attempts, `equal` of those that were equal and went on; `differences` and `failures` hold
what was said, by program. The first failure of a program ends its rounds: the sandbox is gone.

After that, every state that a process can have (:mod:`tests.conformance.states`) is made, dumped, killed, restored and
forked, and
looked at from inside: `states` is their number, `restored`, `refused`, `named` and `impossible` what became of them, as
docs/states.md says of each; `silent` are those of which something else was seen, and `silent_states` says what.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from bench.checkpoint import WORKLOADS, Ours
from bench.harness import aftermath, command, redis
from sandbox import paths
from sandbox.container.container import Container
from sandbox.content import dumpfile
from sandbox.errors import NotEqual, PagurusError
from sandbox.tree import btrfs
from tests.conformance.states import classify

CHECK_TIMEOUT = 30.0  # seconds for a program to answer


def programs() -> dict[str, tuple[str, str]]:
    """(start, check) by name; a check prints "good"."""
    result = {name: (script, "echo good") for name, script in WORKLOADS.items()}
    if (paths.CHECKOUT / "tests" / "support").is_dir():
        from tests.support import checkpoint_programs, checkpoint_programs_held

        result.update(checkpoint_programs.ALL | checkpoint_programs_held.ALL)
    return result


class Soak:
    """Counts over all programs."""

    def __init__(self) -> None:
        self.restores = 0
        self.equal = 0
        self.differences: dict[str, str] = {}
        self.failures: dict[str, str] = {}

    def metrics(self) -> dict[str, Any]:
        return {
            "restores": self.restores,
            "equal": self.equal,
            "differences": self.differences,
            "failures": self.failures,
            "load": os.getloadavg()[0],
        }


async def one_round(ours: Ours, container: Container, check: str, stored: Path | None) -> None:
    """Capture, kill, restore with proof, ask the program."""
    snapshots: list[Path] = []
    number = next(ours.numbers)
    capture = await ours.checkpointer.capture(
        container,
        ours.checkpointer.captures / f"e{number}",
        on_frozen=lambda: snapshots.append(ours.snapshot(container.tree, readonly=True)),
    )
    source = capture.dir
    if stored is not None:
        into = stored / f"e{number}.dump"
        source = (await asyncio.to_thread(dumpfile.pack, capture.dir, into, ours.checkpointer.pages)).path
    await ours.checkpointer.forget(container)
    await container.kill()
    await container.remount(ours.snapshot(snapshots[0], readonly=False))
    await ours.checkpointer.restore(container, source, verify=True, reference=snapshots[0])
    done = await container.exec(["/bin/sh", "-c", check], timeout=CHECK_TIMEOUT)
    if done.stdout != b"good\n":
        raise PagurusError(f"the program answered {done.stdout!r} {done.stderr[-200:]!r}")
    await asyncio.to_thread(shutil.rmtree, capture.dir)
    if stored is not None:
        source.unlink()
    for path in ours.trees[-2:-1]:  # the snapshot; the tree before it is no longer mounted either
        btrfs.delete_subvolume(path)
        ours.trees.remove(path)


async def run(ours: Ours, soak: Soak, name: str, program: tuple[str, str], rounds: int, stored: Path) -> None:
    start, check = program
    extra = await asyncio.to_thread(redis.layer) if name == "redis" else None
    async with ours.sandbox(start, extra) as container:
        for number in range(rounds):
            soak.restores += 1
            try:
                await one_round(ours, container, check, stored if number % 2 else None)
            except NotEqual as error:
                soak.differences[name] = f"round {number}: {error}"
                return
            except PagurusError as error:
                soak.failures[name] = f"round {number}: {error}"
                return
            soak.equal += 1


async def everything(options: argparse.Namespace) -> dict[str, Any]:
    directory = aftermath.directory("pagurus-bench-", "/var/tmp")
    existing = programs()
    soak = Soak()
    try:
        async with Ours(directory, options.image) as ours:
            for name in options.programs.split(",") if options.programs else existing:
                try:
                    await run(ours, soak, name, existing[name], options.rounds, directory / "stored")
                except (OSError, PagurusError, RuntimeError) as error:  # a program that cannot be had or dumped
                    soak.failures[name] = str(error)
                print(name, json.dumps(soak.metrics()), file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return soak.metrics()


async def states(options: argparse.Namespace) -> dict[str, Any]:
    """The classes of all states, or of those named."""

    def report(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    target, result = await classify.poll(options.image, options.states.split(",") if options.states else [], report)
    verdicts = {row.name: result.observed[row.name].verdict(row.promise) for row in target}
    counts = Counter(verdicts.values())
    silent = {row.name: str(result.observed[row.name]) for row in target if verdicts[row.name] == "silent"}
    kinds = ("restored", "refused", "named", "impossible", "silent")
    return {"states": len(target), **{kind: counts[kind] for kind in kinds}, "silent_states": silent}


def main(arguments: list[str]) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--programs", default="", help="all without, none with `-`")
    parser.add_argument("--states", default="", help="names or groups; all without, none with `-`")
    parser.add_argument("--image", type=Path, default=paths.state() / "images" / "debian")
    options = parser.parse_args(arguments)
    result = asyncio.run(everything(options)) if options.programs != "-" else Soak().metrics()
    result |= asyncio.run(states(options)) if options.states != "-" else {}
    command.show(result, options)
    good = result["equal"] == result["restores"] and not result["failures"] and not result.get("silent")
    return 0 if good else 1
