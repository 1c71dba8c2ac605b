"""Is what a daemon calls durable still there when the power goes, whenever it goes?

::

    pagurus bench powercut [--json] [--cuts N] [--crash-states F] [--turns T] [--daemons D] [--seed S] [--image NAME]

A real daemon works on a state directory that lies on a recorded block device (:mod:`tests.crash.power.blockdev`): ext4,
and
in it the catalogue, the pages, the packed images and the pool's btrfs. It creates a sandbox, takes checkpoints of
files, of processes and of both, labels, forks, restores, exports, imports, removes and collects; whatever it answers is
noted with the place in the log of writes, and so is every transaction of its catalogue
(:mod:`tests.crash.power.traced`).
Then the power is cut behind the writes of that log (N of them, spread evenly; 0: every one): the disk holds all that
was flushed, and of the rest what one of F different fates leaves: all, none, only the newest, all but the oldest, the
newest in part, any of them, any sectors of them. Each such disk is mounted and examined: the journal of ext4, btrfs,
both SQLite files, every row that says durable, byte by byte; on D of them a real daemon is started as well and asked to
verify everything. Cuts that leave the same bytes are examined once and judged each for itself.

`old_or_new`: cuts after which the catalogue is one that there was, not older than the last transaction confirmed as
durable and not younger than the last one begun, and one that the answers allow (:mod:`tests.crash.power.story`). `old`:
those
of them on which a transaction that had begun is not there, `new`: the others. `complete`: cuts after which everything
that
the catalogue calls durable is on the disk as it was stored. `broken`: the others, with what was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import ctypes
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness import aftermath, command
from bench.harness.own_daemon import IMAGE, image
from sandbox import Client, Sandbox
from sandbox.errors import PagurusError
from sandbox.tree import hashing
from sandbox.tree.pool import BtrfsPool
from tests.crash.power import traced
from tests.crash.power.blockdev import CRASH_STATES, FLUSH, Cut, Disk, Recorder, available, cuts, events
from tests.crash.power.examine import CLONES, Examiner, finish, host_on, mounted
from tests.crash.power.story import NEVER, CrashResult, Ledger, Story

DISK_SIZE = 900 << 20
POOL_SIZE = 320 << 20
WORKERS = 2  # disks examined at a time, where the kernel mounts several copies of one btrfs
_NEW_MOUNTS, _PRIVATE = 0x20000, 1 << 18 | 1 << 14


# ---------------------------------------------------------------------------- recording


async def work(client: Client, recorder: Recorder, turns: int, retained: Path) -> Story:
    """Everything that a daemon writes, some of it at once. `retained`: where its file snapshots lie."""
    story = Story()

    async def durable(sandbox: Sandbox, command: str) -> str:
        done = await sandbox.exec(command)
        info = await sandbox.durable(done)
        story.life(info.id).durable = min(story.life(info.id).durable, recorder.position())
        if (retained / info.id).is_dir():
            story.files[info.id] = await asyncio.to_thread(hashing.digest, retained / info.id, None)
        return info.id

    sandbox = await client.create(IMAGE)
    server = 'python3 -c \'import os,time; x=os.urandom(3<<20); open("/up","w"); time.sleep(1e6)\' >/dev/null 2>&1 &'
    await durable(sandbox, f"setsid {server} while [ ! -e /up ]; do sleep 0.02; done")
    made: list[str] = []
    for turn in range(turns):
        act = ("echo {t} >> /log", "setsid sleep 100000 >/dev/null 2>&1 &", "head -c 200000 /dev/urandom > /f{t}")[
            turn % 3
        ]
        made.append(await durable(sandbox, act.replace("{t}", str(turn))))
        if turn % 4 == 1:
            await _label(client, recorder, story, made[-1], f"label {turn}")
        if turn % 4 == 3:
            await _remove(client, recorder, story, made.pop(0))
            await client.store.collect()
        if turn % 5 == 4:
            await sandbox.restore(made[-1])
            (fork,) = await client.fork(made[-1], 1)
            assert fork.sandbox is not None, fork.error
            other = fork.sandbox
            leaf, _ = await asyncio.gather(durable(other, "date > /other"), durable(sandbox, "date > /mine"))
            stream = [part async for part in client.store.stream(leaf)]
            story.life(leaf).leaving = recorder.position()
            await other.remove()
            while leaf in {info.id for info in await client.store.checkpoints()}:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.02)  # that it is not listed does not say that it could not come back
            await _import(client, recorder, story, leaf, stream)
    await asyncio.sleep(2.5)  # what is done in the background
    story.end = recorder.position()
    return story


async def _label(client: Client, recorder: Recorder, story: Story, name: str, text: str) -> None:
    requested = recorder.position()
    await client.store.label(name, text)
    story.labels.setdefault(name, []).append((requested, recorder.position(), text))


async def _remove(client: Client, recorder: Recorder, story: Story, name: str) -> None:
    life = story.life(name)
    life.leaving = recorder.position()
    with contextlib.suppress(PagurusError):  # somebody stands on it
        await client.store.remove(name)
        life.gone = recorder.position()
        return
    life.leaving = NEVER


async def _import(client: Client, recorder: Recorder, story: Story, name: str, stream: list[bytes]) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for part in stream:
            yield part

    life = story.again(name, recorder.position())
    await client.store.receive(parts())
    life.durable = recorder.position()


def prepare(directory: Path, tree: Path) -> Path:
    """The disk at the beginning: ext4 with an empty pool on it."""
    disk, point = directory / "disk", directory / "point"
    point.mkdir()
    with open(disk, "wb") as file:
        file.truncate(DISK_SIZE)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-O", "^has_journal", str(disk)], check=True)
    subprocess.run(["tune2fs", "-O", "has_journal", str(disk)], check=True, capture_output=True)
    with mounted(disk, point):
        (point / "state" / "images").mkdir(parents=True)
        (point / "state" / "images" / IMAGE).symlink_to(tree.resolve())
        pool = BtrfsPool(point / "state", size=POOL_SIZE).ensure()
        pool.close()
    return disk


async def record(directory: Path, tree: Path, turns: int) -> tuple[Story, Ledger, Path]:
    """Let a daemon work on a recorded disk. Returns what it answered, what it committed, and the log."""
    disk = await asyncio.to_thread(prepare, directory, tree)
    trace = directory / "trace"
    subprocess.run(["cp", "--sparse=always", disk, directory / "first"], check=True)  # noqa: ASYNC221
    with Recorder(disk, directory) as recorder, mounted(recorder.disk, directory / "point"):
        host = host_on(directory / "point", directory, tree, "tests.crash.power.traced")
        host.environment = {traced.TRACE: str(trace), traced.LOG: str(recorder.log)}
        try:
            await asyncio.to_thread(host.start)
            async with host.client() as client:
                story = await work(client, recorder, turns, directory / "point" / "state" / "pool" / "checkpoints")
        finally:
            await asyncio.to_thread(finish, host)
    return story, Ledger.read(trace), recorder.log


# ---------------------------------------------------------------------------- replaying


@dataclass
class Result:
    """Counts, and what was wrong."""

    ledger: Ledger
    story: Story
    old: int = 0
    new: int = 0
    complete: int = 0
    crash_states: collections.Counter[str] = field(default_factory=collections.Counter)
    broken: list[str] = field(default_factory=list)

    def judge(self, cut: Cut, result: CrashResult) -> None:
        """What this disk means behind this cut."""
        self.crash_states[cut.name] += 1
        wrong = [result.unreadable] if result.unreadable else self.ledger.wrong(result.mark, cut.position)
        if not result.unreadable:
            wrong += self.story.wrong(result.rows, cut.position)
        if not wrong:
            newest = self.ledger.newest(cut.position) == result.mark
            self.new += newest
            self.old += not newest
        self.complete += not (result.damage or result.unreadable)
        if wrong or result.damage:
            said = "; ".join([*wrong, *result.damage][:4])
            self.broken.append(f"cut at {cut.position} ({cut.name}): {said}")
            print(self.broken[-1], file=sys.stderr)


class Examination:
    """Examines disks on threads of its own, each content once."""

    def __init__(self, directory: Path, tree: Path, disk: Disk, files: dict[str, hashing.Digest]) -> None:
        self._directory, self._tree, self._disk, self._files = directory, tree, disk, files
        self.workers = min(WORKERS, os.cpu_count() or 1) if CLONES.exists() else 1
        self._pool = ThreadPoolExecutor(self.workers)
        self._places = threading.Semaphore(self.workers + 1)
        self._mine = threading.local()
        self._existing: dict[int, Future[CrashResult]] = {}
        self.examined = 0

    def begin(self, cut: Cut, *, daemon: bool) -> Future[CrashResult]:
        """Examine the disk as `cut` left it. Cuts come in the order of the log."""
        state = self._disk.state(cut)
        if state in self._existing and not daemon:
            return self._existing[state]
        self._places.acquire()
        # A file of its own each time: a loop device that is just being let go still has the last one in its cache.
        made = self._directory / f"cut-{self.examined}"
        self.examined += 1
        self._disk.make(cut, made)
        self._existing[state] = future = self._pool.submit(self._examine, made, daemon)
        return future

    def _examine(self, made: Path, daemon: bool) -> CrashResult:
        try:
            if not hasattr(self._mine, "examiner"):
                name = str(threading.get_ident())
                self._mine.examiner = Examiner(self._directory, self._tree, name, self._files)
            result: CrashResult = self._mine.examiner.examine(made, daemon=daemon)
            return result
        finally:
            made.unlink()
            self._places.release()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._disk.close()


def replay(
    directory: Path, tree: Path, story: Story, ledger: Ledger, log: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Cut the power, look, count."""
    chance = random.Random(options.seed)
    every = [cut for cut in cuts(log, chance, options.crash_states) if cut.position <= story.end]
    count = len(every) if not options.cuts else min(options.cuts, len(every))
    chosen = [every[min(len(every) - 1, int((n + chance.random()) * len(every) / count))] for n in range(count)]
    daemons = set(chance.sample(range(count), min(options.daemons, count)))
    result = Result(ledger, story)
    examination = Examination(directory, tree, Disk(directory / "first", log), story.files)
    waiting: collections.deque[tuple[Cut, Future[CrashResult]]] = collections.deque()
    try:
        for number, cut in enumerate(chosen, 1):
            waiting.append((cut, examination.begin(cut, daemon=number - 1 in daemons)))
            while waiting and waiting[0][1].done():
                cut, collected = waiting.popleft()
                result.judge(cut, collected.result())
            if number % 200 == 0:
                print(f"{number} of {count} cuts, {len(result.broken)} broken", file=sys.stderr)
        for cut, collected in waiting:
            result.judge(cut, collected.result())
    finally:
        examination.close()
    recorded = [event for event in events(log) if event.end <= story.end]
    flushes = sum(event.kind == FLUSH for event in recorded)
    return {
        "writes": len(recorded) - flushes,
        "flushes": flushes,
        "transactions": sum(item.begun <= story.end for item in ledger.transactions[1:]),
        "answers": len(story.checkpoints),
        "cuts": count,
        "disks": examination.examined,
        "daemons": len(daemons),
        "crash_states": dict(sorted(result.crash_states.items())),
        "old_or_new": result.old + result.new,
        "old": result.old,
        "new": result.new,
        "complete": result.complete,
        "broken": result.broken,
    }


