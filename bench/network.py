"""What a network costs a sandbox: making it, changing it, names, packets; and among a thousand others.

::

    pagurus bench network [--json] [--rounds N]      the last line is one JSON object

The internet is a network namespace of this machine (:mod:`bench.harness.own_internet`), so the figures are those of the
path through the host (two veth pairs, the rules, NAT), not of any wire. `crowd` repeats the packet figures while the
table holds the rules of a thousand more sandboxes.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, cast

from bench.harness import aftermath, command, own_daemon
from bench.harness import own_internet as world
from daemon.catalogue import SandboxRow
from daemon.network.elements import ElementChange, addressed, generation, named, permitted
from daemon.network.networks import Networks
from daemon.network.policy import compile_policy
from daemon.network.probe import fresh_namespace
from sandbox import Client, Network, Sandbox
from sandbox.container.container import Container
from sandbox.criu.tcp import POOL
from sandbox.messages import SandboxState

NETWORK = Network.allow(names=["web.test", "*.wild.test"], cidrs=[f"{world.OTHER}:8080", f"{world.WEB}:7,9,80,udp/7"])
CROWD = 1000
NAMES_OF_ITEM = 20

#: In the sandbox: names per second, round trips by UDP, bytes per second by TCP.
PROBE = """
import json, socket, time
def clock(n, f):
    took = []
    for _ in range(n):
        t = time.perf_counter(); f(); took.append(time.perf_counter() - t)
    return sorted(took)[n // 2]
name = clock(60, lambda: socket.getaddrinfo("web.test", 80, socket.AF_INET, socket.SOCK_STREAM))
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect(("%(web)s", 7)); s.settimeout(5)
trip = clock(400, lambda: (s.send(b"x" * 100), s.recv(200)))
connect = clock(60, lambda: socket.create_connection(("%(web)s", 9)).close())
c = socket.create_connection(("%(web)s", 9)); data = bytes(1 << 20); t = time.perf_counter()
for _ in range(%(megabytes)d): c.sendall(data)
c.shutdown(socket.SHUT_WR); c.recv(1); took = time.perf_counter() - t
print(json.dumps({"name_ms_p50": 1e3 * name, "round_trip_us_p50": 1e6 * trip, "connect_us_p50": 1e6 * connect,
                  "throughput_mb_s": %(megabytes)d * 1.048576 / took}))
"""


async def clocked(rounds: int, work: Callable[[], Awaitable[Any]]) -> float:
    """Milliseconds, median."""
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        await work()
        took.append(1e3 * (time.perf_counter() - began))
    return round(statistics.median(took), 2)


class Bare:
    """A network namespace without a sandbox around it."""

    def __init__(self, netns: Path) -> None:
        self.netns = netns
        self.followers: dict[str, object] = {}
        self.address: str | None = None
        self.outside = self  # of which nobody asks more than what follows

    async def keep(self, name: str, fds: object) -> None:
        """Nobody outlives this."""

    async def retained(self, name: str) -> list[int]:
        return []


async def attaching(directory: Path, rounds: int) -> dict[str, float]:
    """The network alone: a link, its rules and its resolver, given to a namespace and taken away."""
    networks = Networks(directory)
    took: dict[str, list[float]] = {"attach": [], "detach": []}
    await networks.open([])
    for number in range(rounds + 1):
        with fresh_namespace() as namespace:
            row, bare = _row(f"bare-{number}"), cast(Container, Bare(namespace))
            for name, act in (("attach", networks.attach), ("detach", networks.detach)):
                began = time.perf_counter()
                await act(row, bare)
                took[name].append(time.perf_counter() - began)
    await networks.close()
    # The first one makes the table and loads pyroute2.
    return {f"{name}_ms_p50": round(1e3 * statistics.median(item[1:]), 2) for name, item in took.items()}


def _row(name: str) -> SandboxRow:
    empty = {"image": "", "created_at": 0.0, "uid_base": 0, "hostname": "", "tree": None, "head": "", "origin": ""}
    return SandboxRow(id=name, state=SandboxState.RUNNING, network=NETWORK, **empty)  # type: ignore[arg-type]


async def lives(host: Client, rounds: int) -> dict[str, float]:
    """Create and remove with and without a network, alternating so that both see the same load."""
    took: dict[str, list[float]] = {"create_none": [], "create": [], "remove_none": [], "remove": []}
    for _ in range(rounds):
        for suffix, network in (("_none", Network.none()), ("", NETWORK)):
            began = time.perf_counter()
            made = await host.create(own_daemon.IMAGE, network=network)
            took["create" + suffix].append(time.perf_counter() - began)
            began = time.perf_counter()
            await made.remove()
            took["remove" + suffix].append(time.perf_counter() - began)
    return {f"{name}_ms_p50": round(1e3 * statistics.median(item), 2) for name, item in took.items()}


async def changes(host: Client, rounds: int) -> dict[str, float]:
    other = Network.allow(cidrs=[world.WEB, world.OTHER])
    async with host.create(own_daemon.IMAGE, network=NETWORK) as sandbox:
        flip = [other, NETWORK]

        async def change() -> None:
            flip.reverse()
            await sandbox.network.set(flip[0])

        return {
            "set_ms_p50": await clocked(rounds, change),
            "status_ms_p50": await clocked(rounds, sandbox.network.status),
        }


async def packets(sandbox: Sandbox, megabytes: int) -> dict[str, float]:
    code = PROBE % {"web": world.WEB, "megabytes": megabytes}
    done = await sandbox.exec(["python3", "-c", code], timeout=300)
    if done.exit_code:
        raise RuntimeError(done.stderr.decode(errors="replace")[-500:])
    return {name: round(value, 2) for name, value in json.loads(done.stdout).items()}


def crowd(run: Path, *, add: bool) -> None:
    """The rules of a thousand sandboxes that are not there, in the daemon's own table. Blocks."""
    table = Networks(run).table
    table.ownable = False  # nor does the daemon own it
    policy = compile_policy(NETWORK)
    for number in range(CROWD):
        address = POOL[POOL.num_addresses - 2 - number]
        elements = [*addressed(address, f"{table.prefix}{number:x}x"), *permitted(address, policy)]
        elements += generation(address, 7)
        for step in range(NAMES_OF_ITEM):
            elements += named(address, IPv4Address(0x08080000 + step), (), 3600)
        table.apply([ElementChange(element, add=add) for element in elements])
    table.close()


async def run(daemon: own_daemon.BenchHost, rounds: int, megabytes: int) -> dict[str, object]:
    result: dict[str, object] = {"rounds": rounds, "megabytes": megabytes}
    async with daemon.client() as host:
        result |= await lives(host, rounds)
        result |= await changes(host, rounds)
        async with host.create(own_daemon.IMAGE, network=NETWORK) as sandbox:
            result |= await packets(sandbox, megabytes)
            await asyncio.to_thread(crowd, daemon.run, add=True)
            result["crowd"] = {"sandboxes": CROWD, **await packets(sandbox, megabytes)}
            await asyncio.to_thread(crowd, daemon.run, add=False)
    return result


def main(argv: list[str] | None = None) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--megabytes", type=int, default=512, help="to send by TCP")
    parser.add_argument("--image", type=Path)
    options = parser.parse_args(argv)
    if reason := world.missing():
        print(f"bench network: {reason}", file=sys.stderr)
        return 2
    directory = aftermath.directory("pagurus-network-")
    directory.chmod(stat.S_IRWXU)
    daemon = own_daemon.BenchHost(
        directory, options.image or own_daemon.image("debian"), module="bench.harness.shared_table"
    )
    with world.internet(directory) as internet:
        os.environ["PAGURUS_RESOLVERS"] = internet.resolvers
        try:
            result: dict[str, object] = dict(asyncio.run(attaching(directory, options.rounds)))
            daemon.start()
            result |= asyncio.run(run(daemon, options.rounds, options.megabytes))
        finally:
            daemon.clean()
    result["load"] = round(os.getloadavg()[0], 1)
    command.show(result, options)
    return 0
