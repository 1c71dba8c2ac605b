"""Many sandboxes on one host, paced like real agents: what do checkpoints cost them?

::

    pagurus bench density [--json] [--sandboxes N] [--traces FILE] [--minutes M] [--rounds R] [--turns T] [--memory MIB]

Two crowds of N sandboxes live on one daemon. Both run the same turns of real commands (git, python, pytest, gcc,
sqlite, background servers) with the same pauses in between, in which a model would think. One is checkpointed at every
turn, the other never. They run in alternation, a round of T turns each (with, without, without, with, ...), so that
what else the machine does falls on both.

The pace comes from a file of recorded agents (`--traces`: one JSON object a line, ``turns`` with ``llm_wait_s`` and
``guess``), or else from a synthetic distribution of the same shape; `pace` in the output says which. Pauses are as long
as recorded; `--minutes` divides them so that a run ends sooner, while commands run at their own speed. Faster than life
is harder.

With `--memory` each sandbox of both crowds has a process that holds so many MiB, as an agent's own Node or JVM does,
and writes to `--dirty` percent of its pages in each turn, drawn at random. Both crowds together need twice as much.

`overhead_ratio`: time of all trajectories with checkpoints over without, pauses included as they were made.
`overhead_ratio_at_life`: the same with the pauses as long as recorded. `exposed_ms`: time that a command waited for the
checkpoint of the turn before. `skipped_share`: turns that needed no checkpoint. `bytes_stored`: what all checkpoints
added to the disk since the sandboxes were made; `frozen` and `captured`: what checkpoints took;
`bytes_full_every_turn`: what a full dump every turn would have added. `processor_seconds`: what the whole machine
computed in the rounds of each crowd; `checkpoints_of_a_core`: the difference, as a share of one core.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import random
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.harness import aftermath, command
from bench.harness.own_daemon import IMAGE, BenchHost, image
from daemon.checkpoints.queue import quantile
from sandbox import Client, ExecResult, Limits, Sandbox
from sandbox.image.store import ImageStore
from sandbox.tree.pool import BtrfsPool

NAME = "bench-density"
PACKAGES = ("python3", "procps", "iproute2", "git", "gcc", "libc6-dev", "make", "sqlite3", "python3-pytest")
SERVED_INTERVAL = 2  # one of so many sandboxes has a server from the start
# Without recordings: a log-normal pause, and shares of what commands do.
PAUSE_MEDIAN, PAUSE_SIGMA = 3.5, 0.8
SHARES = {"read_only": 0.35, "write": 0.30, "run": 0.25, "install": 0.06, "bg": 0.04}

SETUP = r"""
set -e; mkdir -p /project/src /project/tests; cd /project; export HOME=/root
cat > src/calc.py <<'E'
def add(a, b):
    return a + b
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)
if __name__ == "__main__":
    print(fib(18))
E
cat > tests/test_calc.py <<'E'
import sys; sys.path.insert(0, "/project/src")
import calc
def test_add(): assert calc.add(1, 2) == 3
def test_fib(): assert calc.fib(10) == 55
E
cat > main.c <<'E'
#include <stdio.h>
int main(void) { long s = 0; for (long i = 0; i < 3000000; i++) s += i ^ (s >> 3); printf("%ld\n", s); return 0; }
E
git init -q .; git config user.email a@b.c; git config user.name agent
git add -A; git commit -qm start
sqlite3 app.db 'create table items (id integer primary key, name text); insert into items (name)
  with recursive n(i) as (select 1 union all select i + 1 from n where i < 2000) select "item " || i from n'
"""
#: Holds memory, and writes to some of its pages whenever it reads a line.
HOLDER = r"""
cat > /run/holder.py <<'E'
import os, random
held = bytearray(os.urandom(1 << 20) * {size})
pages = len(held) // 4096
os.mkfifo("/run/turn")
while True:
    with open("/run/turn") as turns:
        for _ in turns:
            for page in random.sample(range(pages), int(pages * {dirty} / 100)):
                held[page * 4096 + 64] = (held[page * 4096 + 64] + 1) % 256
