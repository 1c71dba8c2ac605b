"""What the tests of checkpoints share: a Checkpointer on a tmpfs, snapshots, programs to be checkpointed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from sandbox import paths
from sandbox.container.container import Container
from sandbox.content import dumpfile
from sandbox.criu import rpc
from sandbox.criu.checkpointer import Checkpointer, RestoreReport
from sandbox.criu.dump import Dump
from sandbox.tree import btrfs
from tests.support.container_support import Maker
from tests.support.container_support import shell as plain_shell

__all__ = ["Bench", "Saved", "bench", "shell", "started"]


async def shell(container: Container, script: str) -> str:
    """stdout of a script that must succeed; one that hangs fails instead."""
    return await plain_shell(container, script, timeout=120)


@dataclass
class Saved:
    """One checkpoint: file snapshot, capture directory, stored dump."""

    tree: Path
    capture: Dump
    dump: Path


class Bench:
    """Checkpoints containers and puts everything away at the end."""

    def __init__(self, maker: Maker, checkpointer: Checkpointer, directory: Path):
        self.maker = maker
        self.checkpointer = checkpointer
        self.directory = directory
        self._snapshots: list[Path] = []
        self._number = 0

    def snapshot(self, tree: Path, *, readonly: bool = True) -> Path:
        self._number += 1
        parent = self.maker.pool.checkpoints if readonly else self.maker.pool.sandboxes
        path = parent / f"{tree.name[:24]}-{self._number}"
        btrfs.snapshot(tree, path, readonly=readonly)
        self._snapshots.append(path)
        return path

    async def save(self, container: Container, on_frozen: Callable[[], None] | None = None) -> Saved:
        taken: list[Path] = []
        self._number += 1
        capture = await self.checkpointer.capture(
            container,
            self.checkpointer.captures / f"{container.spec.id}-{self._number}",
            on_stopped=lambda: taken.append(self.snapshot(container.tree)),
            on_frozen=on_frozen,
        )
        into = self.directory / "dumps" / f"{capture.dir.name}.dump"
        await asyncio.to_thread(dumpfile.pack, capture.dir, into, self.checkpointer.pages)
        return Saved(taken[-1], capture, into)

    async def kill_and_restore(
        self, container: Container, saved: Saved, source: Path, *, verify: bool = True
    ) -> RestoreReport:
        """As after a crash: nothing of the sandbox is left but its checkpoint."""
        await container.kill()
        await container.remount(self.snapshot(saved.tree, readonly=False))
        report = await self.checkpointer.restore(container, source, verify=verify, reference=saved.tree)
        assert report.verified is verify
        return report

    async def close(self) -> None:
        await self.maker.close()
        for path in self._snapshots:
            btrfs.delete_subvolume(path)


@pytest_asyncio.fixture
async def bench(maker: Maker, tmp_path: Path) -> AsyncIterator[Bench]:
    async with started(maker, tmp_path) as made:
        yield made


@contextlib.asynccontextmanager
async def started(
    maker: Maker, tmp_path: Path, notes: int | None = None, *, track: bool = True, mappings: int | None = None
) -> AsyncIterator[Bench]:
    """`notes`, `track`, `mappings`: as of a Checkpointer."""
    for needed in (rpc.launcher(), paths.criu()):
        if not needed.exists():
            pytest.skip(f"{needed} is missing: run `make setup`")
    checkpointer = Checkpointer(
        state=tmp_path / "state", run=tmp_path / "run", notes=notes, track=track, mappings=mappings
    )
    await checkpointer.prepare()
    made = Bench(maker, checkpointer, tmp_path)
    try:
        yield made
    finally:
        await checkpointer.close()
        await made.close()
        await asyncio.to_thread(_unmount, tmp_path / "run")
        shutil.rmtree(tmp_path, ignore_errors=True)


def _unmount(run: Path) -> None:
    """A CRIU that was killed a moment ago may still hold a directory; a mount that stays is a leak."""
    deadline = time.monotonic() + 60
    for directory in run.iterdir():
        while os.path.ismount(directory):
            done = subprocess.run(["umount", str(directory)], capture_output=True, text=True, check=False)
            assert not done.returncode or time.monotonic() < deadline, done.stderr
            if done.returncode:
                time.sleep(0.05)
