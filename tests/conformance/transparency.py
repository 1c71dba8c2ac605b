"""Does a program notice that it was checkpointed, restored or forked? Blocking calls that return early, and how late.

::

    pagurus bench transparency [--json] [--seconds N] [--calls WORD,...] [--row N] [--pace N] [--fresh N]
                               [--languages WORD,...]

Through the whole daemon: groups of blocking calls (native/waits.c: timed and not, with and without signal masks, each
by the main thread of a process and by another one) and programs in several languages wait for N seconds in a sandbox.
In the middle it is checkpointed. What is told in the end by the sandbox that ran on is `live`, by a fork of that
checkpoint `forked`, and by the sandbox once it was restored to that checkpoint `restored`. Then the calls wait through
--row turns, one every --pace seconds, each of which is checkpointed with its processes: `in a row`. Last, the first
sandbox of each of --fresh daemons that have just started is checkpointed, of the files alone as well: `first`. A
sandbox beside each of the others, in which the same waits at the same time and nothing is dumped, is the `control`.

Of each of these: `calls` (outcomes told), `returned_early` (before their time, or with another result), `late_ms`,
`standstill_ms` (for how long that sandbox was frozen, in total, or the restore took as well), `beyond_ms` (how much
later than that). docs/checkpoints.md says what late is. From how late a call is, what its twin in the control was late
is taken away: a busy machine makes all late. The kernel rounds time-outs of sockets up by an eighth at most, those that
were begun anew and their twins each in its own way: `beyond_ms` of these leaves that much out.
`missing` are calls that a sandbox does not have, and languages that could not be fetched (`ran`: those that could);
`named` are calls that may return early after a restore, as docs/checkpoints.md says; `failures` names all others.
`adds_ms` is what it adds to the frozen window, in interleaved dumps with the plugin and with an empty one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.checkpoint import Ours, Times
from bench.harness import aftermath, command
from bench.harness.own_daemon import IMAGE, BenchHost, image
from daemon.checkpoints.queue import quantile
from sandbox import Client, ExecResult, Limits, Sandbox, paths
from sandbox.errors import PagurusError
from tests.conformance import languages

SOURCE = Path(__file__).parent / "native" / "waits.c"
LIMITS = Limits(memory="2GiB", processes=2000)
GROUP = 8  # calls that wait in one sandbox
ROW_GROUP = 24  # likewise, through checkpoints in a row
TRIED = 3  # turns that tell how long one takes
ROW_MARGIN = 10.0  # seconds by which such a wait is longer than the row
EARLY_MS = {"bash": 20.0}  # it measures by /proc/uptime; all others by the clock itself:
EARLY_ELSE_MS = 1.5  # time-outs in milliseconds
BEYOND_LIMIT_MS = 5.0  # by which a call may be later than its sandbox stood still: `slow` names those that were
TIMEOUT = 60.0
FIRST = ("nanosleep", "poll", "select", "epoll_wait", "futex")
FIRST_CHECKPOINTS = 5
#: Calls that may be done early after a restore: a restored socket takes less of the room for what is queued.
CAPACITY_AGAIN = frozenset({"send", "send_timed"})
#: Calls whose time is measured by the kernel's wheel of timers, in steps of up to an eighth of what is asked for.
COARSE = frozenset({"recv_timed", "read_timed", "recvmsg_udp_timed", "send_timed", "accept_timed"})
COARSE_STEP = 1 / 8
RESULTS = "/tmp/results"
TURN = "kill $(cat /tmp/job) 2>/dev/null; sleep 9999 >/dev/null 2>&1 & echo $! > /tmp/job"
EMPTY_PLUGIN = """
struct { const char *name; int (*init)(int); void (*exit)(int, int); unsigned version, count; void *hooks[13]; }
CR_PLUGIN_DESC = { .name = "empty", .version = 2 << 8, .count = 13 };
"""
PROGRAMS = {
    "idle": "true",
    "sleepers": f"{languages.CALLS} 9999 /tmp/r nanosleep poll epoll_wait futex >/tmp/said 2>&1 &",
}


@dataclass
class Tally:
    """What one way came to."""

    calls: int = 0
    early: list[str] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)
    standstill_ms: list[float] = field(default_factory=list)
    beyond_ms: list[float] = field(default_factory=list)
    named: list[str] = field(default_factory=list)
    slow: dict[str, float] = field(default_factory=dict)  # later than that, in milliseconds

    def summary(self) -> dict[str, Any]:
        result: dict[str, Any] = {"calls": self.calls, "returned_early": len(self.early)}
        for name in ("late_ms", "standstill_ms", "beyond_ms"):
            values = getattr(self, name)
            result |= {f"{name}_p{n}": round(quantile(values, n / 100), 1) for n in (50, 99)} if values else {}
        return result | {"slow": self.slow}


@dataclass(frozen=True)
class Outcome:
    """One line of native/waits.c."""

    name: str
    place: str
    expected: str
    error: int
    lasted_ms: float
    ended_ms: float  # by CLOCK_REALTIME, of a wait for an instant of it; else 0

    @classmethod
    def read(cls, line: str) -> Outcome:
        name, place, expected, error, lasted, *ended = line.split()
        return cls(name, place, expected, int(error), int(lasted) / 1e3, int(ended[0]) / 1e3 if ended else 0.0)

    @property
    def who(self) -> str:
        return f"{self.name} {self.place}"

    def late_ms(self, seconds: float, resumed: float) -> float:
        """`resumed`: when it ran again after a restore, in seconds of CLOCK_REALTIME; 0: it lived on."""
        late = self.lasted_ms - 1e3 * seconds
        return min(late, max(0.0, self.ended_ms - 1e3 * resumed)) if self.ended_ms and resumed else late


class Results:
    """All outcomes."""

    def __init__(self) -> None:
        self.ways: dict[str, Tally] = {
            way: Tally() for way in ("live", "forked", "restored", "in a row", "first", "control")
        }
        self.failures: list[str] = []
        self.missing: dict[str, str] = {}
        self.ran: set[str] = set()

    def control(self, text: str, seconds: float) -> dict[str, float]:
        """How late each call is where nothing is dumped, in milliseconds."""
        result = [Outcome.read(line) for line in text.splitlines()]
        self.add("control", text, seconds, 0.0, {})
        return {one.who: max(0.0, one.late_ms(seconds, 0.0)) for one in result}

    def add(
        self, way: str, text: str, seconds: float, standstill: float, usual: dict[str, float], resumed: float = 0.0
    ) -> None:
        """`standstill` in milliseconds; `usual`: of the control; `resumed`: see :meth:`Outcome.late_ms`."""
        tally = self.ways[way]
        for one in map(Outcome.read, text.splitlines()):
            if one.expected == "2":
                self.missing[one.name] = os.strerror(one.error)
                continue
            tally.calls += 1
            late = one.late_ms(seconds, resumed)
            if one.expected != "1" or late < -EARLY_MS.get(one.name.partition("_")[0], EARLY_ELSE_MS):
                if way in ("forked", "restored") and one.name in CAPACITY_AGAIN:
                    tally.named.append(one.who)
                    continue
                tally.early.append(one.who)
                said = f"expected {one.expected}, errno {one.error}, after {one.lasted_ms} ms"
                self.failures.append(f"{way}: {one.who}: {said}")
                continue
            late = max(0.0, late - usual.get(one.who, 0.0))
            tally.late_ms.append(late)
            tally.standstill_ms.append(standstill)
            beyond = late - standstill - (1e3 * seconds * COARSE_STEP if one.name in COARSE else 0.0)
            tally.beyond_ms.append(max(0.0, beyond))
            if beyond > BEYOND_LIMIT_MS:
                tally.slow[one.who] = round(beyond, 1)

    def metrics(self) -> dict[str, Any]:
        return {
            "calls": sum(tally.calls for tally in self.ways.values()),
            "returned_early": sum(len(tally.early) for tally in self.ways.values()),
            **{way: tally.summary() for way, tally in self.ways.items() if tally.calls},
            "named": sorted({who for tally in self.ways.values() for who in tally.named}),
            "missing": self.missing,
            "ran": sorted(self.ran),
            "failures": self.failures,
        }


def calls() -> list[str]:
    """The names of all calls of native/waits.c."""
    return re.findall(r"\bT\((?!name\))(\w+)\)", SOURCE.read_text())


async def until(sandbox: Sandbox, test: str, seconds: float = 0.0) -> None:
    """Wait until a test of the shell succeeds. Its commands end no turn."""
    deadline = time.monotonic() + TIMEOUT + seconds
    while (await sandbox.exec(test, ends_turn=False)).exit_code:
        if time.monotonic() > deadline:
            raise TimeoutError(f"`{test}` never came true in {sandbox.id}")
        await asyncio.sleep(0.1)


async def reported(sandbox: Sandbox, seconds: float = 0.0) -> str:
    """The outcomes, when all are there: soon, or when this time is over."""
    await until(sandbox, f"test -e {RESULTS}.done", seconds)
    return (await sandbox.exec(f"cat {RESULTS}", ends_turn=False)).stdout.decode()


def script(programs: list[str], seconds: float, names: list[str]) -> str:
    """Start these waits and return when all of them wait."""
    parts = [f"{command} {seconds:g} {RESULTS}" for command in programs]
    if names:
        parts.append(f"{languages.CALLS} {seconds:g} {RESULTS} {' '.join(names)}")
        ready = f"until [ -e {RESULTS}.ready ]; do sleep 0.05; done"
        rest = f"mv {RESULTS}.done {RESULTS}.c 2>/dev/null;"
    else:
        ready, rest = "sleep 1", ""
    running = " & ".join(f"{part} </dev/null >>/tmp/said 2>&1" for part in parts)
    return f"( {running} & wait; {rest} touch {RESULTS}.done ) >/dev/null 2>&1 & {ready}"


@contextlib.asynccontextmanager
async def waiting(
    client: Client, results: Results, seconds: float, names: list[str], programs: list[str]
) -> AsyncIterator[tuple[Sandbox, ExecResult, Callable[[], Awaitable[dict[str, float]]]]]:
    """A sandbox in which these wait, the turn that started them, and what tells how late those of the control are."""
    command = script(programs, seconds, names)
    async with client.create(IMAGE, limits=LIMITS) as control, client.create(IMAGE, limits=LIMITS) as sandbox:
        await control.exec(command, timeout=TIMEOUT, ends_turn=False)
        started = await sandbox.exec(command, timeout=TIMEOUT)

        async def usual() -> dict[str, float]:
            return results.control(await reported(control, seconds), seconds)

        yield sandbox, started, usual


async def one_group(client: Client, results: Results, seconds: float, names: list[str], programs: list[str]) -> None:
    """Wait in a sandbox that is checkpointed, in a fork of the checkpoint, and in the sandbox once it is restored."""
    async with waiting(client, results, seconds, names, programs) as (sandbox, started, usual):
        after_turn = await sandbox.captured(started) if started.checkpoint else None
        middle = await sandbox.checkpoint()
        began = time.monotonic()
        (forked,) = await client.fork(middle)
        took, resumed = 1e3 * (time.monotonic() - began), time.time()
        frozen = middle.frozen_ms + (after_turn.frozen_ms if after_turn is not None else 0.0)
        async with forked.sandbox as child:
            late = await usual()
            results.add("live", await reported(sandbox), seconds, frozen, late)
            results.add("forked", await reported(child), seconds, frozen + took, late, resumed)
        restored = await sandbox.restore(middle)
        resumed = time.time()
        results.add("restored", await reported(sandbox), seconds, frozen + restored.total_ms, late, resumed)


async def pace_of(client: Client, results: Results, pace: float, names: list[str]) -> float:
    """Seconds from one turn to the next, so that the sandbox runs half of the time: on a busy machine longer."""
    async with waiting(client, results, 9999, names, []) as (sandbox, _, _usual):
        began = time.monotonic()
        for _ in range(TRIED):
            await sandbox.captured(await sandbox.exec(TURN))
        return max(pace, 2 * (time.monotonic() - began) / TRIED)


async def in_a_row(client: Client, results: Results, row: int, pace: float, names: list[str]) -> dict[str, Any]:
    """Wait through many turns, one every `pace` seconds or slower, each checkpointed with its processes."""
    pace = await pace_of(client, results, pace, names)
    seconds = round(row * pace + ROW_MARGIN)
    frozen: list[float] = []
    async with waiting(client, results, seconds, names, []) as (sandbox, _, usual):
        began = time.monotonic()
        while len(frozen) < row and time.monotonic() - began < seconds - ROW_MARGIN / 2:
            turn = await sandbox.exec(TURN)
            if turn.checkpoint:
                frozen.append((await sandbox.captured(turn)).frozen_ms)
            await asyncio.sleep(began + pace * len(frozen) - time.monotonic())
        late = await usual()
        results.add("in a row", await reported(sandbox, seconds), seconds, sum(frozen), late)
    return {
        "waits": 2 * len(names),
        "checkpoints": len(frozen),
        "seconds": seconds,
        "pace_s": round(pace, 2),
        "frozen_ms_p50": round(statistics.median(frozen), 1),
        "frozen_ms_total": round(sum(frozen), 1),
    }


async def first_of_a_daemon(results: Results, tree: Path, seconds: float) -> None:
    """Wait in the first sandbox of a daemon that has just started; each call is started by a command of its own."""
    host = BenchHost(aftermath.directory("pagurus-transparency-", "/var/tmp"), tree)
    try:
        await asyncio.to_thread(host.start)
        async with host.client() as client, client.create(IMAGE, limits=LIMITS) as sandbox:
            for name in FIRST:
                said = f"</dev/null >/tmp/{name}.said 2>&1 &"
                await sandbox.exec(f"{languages.CALLS} {seconds:g} /tmp/{name} {name} {said}")
            frozen = 0.0
            for number in range(FIRST_CHECKPOINTS):
                frozen += (await sandbox.checkpoint()).frozen_ms
                written = await sandbox.exec(f"echo {number} > /tmp/file")
                if written.checkpoint:
                    frozen += (await sandbox.captured(written)).frozen_ms
            for name in FIRST:
                await until(sandbox, f"test -e /tmp/{name}.done", seconds)
                reported = await sandbox.exec(f"cat /tmp/{name}", ends_turn=False)
                results.add("first", reported.stdout.decode(), seconds, frozen, {})
    finally:
        await asyncio.to_thread(host.clean)


async def adds(tree: Path, rounds: int) -> dict[str, Any]:
    """Frozen milliseconds with the plugin and with an empty one, interleaved."""
    with (
        aftermath.TemporaryDirectory("pagurus-empty-") as name,
        aftermath.TemporaryDirectory("pagurus-transparency-", "/var/tmp") as directory,
    ):
        await asyncio.to_thread(_compile_empty, Path(name) / "waits.so")
        plugins = {"with": paths.criu_plugins(), "without": Path(name)}
        result: dict[str, Any] = {}
        async with Ours(Path(directory), tree) as ours:
            for program, start in PROGRAMS.items():
                times = {which: Times() for which in plugins}
                async with ours.sandbox(start) as container:
                    for number in range(2 * rounds + 4):
                        which = ("with", "without", "without", "with")[number % 4]
                        paths.criu_plugins = lambda which=which: plugins[which]  # type: ignore[misc, assignment]
                        await ours.checkpointer.forget(container)
                        await ours.checkpointer.warm(container)
                        await ours.checkpoint(container, Times() if number < 4 else times[which])
                metrics = {which: times[which].metrics()["frozen_ms"]["p50"] for which in plugins}
                result[program] = {**metrics, "adds": round(metrics["with"] - metrics["without"], 2)}
        return result


def _compile_empty(into: Path) -> None:
    argv = ["cc", "-shared", "-fPIC", "-x", "c", "-o", str(into), "-"]
    subprocess.run(argv, input=EMPTY_PLUGIN.encode(), check=True)


async def everything(options: argparse.Namespace) -> dict[str, Any]:
    words = options.calls.split(",") if options.calls else [""]
    names = [name for name in calls() if any(word in name for word in words)]
    base = await asyncio.to_thread(image, options.image)
    tree, missing = await asyncio.to_thread(languages.image, base)
    results = Results()
    results.missing |= missing
    programs = [name for name in options.languages.split(",") if name in languages.COMMANDS and name not in missing]
    results.ran |= set(programs) | {"c"}
    load = os.getloadavg()[0]
    host = BenchHost(aftermath.directory("pagurus-transparency-", "/var/tmp"), tree)
    try:
        await asyncio.to_thread(host.start)
        async with host.client() as client:
            groups: list[tuple[list[str], list[str]]] = [
                (names[at : at + GROUP], []) for at in range(0, len(names), GROUP)
            ]
            for group, commands in [*groups, *(([], [languages.COMMANDS[name]]) for name in programs)]:
                await _attempt(one_group(client, results, options.seconds, group, commands), results, group or commands)
            lasting = [name for name in names if name != "nanosleep_read_only"]  # whose seconds are a constant
            row = [
                await in_a_row(client, results, options.row, options.pace, lasting[at : at + ROW_GROUP])
                for at in range(0, len(lasting) if options.row else 0, ROW_GROUP)
            ]
    finally:
        await asyncio.to_thread(host.clean)
    for _ in range(options.fresh):
        await first_of_a_daemon(results, tree, options.seconds)
    return {
        **results.metrics(),
        "row": row,
        "adds_ms": await adds(tree, options.rounds),
        "cores": os.cpu_count(),
        "load_before": round(load, 2),
    }


async def _attempt(step: Any, results: Results, what: list[str]) -> None:
    """A group whose sandbox could not be checkpointed, forked or restored is a failure by its name; others go on."""
    print(f"waits: {' '.join(what)}", file=sys.stderr, flush=True)
    try:
        await step
    except (PagurusError, TimeoutError) as error:
        results.failures.append(f"{' '.join(what)}: {type(error).__name__}: {error}"[:500])


def main(arguments: list[str]) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="that each call waits: whole ones")
    parser.add_argument("--calls", default="", help="only those whose name holds one of these words (commas between)")
    parser.add_argument("--row", type=int, default=100, help="checkpoints in a row; 0: none")
    parser.add_argument("--pace", type=float, default=1.0, help="seconds from one to the next")
    parser.add_argument("--fresh", type=int, default=4, help="daemons that have just started")
    parser.add_argument("--rounds", type=int, default=20, help="dumps with and without, for what it adds")
    parser.add_argument("--languages", default=",".join(languages.COMMANDS), help="only these; empty: none")
    parser.add_argument("--image", default="debian")
    options = parser.parse_args(arguments)
    result = asyncio.run(everything(options))
    command.show(result, options)
    return 0