def alone() -> None:
    """Mounts of our own: sandboxes of other daemons copy those of the host, and would keep our disks busy."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS) or libc.mount(b"none", b"/", None, _PRIVATE, None):
        raise OSError(ctypes.get_errno(), "unshare")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Record, cut, examine. All traces are gone at the end."""
    began = time.monotonic()
    alone()
    tree = image(options.image)
    directory = aftermath.directory("pagurus-powercut-", "/dev/shm")
    try:
        story, ledger, log = asyncio.run(record(directory, tree, options.turns))
        print(f"recorded {log.stat().st_size >> 20} MiB of writes", file=sys.stderr)
        result = replay(directory, tree, story, ledger, log, options)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return {**result, "seed": options.seed, "seconds": round(time.monotonic() - began, 1)}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = command.parser(__name__, __doc__)
    parser.add_argument(
        "--cuts", type=int, default=300, help="power cuts examined, spread over all writes; 0: every one"
    )
    parser.add_argument(
        "--crash-states",
        type=int,
        default=1,
        help=f"of the unflushed writes, behind each write; {len(CRASH_STATES)}: every kind",
    )
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--daemons", type=int, default=8, help="cuts on which a real daemon is started as well")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--image", default="debian")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if why := available():
        print(f"pagurus bench powercut: {why}", file=sys.stderr)
        return 2
    result = run(options)
    command.show(result, options)
    return 1 if result["broken"] else 0
