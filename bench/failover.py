"""Hosts that die, are cut off and are left: what becomes of the sandboxes on them?

::

    pagurus bench failover [--json] [--hosts N] [--sandboxes N] [--kills N] [--cuts N] [--moves N] [--lease S]
                           [--rate 1gbit] [--image NAME] [--seed N] [--overhead TURNS]

Hosts are daemons in network namespaces, each with a pool and control groups of its own, behind a link of `--rate`; a
coordinator copies the state of their sandboxes. Every sandbox is made with `replicated_answers` and works without end:
each turn appends a number to a file and to the memory of a process that lives since the start, and is answered with
both. At random instants a host is killed as a whole (`--kills`) or its link goes down (`--cuts`); it comes back later.

`trajectories_lost`: sandboxes that did not go on. `recovered_equal`: whether every answer told exactly the numbers that
were told before, and its own, once. `recovery_s_*`: from the end of the lease (the kill or cut, and `--lease` seconds)
to the next answer of each sandbox that was on the host. `double_actors`: how often processes of one sandbox were seen
running on two hosts, looked at every 10 ms (`doubles`: when, and how; one that is being killed does not run).
`answer_ms_*`: of a turn when nothing is lost. `moves_pause_ms`: of `pagurus migrate`, with `--move-mb` of memory that
does not compress. `replicated_bytes`: of copies while the sandboxes worked, as a part of as many whole ones.
`replication_overhead`: the median turn of sandboxes whose answers do not wait for copies, while copies are made, to one
where none are made; of `--overhead` turns of each sandbox with and without, twice in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness import command
from bench.harness.many_hosts import Hosts, NetHost
from bench.harness.own_daemon import IMAGE, image
from bench.harness.whole_host import lose
from sandbox import Client, Sandbox
from sandbox.errors import PagurusError
from sandbox.messages.cluster import HostInfo, Moved, MoveRequest, PlaceInfo
from trainer.machine import processor

WARM_UP = 5  # turns
BEGAN = time.monotonic()
LOOK = 0.01  # seconds between two looks for double actors
PAUSE = (0.2, 1.0)  # seconds in which a model would think
# Keeps what it is told in memory, and tells all of it.
KEEPER = r"""mkfifo /in /out; setsid sh -c 'all=; while read -r n < /in; do all="$all $n"; echo $all > /out; done' \
  > /dev/null 2>&1 < /dev/null & sleep 0.2"""
TURN = "echo {n} >> /log; echo {n} > /in; cat /out; tr '\\n' ' ' < /log"
HOLDER = """perl -e 'open F, "/dev/urandom"; read F, $x, {bytes}; $| = 1; while (1) {{ sleep 1000 }}' > /dev/null 2>&1 &
  while ! grep -q perl /proc/[0-9]*/comm; do :; done; sleep 1"""


@dataclass
class Player:
    """One sandbox at work."""

    sandbox: Sandbox
    turns: int = 0
    wrong: list[str] = field(default_factory=list)
    answered_at: float = 0.0
    durations: list[float] = field(default_factory=list)
    lost: str = ""

    async def play(self, stop: asyncio.Event, chance: random.Random) -> None:
        while not stop.is_set():
            began = time.monotonic()
            try:
                result = await self.sandbox.exec(TURN.format(n=self.turns))
            except PagurusError as error:
                self.lost = str(error)
                return
            lines = result.text.splitlines()
            expected = [str(number) for number in range(self.turns + 1)]
            if [line.split() for line in lines] != [expected, expected]:
                self.wrong.append(f"turn {self.turns}: {result.text[:200]!r} {result.stderr[:200]!r}")
            self.turns += 1
            self.answered_at = time.monotonic()
            self.durations.append(self.answered_at - began)
            await asyncio.sleep(chance.uniform(*PAUSE))


class Watch:
    """Looks for sandboxes that act on two hosts."""

    def __init__(self, hosts: list[NetHost], players: list[Player]) -> None:
        self._hosts, self._players = hosts, players
        self.doubles: list[str] = []
        self.looks = 0

    async def run(self) -> None:
        while True:
            await asyncio.to_thread(self._look)
            await asyncio.sleep(LOOK)

    def _look(self) -> None:
        self.looks += 1
        for player in self._players:
            acting = [host for host in self._hosts if host.acts(player.sandbox.id)]
            # Looks take time: who is seen before and after another one was seen did act at the same time.
            if len(acting) > 1 and sum(host.acts(player.sandbox.id) for host in acting) > 1:
                told = [f"{host.name} ({host.switch(player.sandbox.id)})" for host in acting]
                self.doubles.append(f"{player.sandbox.id} at {time.monotonic() - BEGAN:.2f} s on {', '.join(told)}")


async def places(client: Client) -> dict[str, str]:
    return {each.sandbox: each.host for each in await client.call("GET", "/v1/cluster/places", list[PlaceInfo])}


async def strike(client: Client, players: list[Player], host: NetHost, kind: str, lease: float) -> list[float]:
    """Lose a host; seconds after the end of its lease to the next answer of each of its sandboxes. It comes back."""
    there = await places(client)
    hit = [player for player in players if there.get(player.sandbox.id) == host.name and not player.lost]
    at = time.monotonic()
    if kind == "kill":
        await asyncio.to_thread(lose, host)
    else:
        await asyncio.to_thread(host.cut, True)
    deadline = at + lease + 120
    struck = time.monotonic()
    while any(p.answered_at < struck and not p.lost for p in hit) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    recovered = [max(0.0, player.answered_at - at - lease) for player in hit if player.answered_at >= struck]
    if kind == "kill":
        await asyncio.to_thread(host.serve)
    else:
        await asyncio.to_thread(host.cut, False)
    while time.monotonic() < deadline:
        infos = await client.call("GET", "/v1/cluster/hosts", list[HostInfo])
        if all(info.state == "alive" for info in infos):
            break
        await asyncio.sleep(0.2)
    return recovered


async def move(client: Client, count: int, megabytes: int) -> list[Moved]:
    """Let a sandbox with that much memory go on elsewhere, `count` times."""
    sandbox = await client.create(IMAGE)
    await sandbox.exec(HOLDER.format(bytes=megabytes << 20), timeout=120)
    moves = []
    for _ in range(count):
        here = (await places(client))[sandbox.id]
        infos = await client.call("GET", "/v1/cluster/hosts", list[HostInfo])
        target = next(info.name for info in infos if info.name != here)
        moves.append(
            await client.call("POST", "/v1/cluster/moves", Moved, MoveRequest(sandbox=sandbox.id, host=target))
        )
    await sandbox.remove()
    return moves


async def counters(client: Client) -> dict[str, float]:
    """What the coordinator itself counts."""
    text = (await client.raw("GET", "/metrics", None, "")).decode()
    lines = [line.split() for line in text.splitlines() if line.startswith("pagurus_cluster_")]
    return {line[0].removeprefix("pagurus_cluster_").removesuffix("_total"): float(line[1]) for line in lines}


async def _turns(options: argparse.Namespace, tree: Path, words: list[str]) -> list[float]:
    """Seconds of turns at a cluster of its own, but for the first ones of each sandbox, whose first copy is whole."""
    with tempfile.TemporaryDirectory(prefix="pagurus-bench-") as folder:
        made = Hosts(Path(folder), tree, 2, rate=options.rate, options=words)
        async with made as hosts, hosts.client() as client:

            async def play(number: int) -> list[float]:
                player = Player(await client.create(IMAGE))
                await player.sandbox.exec(KEEPER)
                stop, most = asyncio.Event(), options.overhead + WARM_UP
                playing = asyncio.create_task(player.play(stop, random.Random(number)))
                while player.turns < most and not playing.done():  # noqa: ASYNC110 - counts what another task does
                    await asyncio.sleep(0.05)
                stop.set()
                await playing
                return player.durations[WARM_UP:most]

            played = await asyncio.gather(*(play(number) for number in range(max(1, options.sandboxes))))
            return [duration for durations in played for duration in durations]


async def overhead(options: argparse.Namespace, tree: Path) -> float:
    durations: dict[bool, list[float]] = {False: [], True: []}
    for copied in (False, True, True, False):
        words = ["--replicate", "--lease", str(options.lease)] if copied else []
        durations[copied] += await _turns(options, tree, words)
    return statistics.median(durations[True]) / statistics.median(durations[False])


async def run(options: argparse.Namespace) -> dict[str, Any]:
    chance = random.Random(options.seed)
    words = ["--replicate", "--lease", str(options.lease)]
    with tempfile.TemporaryDirectory(prefix="pagurus-bench-") as folder:
        tree = image(options.image)
        made = Hosts(Path(folder), tree, options.hosts, rate=options.rate, options=words)
        async with made as hosts, hosts.client() as client:
            found = await _measured(options, hosts, client, chance)
    if options.overhead:
        found["replication_overhead"] = round(await overhead(options, tree), 4)
    return found


async def _measured(options: argparse.Namespace, hosts: Hosts, client: Client, chance: random.Random) -> dict[str, Any]:
    while not all((host.run / "lease").exists() for host in hosts.hosts):  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.1)
    players = []
    for _ in range(options.sandboxes):
        sandbox = await client.create(IMAGE, replicated_answers=True)
        await sandbox.exec(KEEPER)
        players.append(Player(sandbox))
    stop = asyncio.Event()
    playing = [asyncio.create_task(player.play(stop, random.Random(chance.random()))) for player in players]
    watch = Watch(hosts.hosts, players)
    watching = asyncio.create_task(watch.run())
    await asyncio.sleep(options.calm)
    calm = [duration for player in players for duration in player.durations]
    recovered: list[float] = []
    struck: list[str] = []
    strikes = ["kill"] * options.kills + ["cut"] * options.cuts
    chance.shuffle(strikes)
    for kind in strikes:
        await asyncio.sleep(chance.uniform(1, 4))
        host = chance.choice(hosts.hosts)
        struck.append(f"{kind} of {host.name} at {time.monotonic() - BEGAN:.2f} s")
        recovered += await strike(client, players, host, kind, options.lease)
    stop.set()
    await asyncio.gather(*playing)
    watching.cancel()
    counted = await counters(client)
    moves = await move(client, options.moves, options.move_mb) if options.moves else []
    return {
        "hosts": options.hosts,
        "sandboxes": options.sandboxes,
        "kills": options.kills,
        "cuts": options.cuts,
        "turns": sum(player.turns for player in players),
        "trajectories_lost": sum(bool(player.lost) for player in players),
        "recovered_equal": not any(player.wrong for player in players),
        "wrong": [line for player in players for line in player.wrong][:10] + [p.lost for p in players if p.lost][:10],
        "recoveries": len(recovered),
        "recovery_s_p50": round(_at(recovered, 0.5), 2),
        "recovery_s_p95": round(_at(recovered, 0.95), 2),
        "double_actors": len(watch.doubles),
        "doubles": watch.doubles[:20],
        "strikes": struck,
        "looks": watch.looks,
        "answer_ms_p50": round(1000 * _at(calm, 0.5), 1),
        "answer_ms_p95": round(1000 * _at(calm, 0.95), 1),
        "copies": int(counted["copies"]),
        "replicated_bytes": round(counted["copied_bytes"] / max(1.0, counted["whole_bytes"]), 4),
        "move_mb": options.move_mb,
        "moves_pause_ms": [round(each.pause_ms, 1) for each in moves],
        "moves_pause_ms_p50": round(statistics.median([each.pause_ms for each in moves] or [0.0]), 1),
        "moves_parts_ms": [{name: round(ms, 1) for name, ms in each.parts_ms.items()} for each in moves],
        "moves_copied_bytes": [each.copied_bytes for each in moves],
        "lease_s": options.lease,
        "rate": options.rate,
        "processor": processor(),
        "load": os.getloadavg()[0],
    }


def _at(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else 0.0


def main(arguments: list[str] | None = None) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--sandboxes", type=int, default=8)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--cuts", type=int, default=2)
    parser.add_argument("--moves", type=int, default=4)
    parser.add_argument("--move-mb", type=int, default=16)
    parser.add_argument("--calm", type=float, default=5.0, help="seconds before the first host is lost")
    parser.add_argument("--lease", type=float, default=5.0)
    parser.add_argument("--overhead", type=int, default=0, metavar="TURNS", help="also measure what copies cost turns")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--image", default="debian")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    found = asyncio.run(run(options))
    command.show(found, options)
    return 0
