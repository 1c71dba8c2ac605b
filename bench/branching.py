"""One reset for a group: what it saves, and whether all members begin in the same state.

The environment's reset builds and starts a service: it writes and compiles `--modules` Python modules, fills an SQLite
database, and starts an HTTP server that answers from both. Groups of `--size` are set up in turns as before (a
reset in each sandbox) and from one prepared state, until each member asks for its first token. Its first action then
asks the service and hashes all that the reset wrote.

`setup_ratio`: seconds of setting up, one member after another, the one way over the other: what a host with a
core per sandbox would save. `setup_wall_ratio`: the same with the whole group at once, on the cores that are here.
`fork_group_equal`: members whose first action said what all others said. `fork_s`: from nothing to the first token in a
state that is there already, which is what a second epoch pays. `tree_saving`: see :mod:`bench.harness.trees`. What
scoring in forks saves: see :mod:`bench.harness.scoring`. `--part learning`, which is not in `all`, needs no
sandboxes but with `--real`: see :mod:`bench.harness.tree_learning`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from pathlib import Path
from typing import Any

from bench.harness import aftermath, command, scoring, tree_learning, trees
from bench.harness.own_daemon import IMAGE, BenchHost, image
from rollout.engine.chat import END, Characters
from rollout.engine.client import Generation, Sampling, WeightSpan
from rollout.environments.base import Environment, Observation
from rollout.episode.manager import EpisodeManager
from rollout.episode.prepared import PreparedStates
from rollout.episode.spec import EpisodeLimits, EpisodeSpec
from rollout.labels import LabellingClient
from sandbox.messages import Limits as SandboxLimits
from trainer.machine import processor

BUILD = """
import compileall, os, py_compile, sqlite3, sys
modules, seed = int(sys.argv[1]), int(sys.argv[2])
os.makedirs('/srv/code')
for number in range(modules):
    body = ''.join(f'def f{n}(x, y={n}):\\n    z = [x * {number} + y for _ in range({n})]\\n    return sum(z) + y\\n'
                   for n in range(200))
    open(f'/srv/code/m{number}.py', 'w').write(body)
