"""Is a prompt, a sample or a turn ever lost? Kills the processes of a training run, again and again, and counts.

::

    pagurus bench roles [--json] [--role NAME ...] [--kills N] [--minutes M] [--seed S] [--image NAME] [--groups G]
                        [--size S]

A daemon of its own and one training run of the example (`pagurus train`). At random instants a random role is killed
with `kill -9`: engine, rollout (which carries router and reward, see `carries`), trainer, their supervisor or the
daemon. The bench starts supervisor and daemon again, the supervisor rollout and trainer, the rollout the engine. The
next kill comes when turns go on. It ends after `--kills` of each role, or after `--minutes`. Then the host is away for
`--away` seconds. At the end the run's books are compared with what was seen before each kill, and its samples are
trained on once more by a trainer that nobody kills, and by one that is killed `--replays` times.

`kills` by role; `prompts_lost`: issued and in no state, or in the wrong one; `prompts_doubled`: in more than one batch;
`finished_groups_lost`: whole before a kill and not after it; `turns_replayed_max`: turns of one trajectory that were
executed again after one death; `first_token_s`: from a kill to the first answer that was asked for and finished after
it, by role, and `first_token_s_p95` of all; `recovery_phases`: what the next process of a killed role took for each
stage of its start, and when that answer began and ended, see rollout.store.stages; `hangs`: nothing went on for two
minutes; `continued`: trajectories that another went on with; `decisions`, `identical`: logged, and made again by a
replay; `given_up` with reasons should be none; `weights_identical`, `live_weights_identical`: the last weights of the
trainer that was killed on recorded samples, and those of the run itself, are bit by bit what the trainer that nobody
killed made.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.harness import aftermath, command
from bench.harness.own_daemon import IMAGE, BenchHost, image
from coordinator import local
from rollout.messages import TurnRecord
from rollout.store import decisions, stages
from rollout.store.journal import TurnJournal
from rollout.store.samples import SampleStore
from rollout.store.status import read_status
from rollout.weights.store import VersionStore
from sandbox.errors import NotFound
from sandbox.paths import CHECKOUT
from tests.crash import recorded
from trainer.config import TrainConfig, open_run

ROLES = ("engine", "rollout", "trainer", "supervisor", "daemon")
CARRIES = {
    "rollout": ["router", "reward"]
}  # rollout.pool, and the environment's `score`: they have no process of their own
APART = (0.1, 3.0)  # seconds between the return of turns and the next kill
HANG = 120.0  # seconds without a turn, as far as we were not stopped ourselves
FIRST = 5  # times as long for the first turn, of processes none of which has begun
POLL_INTERVAL = 0.05  # seconds between two looks
STEPS = 100_000  # more than any bench makes


class Bench:
    """One daemon, one run, and what was seen of both."""

    def __init__(self, host: BenchHost, directory: Path, options: argparse.Namespace):
        self.host, self.out, self.options = host, directory, options
        self.chance = random.Random(options.seed)
        self.process: subprocess.Popen[bytes] | None = None
        self.kills: Counter[str] = Counter()
        self.first: dict[str, list[float]] = defaultdict(list)
        self.injected: list[tuple[str, float, TurnRecord]] = []  # role, when, and the first answer after that
        self.complete: dict[str, set[str]] = {}  # prompt -> states that it may be in from now on
        self.groups_lost = self.hangs = 0
        self.journal: TurnJournal | None = None

    @property
    def run_directory(self) -> Path:
        return (self.out / "latest").resolve()

    @property
    def fresh(self) -> Path:
        """The run folder as it was before the first step."""
        return self.out / "fresh"

    def prepare(self) -> None:
        """A run folder, and what it was before its first step."""
        options = self.options
        config = TrainConfig(
            task=CHECKOUT / "examples" / "fix_the_service", steps=STEPS, groups=options.groups, size=options.size,
            concurrency=16, held_out=2, faults=0, pace=0.2, image=IMAGE, seed=options.seed, out=self.out,
        )  # fmt: skip
        open_run(config)
        shutil.copytree(self.run_directory, self.fresh)

    def start_run(self) -> None:
        """From the beginning, or where the last one was."""
        argv = [sys.executable, "-m", "pagurus", "train", "--resume", str(self.run_directory)]
        environment = {**os.environ, "PAGURUS_STATE": str(self.host.state), "PAGURUS_RUN": str(self.host.run)}
        with (self.out / "run.log").open("ab") as log:
            self.process = subprocess.Popen(argv, cwd=CHECKOUT, env=environment, stdout=log, stderr=log)

    def kill(self, role: str) -> float:
        """When it was killed. One that is dead already is waited for."""
        at = time.time()
        if role == "daemon":
            self.host.kill()
            self.host.start()
            return at
        if role == "supervisor":
            assert self.process is not None
            self.process.kill()
            self.process.wait()
            self.start_run()
            return at
        for _ in polls():
            at = time.time()
            if local.restart(self.run_directory, role):
                return at
        raise RuntimeError(f"no {role} to kill:\n{tail(self.out / 'run.log')}")

    def turns_go_on(self, since: float) -> TurnRecord | None:
        """The first answer that was asked for and finished after `since`, by the journal; None: nothing comes."""
        for _ in polls():
            if self.process is not None and self.process.poll() is not None:
                raise RuntimeError(f"the run ended by itself:\n{tail(self.out / 'run.log')}")
            if ended := self.answers(since):
                return min(ended, key=lambda record: record.gen_end)
        return None

    def answers(self, since: float) -> list[TurnRecord]:
        """Answers after `since` in the journal."""
        if self.journal is None:
            if not (self.run_directory / "rollout" / "journal.sqlite").exists():
                return []
            self.journal = TurnJournal(self.run_directory / "rollout")
        entries = [self.journal.entries(key)[-1:] for key in self.journal.open()]
        records = [record for result in entries for entry in result for record in entry.records]
        return [record for record in records if record.gen_start > since]

    def recovery_phases(self) -> dict[str, dict[str, list[float]]]:
        """What each way back consisted of: stages of the next process, each in seconds since the one before it. Of a
        process that was killed on its way, those that it reached."""
        phases: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for number, (role, at, answer) in enumerate(self.injected):
            again = min((when for name, when, _ in self.injected[number + 1 :] if name == role), default=math.inf)
            if role == "daemon":
                reached = daemon_stages(self.host.log, at)
            else:
                result = stages.read(local.roles_of(self.run_directory), role=role, since=at)
                reached = [(item.stage, item.at) for item in result]
            last = at
            for stage, when in reached:
                if when >= again:
                    break
                phases[role][stage].append(when - last)
                last = when
                if stage == stages.READY:
                    break
            phases[role]["kill to asking"].append(answer.gen_start - at)
            phases[role]["asking to answer"].append(answer.gen_end - answer.gen_start)
        return phases

    def note_groups(self) -> None:
        """What is whole now must be whole, handed out or consumed for ever."""
        store = SampleStore(self.run_directory / "rollout")
        try:
            states = dict(store._read("select id, state from prompts"))
        finally:
            store.close()
        for prompt, allowed in self.complete.items():
            if states.get(prompt) not in allowed:
                self.groups_lost += 1
        later = {"buffered": ("buffered", "handed", "consumed"), "handed": ("handed", "consumed")}
        later["consumed"] = ("consumed", "handed")  # the trainer's save may be older
        self.complete = {prompt: set(later[state]) for prompt, state in states.items() if state in later}

    def inject(self, role: str) -> None:
        time.sleep(self.chance.uniform(*APART))
        self.note_groups()
        at = self.kill(role)
        self.kills[role] += 1
        answer = self.turns_go_on(at)
        if answer is None:
            self.hangs += 1
            print(f"hang after kill of {role}:\n{self.explained()}", file=sys.stderr)
        else:
            self.first[role].append(answer.gen_end - at)
            self.injected.append((role, at, answer))
        self.note_groups()

    def injections(self) -> None:
        """So many of each role, in any order, as long as there is time."""
        roles = (self.options.role or list(ROLES)) * self.options.kills
        self.chance.shuffle(roles)
        until = time.monotonic() + 60 * self.options.minutes
        for role in roles:
            if time.monotonic() > until:
                return
            self.inject(role)
            last = self.first[role][-1] if self.first[role] else math.inf
            print(f"{dict(self.kills)}, {self.hangs} hangs; {role}: {last:.2f} s", file=sys.stderr)

    def explained(self) -> str:
        """What a person looks at when nothing goes on."""
        living = [f"{item.name} {'lives' if item.alive else 'is dead'}" for item in local.states(self.run_directory)]
        status = read_status(self.run_directory / "rollout")
        said = [f"{time.time() - status.at:.0f} s ago: {len(status.running)} trajectories run; {', '.join(living)}"]
        said += [f"{wait.who} waits: {wait.reason}" for wait in status.waits]
        said += [
            f"{item.name} turn {item.turn}: {item.doing} for {status.at - item.since:.0f} s" for item in status.running
        ]
        logs = [
            self.out / "run.log",
            self.run_directory / "rollout.log",
            self.run_directory / "engine.log",
            self.host.log,
        ]
        return "\n".join([*said, *(f"{log.name}:\n{tail(log)}" for log in logs)])

    def away(self, seconds: float) -> None:
        """The host refuses everything for a while."""
        self.note_groups()
        self.host.kill()
        time.sleep(seconds)
        self.host.start()
        if self.turns_go_on(time.time()) is None:
            self.hangs += 1
        self.note_groups()

    def replays(self) -> dict[str, Any]:
        """The weights of this run, and of a trainer that is killed, against those of one that is not."""
        newest = VersionStore(self.run_directory / "weights").newest()
        assert newest is not None, "a run publishes what it begins with"
        steps = min(newest.version, self.options.replay_steps)
        result: dict[str, Any] = {"replay_steps": steps}
        digests = {}
        for name, kills in (("undisturbed", 0), ("killed", self.options.replays)):
            directory = self.out / name
            shutil.copytree(self.fresh, directory)
            shutil.copytree(self.run_directory / "rollout", directory / "rollout")
            result[f"replay_{name}"] = asyncio.run(recorded.train(directory, steps, kills=kills, seed=1, longest=2.0))
            digests[name] = VersionStore(directory / "weights").digests(steps)
        result["weights_identical"] = digests["killed"] == digests["undisturbed"]
        with contextlib.suppress(NotFound):  # collected meanwhile
            live = VersionStore(self.run_directory / "weights").digests(steps)
            result["live_weights_identical"] = live == digests["undisturbed"]
        return result

    def end(self) -> None:
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def everything(options: argparse.Namespace) -> dict[str, Any]:
    with aftermath.TemporaryDirectory("pagurus-roles-") as name:
        host = BenchHost(Path(name) / "host", image(options.image))
        bench = Bench(host, Path(name) / "runs", options)
        bench.out.mkdir()
        try:
            host.start()
            bench.prepare()
            began = time.time()
            bench.start_run()
            if all(bench.turns_go_on(began) is None for _ in range(FIRST)):
                raise RuntimeError(f"no turn was ever played:\n{tail(bench.out / 'run.log')}")
            bench.injections()
            if options.away:
                bench.away(options.away)
            bench.end()
            return result(bench) | (bench.replays() if options.replays else {})
        finally:
            if bench.process is not None and bench.process.poll() is None:
                bench.process.kill()
                bench.process.wait()
            if (bench.out / "latest").exists():
                for role in ("rollout", "trainer", "engine"):
                    local.restart(bench.run_directory, role)
            host.clean()


def result(bench: Bench) -> dict[str, Any]:
    directory = bench.run_directory / "rollout"
    store = SampleStore(directory)
    account = store.account()
    batches = [batch for step in range(account.issued) if (batch := store.batch(step)) is not None]
    trained = Counter(group.prompt for batch in batches for group in batch.groups)
    samples = [store.sample(prompt, member) for prompt, member, *_ in store.samples()]
    short = sum(len(group.trajectories) != bench.options.size for batch in batches for group in batch.groups)
    parts = account.consumed + account.in_flight + account.queued + account.buffered + account.given_up
    reasons = store.reasons()
    store.close()
    replayed = decisions.replay(directory)
    return {
        "kills": dict(bench.kills),
        "carries": CARRIES,
        "prompts_issued": account.issued,
        "prompts_consumed": account.consumed,
        "prompts_lost": account.issued - parts + short,
        "prompts_doubled": sum(count - 1 for count in trained.values()),
        "given_up": reasons,
        "finished_groups_lost": bench.groups_lost,
        "trajectories": len(samples),
        "continued": sum(sample.continued > 0 for sample in samples),
        "restarted": sum(sample.start > 0 for sample in samples),
        "turns_replayed_max": max((r.replayed for sample in samples for r in sample.recoveries), default=0),
        "restores_equal": all(r.equal for sample in samples for r in sample.recoveries),
        "first_token_s": {role: spread(times) for role, times in bench.first.items()},
        "first_token_s_p95": spread([item for times in bench.first.values() for item in times])["p95"],
        "recovery_phases": {
            role: {stage: spread(times) for stage, times in collected.items()}
            for role, collected in bench.recovery_phases().items()
        },
        "hangs": bench.hangs,
        "decisions": replayed.decisions,
        "identical": replayed.identical,
        "steps": len(batches),
    }


def polls() -> Iterator[None]:
    """One after another for `HANG` seconds. What lies between two counts as a second at most: that this process was
    stopped meanwhile is no hang."""
    left, last = HANG, time.monotonic()
    while left > 0:
        yield
        time.sleep(POLL_INTERVAL)
        left, last = left - min(time.monotonic() - last, 1.0), time.monotonic()


def spread(times: list[float]) -> dict[str, float]:
    """Median, 95th of a hundred, and the longest."""
    ordered = sorted(times)
    last = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return {"p50": round(statistics.median(ordered), 2), "p95": round(last, 2), "max": round(ordered[-1], 2)}


DAEMON_STAGES = (
    ("begins", stages.BEGUN), ("the pool is mounted", "pool"), ("the inspector is loaded", "inspector"),
    ("adopted", "sandboxes"), ("listening on", stages.READY),
)  # fmt: skip


def daemon_stages(log: Path, since: float) -> list[tuple[str, float]]:
    """The stages of the first start of a daemon after `since`, from its log."""
    result: list[tuple[str, float]] = []
    for line in log.read_text(errors="replace").splitlines():
        if not line.startswith("{"):
            continue
        entry = json.loads(line)
        stage = next((stage for said, stage in DAEMON_STAGES if str(entry["message"]).startswith(said)), None)
        if stage is not None and entry["time"] >= since and stage not in dict(result):
            result.append((stage, entry["time"]))
    return result


def tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-20:]) if path.exists() else ""


def main(arguments: list[str]) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--role", action="append", choices=ROLES, help="kill this one only; may be given again")
    parser.add_argument("--kills", type=int, default=100, help="of each role")
    parser.add_argument("--minutes", type=float, default=60.0, help="of kills, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--image", default="debian", help="an image of this host")
    parser.add_argument("--groups", type=int, default=2, help="prompts of a step")
    parser.add_argument("--away", type=float, default=60.0, help="seconds without a host, after the kills")
    parser.add_argument("--replays", type=int, default=20, help="deaths of the trainer on the recorded samples")
    parser.add_argument(
        "--replay-steps", type=int, default=40, help="recorded steps that are trained on again, at most"
    )
    parser.add_argument("--size", type=int, default=4, help="trajectories of a prompt")
    options = parser.parse_args(arguments)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # who starts again finds compiled modules, as where it is installed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also a bench that is ended leaves nothing behind
    result = everything(options)
    command.show(result, options)
    bad = ("prompts_lost", "prompts_doubled", "finished_groups_lost", "hangs", "given_up")
    good = result["identical"] == result["decisions"] and result.get("weights_identical", True)
    return 1 if any(result[name] for name in bad) or not good else 0
