"""The daemon as a whole: how fast, how large, how hard to kill.

::

    pagurus bench daemon [--json] [--parts exec,idle,kills] [--sandboxes N] [--kills N] [--seconds S] [--image NAME]

`exec`: commands per second over 16 sandboxes (`exec_per_s`: the program ``true``; `shell_per_s`: ``sh -c true``), and
what a command costs beyond the mechanism: the SDK against the daemon, interleaved call by call with the same
mechanism (shim, pipes, exit code) driven directly, in a sandbox alike, at the daemon's own priority
(`exec_overhead_ms_p50`: the difference of the medians).

`idle`: starts N sandboxes, has each run a command, looks at what they take while nothing happens, restarts the
daemon over them, stops them. `idle_memory_gb` is the larger of two figures: the fall of MemAvailable, which sees
everything but also what others on the machine do, and the sum of PSS of daemon, shims and sandboxes plus the growth
of kernel memory (slab, page tables, stacks, per-cpu).

`kills`: kill -9 of the daemon, N times, under load from 16 sandboxes (see :mod:`bench.harness.kills`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from bench.harness import aftermath, command, kills
from bench.harness.own_daemon import IMAGE, BenchHost, Census, image, meminfo, pss, shims, tasks, ticks
from daemon.precedence import PRECEDENCE
from sandbox import Client, Limits, Sandbox
from sandbox.container.container import Container, ContainerSpec
from sandbox.container.shim import short_slice
from sandbox.errors import PagurusError
from sandbox.tree import btrfs
from sandbox.tree.pool import BtrfsPool

CROWD = 16  # sandboxes under load
MAKERS = 4  # creations at once
PAIRS = 400  # of interleaved calls
KERNEL = ("SUnreclaim", "PageTables", "KernelStack", "Percpu")  # lines of /proc/meminfo
TRUE = ["/bin/true"]


# --------------------------------------------------------------------------- exec


async def exec_part(host: BenchHost, options: argparse.Namespace) -> dict[str, Any]:
    async with host.client() as client:
        crowd = [await client.create(IMAGE) for _ in range(CROWD)]
        try:
            result: dict[str, Any] = {
                "exec_per_s": await _rate(crowd, TRUE, options.seconds),
                "shell_per_s": await _rate(crowd, "true", options.seconds),
            }
            result |= await _overhead(host, crowd[0])
        finally:
            for sandbox in crowd:
                await sandbox.remove()
    return result


async def _rate(crowd: list[Sandbox], command: str | list[str], seconds: float) -> float:
    end, done = time.monotonic() + seconds, 0

    async def work(sandbox: Sandbox) -> None:
        nonlocal done
        while time.monotonic() < end:
            result = await sandbox.exec(command)
            if result.exit_code:
                raise RuntimeError(f"{command} ended with {result.exit_code}")
            done += 1

    began = time.monotonic()
    await asyncio.gather(*map(work, crowd))
    return round(done / (time.monotonic() - began), 1)


async def _overhead(host: BenchHost, sandbox: Sandbox) -> dict[str, Any]:
    """Medians of the two ways, call by call in turn."""
    ways: dict[str, list[float]] = {"daemon": [], "mechanism": [], "no_turn": []}
    async with _alone(host) as container:

        async def timed(way: str, call: Callable[[], Awaitable[Any]]) -> None:
            began = time.perf_counter()
            await call()
            ways[way].append(1000 * (time.perf_counter() - began))

        short_slice()  # as the daemon does
        for _ in range(PAIRS):
            await timed("daemon", lambda: sandbox.exec(TRUE))
            with _precedence():
                await timed("mechanism", lambda: container.exec(TRUE))
            await timed("no_turn", lambda: sandbox.exec(TRUE, ends_turn=False))
    medians = {way: statistics.median(times) for way, times in ways.items()}
    return {
        "exec_overhead_ms_p50": round(medians["daemon"] - medians["mechanism"], 3),
        "exec_ms_p50": round(medians["daemon"], 3),
        "mechanism_ms_p50": round(medians["mechanism"], 3),
        "overhead_without_turn_ms_p50": round(medians["no_turn"] - medians["mechanism"], 3),
    }


@contextlib.contextmanager
def _precedence() -> Any:
    """The priority that the daemon's loop has."""
    os.setpriority(os.PRIO_PROCESS, 0, PRECEDENCE)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, 0)


@contextlib.asynccontextmanager
async def _alone(host: BenchHost) -> AsyncIterator[Container]:
    """A sandbox without a daemon, in the same pool."""
    pool, name = BtrfsPool(host.state), f"alone-{os.getpid()}"
    tree = pool.sandboxes / name
    await asyncio.to_thread(pool.create_tree, tree)
    spec = ContainerSpec(
        id=name,
        image=(host.state / "images" / IMAGE).resolve(),
        tree=tree,
        uid_base=30_000_000,
        hostname="alone",
        limits=Limits(),
        run_dir=host.directory / name,
    )
    container = await Container.create(spec)
    try:
        yield container
    finally:
        await container.destroy()
        await asyncio.to_thread(btrfs.delete_subvolume, tree)


# --------------------------------------------------------------------------- idle


