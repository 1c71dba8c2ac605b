"""Mounts disks as power cuts left them and says what they hold.

Nothing of a disk stays mounted, whatever is wrong with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from bench.harness.own_daemon import BenchHost
from daemon.catalogue import CheckpointRow
from daemon.checkpoints.capture import Places
from daemon.checkpoints.persist import LOST
from sandbox.content import dumpfile
from sandbox.content.pages import PageStore
from sandbox.errors import PagurusError
from sandbox.messages import CheckpointState
from sandbox.tree import hashing
from sandbox.tree.pool import BtrfsPool
from tests.crash.power.story import EMPTY, CrashResult, mark

#: All disks of a story hold sandboxes of the same names, which are those of their control groups on this host.
ONE_DAEMON = threading.Lock()

CLONES = Path("/sys/fs/btrfs/features/temp_fsid")  # several copies of one btrfs may be mounted at a time


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
    result = subprocess.run(["losetup", "-a"], capture_output=True, text=True, check=False).stdout.splitlines()
    result = [line for line in result if str(point) in line]
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            held = {os.readlink(link) for link in (entry / "fd").iterdir()} if entry.name.isdigit() else set()
            files = sorted(link for link in held if link.startswith(str(point)))
            mounts = "its mounts" if f"{point}/" in (entry / "mountinfo").read_text() else ""
            if files or mounts:
                result.append(f"{entry.name} {(entry / 'cmdline').read_bytes()[:60]!r} {files[:3]} {mounts}")
    return result


def host_on(point: Path, directory: Path, tree: Path, module: str = "daemon") -> BenchHost:
    """A daemon whose state lies on the mounted disk and whose log does not."""
    scratch = directory / f"host-{time.monotonic_ns()}"
    scratch.mkdir()
    host = BenchHost(scratch, tree, module)
    host.state = point / "state"
    return host


def finish(host: BenchHost) -> None:
    """End a daemon, its sandboxes and its mounts, but for the disk itself."""
    state = host.state
    host.kill()
    host.module = "daemon"
    host.start("--stop-sandboxes")
    host.stop()
    BtrfsPool(state).close()
    host.state = host.directory / "state"  # what clean() removes is not the disk
    host.clean()


class Examiner:
    """Examines disks, each thread of `name` its own."""

    def __init__(self, directory: Path, tree: Path, name: str, files: Mapping[str, hashing.Digest]) -> None:
        self.directory, self.tree, self.files = directory, tree, files
        self.point = directory / f"point-{name}"
        self.point.mkdir()

    def examine(self, disk: Path, *, daemon: bool) -> CrashResult:
        """What is on a disk. Whatever keeps it from being read is told as well."""
        try:
            return self._examine(disk, daemon=daemon)
        except (OSError, ValueError, RuntimeError, sqlite3.Error, PagurusError, subprocess.CalledProcessError) as error:
            return CrashResult(unreadable=f"{type(error).__name__}: {error}")

    def _examine(self, disk: Path, *, daemon: bool) -> CrashResult:
        with mounted(disk, self.point):
            state = self.point / "state"
            # The disks look like one to btrfs: let it forget the one before.
            subprocess.run(["btrfs", "device", "scan", "--forget"], check=False, capture_output=True)
            pool = BtrfsPool(state).ensure()
            try:
                existing, rows = load(state / "catalogue.sqlite")
                damage = contents(rows, state, self.files)
            finally:
                pool.close()
            if daemon:
                damage += self.started(state)
        return CrashResult(existing, rows, tuple(damage))

    def started(self, state: Path) -> list[str]:
        """What a real daemon says that starts on this disk."""
        with ONE_DAEMON:
            host = host_on(state.parent, self.directory, self.tree)
            try:
                host.start()
                return asyncio.run(self._verify(host))
            finally:
                finish(host)

    async def _verify(self, host: BenchHost) -> list[str]:
        async with host.client() as client:
            result = [f"{r.checkpoint}: {'; '.join(r.damage)}" for r in await client.store.verify() if r.damage]
            result += [
                f"{info.id}: {info.error}"
                for info in await client.store.checkpoints()
                if (info.error or "").startswith(LOST)
            ]
            for info in await client.sandboxes():
                await (await client.get(info.id)).restore(verify=True)  # from the latest whole one, whatever was cut
        return result


def load(path: Path) -> tuple[str, dict[str, CheckpointRow]]:
    """The catalogue as a new daemon would find it: mark and checkpoints. Raises when SQLite cannot make sense of it."""
    if not path.exists():
        return EMPTY, {}
    database = sqlite3.connect(path)
    try:
        (verdict,) = database.execute("PRAGMA integrity_check").fetchone()
        if verdict != "ok":
            raise ValueError(f"{path.name}: {verdict}")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if not version:
            return EMPTY, {}
        existing = mark(database)
        blobs = [row[0] for row in database.execute("SELECT row FROM checkpoints")]
    finally:
        database.close()
    rows = [msgspec.msgpack.decode(blob, type=CheckpointRow) for blob in blobs]
    return existing, {row.id: row for row in rows}


def contents(rows: dict[str, CheckpointRow], state: Path, files: Mapping[str, hashing.Digest]) -> list[str]:
    """What the catalogue calls durable and the disk does not hold as it was stored.

    A snapshot is compared with its hashes where the daemon had come to them, else with `files`: what it held when it
    was answered as durable.
    """
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
                continue
            hashes = places.digest(owner or "")
            expected = hashing.Digest.load(hashes) if hashes.exists() else files.get(owner or "")
            if expected is None:
                raise ValueError(f"nothing is known of what the file snapshot {owner} holds")
            wrong += [f"{owner}: {item}" for item in hashing.damage(snapshot, expected)]
        again = store.add(os.urandom(4096))  # and it goes on from there
        store.verify(again.numbers)
    finally:
        store.close()
    return wrong
