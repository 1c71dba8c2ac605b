"""Is what a daemon calls durable still there when the power goes, whenever it goes?

::

    pagurus bench powercut [--json] [--cuts N] [--turns T] [--daemons D] [--seed S] [--image NAME]

A real daemon works on a state directory that lies on a recorded block device (:mod:`bench._blockdev`): ext4, and in it
the catalogue, the pages, the packed images and the pool's btrfs. It creates a sandbox, takes checkpoints of files, of
processes and of both, labels, forks, restores, removes and collects; whatever it answers is noted with the place in
the log of writes. Then the power is cut behind the writes of that log (N of them, spread evenly; 0: every one): the
disk holds all that was flushed, and of the rest any part. Each such disk is mounted and examined: the journal of ext4,
btrfs, both SQLite files, every row that says durable, byte by byte; on D of them a real daemon is started as well and
asked to verify everything.

`old_or_new`: cuts after which the catalogue is one that the answers allow: all that was answered as durable is there,
nothing whose removal was answered, and of what was under way either. `whole`: cuts after which everything that the
catalogue calls durable is on the disk as it was stored. `broken`: the others, with what was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from bench._blockdev import FLUSH, Cut, Disk, Recorder, available, cuts, events
from bench._host import IMAGE, BenchHost, image
from daemon.capture import Places
from daemon.catalogue import CheckpointRow
from sandbox import Client, Sandbox, dumpfile, snapshots
from sandbox.errors import PagurusError
from sandbox.messages import CheckpointState
from sandbox.pages import PageStore
from sandbox.pool import Pool

DISK_SIZE = 900 << 20
POOL_SIZE = 320 << 20
NEVER = 1 << 62
_NEW_MOUNTS, _PRIVATE = 0x20000, 1 << 18 | 1 << 14


@dataclass
class Life:
    """Of one checkpoint: the places of the log at which it was answered as durable, its removal asked for, answered."""

    durable: int = NEVER
    leaving: int = NEVER
    gone: int = NEVER


@dataclass
class Story:
    """What the daemon answered, and when."""

    checkpoints: dict[str, Life] = field(default_factory=dict)
    labels: dict[str, list[tuple[int, int, str]]] = field(default_factory=dict)  # (asked, answered, label)
    end: int = NEVER  # what comes later is the bench tidying up

    def life(self, checkpoint: str) -> Life:
        return self.checkpoints.setdefault(checkpoint, Life())


# ---------------------------------------------------------------------------- recording


async def work(client: Client, recorder: Recorder, turns: int) -> Story:
    """Everything that a daemon writes, some of it at once."""
    story = Story()

    async def durable(sandbox: Sandbox, command: str) -> str:
        done = await sandbox.exec(command)
        info = await sandbox.durable(done)
        story.life(info.id).durable = min(story.life(info.id).durable, recorder.position())
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
            story.life(leaf).leaving = recorder.position()
            await other.remove()
    await asyncio.sleep(2.5)  # what is done in the background
    story.end = recorder.position()
    return story


async def _label(client: Client, recorder: Recorder, story: Story, name: str, text: str) -> None:
    asked = recorder.position()
    await client.store.label(name, text)
    story.labels.setdefault(name, []).append((asked, recorder.position(), text))


async def _remove(client: Client, recorder: Recorder, story: Story, name: str) -> None:
    life = story.life(name)
    life.leaving = recorder.position()
    with contextlib.suppress(PagurusError):  # somebody stands on it
        await client.store.remove(name)
        life.gone = recorder.position()
        return
    life.leaving = NEVER


@contextlib.contextmanager
def mounted(disk: Path, point: Path) -> Iterator[None]:
    subprocess.run(["mount", "-o", "loop", str(disk), str(point)], check=True)
    try:
        yield
    finally:
        deadline = time.monotonic() + 20
        while subprocess.run(["umount", str(point)], capture_output=True, check=False).returncode:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{point} stays busy: {_users(point)}")
            time.sleep(0.05)


def _users(point: Path) -> list[str]:
    """Who holds something below a mount point."""
    found = subprocess.run(["losetup", "-a"], capture_output=True, text=True, check=False).stdout.splitlines()
    found = [line for line in found if str(point) in line]
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            held = {os.readlink(link) for link in (entry / "fd").iterdir()} if entry.name.isdigit() else set()
            files = sorted(link for link in held if link.startswith(str(point)))
            mounts = "its mounts" if f"{point}/" in (entry / "mountinfo").read_text() else ""
            if files or mounts:
                found.append(f"{entry.name} {(entry / 'cmdline').read_bytes()[:60]!r} {files[:3]} {mounts}")
    return found


def host_on(point: Path, directory: Path, tree: Path) -> BenchHost:
    """A daemon whose state lies on the mounted disk and whose log does not."""
    scratch = directory / f"host-{time.monotonic_ns()}"
    scratch.mkdir()
    host = BenchHost(scratch, tree)
    host.state = point / "state"
    return host


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
        pool = Pool(point / "state", size=POOL_SIZE).ensure()
        pool.close()
    return disk


async def record(directory: Path, tree: Path, turns: int) -> tuple[Story, Path]:
    """Let a daemon work on a recorded disk. Returns what it answered, and the log."""
    disk = await asyncio.to_thread(prepare, directory, tree)
    subprocess.run(["cp", "--sparse=always", disk, directory / "first"], check=True)  # noqa: ASYNC221
    with Recorder(disk, directory) as recorder, mounted(recorder.disk, directory / "point"):
        host = host_on(directory / "point", directory, tree)
        try:
            await asyncio.to_thread(host.start)
            async with host.client() as client:
                story = await work(client, recorder, turns)
        finally:
            await asyncio.to_thread(finish, host)
    return story, recorder.log


def finish(host: BenchHost) -> None:
    """End a daemon, its sandboxes and its mounts, but for the disk itself."""
    state = host.state
    host.kill()
    host.start("--stop-sandboxes")
    host.stop()
    Pool(state).close()
    host.state = host.directory / "state"  # what clean() removes is not the disk
    host.clean()


# ---------------------------------------------------------------------------- examining


class Examiner:
    """Mounts disks as power cuts left them and tells what is wrong with each."""

    def __init__(self, directory: Path, tree: Path, story: Story) -> None:
        self.directory, self.tree, self.story = directory, tree, story
        self.point = directory / "point"

    def examine(self, disk: Path, cut: Cut, *, daemon: bool) -> tuple[list[str], list[str]]:
        """(what of the catalogue is neither old nor new, what it calls durable and is not whole)"""
        with mounted(disk, self.point):
            state = self.point / "state"
            # The disks look like one to btrfs: let it forget the one before.
            subprocess.run(["btrfs", "device", "scan", "--forget"], check=False, capture_output=True)
            pool = Pool(state).ensure()
            try:
                rows = load(state / "catalogue.sqlite")
                wrong = self.history(rows, cut.position)
                torn = contents(rows, state)
            finally:
                pool.close()
            if daemon:
                torn += self.started(state)
        return wrong, torn

    def history(self, rows: dict[str, CheckpointRow], position: int) -> list[str]:
        """What the answers until `position` do not allow."""
        wrong = []
        for name, life in self.story.checkpoints.items():
            row = rows.get(name)
            there = row is not None and row.state is CheckpointState.DURABLE
            if life.durable <= position < life.leaving and not there:
                wrong.append(f"{name} was answered as durable and is {row.state if row else 'not there'}")
            if life.gone <= position and row is not None:
                wrong.append(f"{name} was answered as removed and is there")
        for name, changes in self.story.labels.items():
            row = rows.get(name)
            known = [text for _, answered, text in changes if answered <= position]
            begun = [text for asked, _, text in changes if asked <= position]
            if row is not None and known and row.label not in {known[-1], *begun}:
                wrong.append(f"{name} was labelled {known[-1]!r} and is labelled {row.label!r}")
        return wrong

    def started(self, state: Path) -> list[str]:
        """What a real daemon says that starts on this disk."""
        host = host_on(state.parent, self.directory, self.tree)
        try:
            host.start()
            return asyncio.run(self._verify(host))
        finally:
            finish(host)

    async def _verify(self, host: BenchHost) -> list[str]:
        async with host.client() as client:
            found = [f"{r.checkpoint}: {'; '.join(r.damage)}" for r in await client.store.verify() if r.damage]
            infos = {info.id: info for info in await client.store.checkpoints()}
            found += [f"{i.id}: {i.error}" for i in infos.values() if "lost with the power: " in (i.error or "")]
            for info in await client.sandboxes():
                await (await client.get(info.id)).restore(verify=True)  # from the latest whole one, whatever was cut
        return found


def load(path: Path) -> dict[str, CheckpointRow]:
    """The checkpoints of a catalogue as a new daemon would find them. Raises when SQLite cannot make sense of it."""
    if not path.exists():
        return {}
    database = sqlite3.connect(path)
    try:
        (verdict,) = database.execute("PRAGMA integrity_check").fetchone()
        if verdict != "ok":
            raise ValueError(f"{path.name}: {verdict}")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        blobs = [row[0] for row in database.execute("SELECT row FROM checkpoints")] if version else []
    finally:
        database.close()
    rows = [msgspec.msgpack.decode(blob, type=CheckpointRow) for blob in blobs]
    return {row.id: row for row in rows}


def contents(rows: dict[str, CheckpointRow], state: Path) -> list[str]:
    """What the catalogue calls durable and the disk does not hold as it was stored."""
    places = Places(state / "pool/sandboxes", state / "pool/checkpoints", state / "none", state / "checkpoints")
    wrong: list[str] = []
    store = PageStore(state / "pages")
    try:
        durable = [row for row in rows.values() if row.state is CheckpointState.DURABLE]
        for owner in {row.dump for row in durable} - {None}:
            try:
                dumpfile.verify(places.packed(owner or ""), store)
            except PagurusError as error:
                wrong.append(f"process images {owner}: {error}")
        for owner in {row.files for row in durable} - {None}:
            snapshot = places.snapshot(owner or "")
            if not snapshot.is_dir():
                wrong.append(f"file snapshot {owner} is missing")
            elif places.digest(owner or "").exists():
                expected = snapshots.Digest.load(places.digest(owner or ""))
                wrong += [f"{owner}: {each}" for each in snapshots.damage(snapshot, expected)]
        again = store.add(os.urandom(4096))  # and it goes on from there
        store.verify(again.numbers)
    finally:
        store.close()
    return wrong


def replay(directory: Path, tree: Path, story: Story, log: Path, options: argparse.Namespace) -> dict[str, Any]:
    chance = random.Random(options.seed)
    every = [cut for cut in cuts(log, chance) if cut.position <= story.end]
    count = len(every) if not options.cuts else min(options.cuts, len(every))
    chosen = [every[min(len(every) - 1, int((n + chance.random()) * len(every) / count))] for n in range(count)]
    daemons = set(chance.sample(range(count), min(options.daemons, count)))
    disk, examiner = Disk(directory / "first", log), Examiner(directory, tree, story)
    result: dict[str, Any] = {"old_or_new": 0, "whole": 0, "broken": []}
    fates: dict[str, int] = {}
    try:
        for number, cut in enumerate(chosen):
            # A file of its own each time: a loop device that is just being let go still has the last one in its cache.
            made = directory / f"cut-{number}"
            disk.make(cut, made)
            try:
                wrong, torn = examiner.examine(made, cut, daemon=number in daemons)
            except (OSError, ValueError, sqlite3.Error, PagurusError, subprocess.CalledProcessError) as error:
                wrong, torn = [f"{type(error).__name__}: {error}"], ["could not be examined"]
            finally:
                made.unlink()
            result["old_or_new"] += not wrong
            result["whole"] += not torn
            fates[cut.name] = fates.get(cut.name, 0) + 1
            if wrong or torn:
                result["broken"].append(f"cut at {cut.position} ({cut.name}): {'; '.join([*wrong, *torn][:4])}")
                print(result["broken"][-1], file=sys.stderr)
            if number % 50 == 49:
                print(f"{number + 1} of {count} cuts, {len(result['broken'])} broken", file=sys.stderr)
    finally:
        disk.close()
    flushes = sum(event.kind == FLUSH for event in events(log))
    facts = {"writes": len(every) - flushes, "flushes": flushes, "cuts": count, "daemons": len(daemons), "fates": fates}
    return {**facts, "answers": len(story.checkpoints), **result}


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
    directory = Path(tempfile.mkdtemp(prefix="pagurus-powercut-", dir="/dev/shm"))
    try:
        story, log = asyncio.run(record(directory, tree, options.turns))
        print(f"recorded {log.stat().st_size >> 20} MiB of writes", file=sys.stderr)
        result = replay(directory, tree, story, log, options)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return {**result, "seed": options.seed, "seconds": round(time.monotonic() - began, 1)}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="pagurus bench powercut", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument(
        "--cuts", type=int, default=300, help="power cuts examined, spread over all writes; 0: every one"
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
    if options.json:
        print(json.dumps(result))
    else:
        print(*(f"{key} {value}" for key, value in result.items()), sep="\n")
    return 1 if result["broken"] else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
