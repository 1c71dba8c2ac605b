"""Does the inspector miss anything, and what does it cost?

::

    pagurus bench inspector [--json] [--programs N] [--seed S] [--quick]

runs every case of native/operations.h and N random programs in real sandboxes, compares each verdict with the truth
(_oracle), repeats the cases with absurdly small maps, counts 23 events of each kind, measures the verdict beside 30
noisy sandboxes, and a syscall-heavy workload with and without the inspector, interleaved.

`cases` counts cases and programs; `overhead_ratio` compares the first quartiles of the wall times, which other load
on the machine disturbs less than medians (the workload runs at a high priority); `overhead_cpu_ratio` of CPU times.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench._torture import Arena, Tally, build, cases, programs
from daemon.judge import judge
from ebpf.inspector import Inspector, Sizes
from sandbox import paths
from sandbox.pool import Pool
from sandbox.shim import short_slice

TINY = Sizes(sandboxes=40, inodes=16, explanations=4096)
SANDBOXES, NOISY = 32, 30

# What 23 operations of a kind must read as: operation, what comes before the mark, field of Effects.
COUNTS: tuple[tuple[str, tuple[str, ...], Callable[[Any], int]], ...] = (
    ("count_creates", (), lambda e: e.name_changes),
    ("count_creates", (), lambda e: e.data_writes),
    ("count_removes", ("count_creates",), lambda e: e.name_changes),
    ("count_renames", (), lambda e: e.name_changes),
    ("count_metadata", (), lambda e: e.metadata_changes),
    ("count_temporary", (), lambda e: e.temporary),
    ("count_ipc", (), lambda e: e.ipc_changes),
    ("count_listens", (), lambda e: e.listens),
    ("count_signals", ("start_signal_taker",), lambda e: e.signals),
    ("count_survivors", (), lambda e: e.survivors_new),
    ("kill_all", ("count_survivors",), lambda e: e.survivors_gone),
)
# Relative to a program that does nothing, because the command itself forks, executes and ends.
RELATIVE_COUNTS: tuple[tuple[str, Callable[[Any], int]], ...] = (
    ("count_forks", lambda e: e.forks),
    ("count_forks", lambda e: e.exits),
    ("count_threads", lambda e: e.forks),
    ("count_execs", lambda e: e.execs),
)


async def count(arena: Arena) -> dict[str, int]:
    """Kinds of events that were not counted exactly, with what was counted."""
    wrong: dict[str, int] = {}

    async def counted(setup: tuple[str, ...], word: str, field: Callable[[Any], int]) -> int:
        async with arena.sandbox() as container:
            if setup:
                await arena.do(container, *setup)
            arena.mark(container)
            return field(await arena.judged(container, (word,)))

    for word, setup, field in COUNTS:
        if (found := await counted(setup, word, field)) != 23:
            wrong[word] = found
    for word, field in RELATIVE_COUNTS:
        found = await counted((), word, field) - await counted((), "nothing", field)
        if found != 23:
            wrong[word] = found
    return wrong


async def latency(arena: Arena, rounds: int) -> list[float]:
    """Milliseconds from the end of a command to its verdict, beside noisy sandboxes."""
    taken = []
    async with contextlib.AsyncExitStack() as stack:
        boxes = [await stack.enter_async_context(arena.sandbox()) for _ in range(SANDBOXES)]
        for box in boxes[:NOISY]:
            await arena.do(box, "noise")
        for number in range(rounds):
            box = boxes[NOISY + number % (SANDBOXES - NOISY)]
            await arena.do(box, "read_file")
            began = time.perf_counter()
            judge(arena.inspector.read(box.cgroup.id))
            taken.append(1000 * (time.perf_counter() - began))
    return taken


# --------------------------------------------------------------------------- overhead


class Workload:
    """Untar a source tree, `git status`, install a package, compile: what agents do."""

    def __init__(self, folder: Path):
        self.folder = folder
        source = Path(sysconfig.get_paths()["stdlib"])
        self.archive = folder / "source.tar"
        with tarfile.open(self.archive, "w") as tar:
            for name in ("asyncio", "json", "email", "http"):
                if (source / name).is_dir():
                    tar.add(source / name, name, filter=_source_only)
        self.script = "\n".join(
            (
                "set -e; cd work; tar xf ../source.tar; git init -q .; git add -A; git status >/dev/null",
                f"{sys.executable} -c 'import compileall; compileall.compile_dir(\".\", quiet=2, workers=1)'",
                f"cp -r . ../site; cd ../site; cc -O1 -c -o x.o {Path(__file__).parent}/native/effects.c",
                "for i in 1 2 3; do git status >/dev/null; find . -type f | xargs stat >/dev/null; done",
            )
        )

    def run(self, cgroup: Path) -> tuple[float, float]:
        """Seconds of wall time and of CPU time."""
        for name in ("work", "site"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / "work").mkdir()
        os.sync()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.perf_counter()
        subprocess.run(
            ["/bin/sh", "-c", f"echo $$ > {cgroup}/cgroup.procs; {self.script}"],
            cwd=self.folder, check=True, stdout=subprocess.DEVNULL,
            preexec_fn=lambda: os.setpriority(os.PRIO_PROCESS, 0, -15),
        )  # fmt: skip
        wall = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _source_only(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in member.name else member


def overhead(folder: Path, rounds: int, load: Callable[[], Inspector]) -> tuple[float, float]:
    """First quartiles of wall time and of CPU time with the inspector attached, each over the same without it."""
    unified = Path("/sys/fs/cgroup/unified")
    cgroup = (unified if unified.is_dir() else unified.parent) / f"bench-inspector-{os.getpid()}"
    workload = Workload(folder)
    cgroup.mkdir()
    wall: dict[bool, list[float]] = {True: [], False: []}
    cpu: dict[bool, list[float]] = {True: [], False: []}
    try:
        workload.run(cgroup)  # warm caches
        for number in range(rounds):
            for attached in (True, False) if number % 2 else (False, True):
                with contextlib.ExitStack() as stack:
                    if attached:
                        inspector = stack.enter_context(load())
                        inspector.watch(cgroup.stat().st_ino, contained=False)
                    taken, used = workload.run(cgroup)
                wall[attached].append(taken)
                cpu[attached].append(used)
    finally:
        cgroup.rmdir()
    return _quartile(wall[True]) / _quartile(wall[False]), _quartile(cpu[True]) / _quartile(cpu[False])


def _quartile(values: list[float]) -> float:
    return sorted(values)[len(values) // 4]


# --------------------------------------------------------------------------- all of it


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    pool = await asyncio.to_thread(Pool(paths.state()).ensure)
    image = build(folder)
    run = paths.run() / "sandboxes"
    run.mkdir(parents=True, exist_ok=True)
    short_slice()
    chosen = list(cases())
    tally, tiny = Tally(), Tally()
    with Inspector.load() as inspector:
        tier, missing = inspector.tier, inspector.missing
        arena = Arena(pool, image, run, inspector)
        await arena.run_cases(chosen, tally)
        say(options, f"{len(chosen)} cases: {len(tally.false_negatives)} missed")
        await arena.run_programs(list(programs(options.seed, options.programs)), tally)
        say(options, f"{options.programs} random programs: {len(tally.false_negatives)} missed in all")
        wrong = await count(arena)
        say(options, f"23 events of each kind: {len(COUNTS) + len(RELATIVE_COUNTS) - len(wrong)} kinds exact")
        taken = sorted(await latency(arena, options.rounds * 25))
        lost = inspector.statistics()["lost_events"]
    with Inspector.load(sizes=TINY) as inspector:
        await Arena(pool, image, run, inspector).run_cases(chosen[:: 4 if options.quick else 1], tiny)
        say(options, f"tiny maps: {len(tiny.false_negatives)} missed")
    ratio, cpu = await asyncio.to_thread(overhead, folder, options.rounds, Inspector.load)
    return {
        "tier": tier,
        "missing": missing,
        "cases": tally.cases,
        "distinct_cases": len(chosen),
        "false_negatives": len(tally.false_negatives),
        "no_effect_cases": tally.no_effect_cases,
        "false_positives": len(tally.false_positives),
        "safest_verdicts": tally.safest,
        "verdicts": {str(name): number for name, number in tally.verdicts.items()},
        "verdict_ms_p50": round(statistics.median(taken), 4),
        "verdict_ms_p95": round(taken[int(0.95 * len(taken))], 4),
        "overhead_ratio": round(ratio, 4),
        "overhead_cpu_ratio": round(cpu, 4),
        "lost_events": lost,
        "sandboxes": SANDBOXES,
        "noisy": NOISY,
        "tiny_cases": tiny.cases,
        "tiny_false_negatives": len(tiny.false_negatives),
        "miscounted": wrong,
        "missed": (tally.false_negatives + tiny.false_negatives)[:20],
        "mistaken": tally.false_positives[:20],
    }


def say(options: argparse.Namespace, line: str) -> None:
    print(line, file=sys.stderr if options.json else sys.stdout, flush=True)


def main(arguments: list[str]) -> int:
    """Exit code 0 when nothing was missed and everything counted exactly."""
    parser = argparse.ArgumentParser(prog="pagurus bench inspector", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object, last")
    parser.add_argument("--programs", type=int, default=10_000, help="random programs (default 10000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20, help="pairs of the overhead measurement")
    parser.add_argument("--quick", action="store_true", help="200 programs, 3 rounds")
    options = parser.parse_args(arguments)
    if options.quick:
        options.programs, options.rounds = 200, 3
    with tempfile.TemporaryDirectory(prefix="pagurus-inspector-") as folder:
        result = asyncio.run(measure(options, Path(folder)))
    print(json.dumps(result, indent=None if options.json else 2))
    return 1 if result["false_negatives"] or result["tiny_false_negatives"] or result["miscounted"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
