"""What a run of a bench that was killed left behind, removed behind it, or by the next one.

A run holds a lock on a file in its folder; the kernel drops it however the run ends. Whoever gets it knows that the run
is dead, and ends its sandboxes. The lock appears in the folder under its name only once it is held.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.harness import aftermath
from sandbox.container.cgroup import hierarchy
from sandbox.container.container import Container, ContainerSpec
from sandbox.errors import PagurusError
from sandbox.tree import btrfs
from sandbox.tree.pool import BtrfsPool

PREFIX = "pagurus-inspector-"
_LOCK = "lock"


@dataclass(frozen=True)
class Run:
    """A run: its folder, and what its trees, snapshots and control groups are called."""

    directory: Path
    tag: str

    @property
    def sandboxes(self) -> Path:
        """Where the sandboxes have their run directories."""
        return self.directory / "run"


@contextlib.contextmanager
def run(pool: BtrfsPool) -> Iterator[Run]:
    """A new run, whose sandboxes lie in `pool`."""
    aftermath.note(command=[sys.executable, "-m", "bench.harness.leftovers"])
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        directory = Path(name)
        lock = os.open(directory / f"{_LOCK}.new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.write(lock, os.fsencode(pool.state))
            (directory / f"{_LOCK}.new").rename(directory / _LOCK)
            made = Run(directory, directory.name.removeprefix(PREFIX))
            made.sandboxes.mkdir()
            yield made
        finally:
            os.close(lock)


async def remove() -> list[str]:
    """End and remove what dead runs left; returns their tags."""
    result = []
    for directory in _named(Path(tempfile.gettempdir()), f"{PREFIX}*"):
        try:
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError):  # it is being made, or removed
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            await _remove(
                Run(directory, directory.name.removeprefix(PREFIX)), BtrfsPool(Path(os.fsdecode(os.read(lock, 4096))))
            )
            result.append(directory.name.removeprefix(PREFIX))
        except BlockingIOError:  # it lives
            continue
        finally:
            os.close(lock)
    return result


async def _remove(dead: Run, pool: BtrfsPool) -> None:
    for directory in _named(dead.sandboxes, f"*{dead.tag}*"):
        await _end(directory)
    if pool.mounted():
        for parent in (pool.sandboxes, pool.checkpoints):
            for tree in _named(parent, f"*{dead.tag}*"):
                await asyncio.to_thread(btrfs.delete_subvolume, tree)
        for scratch in _named(pool.path, f"*{dead.tag}*"):
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
    for group in _named(hierarchy().unified, f"*{dead.tag}*"):
        with contextlib.suppress(OSError):  # a command of the dead run is in it still: the next run removes it
            group.rmdir()
    await asyncio.to_thread(shutil.rmtree, dead.directory, ignore_errors=True)


def _named(parent: Path, pattern: str) -> list[Path]:
    return sorted(parent.glob(pattern))


async def _end(directory: Path) -> None:
    """A sandbox, by its run directory, whatever of it is left."""
    spec = ContainerSpec(
        id=directory.name, image=directory, tree=directory, uid_base=1 << 20, hostname="crab", run_dir=directory
    )
    try:
        container = await Container.adopt(spec)
    except PagurusError:  # its shim is gone
        container = Container(spec)
    await container.destroy()


if __name__ == "__main__":
    asyncio.run(remove())
