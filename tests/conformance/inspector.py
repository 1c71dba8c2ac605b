"""Does the inspector miss anything, and what does it cost?

::

    pagurus bench inspector [--json] [--quick] [--programs N] [--seed S] [--rounds N]
    pagurus bench inspector --only CASE      one case, or all whose names hold CASE, with all that was seen

runs every operation, every call of the matrix (call x outcome x actor x place) and N different random programs in
real sandboxes and compares each verdict with the truth; repeats a part with absurdly small maps; counts 23 events
of each kind; measures the verdict beside 30 noisy sandboxes, and a syscall-heavy workload with and without the
inspector.

Hypothesis draws the random programs, and makes the first ones that were missed small (`minimal`): it runs smaller and
smaller ones until nothing more can be left out. What a run that was killed left is removed by the next run.

`cases` counts cases and programs. A no-effect case is one after which nothing differs that a checkpoint holds; changes
that the program itself set back (`set_back`) are not among them: capturing those is no mistake, and
`set_back_captured` says how often it happens. `scratch`: those of them after which scratch differs, which no checkpoint
holds: it must be seen, but capturing for it is a false positive. `wider_verdicts`: a difference is captured together
with the other half. `only_times`: only modification times differ and no call set them; both verdicts are right.
`in_memory`: the program left no difference on a tmpfs; capturing is allowed. `unexpected_truths`: the recording
contradicts a successful call, so the test is broken. `never_succeeded`: calls refused everywhere, which prove nothing.
`overhead_ratio` is of wall time. A failure is named; `--only NAME` repeats it alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness import command, leftovers
from daemon.verdict.assess import Assessor
from ebpf.inspector import Inspector, Sizes
from sandbox import paths
from sandbox.container.shim import short_slice
from sandbox.messages import Verdict
from sandbox.tree.pool import BtrfsPool
from tests.conformance import inspector_cost
from tests.crash.torture.cases import PLACES, WORK, Case, Place
from tests.crash.torture.programs import PREFIX, Series, Vocabulary, drawn
from tests.crash.torture.run import Arena, Tally, build, calls, cases, matrix, smallest

# Room for one sandbox, a page of explanations, and four of everything else.
TINY = Sizes(**{**{one.name: 4 for one in dataclasses.fields(Sizes)}, "sandboxes": 1, "explanations": 4096})
SANDBOXES, NOISY = 32, 30
HURRY = -15
LANES = 4  # sandboxes in which cases run side by side
SHRUNK = 3  # misses of each part that are made small

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
    ("count_woken", ("count_signal_takers",), lambda e: e.survivors_ran),
)
# Of programs without a system-call filter: operation, place, field.
ENTERED_COUNTS: tuple[tuple[str, Place, Callable[[Any], int]], ...] = (
    ("count_mounts", WORK, lambda e: e.mounts),
    ("count_tmpfs", PLACES["tmpfs"], lambda e: e.tmpfs_writes),
    ("count_uring", WORK, lambda e: e.uring_requests),
)
# Relative to a program that does nothing, because the command itself forks, executes and ends.
RELATIVE_COUNTS: tuple[tuple[str, Callable[[Any], int]], ...] = (
    ("count_forks", lambda e: e.forks),
    ("count_forks", lambda e: e.exits),
    ("count_threads", lambda e: e.forks),
    ("count_execs", lambda e: e.execs),
)
KINDS = len(COUNTS) + len(RELATIVE_COUNTS) + len(ENTERED_COUNTS)


async def count(arena: Arena) -> dict[str, int]:
    """Kinds of events that were not counted exactly, with what was counted."""
    wrong: dict[str, int] = {}

    async def counted(setup: tuple[str, ...], word: str, number: Callable[[Any], int]) -> int:
        async with arena.sandbox() as container:
            if setup:
                await arena.do(container, *setup)
            arena.mark(container)
            await arena.do(container, word)
            await arena.finalize(container)
            return number(arena.inspector.read(container.cgroup.id))

    for word, setup, number in COUNTS:
        if (result := await counted(setup, word, number)) != 23:
            wrong[word] = result
    for word, number in RELATIVE_COUNTS:
        result = await counted((), word, number) - await counted((), "nothing", number)
        if result != 23:
            wrong[word] = result
    for word, place, number in ENTERED_COUNTS:
        async with arena.sandbox(place) as container:
            arena.mark(container)
            await arena.do(container, word, way="setns", place=place)
            if (result := number(arena.inspector.read(container.cgroup.id))) != 23:
                wrong[word] = result
    return wrong


# Commands whose verdicts are timed: a turn that reads, one that leaves nothing, one that changes a file.
TURNS = ("read_file", "temporary_file", "write_existing")


async def latency(arena: Arena, verdicts: int) -> dict[str, list[float]]:
    """Milliseconds from the end of a command to its verdict, beside noisy sandboxes, sorted, by kind of turn.

    The verdict is the daemon's: effects, judge, and where it says `files` alone, the comparison.
    """
    taken: dict[str, list[float]] = {turn: [] for turn in TURNS}
    async with contextlib.AsyncExitStack() as stack:
        boxes = [await stack.enter_async_context(arena.sandbox()) for _ in range(SANDBOXES)]
        for box in boxes[:NOISY]:
            await arena.do(box, "noise")
        quiet = {box.spec.id: (box, Assessor()) for box in boxes[NOISY:]}
        for box, _ in quiet.values():
            arena.mark(box)
        for number in range(verdicts):
            box, assessor = list(quiet.values())[number % len(quiet)]
            turn = TURNS[number // len(quiet) % len(TURNS)]
            await arena.do(box, turn)
            began = time.perf_counter()
            _, judgement = await assessor.assess(arena.inspector, box, functools.partial(arena.trees, box))
            taken[turn].append(1000 * (time.perf_counter() - began))
            if judgement.verdict is not Verdict.NONE:
                arena.mark(box)
    return {turn: sorted(times) for turn, times in taken.items()}


def latencies(taken: dict[str, list[float]]) -> dict[str, Any]:
    """Keys about the time of a verdict."""
    everything = sorted(value for times in taken.values() for value in times)
    return {
        "verdict_ms_p50": round(statistics.median(everything), 4),
        "verdict_ms_p95": round(everything[int(0.95 * len(everything))], 4),
        "verdict_ms_by_turn": {
            turn: [round(statistics.median(times), 4), round(times[int(0.95 * len(times))], 4)]
            for turn, times in taken.items()
        },
        "sandboxes": SANDBOXES,
        "noisy": NOISY,
    }


# --------------------------------------------------------------------------- all of it


@dataclass
class Bench:
    """What all parts of a run share."""

    options: argparse.Namespace
    place: leftovers.Run
    pool: BtrfsPool
    began: float = field(default_factory=time.monotonic)
    programs: dict[Series, str] = field(default_factory=dict)  # random ones, and the batches that they are of
    minimal: list[str] = field(default_factory=list)  # commands that repeat the smallest programs that were missed

    def __post_init__(self) -> None:
        self.image = build(self.place.directory)
        self.calls = calls(self.image)
        self.vocabulary = Vocabulary.of(self.calls)
        self.every = 10 if self.options.quick else 1

    def say(self, line: str) -> None:
        passed = f"[{time.monotonic() - self.began:4.0f} s, load {os.getloadavg()[0]:.1f}]"
        print(passed, line, file=sys.stderr if self.options.json else sys.stdout, flush=True)

    @contextlib.contextmanager
    def hurry(self) -> Iterator[None]:
        """A high priority, so that other load on the machine takes less of the time that verdicts do not depend on."""
        os.setpriority(os.PRIO_PROCESS, 0, HURRY)
        try:
            yield
        finally:
            os.setpriority(os.PRIO_PROCESS, 0, 0)

    @contextlib.contextmanager
    def arena(self, inspector: Inspector) -> Iterator[Arena]:
        arena = Arena(self.pool, self.image, self.place.sandboxes, inspector, self.place.tag)
        try:
            yield arena
        finally:
            arena.close()

    async def tortured(
        self, inspector: Inspector, chosen: list[Case], what: str, tally: Tally, lanes: int = LANES, how: str = ""
    ) -> int:
        """Run cases; returns the explanations that were lost. `how`: options that repeat a miss."""
        before = len(tally.false_negatives), len(tally.false_positives)
        with self.hurry(), self.arena(inspector) as arena:
            await arena.run_lanes(chosen, tally, lanes)
        missed, mistaken = len(tally.false_negatives) - before[0], len(tally.false_positives) - before[1]
        self.say(f"{len(chosen)} {what}: {missed} missed, {mistaken} captured for nothing")
        for line in tally.false_negatives[before[0] :][:20]:
            self.say(f"  missed: {line}")
        await self.shrunk(inspector, tally.missed[before[0] :], how)
        return arena.lost_events

    async def shrunk(self, inspector: Inspector, missed: list[Case], how: str) -> None:
        """Let hypothesis make the first random programs that were missed small, and say how they are repeated."""
        everything = list(self.programs)
        for group in list(dict.fromkeys(case.group for case in missed if case.group >= 0))[:SHRUNK]:
            if group >= len(everything):  # it was not drawn, but asked for
                continue
            series = everything[group]
            self.say(f"shrink {series.text}")
            with self.arena(inspector) as arena:
                result = await smallest(arena, self.vocabulary, series, self.programs[series])
            if result is None:
                self.say("  it was not missed again")
                continue
            self.minimal.append(f"pagurus bench inspector --only {shlex.quote(result.text)}{how}")
            self.say(f"  smallest: {self.minimal[-1]}")


async def measure(bench: Bench) -> dict[str, Any]:
    options = bench.options
    operations, everything = list(cases()), list(matrix(bench.calls))
    began = time.monotonic()
    bench.programs = drawn(bench.vocabulary, options.seed, options.programs)
    serieses = sorted((series.cases(n) for n, series in enumerate(bench.programs)), key=lambda item: item[0].place.name)
    random_programs = [case for item in serieses for case in item]
    bench.say(f"{len(random_programs)} random programs drawn in {time.monotonic() - began:.1f} s")
    tally, tiny = Tally(), Tally()
    with Inspector.load() as inspector:
        missing = inspector.missing
        lost = await bench.tortured(inspector, operations, "operations", tally)
        lost += await bench.tortured(inspector, everything[:: bench.every], "cases of the matrix", tally)
        lost += await bench.tortured(inspector, random_programs, f"random programs of seed {options.seed}", tally)
        with bench.arena(inspector) as arena:
            wrong = await count(arena)
            bench.say(f"23 events of each kind: {KINDS - len(wrong)} kinds exact")
            taken = await latency(arena, 99 if options.quick else 999)
    part = [*operations[:: 4 * bench.every], *everything[:: 7 * bench.every]]
    part += [case for item in serieses[::20] for case in item]
    with Inspector.load(sizes=TINY) as inspector:
        await bench.tortured(inspector, part, "cases with tiny maps", tiny, lanes=TINY.sandboxes, how=" --tiny")
    with tempfile.TemporaryDirectory(prefix=f"bench-{bench.place.tag}-", dir=bench.pool.path) as directory:
        cost = await asyncio.to_thread(inspector_cost.measure, Path(directory), options.rounds, Inspector.load)
    return {
        "missing": missing,
        **results(tally, tiny),
        "distinct_cases": len(operations) + len(everything[:: bench.every]),
        "random_programs": len(random_programs),
        "different_programs": len({(case.place, case.way, case.program) for case in random_programs}),
        "minimal": bench.minimal,
        "seed": options.seed,
        **latencies(taken),
        **overhead(cost),
        "lost_events": lost,
        "exact_kinds": KINDS - len(wrong),
        "miscounted": wrong,
        "seconds": round(time.monotonic() - bench.began),
        "load": os.getloadavg()[0],
    }


def results(tally: Tally, tiny: Tally) -> dict[str, Any]:
    """Keys about verdicts."""
    return {
        "cases": tally.cases,
        "false_negatives": len(tally.false_negatives),
        "no_effect_cases": tally.no_effect_cases,
        "false_positives": len(tally.false_positives),
        "false_positive_share": round(len(tally.false_positives) / max(1, tally.no_effect_cases), 5),
        "set_back": tally.set_back,
        "set_back_captured": tally.set_back_captured,
        "only_times": tally.only_times,
        "scratch": tally.scratch,
        "scratch_captured": tally.scratch_captured,
        "in_memory": tally.in_memory,
        "in_memory_captured": tally.in_memory_captured,
        "wider_verdicts": tally.wider,
        "safest_verdicts": tally.safest,
        "verdicts": dict(tally.verdicts),
        "never_succeeded": tally.never_succeeded(),
        "unexpected_truths": tally.unexpected[:100],
        "tiny_cases": tiny.cases,
        "tiny_false_negatives": len(tiny.false_negatives),
        "missed": [line for item in (tally, tiny) for line in item.false_negatives][:100],
        "mistaken": tally.false_positives[:100],
    }


def overhead(cost: inspector_cost.Measured) -> dict[str, Any]:
    """Keys about cost."""
    wall, cpu = inspector_cost.estimate(cost.wall[1], cost.wall[0]), inspector_cost.estimate(cost.cpu[1], cost.cpu[0])
    steps = {name: inspector_cost.estimate(times[1], times[0]).ratio for name, times in cost.steps.items()}
    return {
        "overhead_ratio": round(wall.ratio, 4),
        "overhead_interval": [round(wall.low, 4), round(wall.high, 4)],
        "overhead_cpu_ratio": round(cpu.ratio, 4),
        "overhead_cpu_interval": [round(cpu.low, 4), round(cpu.high, 4)],
        "overhead_pairs": wall.pairs,
        "overhead_cpu_steps": {name: round(ratio, 4) for name, ratio in steps.items()},
    }


async def only(bench: Bench) -> dict[str, Any]:
    """The chosen cases alone, each with what was seen and what differed."""
    target: str = bench.options.only
    if target.startswith(PREFIX):
        chosen = Series.parse(target, bench.vocabulary).cases()
    else:
        everything = [*cases(), *matrix(bench.calls)]
        exact = [case for case in everything if case.name == target]
        chosen = exact or [case for case in everything if target in case.name]
    tally = Tally(report=bench.say)
    with Inspector.load(sizes=TINY if bench.options.tiny else None) as inspector:
        await bench.tortured(inspector, chosen, "cases", tally, lanes=1)
        return results(tally, Tally())


async def run(options: argparse.Namespace) -> dict[str, Any]:
    pool = await asyncio.to_thread(BtrfsPool(paths.state()).ensure)
    await leftovers.remove()
    with leftovers.run(pool) as place:
        if "hypothesis" not in sys.modules:  # it keeps notes, else in the working directory
            os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(place.directory / "hypothesis"))
        bench = Bench(options, place, pool)
        short_slice()
        return await (only(bench) if options.only else measure(bench))


def main(arguments: list[str]) -> int:
    """Exit code 0 when nothing was missed and everything counted exactly."""
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--programs", type=int, default=10_000, help="different random programs (default 10000)")
    parser.add_argument("--seed", type=int, default=1, help="of the random programs")
    parser.add_argument("--rounds", type=int, default=48, help="pairs of the overhead measurement")
    parser.add_argument("--quick", action="store_true", help="200 programs, a tenth of the matrix, 3 pairs")
    parser.add_argument(
        "--only", metavar="CASE", help="the case of this name, or all whose names hold it; or `program in ...`"
    )
    parser.add_argument("--tiny", action="store_true", help="with --only: with absurdly small maps")
    options = parser.parse_args(arguments)
    if options.quick:
        options.programs, options.rounds = 200, 3
    result = asyncio.run(run(options))
    command.show(result, options)
    failed = ("false_negatives", "tiny_false_negatives", "miscounted")
    return 1 if any(result.get(name) for name in failed) else 0
