"""Hosts that die, are cut off and are left: what becomes of the sandboxes on them?

::

    pagurus bench failover [--json] [--hosts N] [--sandboxes N] [--think S] [--memory MB] [--kills N] [--cuts N]
                           [--moves N] [--move memory|http] [--lease S] [--rate 1gbit] [--image NAME] [--seed N]
                           [--overhead TURNS] [--rounds N] [--last-loss S] [--logs DIR]

Hosts are daemons in network namespaces, each with a pool and control groups of its own, behind a link of `--rate`; a
coordinator copies the state of their sandboxes. Every sandbox is made with `replicated_answers` and works without end,
as :mod:`tests.crash.at_work` says: a model that thinks for `--think` seconds in the median, a process with `--memory`
MB that do not compress. At random instants a host is killed as a whole (`--kills`) or its link goes down (`--cuts`); it
comes back later. After `--last-loss` seconds no further host is lost. What happens is told on stderr as it does.

`trajectories_lost`: sandboxes that did not go on. `recovered_equal`: whether every answer told exactly the numbers that
were told before, and its own, once. `recovery_s_*`: of each sandbox of a host that was lost, from the end of the lease,
as that host itself had it, until it runs elsewhere, and if it was asked for something meanwhile, until that is
answered: to whoever asks later it looks as ever (`runs_s_*`: until it runs; `waited`: of how many an answer was waited
for). `double_actors`: how often processes of one sandbox were seen running on two hosts, looked at every 10 ms
(`doubles`: when, and how; one that is being killed does not run).
`answer_ms_*`: of a turn when nothing is lost. `moves_pause_ms`: of `pagurus migrate`, of a process with `--move-mb` of
memory that does not compress, or of an HTTP service with SQLite and a client; `moves_wrong`: what did not go on in it.
`replicated_bytes`: of copies from the end of the calm time (`--calm`) on, as a part of as many whole ones;
`replicated_bytes_all`: with those before, of which each sandbox's first to each of two hosts is whole.
`replication_overhead`: the median turn of sandboxes whose answers do not wait for copies, while copies are made, to one
where none are made; of `--overhead` turns of each sandbox with and without, twice in turn, `--rounds` times. Medians of
clusters of one kind differ by some percent, so few of them tell little.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness import command
from bench.harness.own_daemon import IMAGE, image
from daemon.host import fence
from sandbox import Client
from sandbox.messages.cluster import HostInfo, PlaceInfo
from tests.crash import moved
from tests.crash.at_work import THINK, Player
from tests.crash.many_hosts import Hosts, NetHost
from tests.crash.whole_host import lose
from trainer.machine import processor

WARM_UP = 5  # turns
BEGAN = time.monotonic()
TIMEOUT = 120.0  # seconds for which a sandbox or a host is waited for
POLL_INTERVAL = 0.01  # seconds between two looks for double actors


class Watch:
    """Looks for sandboxes that act on two hosts."""

    def __init__(self, hosts: list[NetHost], players: list[Player]) -> None:
        self._hosts, self._players = hosts, players
        self.doubles: list[str] = []
        self.polls = 0

    async def run(self) -> None:
        while True:
            await asyncio.to_thread(self._poll)
            await asyncio.sleep(POLL_INTERVAL)

    def _poll(self) -> None:
        self.polls += 1
        observed = Counter(name for host in self._hosts for name in host.groups())
        for player in self._players:
            if observed[player.sandbox.id] < 2 or sum(host.moves(player.sandbox.id) for host in self._hosts) < 2:
                continue
            acting = [host for host in self._hosts if host.acts(player.sandbox.id)]
            # Looks take time: who is seen before and after another one was seen did act at the same time.
            if len(acting) > 1 and sum(host.acts(player.sandbox.id) for host in acting) > 1:
                reported = [f"{host.name} ({host.switch(player.sandbox.id)})" for host in acting]
                self.doubles.append(f"{player.sandbox.id} at {time.monotonic() - BEGAN:.2f} s on {', '.join(reported)}")


@dataclass
class Recovery:
    """Of one sandbox, in seconds after the end of its host's lease."""

    runs: float
    answers: float | None  # None: nobody waited for an answer

    @property
    def complete(self) -> float:
        return self.runs if self.answers is None else max(self.runs, self.answers)


async def places(client: Client) -> dict[str, str]:
    return {item.sandbox: item.host for item in await client.call("GET", "/v1/cluster/places", list[PlaceInfo])}


