"""What do checkpoint, restore and fork cost, beside runc on the same content?

::

    pagurus bench checkpoint [--json] [--rounds N] [--workloads idle,bash,...] [--image DIR] [--peers runc,podman]

Each workload runs in a sandbox, and in a container of each peer over the same image. Rounds are interleaved: our
checkpoint (dump and file snapshot, leave running), `checkpoint --leave-running` of each peer and its restore, our kill
and restore. `frozen_ms` is
CRIU's own measure of the frozen window, our work inside it included. Times of ours are taken around the same calls
that the daemon makes, and with the CRIU processes that it has waiting for the next dump and the next restore; those of
peers around their command lines, which is how they are used. Before each timed step all dirty
pages of the machine are written out: what one side left behind must not be paid for by the other. `load` is the
machine's load average at the beginning and at the end: figures of a busy machine say little.

`create_ms` and `exec_ms` alternate with the peers'. A peer that is not installed (Debian's packages) is left out.
`restore_stored_ms` is a restore of the http sandbox from the durable store: unpacked, as after a reboot or when the raw
images have gone.

`redis` needs redis-server, which the base image lacks: it is taken from Debian's packages once and put into both
sandboxes. Where that is not possible the workload is skipped, and `skipped` says why.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from bench.harness import aftermath, command, redis
from bench.harness.peers import PEERS, Peer
from ebpf.inspector import Inspector
from sandbox import paths
from sandbox.container.container import Container, ContainerSpec
from sandbox.container.shim import short_slice
from sandbox.content import dumpfile
from sandbox.criu.checkpointer import Checkpointer
from sandbox.messages import Limits
from sandbox.tree import btrfs
from sandbox.tree.pool import BtrfsPool

_READY = " while [ ! -e /tmp/ready ]; do sleep 0.02; done"
_HOLD = (
    'rm -f /tmp/ready; python3 -c "import os,time; b=bytearray(os.urandom({size}<<20)); '
    "open('/tmp/ready','w').close(); time.sleep(1e9)\" </dev/null >/dev/null 2>&1 &" + _READY
)
_SERVER = """
import http.server, sqlite3
table = sqlite3.connect("/tmp/db")
table.execute("create table if not exists t(a, b)")
table.executemany("insert into t values (?, ?)", ((i, "x" * 50) for i in range(2000)))
table.commit()
server = http.server.ThreadingHTTPServer(("127.0.0.1", 8000), http.server.SimpleHTTPRequestHandler)
open("/tmp/ready", "w").close()
server.serve_forever()
"""
_HTTP = f"rm -f /tmp/ready; python3 -c '{_SERVER}' </dev/null >/dev/null 2>&1 &{_READY}"
WORKLOADS = {
    "idle": "true",
    "bash": "bash -c 'while :; do read -t 1000 < <(sleep 1000); done' </dev/null >/dev/null 2>&1 & sleep 0.2",
    "py10": _HOLD.format(size=10),
    "py50": _HOLD.format(size=50),
    "py200": _HOLD.format(size=200),
    "http": _HTTP,
    "redis": redis.START,
}
FORKS, AT_A_TIME = 8, 4


class Times:
    """Figures in milliseconds by name."""

    def __init__(self) -> None:
        self._all: dict[str, list[float]] = {}

    def add(self, name: str, value: float) -> None:
        self._all.setdefault(name, []).append(value)

    @contextlib.contextmanager
    def taken(self, name: str) -> Any:
        began = time.perf_counter()
        yield
        self.add(name, (time.perf_counter() - began) * 1e3)

    def metrics(self) -> dict[str, dict[str, float]]:
        return {name: figure(values) for name, values in self._all.items()}


def figure(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return {"p50": round(statistics.median(ordered), 2), "p95": round(p95, 2), "n": len(ordered)}


class Ours:
    """Sandboxes as the daemon makes them, in a pool of their own."""

    def __init__(self, directory: Path, image: Path, *, track: bool = True, limits: Limits | None = None):
        self.track = track
        self.limits = limits or Limits()
        self.pool = BtrfsPool(directory / "state", size=4 << 30)
        self.run = directory / "run"
        self.image = image
        self.numbers = itertools.count(1)
        self.trees: list[Path] = []
        self.checkpointer: Checkpointer

    async def __aenter__(self) -> Ours:
        await asyncio.to_thread(self.pool.ensure)
        self.inspector = await asyncio.to_thread(Inspector.load)
        mappings = self.inspector.mappings
        self.checkpointer = Checkpointer(state=self.pool.state, run=self.run, track=self.track, mappings=mappings)
        await self.checkpointer.prepare()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.checkpointer.close()
        for tree in reversed(self.trees):
            btrfs.delete_subvolume(tree)
        await asyncio.to_thread(self._unmount)
        self.inspector.close()

    def _unmount(self) -> None:
        self.pool.close()
        for directory in self.run.iterdir():
            subprocess.run(["umount", "-q", str(directory)], check=False)

    def snapshot(self, tree: Path, *, readonly: bool) -> Path:
        parent = self.pool.checkpoints if readonly else self.pool.sandboxes
        path = parent / f"s{next(self.numbers)}"
        btrfs.snapshot(tree, path, readonly=readonly)
        self.trees.append(path)
        return path

    def keep(self, tree: Path) -> None:
        self.snapshot(tree, readonly=True)

    def spec(self, tree: Path | None = None) -> ContainerSpec:
        name = f"bench-{secrets.token_hex(4)}"
        if tree is None:
            tree = self.pool.sandboxes / name
            self.pool.create_tree(tree)
            self.trees.append(tree)
        base = 200_000_000 + 65_536 * next(self.numbers)
        return ContainerSpec(
            id=name,
            image=self.image,
            tree=tree,
            uid_base=base,
            hostname="crab",
            run_dir=self.run / "sandboxes" / name,
            limits=self.limits,
        )

    @contextlib.asynccontextmanager
    async def sandbox(self, script: str, extra: Path | None = None) -> AsyncIterator[Container]:
        """A sandbox in which `script` has run; `extra` is what the image lacks."""
        spec = self.spec()
        if extra is not None:
            await asyncio.to_thread(shutil.copytree, extra, spec.tree / "upper" / redis.PLACE)
        container = await Container.create(spec)
        try:
            done = await container.exec(["/bin/sh", "-c", script], timeout=120)
            if done.exit_code:
                raise RuntimeError(f"workload failed: {done.stderr.decode()}")
            await self.checkpointer.warm(container)
            yield container
        finally:
            await self.checkpointer.forget(container)
            await container.destroy()

    async def checkpoint(self, container: Container, times: Times) -> tuple[Path, Path]:
        """A checkpoint as the daemon takes it; returns capture directory and file snapshot."""
        taken: list[Path] = []
        await asyncio.to_thread(os.sync)
        capture = await self.checkpointer.capture(
            container,
            self.checkpointer.captures / f"c{next(self.numbers)}",
            on_stopped=lambda: taken.append(self.snapshot(container.tree, readonly=True)),
        )
        times.add("total_ms", capture.total_ms)
        times.add("frozen_ms", capture.frozen_ms)
        await asyncio.sleep(0.03)  # as long as a model thinks at the very least: the next CRIU process warms up
        return capture.dir, taken[-1]

    async def restore(self, container: Container, images: Path, tree: Path, times: Times) -> None:
        await self.checkpointer.forget(container, restoring=True)
        await asyncio.to_thread(os.sync)
        await container.kill()
        with times.taken("restore_ms"):
            await container.remount(self.snapshot(tree, readonly=False))
            await self.checkpointer.restore(container, images)
        await self.checkpointer.warm(container)


async def measure(ours: Ours, directory: Path, name: str, rounds: int, peers: list[type[Peer]]) -> dict[str, Any]:
    """One workload, all rounds interleaved."""
    times = Times()
    script = WORKLOADS[name]
    try:
        extra = await asyncio.to_thread(redis.layer) if name == "redis" else None
    except (OSError, subprocess.SubprocessError) as error:
        return {"skipped": str(error)}
    others = [await asyncio.to_thread(peer, directory, ours.image) for peer in peers]
    trouble: dict[str, str] = {}
    try:
        for other in others:
            await asyncio.to_thread(other.start, script, extra)
        async with ours.sandbox(script, extra) as container:
            for number in range(rounds + 1):
                sink = times if number else Times()  # the first round warms caches, for both
                images, tree = await ours.checkpoint(container, sink)
                for other in others:
                    if other.program not in trouble:
                        try:
                            await asyncio.to_thread(_round, other, directory / f"images-{name}", sink)
                        except RuntimeError as error:
                            trouble[other.program] = str(error)
                await ours.restore(container, images, tree, sink)
                await asyncio.to_thread(shutil.rmtree, images)
    finally:
        for other in others:
            await asyncio.to_thread(other.close)
    return {**times.metrics(), **{f"{program}_error": words for program, words in trouble.items()}}


def _round(other: Peer, images: Path, times: Times) -> None:
    shutil.rmtree(images, ignore_errors=True)
    images.mkdir()
    os.sync()
    with times.taken(f"{other.program}_total_ms"):
        other.checkpoint(images)
    os.sync()
    other.kill()
    with times.taken(f"{other.program}_restore_ms"):
        other.restore(images)


async def repeat(rounds: int, once: Callable[[], Awaitable[float]]) -> dict[str, float]:
    await once()
    return figure([await once() for _ in range(rounds)])


async def singles(ours: Ours, directory: Path, rounds: int, peers: list[type[Peer]]) -> dict[str, Any]:
    """Figures that belong to no workload."""
    result: dict[str, Any] = {}

    async def create() -> float:
        began = time.perf_counter()
        container = await Container.create(ours.spec())  # with the subvolume of its files
        took = (time.perf_counter() - began) * 1e3
        await container.destroy()
        return took

    async with ours.sandbox("true") as container:

        async def run_true() -> float:
            began = time.perf_counter()
            await container.exec(["/bin/true"])
            return (time.perf_counter() - began) * 1e3

        async def files() -> float:
            await asyncio.to_thread(os.sync)
            await container.exec(["dd", "if=/dev/urandom", "of=/tmp/dirty", "bs=1M", "count=1"])
            began = time.perf_counter()
            await asyncio.to_thread(ours.keep, container.tree)
            return (time.perf_counter() - began) * 1e3

        times = Times()
        for number in range(rounds + 1):  # of the same things, ours and the peers' in turn
            sink = times if number else Times()
            sink.add("create_ms", await create())
            for _ in range(10):
                sink.add("exec_ms", await run_true())
            for peer in peers:
                await asyncio.to_thread(_single, peer(directory, ours.image), sink)
        result.update(times.metrics())
        result["files_ms"] = await repeat(rounds, files)
    async with ours.sandbox(WORKLOADS["http"]) as container:
        images, tree = await ours.checkpoint(container, Times())
        result["fork8_ms"] = await repeat(max(3, rounds // 3), lambda: fork(ours, images, tree))
        into = ours.pool.state / "checkpoints" / "http.dump"
        stored = await asyncio.to_thread(dumpfile.pack, images, into, ours.checkpointer.pages)

        async def restore_stored() -> float:
            times = Times()
            await ours.restore(container, stored.path, tree, times)
            return times.metrics()["restore_ms"]["p50"]

        result["restore_stored_ms"] = await repeat(rounds, restore_stored)
    return result


async def fork(ours: Ours, images: Path, tree: Path) -> float:
    """FORKS sandboxes from one checkpoint, AT_A_TIME at once."""
    gate = asyncio.Semaphore(AT_A_TIME)
    children: list[Container] = []

    async def one() -> None:
        async with gate:
            child = await Container.prepare(ours.spec(ours.snapshot(tree, readonly=False)))
            children.append(child)
            await ours.checkpointer.restore(child, images)

    await asyncio.to_thread(os.sync)
    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(FORKS)))
    took = (time.perf_counter() - began) * 1e3
    for child in children:
        await child.destroy()
    return took


def _single(other: Peer, times: Times) -> None:
    try:
        with times.taken(f"{other.program}_create_ms"):
            other.create()
        with times.taken(f"{other.program}_exec_ms"):
            other.run(["/bin/true"])
    finally:
        other.close()


async def everything(options: argparse.Namespace) -> dict[str, Any]:
    directory = aftermath.directory("pagurus-bench-", "/var/tmp")
    peers = [PEERS[name] for name in options.peers.split(",") if name and shutil.which(name)]
    try:
        async with Ours(directory, options.image) as ours:
            result: dict[str, Any] = {
                "workloads": {},
                "peers": [peer.program for peer in peers],
                "load": [os.getloadavg()[0]],
            }
            for name in options.workloads.split(","):
                result["workloads"][name] = await measure(ours, directory, name, options.rounds, peers)
                print(name, json.dumps(result["workloads"][name]), file=sys.stderr)
            result.update(await singles(ours, directory, options.rounds, peers))
            result["load"].append(os.getloadavg()[0])
            return result
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def main(arguments: list[str]) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--image", type=Path, default=paths.state() / "images" / "debian")
    parser.add_argument("--peers", default=",".join(PEERS), help="container programs to compare with; empty: none")
    options = parser.parse_args(arguments)
    with contextlib.suppress(OSError):
        short_slice()
    gc.collect()
    gc.freeze()  # as the daemon does
    result = asyncio.run(everything(options))
    if options.json:
        print(json.dumps(result))
        return 0
    for name, metrics in result["workloads"].items():
        print(name, *(f"{key} {value['p50']}" for key, value in metrics.items() if isinstance(value, dict)))
    print(*(f"{key} {value['p50']}" for key, value in result.items() if isinstance(value, dict) and "p50" in value))
    return 0