compileall.compile_dir('/srv/code', quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
db = sqlite3.connect('/srv/data.sqlite')
db.execute('create table rows (id integer primary key, word text)')
db.executemany('insert into rows (word) values (?)', ((f'{seed * n % 99991:x}',) for n in range(modules * 500)))
db.execute('create index words on rows (word)')
db.commit()
"""
SERVE = """
import http.server, sqlite3
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        db = sqlite3.connect('file:/srv/data.sqlite?mode=ro', uri=True)
        (count,) = db.execute("select count(*) from rows where word like '1%'").fetchone()
        self.send_response(200); self.end_headers(); self.wfile.write(str(count).encode())
    def log_message(self, *_): pass
http.server.HTTPServer(('127.0.0.1', 8000), Answers).serve_forever()
"""
PROBE = """
import hashlib, pathlib, urllib.request
total = hashlib.sha256()
for path in sorted(pathlib.Path('/srv').rglob('*')):
    if path.is_file(): total.update(str(path).encode() + path.read_bytes())
print(urllib.request.urlopen('http://127.0.0.1:8000').read().decode(), total.hexdigest())
"""
REQUEST = "import urllib.request as u; u.urlopen('http://127.0.0.1:8000')"
UP = f'until python3 -c "{REQUEST}" 2>/dev/null; do sleep 0.1; done'
LONGEST = 900.0  # seconds of a reset


class Service(Environment):
    """Builds and starts a service; one turn."""

    image = IMAGE
    max_turns = 1
    limits = SandboxLimits(cpus=1, memory="1GiB", processes=64, disk="2GiB")
    modules = 0

    def __init__(self) -> None:
        self.size = type(self).modules

    async def reset(self, sandbox: Any, seed: int) -> Observation:
        await sandbox.files.write("/build.py", BUILD)
        await sandbox.files.write("/serve.py", SERVE)
        done = await sandbox.exec(["python3", "/build.py", str(self.size), str(seed)], timeout=LONGEST)
        assert done.exit_code == 0, (done.exit_code, done.text, done.stderr)
        await sandbox.exec(f"python3 /serve.py > /dev/null 2>&1 & {UP}", timeout=LONGEST)
        return Observation("ready")

    async def step(self, sandbox: Any, action: str) -> Observation:
        return Observation((await sandbox.exec(["python3", "-c", PROBE], timeout=LONGEST)).text, done=True)


class Requested:
    """An engine that only notes when it is asked."""

    def __init__(self) -> None:
        self.at: list[float] = []

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "") -> Generation:
        self.at.append(time.monotonic())
        return Generation(token_ids=[65, END], logprobs=[0.0, 0.0], spans=[WeightSpan(0, 0, 2)], finish_reason="stop")


async def group(
    host: LabellingClient, states: PreparedStates | None, seed: int, size: int, *, at_once: bool
) -> dict[str, Any]:
    """Seconds until the members' first tokens, one after another or together, and what each saw."""
    engine = Requested()
    limits = EpisodeLimits(create=LONGEST, reset=LONGEST, step=LONGEST)
    episodes = EpisodeManager(
        environment=Service, host=host, engine=engine, tokenizer=Characters(), limits=limits, prepared=states
    )
    sampling = Sampling(max_tokens=8, stop_token_ids=[END])

    async def play(index: int) -> tuple[float, str]:
        began, requested = time.monotonic(), len(engine.at)
        played = await episodes.run(EpisodeSpec(prompt=f"p{seed}", seed=seed, index=index), sampling)
        assert played.failure is None, played.reason
        return (engine.at[requested] if not at_once else max(engine.at)) - began, played.turns[0].observation

    if at_once:
        played = list(await asyncio.gather(*(play(index) for index in range(size))))
        return {"seconds": [max(took for took, _ in played)], "observed": [said for _, said in played]}
    played = [await play(index) for index in range(size)]
    return {"seconds": [took for took, _ in played], "observed": [said for _, said in played]}


async def measure(bench: BenchHost, directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    Service.modules = options.modules
    ratios: dict[bool, list[float]] = {False: [], True: []}
    resets, forks, equal, members = [], [], 0, 0
    async with bench.client() as client:
        host = LabellingClient(client, directory / "run")
        seeds = iter(range(1, 1_000_000))
        for number in range(options.rounds):
            for at_once in (False, True):
                seed = next(seeds)
                ways: list[PreparedStates | None] = [None, PreparedStates(host, directory / "book")]
                took = {}
                for states in ways if number % 2 else reversed(ways):
                    result = await group(host, states, seed, options.size, at_once=at_once)
                    took[states is not None] = result["seconds"]
                    if states is not None:
                        common = max(set(result["observed"]), key=result["observed"].count)
                        equal, members = equal + result["observed"].count(common), members + options.size
                ratios[at_once].append(sum(took[False]) / sum(took[True]))
                if not at_once:
                    resets += took[False]
                    forks += took[True][1:]
    return {
        "size": options.size,
        "setup_ratio": round(statistics.median(ratios[False]), 2),
        "setup_wall_ratio": round(statistics.median(ratios[True]), 2),
        "fork_group_equal": equal / members,
        "reset_s": round(statistics.median(resets), 2),
        "fork_s": round(statistics.median(forks), 3),
    }


async def measure_trees(bench: BenchHost, directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    async with bench.client() as client:
        host = LabellingClient(client, directory / "trees")
        return await trees.measure(host, directory, image=IMAGE, leaves=options.size, rounds=options.rounds)


async def measure_learning(bench: BenchHost, directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    async with bench.client() as client:
        return await tree_learning.measure(
            directory / "learning", options, LabellingClient(client, directory / "learning")
        )


def _in_sandboxes(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The parts that need a daemon."""
    result: dict[str, Any] = {}
    bench = BenchHost(directory / "host", image("debian"))
    (bench.state / "images" / "debian").symlink_to(image("debian").resolve())  # as an example calls it
    try:
        bench.start()
        if options.part == "learning":
            result |= asyncio.run(measure_learning(bench, directory, options))
        if options.part in ("setup", "all"):
            result |= asyncio.run(measure(bench, directory, options))
        if options.part in ("trees", "all"):
            result |= asyncio.run(measure_trees(bench, directory, options))
        if options.part in ("scoring", "all"):
            parts = {"scored": options.scored, "suite": options.suite, "unruly": options.scorings}
            result |= asyncio.run(scoring.measure(bench, directory, **parts))
    finally:
        bench.clean()
    return result


def main(argv: list[str] | None = None) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--size", type=int, default=8, help="members of a group (default: 8)")
    parser.add_argument("--modules", type=int, default=3000, help="how much a reset builds (default: 3000)")
    parser.add_argument("--scored", type=int, default=8, help="episodes that are scored in a fork (default: 8)")
    parser.add_argument("--suite", type=float, default=2.0, help="seconds of their tests (default: 2)")
    parser.add_argument("--scorings", type=int, default=1000, help="by unruly functions (default: 1000)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--part", choices=("setup", "trees", "scoring", "learning", "all"), default="all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of --part learning (default: 0)")
    parser.add_argument("--steps", type=int, default=15, help="of --part learning (default: 15)")
    parser.add_argument("--every", type=int, default=3, help="steps between evaluations, of --part learning")
    parser.add_argument("--held-out", type=int, default=256, help="episodes, of --part learning (default: 256)")
    parser.add_argument("--example", default="finish_the_migration", help="of --part learning")
    parser.add_argument("--by", choices=("turns", "entropy", "spread"), default="turns", help="of --part learning")
    parser.add_argument("--real", action="store_true", help="--part learning in sandboxes")
    options = parser.parse_args(argv)
    result: dict[str, Any] = {"cpu": processor(), "load": [round(os.getloadavg()[0], 1)]}
    with aftermath.TemporaryDirectory("pagurus-branching-", "/var/tmp") as directory:
        if options.part == "learning" and not options.real:
            result |= asyncio.run(tree_learning.measure(Path(directory), options))
        else:
            result |= _in_sandboxes(Path(directory), options)
    result["load"].append(round(os.getloadavg()[0], 1))
    command.show(result, options)
    return 0