async def inject(client: Client, players: list[Player], host: NetHost, kind: str) -> list[Recovery]:
    """Lose a host; what became of each of its sandboxes. It comes back."""
    there = await places(client)
    hit = [player for player in players if there.get(player.sandbox.id) == host.name and not player.lost]
    if kind == "kill":
        await asyncio.to_thread(lose, host)
    else:
        await asyncio.to_thread(host.cut, True)
    over = time.monotonic() + (fence.read(host.run) or 0.0) - fence.clock()
    recovered = await _recoveries(client, hit, host.name, over)
    if kind == "kill":
        await asyncio.to_thread(host.serve)
    else:
        await asyncio.to_thread(host.cut, False)
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        infos = await client.call("GET", "/v1/cluster/hosts", list[HostInfo])
        if all(info.state == "alive" for info in infos):
            break
        await asyncio.sleep(0.2)
    return recovered


async def _recoveries(client: Client, hit: list[Player], lost: str, over: float) -> list[Recovery]:
    """Of those that came back in time. `over`: when the lease ends."""
    runs: dict[str, tuple[float, bool]] = {}  # since when it does, and whether an answer is waited for
    result: dict[str, Recovery] = {}
    while time.monotonic() < over + TIMEOUT and any(p.sandbox.id not in result and not p.lost for p in hit):
        there, now = await places(client), time.monotonic()
        for player in hit:
            id = player.sandbox.id
            if there.get(id, lost) != lost:
                since, requested = runs.setdefault(id, (now, player.waits))
                if not requested or player.answered_at >= since:
                    answers = max(0.0, player.answered_at - over) if requested else None
                    result.setdefault(id, Recovery(max(0.0, since - over), answers))
        await asyncio.sleep(0.05)
    return list(result.values())


async def counters(client: Client) -> dict[str, float]:
    """What the coordinator itself counts."""
    text = (await client.raw("GET", "/metrics", None, "")).decode()
    lines = [line.split() for line in text.splitlines() if line.startswith("pagurus_cluster_")]
    return {line[0].removeprefix("pagurus_cluster_").removesuffix("_total"): float(line[1]) for line in lines}


async def _turns(options: argparse.Namespace, tree: Path, words: list[str]) -> list[float]:
    """Seconds of turns at a cluster of its own, but for the first ones of each sandbox, whose first copy is whole."""
    with tempfile.TemporaryDirectory(prefix="pagurus-bench-") as directory:
        made = Hosts(Path(directory), tree, 2, rate=options.rate, options=words)
        async with made as hosts, hosts.client() as client:

            async def play(number: int) -> list[float]:
                player = Player(await client.create(IMAGE), options.think)
                await player.start(options.memory)
                stop, limit = asyncio.Event(), options.overhead + WARM_UP
                playing = asyncio.create_task(player.play(stop, random.Random(number)))
                while player.turns < limit and not playing.done():  # noqa: ASYNC110 - counts what another task does
                    await asyncio.sleep(0.05)
                stop.set()
                await playing
                return player.durations[WARM_UP:limit]

            played = await asyncio.gather(*(play(number) for number in range(max(1, options.sandboxes))))
            return [duration for durations in played for duration in durations]


async def overhead(options: argparse.Namespace, tree: Path) -> float:
    durations: dict[bool, list[float]] = {False: [], True: []}
    for copied in (False, True, True, False) * options.rounds:
        words = ["--replicate", "--lease", str(options.lease)] if copied else []
        durations[copied] += await _turns(options, tree, words)
    return statistics.median(durations[True]) / statistics.median(durations[False])


async def run(options: argparse.Namespace) -> dict[str, Any]:
    chance = random.Random(options.seed)
    words = ["--replicate", "--lease", str(options.lease)]
    with tempfile.TemporaryDirectory(prefix="pagurus-bench-") as directory:
        tree = image(options.image)
        made = Hosts(Path(directory), tree, options.hosts, rate=options.rate, options=words)
        async with made as hosts, hosts.client() as client:
            try:
                result = await _measured(options, hosts, client, chance)
            finally:
                keep_logs(hosts, options.logs)
    if options.overhead:
        result["replication_overhead"] = round(await overhead(options, tree), 4)
    return result