E
setsid python3 /run/holder.py >/dev/null 2>&1 & while [ ! -p /run/turn ]; do sleep 0.02; done
"""
HELD = "; echo >/run/turn"
SERVER = "setsid python3 -m http.server {port} --bind 127.0.0.1 --directory /project >/dev/null 2>&1 & sleep 0.2"
FETCH = (
    "python3 -c 'import urllib.request as u; print(len(u.urlopen(\"http://127.0.0.1:8000/main.c\").read()))' || true"
)
INSERT = 'insert into items (name) values ("more {n}"); update items set name = name || "!" where id % 97 = 0'
COMMANDS: dict[str, tuple[str, ...]] = {
    "read_only": (
        "cd /project && git --no-optional-locks status --short | head",
        "cat /project/src/calc.py | head -40",
        "grep -rn def /project/src /project/tests | head",
        "ls -la /project /project/src",
        "cd /project && git log --oneline | head -5",
        "sqlite3 -readonly /project/app.db 'select count(*) from items'",
        "find / -xdev -name '*.py' 2>/dev/null | wc -l",
        FETCH,
    ),
    "write": (
        "printf 'def f{n}(x):\\n    return x * {n}\\n' >> /project/src/calc.py",
        "sed -i 's/[0-9]*00000/{n}00000/' /project/main.c",
        'python3 -c \'open("/project/notes.{n}", "w").write("note {n}\\n" * 200)\'',
        "cd /project && git add -A && git commit -qm 'turn {n}' || true",
        f"sqlite3 /project/app.db '{INSERT}'",
    ),
    "run": (
        "cd /project && python3 -m pytest -q tests 2>&1 | tail -1",
        "cd /project && gcc -O1 -o main main.c && ./main",
        "python3 /project/src/calc.py",
        "cd /project && python3 -m compileall -q src tests",
    ),
    "install": (
        "cp -r /usr/lib/python3/dist-packages/iniconfig /project/vendor-{n}",
        "mkdir -p /opt/tool-{n} && tar c -C /usr/lib/python3.11/email . | tar x -C /opt/tool-{n}",
    ),
    "bg": (SERVER.replace("{port}", "81{n:02}"),),
    "unknown": ("cd /project && git diff --stat | tail -1; date > /project/stamp",),
}


@dataclass(frozen=True)
class Turn:
    """What one agent does: it thinks, then it runs a command."""

    pause: float  # seconds, as recorded
    command: str


@dataclass
class Crowd:
    """N sandboxes, and what their turns took."""

    checkpointed: bool
    sandboxes: list[Sandbox] = field(default_factory=list)
    taken: float = 0.0  # seconds of all trajectories
    paused: float = 0.0
    lasted: float = 0.0  # seconds of its rounds
    computed: float = 0.0  # seconds of processor time of the machine in them
    results: list[ExecResult] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def plan(count: int, turns: int, traces: Path | None, seed: int) -> tuple[list[list[Turn]], str]:
    """For each of `count` sandboxes its turns, and where the pace is from."""
    chance = random.Random(seed)
    recorded: list[list[tuple[float, str]]] = []
    if traces is not None:
        opened = gzip.open if traces.suffix == ".gz" else open
        with opened(traces, "rt") as lines:
            for line in lines:
                result = [
                    (t["llm_wait_s"], t["guess"]) for t in json.loads(line)["turns"] if t["llm_wait_s"] is not None
                ]
                recorded += [result] if len(result) >= turns else []
    plans = []
    for number in range(count):
        if recorded:
            trial = recorded[number % len(recorded)]
            start = chance.randrange(len(trial) - turns + 1)
            paces = trial[start : start + turns]
        else:
            kinds = chance.choices(list(SHARES), list(SHARES.values()), k=turns)
            paces = [(chance.lognormvariate(0, PAUSE_SIGMA) * PAUSE_MEDIAN, kind) for kind in kinds]
        plans.append([Turn(pause, _command(chance, kind, turn)) for turn, (pause, kind) in enumerate(paces)])
    return plans, f"recorded: {len(recorded)} trials" if recorded else "synthetic: log-normal pauses, fixed shares"


def _command(chance: random.Random, kind: str, number: int) -> str:
    text = chance.choice(COMMANDS.get(kind, COMMANDS["unknown"]))
    return text.replace("{n:02}", f"{number % 100:02}").replace("{n}", str(number))


def speedup_for(plans: list[list[Turn]], rounds: int, minutes: float) -> float:
    """By how much the pauses are divided so that all rounds of both crowds end in time."""
    turns = len(plans[0]) // rounds
    longest = sum(
        max(sum(turn.pause for turn in item[r * turns : (r + 1) * turns]) for item in plans) for r in range(rounds)
    )
    return max(1.0, 2 * longest / (60 * minutes))


async def make(host: Client, plans: list[list[Turn]], crowd: Crowd, holder: str, memory: int) -> None:
    """`holder`: a script that starts what holds `memory` MiB."""
    gate = asyncio.Semaphore(4)

    async def one(number: int) -> Sandbox:
        async with gate:
            sandbox = await host.create(IMAGE, limits=Limits(memory=f"{512 + memory}MiB", disk=None))
            served = number % SERVED_INTERVAL == 0
            text = SETUP + (SERVER.replace("{port}", "8000") + "\n" if served else "") + holder
            done = await sandbox.exec(text, ends_turn=crowd.checkpointed, timeout=120)
            if done.exit_code:
                raise RuntimeError(f"set-up failed: {done.stderr.decode()}")
            return sandbox

    crowd.sandboxes = list(await asyncio.gather(*(one(number) for number in range(len(plans)))))


async def play(crowd: Crowd, plans: list[list[Turn]], first: int, last: int, speedup: float) -> None:
    """One round: turns `first` to `last` of every sandbox, all at once."""

    async def one(sandbox: Sandbox, turns: list[Turn]) -> None:
        began = time.monotonic()
        for turn in turns:
            await asyncio.sleep(turn.pause / speedup)
            done = await sandbox.exec(turn.command, ends_turn=crowd.checkpointed, env={"HOME": "/root"}, timeout=120)
            crowd.results.append(done)
            crowd.paused += turn.pause / speedup
            if done.checkpoint_error:
                crowd.failures.append(done.checkpoint_error)
        crowd.taken += time.monotonic() - began

    await asyncio.gather(*(one(s, turns[first:last]) for s, turns in zip(crowd.sandboxes, plans, strict=True)))


async def measure(options: argparse.Namespace, host: Client, socket: Path) -> dict[str, Any]:
    total = options.rounds * options.turns
    plans, pace = plan(options.sandboxes, total, options.traces, options.seed)
    holder = ""
    if options.memory:
        holder = HOLDER.replace("{size}", str(options.memory)).replace("{dirty}", str(options.dirty))
        plans = [[Turn(turn.pause, turn.command + HELD) for turn in turns] for turns in plans]
    speedup = speedup_for(plans, options.rounds, options.minutes) if options.minutes else 1.0
    crowds = Crowd(checkpointed=True), Crowd(checkpointed=False)
    for crowd in crowds:
        await make(host, plans, crowd, holder, options.memory)
    await _durable(host, crowds[0])
    print(f"{2 * options.sandboxes} sandboxes, pauses divided by {speedup:.2f}", file=sys.stderr)
    for number in range(options.rounds):
        for crowd in crowds if number % 2 == 0 else reversed(crowds):
            first = number * options.turns
            began, before = time.monotonic(), _computed()
            await play(crowd, plans, first, first + options.turns, speedup)
            await asyncio.sleep(1.0)  # what one leaves to do in the background is not the other's
            crowd.lasted += time.monotonic() - began
            crowd.computed += _computed() - before
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
    await _durable(host, crowds[0])
    await asyncio.sleep(3.0)  # the hashes of files are written when all else is done
    return {"pace": pace, "speedup": round(speedup, 2), **await judge(host, socket, crowds, speedup)}


def _computed() -> float:
    """Seconds of processor time of all that has ever run on this machine."""
    user, nice, system, _, _, interrupts, soft = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")


async def _durable(host: Client, crowd: Crowd) -> None:
    for sandbox in crowd.sandboxes:
        await host.checkpoint((await sandbox.refresh()).head or "", wait="durable")


async def judge(host: Client, socket: Path, crowds: tuple[Crowd, Crowd], speedup: float) -> dict[str, Any]:
    ours, theirs = crowds
    statistics = await host.statistics()
    exposed = [done.waited_ms for done in ours.results]
    acted = [crowd.taken - crowd.paused for crowd in crowds]
    life = ours.paused * speedup
    verdicts = [str(done.verdict) for done in ours.results]
    return {
        "sandboxes": len(ours.sandboxes),
        "turns": len(ours.results),
        "overhead_ratio": round(ours.taken / theirs.taken, 4),
        "overhead_ratio_at_life": round((acted[0] + life) / (acted[1] + life), 4),
        "exposed_ms_p50": round(quantile(exposed, 0.5), 2),
        "exposed_ms_p99": round(quantile(exposed, 0.99), 2),
        "exposed_ms_max": round(max(exposed), 2),
        "skipped_share": round(verdicts.count("none") / len(verdicts), 4),
        "verdicts": {verdict: verdicts.count(verdict) for verdict in sorted(set(verdicts))},
        "bytes_stored": statistics.stored_bytes,
        "bytes_full_every_turn": statistics.full_bytes,
        "stored_share": round(statistics.stored_bytes / max(1, statistics.full_bytes), 4),
        "frozen": await _seconds(socket, "pagurus_checkpoint_frozen_seconds", "verdict"),
        "captured": await _seconds(socket, "pagurus_checkpoint_captured_seconds", "verdict"),
        "processor_seconds": {"with": round(ours.computed, 1), "without": round(theirs.computed, 1)},
        "checkpoints_of_a_core": round((ours.computed - theirs.computed) / ours.lasted, 3),
        "command_seconds": {"with": round(acted[0], 1), "without": round(acted[1], 1)},
        "checkpoints_failed": statistics.checkpoints_failed,
        "failures": ours.failures[:5],
    }


async def _seconds(socket: Path, name: str, label: str) -> dict[str, dict[str, float]]:
    """What the daemon measured: by `label`, how often and how long on the average."""
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket))) as session,
        session.get("http://host/metrics") as answer,
    ):
        text = await answer.text()
    values = re.findall(rf'^{name}_(count|sum){{{label}="(\w+)"}} (\S+)$', text, re.M)
    result = {which: {kind: float(value) for kind, item, value in values if item == which} for _, which, _ in values}
    return {
        which: {"count": item["count"], "mean_ms": round(1000 * item["sum"] / item["count"], 2)}
        for which, item in result.items()
        if item["count"]
    }


def need_image(name: str) -> Path:
    """The tree of the image, built when it is the bench's own and missing (minutes, from the host's Debian mirror)."""
    images = ImageStore(BtrfsPool().images)
    if name == NAME and name not in images.list():
        print(f"build the image {name}: git, gcc, pytest, sqlite", file=sys.stderr)
        images.debootstrap(name, include=PACKAGES)
    return image(name)


async def everything(options: argparse.Namespace) -> dict[str, Any]:
    tree = await asyncio.to_thread(need_image, options.image)
    directory = aftermath.directory("pagurus-density-", "/var/tmp")
    host = BenchHost(directory, tree)
    began = time.monotonic()
    load = os.getloadavg()[0]
    try:
        await asyncio.to_thread(host.start, *([] if options.track_memory else ["--no-track-memory"]))
        async with host.client() as client:
            result = await measure(options, client, host.socket)
    except BaseException:  # the daemon's own words tell why, whatever it was
        print(*host.complaints()[-8:], sep="\n", file=sys.stderr)
        raise
    finally:
        await asyncio.to_thread(host.clean)
    return {**result, "seconds": round(time.monotonic() - began, 1), "load_before": round(load, 2)}


def main(arguments: list[str]) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--sandboxes", type=int, default=32)
    parser.add_argument("--traces", type=Path, default=None, help="recorded agents; synthetic pace without")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--turns", type=int, default=8, help="of each sandbox in each round")
    parser.add_argument("--minutes", type=float, help="divide the pauses so that the turns take about so long in all")
    parser.add_argument("--memory", type=int, default=0, help="MiB that a process of each sandbox holds")
    parser.add_argument("--dirty", type=float, default=1.0, help="percent of them that it writes to in each turn")
    parser.add_argument(
        "--track-memory", action=argparse.BooleanOptionalAction, default=True, help="as for `pagurus daemon`"
    )
    parser.add_argument("--image", default=NAME)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    result = asyncio.run(everything(options))
    command.show(result, options)
    return 0