async def idle_part(host: BenchHost, options: argparse.Namespace) -> dict[str, Any]:
    available, kernel = meminfo("MemAvailable"), meminfo(*KERNEL)
    began = time.monotonic()
    async with host.client() as client:
        made, failed = await _several([lambda: client.create(IMAGE)] * options.sandboxes)
        result: dict[str, Any] = {
            "idle_asked": options.sandboxes,
            "idle_start_s": round(time.monotonic() - began, 2),
            "idle_failures": failed[:3],
        }
        try:
            began = time.monotonic()
            answers, _ = await _several([_answers(sandbox) for sandbox in made])
            result["idle_sandboxes"] = sum(answers)
            result["idle_first_command_s"] = round(time.monotonic() - began, 2)
            await asyncio.sleep(3)  # collections and deferred work of the kernel
            result |= await asyncio.to_thread(_sizes, host, [item.id for item in made], available, kernel)
            await asyncio.to_thread(host.stop)
            result["idle_restart_s"] = round(await asyncio.to_thread(host.start), 2)
            answers, _ = await _several([_answers(sandbox) for sandbox in made])
            result["idle_after_restart"] = sum(answers)
        finally:
            began = time.monotonic()
            _, failed = await _several([sandbox.remove for sandbox in made])
            result["idle_stop_s"] = round(time.monotonic() - began, 2)
            result["idle_failures"] += failed[:3]
    return result


def _answers(sandbox: Sandbox) -> Callable[[], Awaitable[bool]]:
    async def request() -> bool:
        return (await sandbox.exec(["/bin/echo", sandbox.id])).text.strip() == sandbox.id

    return request


def _sizes(host: BenchHost, sandboxes: list[str], available: int, kernel: int) -> dict[str, Any]:
    assert host.process is not None
    pid, used = host.process.pid, ticks(host.process.pid)
    time.sleep(5)
    fell = available - meminfo("MemAvailable")
    parts = {
        "daemon": pss([pid]),
        "shims": pss(shims(host.run)),
        "inits": pss(tasks(sandboxes)),
        "kernel": meminfo(*KERNEL) - kernel,
    }
    return {
        "idle_memory_gb": round(max(fell, sum(parts.values())) / 1e9, 3),
        "idle_memory_by": "MemAvailable" if fell >= sum(parts.values()) else "PSS and kernel",
        "idle_memory_parts_gb": {
            "MemAvailable": round(fell / 1e9, 3),
            **{name: round(size / 1e9, 3) for name, size in parts.items()},
        },
        "idle_daemon_cpu": round((ticks(pid) - used) / 5, 3),  # cores
        "idle_daemon_fds": len(os.listdir(f"/proc/{pid}/fd")),
    }


async def _several(calls: list[Callable[[], Awaitable[Any]]]) -> tuple[list[Any], list[str]]:
    """All of them, MAKERS at once: what succeeded, and why the others failed."""
    gate, done, failed = asyncio.Semaphore(MAKERS), [], []

    async def one(call: Callable[[], Awaitable[Any]]) -> None:
        async with gate:
            try:
                done.append(await call())
            except PagurusError as error:
                failed.append(str(error))

    await asyncio.gather(*map(one, calls))
    return done, failed


# --------------------------------------------------------------------------- all


async def everything(options: argparse.Namespace, host: BenchHost) -> dict[str, Any]:
    parts: dict[str, Callable[[BenchHost, argparse.Namespace], Awaitable[dict[str, Any]]]] = {
        "exec": exec_part,
        "idle": idle_part,
        "kills": kills.kills_part,
    }
    result: dict[str, Any] = {"load": round(os.getloadavg()[0], 1), "cores": os.cpu_count()}
    await asyncio.to_thread(host.start)
    census = Census(host)
    for name in options.parts.split(","):
        print(f"{name} ...", file=sys.stderr, flush=True)
        result |= await parts[name](host, options)
    await _until_collected(host)
    await asyncio.to_thread(host.stop)
    left = await asyncio.to_thread(census.leaks)
    result["leaks"], result["leaked"] = len(left), left[:20]
    result["complaints"] = (await asyncio.to_thread(host.complaints))[-5:]
    return result


async def _until_collected(host: BenchHost) -> None:
    """Removals are finished in the background."""
    async with host.client() as client:
        for _ in range(100):
            if not await _left(client, host):
                return
            await asyncio.sleep(0.1)


async def _left(client: Client, host: BenchHost) -> bool:
    checkpoints = await asyncio.to_thread(os.listdir, host.state / "pool" / "checkpoints")
    return bool(await client.sandboxes()) or bool(checkpoints)


def main(arguments: list[str]) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--parts", default="exec,idle,kills", help="which, separated by commas")
    parser.add_argument("--sandboxes", type=int, default=1000, help="idle ones")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each rate")
    parser.add_argument("--image", default="debian")
    options = parser.parse_args(arguments)
    directory = aftermath.directory("pagurus-daemon-", "/var/tmp")
    host = BenchHost(directory, image(options.image))
    try:
        result = asyncio.run(everything(options, host))
    finally:
        host.clean()
    command.show(result, options)
    bad = any(result.get(name) for name in ("leaks", "sandboxes_lost", "sessions_broken", "answers_doubled"))
    return 1 if bad else 0