async def _measured(options: argparse.Namespace, hosts: Hosts, client: Client, chance: random.Random) -> dict[str, Any]:
    while not all((host.run / "lease").exists() for host in hosts.hosts):  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.1)
    players = []
    for _ in range(options.sandboxes):
        players.append(Player(await client.create(IMAGE, replicated_answers=True), options.think))
        await players[-1].start(options.memory)
    stop = asyncio.Event()
    playing = [asyncio.create_task(player.play(stop, random.Random(chance.random()))) for player in players]
    watch = Watch(hosts.hosts, players)
    watching = asyncio.create_task(watch.run())
    await asyncio.sleep(options.calm)
    first = await counters(client)
    calm = [duration for player in players for duration in player.durations]
    recovered: list[Recovery] = []
    injected: list[str] = []
    injections = ["kill"] * options.kills + ["cut"] * options.cuts
    chance.shuffle(injections)
    for kind in injections:
        if options.last_loss and time.monotonic() - BEGAN > options.last_loss:
            break
        await asyncio.sleep(chance.uniform(1, 4))
        host = chance.choice(hosts.hosts)
        injected.append(f"{kind} of {host.name} at {time.monotonic() - BEGAN:.2f} s")
        came = await inject(client, players, host, kind)
        recovered += came
        slowest = max((item.complete for item in came), default=0.0)
        lost = sum(bool(player.lost or player.wrong) for player in players)
        reported = (
            f"{len(injected)}: {injected[-1]}: {len(came)} back, the last after {slowest:.2f} s; {lost} lost or wrong"
        )
        print(reported, file=sys.stderr, flush=True)
    stop.set()
    await asyncio.gather(*playing)
    watching.cancel()
    counted = await counters(client)
    moves, wrong = await moved.move(client, options.move, options.moves, options.move_mb) if options.moves else ([], [])
    return {
        "hosts": options.hosts,
        "sandboxes": options.sandboxes,
        "think_s": options.think,
        "memory_mb": options.memory,
        "kills": sum(item.startswith("kill") for item in injected),
        "cuts": sum(item.startswith("cut") for item in injected),
        "turns": sum(player.turns for player in players),
        "trajectories_lost": sum(bool(player.lost) for player in players),
        "recovered_equal": not any(player.wrong for player in players),
        "wrong": [f"{p.sandbox.id}: {item}" for p in players for item in [*p.wrong[:3], *filter(None, [p.lost])]][:20],
        "recoveries": len(recovered),
        "waited": sum(item.answers is not None for item in recovered),
        **_quantiles("recovery_s", [item.complete for item in recovered]),
        **_quantiles("runs_s", [item.runs for item in recovered]),
        "double_actors": len(watch.doubles),
        "doubles": watch.doubles[:20],
        "strikes": injected,
        "looks": watch.polls,
        **_quantiles("answer_ms", [1000 * item for item in calm]),
        "copies": int(counted["copies"]),
        "replicated_bytes": _part({name: counted[name] - first[name] for name in counted}),
        "replicated_bytes_all": _part(counted),
        "move": options.move,
        "move_mb": options.move_mb,
        "moves_wrong": wrong,
        "moves_pause_ms": [round(item.pause_ms, 1) for item in moves],
        "moves_pause_ms_p50": round(statistics.median([item.pause_ms for item in moves] or [0.0]), 1),
        "moves_parts_ms": [{name: round(ms, 1) for name, ms in item.parts_ms.items()} for item in moves],
        "moves_copied_bytes": [item.copied_bytes for item in moves],
        "lease_s": options.lease,
        "rate": options.rate,
        "processor": processor(),
        "load": os.getloadavg()[0],
    }


def _part(counted: dict[str, float]) -> float:
    """What travelled, of what had travelled if each copy were whole."""
    return round(counted["copied_bytes"] / max(1.0, counted["total_bytes"]), 4)


def _quantiles(name: str, values: list[float]) -> dict[str, float]:
    ordered = sorted(values) or [0.0]
    return {
        f"{name}_p{part}": round(ordered[min(len(ordered) - 1, part * len(ordered) // 100)], 2) for part in (50, 95)
    }


def keep_logs(hosts: Hosts, into: Path | None) -> None:
    if into is not None:
        into.mkdir(parents=True, exist_ok=True)
        shutil.copy(hosts.directory / "coordinator.log", into)
        for host in hosts.hosts:
            shutil.copy(host.log, into / f"{host.name}.log")


def main(arguments: list[str] | None = None) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--sandboxes", type=int, default=8)
    parser.add_argument("--think", type=float, default=THINK, help="seconds that a model thinks, the median")
    parser.add_argument("--memory", type=int, default=16, metavar="MB", help="of each sandbox, that does not compress")
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--cuts", type=int, default=2)
    parser.add_argument("--moves", type=int, default=4)
    parser.add_argument("--move", choices=("memory", "http"), default="memory", help="what works in what moves")
    parser.add_argument("--move-mb", type=int, default=16)
    parser.add_argument("--calm", type=float, default=5.0, help="seconds before the first host is lost")
    parser.add_argument("--lease", type=float, default=5.0)
    parser.add_argument("--overhead", type=int, default=0, metavar="TURNS", help="also measure what copies cost turns")
    parser.add_argument("--rounds", type=int, default=1, help="of that, each with four clusters")
    parser.add_argument("--last-loss", type=float, default=0.0, metavar="S", help="after that no further host is lost")
    parser.add_argument("--logs", type=Path, help="keep the logs of coordinator and hosts there")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--image", default="debian")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    result = asyncio.run(run(options))
    command.show(result, options)
    return 0
