"""What a sandbox costs through the client of E2B, beside the same through our own.

::

    pagurus bench clients [--json] [--rounds N] [--version 2.63.0]

A program in the client's own environment (`make setup-clients`) makes sandboxes, runs ``true`` in one, and forks it,
over TCP with a token, as its users do; then our SDK does the same on the daemon's socket. Seconds are those of the
caller; the first of each kind is left out, as it loads what later ones have.

`e2b_create_ms_p50`, `e2b_run_ms_p50`, `e2b_fork8_ms_p50`: through the client of E2B. `own_*`: through our own. E2B's
sandboxes have a network, a user and a home, and ours here have none of these; `own_open_create_ms_p50` has the network.
E2B's client has a login shell run each command; `own_shell_ms_p50`: the same by our own, so `own_shell_ms_p50` less
`own_run_ms_p50` is the shell's part of `e2b_run_ms_p50`.
`targets`: of each of the three that have one, the most that it may be, what was measured, and whether it was met.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from bench.harness import aftermath, command
from bench.harness.own_daemon import IMAGE, BenchHost, image
from daemon.auth.access import e2b_spelling
from sandbox import Client, Network, PagurusError, Unsupported, paths
from sandbox.messages.tokens import NewToken, TokenRequest
from trainer.machine import processor

FORKS = 8
SHELL = ["/bin/bash", "-l", "-c", "true"]  # what E2B's client sends for "true"
PORTS = 10_000  # one of those from here on, which the kernel gives to no caller
TARGETS = {"e2b_create_ms_p50": 25.0, "e2b_run_ms_p50": 6.0, "e2b_fork8_ms_p50": 200.0}  # at most
PROGRAM = r"""
import json, sys, time
from e2b import Sandbox
rounds, template = int(sys.argv[1]), sys.argv[2]
found = {"create": [], "run": [], "fork8": []}
def timed(kind, act):
    began = time.perf_counter()
    made = act()
    found[kind].append(1000 * (time.perf_counter() - began))
    return made
for _ in range(rounds + 1):
    timed("create", lambda: Sandbox.create(template, timeout=300)).kill()
box = Sandbox.create(template, timeout=300)
for _ in range(10 * rounds + 1):
    timed("run", lambda: box.commands.run("true"))
if hasattr(box, "fork"):
    for _ in range(max(2, rounds // 4)):
        for child in timed("fork8", lambda: box.fork(count=8)):
            getattr(child, "sandbox", child).kill()
box.kill()
print(json.dumps(found))
"""


def middle(times: list[float]) -> float | None:
    """The median but for the first."""
    return round(statistics.median(times[1:]), 1) if len(times) > 1 else None


async def timed(times: list[float], work: Callable[[], Awaitable[Any]]) -> Any:
    began = time.perf_counter()
    made = await work()
    times.append(1000 * (time.perf_counter() - began))
    return made


async def through_ours(host: Client, rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"create": [], "open_create": [], "run": [], "shell": [], "fork8": []}
    for kind, network in (("create", Network.none()), ("open_create", Network.open())):
        for _ in range(rounds + 1):
            box = await timed(found[kind], lambda network=network: _made(host, network))  # type: ignore[misc]
            await box.remove()
    async with host.create(IMAGE) as box:
        for _ in range(10 * rounds + 1):
            await timed(found["run"], lambda: box.exec(["true"]))
            await timed(found["shell"], lambda: box.exec(SHELL))
        for _ in range(max(2, rounds // 4)):
            for child in await timed(found["fork8"], lambda: box.fork(FORKS)):
                await child.sandbox.remove()
    return found


async def _made(host: Client, network: Network) -> Any:
    return await host.create(IMAGE, network=network)


async def key(host: Client) -> str:
    made = await host.call("POST", "/v1/tokens", NewToken, TokenRequest(name="bench"))
    return e2b_spelling(made.text)


def through_e2b(python: Path, url: str, key: str, rounds: int, place: Path) -> dict[str, list[float]]:
    variables = {"PATH": os.environ["PATH"], "HOME": str(place)}
    program = [str(python), "-c", PROGRAM, str(rounds), IMAGE]
    ran = subprocess.run(
        program,
        env={**variables, "E2B_API_KEY": key, "E2B_API_URL": url, "E2B_SANDBOX_URL": url},
        cwd=place,
        capture_output=True,
        text=True,
    )
    if ran.returncode != 0:
        raise PagurusError(f"the client of E2B failed: {ran.stderr[-2000:]}")
    times: dict[str, list[float]] = json.loads(ran.stdout)
    return times


async def measure(bench: BenchHost, port: int, python: Path, rounds: int) -> dict[str, Any]:
    async with bench.client() as host:
        told = await key(host)
        theirs = await asyncio.to_thread(through_e2b, python, f"http://127.0.0.1:{port}", told, rounds, bench.directory)
        ours = await through_ours(host, rounds)
    figures: dict[str, Any] = {f"e2b_{kind}_ms_p50": middle(times) for kind, times in theirs.items()}
    figures |= {f"own_{kind}_ms_p50": middle(times) for kind, times in ours.items()}
    return figures


def judged(figures: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Each target beside what was measured. What was not measured is not met.

    >>> judged({"e2b_create_ms_p50": 20.0})["e2b_create_ms_p50"]
    {'at_most': 25.0, 'measured': 20.0, 'met': True}
    """
    return {
        name: {"at_most": limit, "measured": figures.get(name), "met": (figures.get(name) or math.inf) <= limit}
        for name, limit in TARGETS.items()
    }


def main(argv: list[str] | None = None) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--rounds", type=int, default=20, help="sandboxes made each way; ten times as many commands")
    parser.add_argument("--version", default="2.63.0", help="of the client of E2B, as `make setup-clients` has it")
    options = parser.parse_args(argv)
    python = paths.prefix() / f"clients/e2b-{options.version}/bin/python"
    if not python.exists():
        raise Unsupported(f"e2b {options.version} is not installed", hint="make setup-clients")
    figures: dict[str, Any] = {"cpu": processor(), "load": [round(os.getloadavg()[0], 1)], "rounds": options.rounds}
    with aftermath.TemporaryDirectory("pagurus-clients-", "/var/tmp") as folder:
        bench, port = BenchHost(Path(folder) / "host", image("debian")), PORTS + os.getpid() % PORTS
        try:
            bench.start("--listen", f"127.0.0.1:{port}", "--plain")
            figures |= asyncio.run(measure(bench, port, python, options.rounds))
        finally:
            bench.clean()
    figures["load"].append(round(os.getloadavg()[0], 1))
    figures["targets"] = judged(figures)
    command.show(figures, options)
    return 0
