"""The btrfs pool: the disk space of all sandboxes and checkpoints of a host.

Owns: the pool's file, its loop device, its mount, its folders. Does not own: what lies in them.
Guarantee: after `ensure()` the folders exist on a mounted btrfs; calling it again changes nothing. `close()` leaves
no mount and no loop device behind (the kernel frees it with the last user).

::

    <state>/pool.btrfs           the file (sparse); absent when <state>/pool is btrfs itself
    <state>/pool/sandboxes/ID/   subvolume of one sandbox: upper/ and work/ of its overlay
    <state>/pool/checkpoints/ID/ read-only snapshot of such a subvolume
    <state>/images/NAME/         read-only image trees, on the host's own disk

Images lie outside the pool on purpose. Inode numbers of btrfs subvolumes coincide; with lower and upper layer on
one file system overlayfs shows them as they are, and two files of a sandbox could look like one (`cp` then says
"are the same file"). On different file systems it makes them distinct.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from sandbox import btrfs, paths
from sandbox.errors import NoSpace, Unsupported

GIB = 1 << 30
SMALLEST = 256 << 20
MIXED_BELOW = GIB  # bytes; what mkfs.btrfs recommends
TREE_PARTS = ("upper", "work")


@dataclass(frozen=True)
class Usage:
    """Bytes of the pool."""

    total: int
    free: int


class Pool:
    """The pool below a state directory.

    `size`: bytes of a pool file made anew; None is 40 % of the free space, at most 32 GiB.
    """

    def __init__(self, state: Path | None = None, *, size: int | None = None):
        self.state = state or paths.state()
        self.path = self.state / "pool"
        self.file = self.state / "pool.btrfs"
        self.sandboxes = self.path / "sandboxes"
        self.checkpoints = self.path / "checkpoints"
        self.images = self.state / "images"
        self._size = size

    # ---------------------------------------------------------------- lifetime

    def ensure(self) -> Pool:
        """Make and mount what is missing. Blocking; safe against another process that does the same."""
        self.state.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.state / "pool.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.path.mkdir(mode=0o700, exist_ok=True)
            self.images.mkdir(mode=0o700, exist_ok=True)
            if not btrfs.is_btrfs(self.path):
                if not self.file.exists():
                    self._make_file()
                self._mount()
            btrfs.enable_quota(self.path)
            for folder in (self.sandboxes, self.checkpoints):
                folder.mkdir(mode=0o700, exist_ok=True)
        finally:
            os.close(lock)
        return self

    def _make_file(self) -> None:
        if shutil.which("mkfs.btrfs") is None:
            raise Unsupported("mkfs.btrfs is missing", remedy="apt-get install btrfs-progs")
        free = shutil.disk_usage(self.state).free
        size = self._size or min(32 * GIB, free * 2 // 5)
        if size < SMALLEST:
            raise NoSpace(
                f"{self.state} has {free >> 20} MiB free; the pool needs {SMALLEST * 5 // 2 >> 20} MiB",
                remedy="free space or set PAGURUS_STATE to another disk",
            )
        unfinished = self.file.with_suffix(".new")
        with open(unfinished, "wb") as file:
            file.truncate(size)
        # On a small one data could claim all chunks; then no snapshot is possible any more, not even to go back.
        mixed = ["--mixed"] if size < MIXED_BELOW else []
        _run("mkfs.btrfs", "-q", "-f", *mixed, "--metadata", "single", "--data", "single", str(unfinished))
        unfinished.rename(self.file)

    def _mount(self) -> None:
        # Discards give the space of deleted checkpoints back to the host's disk.
        _run("mount", "-t", "btrfs", "-o", "loop,noatime,discard=async,compress=no", str(self.file), str(self.path))

    def mounted(self) -> bool:
        return self.path.is_dir() and btrfs.is_btrfs(self.path)

    def close(self, *, patience: float = 10.0) -> None:
        """Unmount. Overlays of sandboxes that ended a moment ago keep it busy briefly: waits for them."""
        deadline = time.monotonic() + patience
        while os.path.ismount(self.path):
            done = subprocess.run(["umount", str(self.path)], capture_output=True, text=True, check=False)
            if done.returncode and time.monotonic() > deadline:
                raise OSError(errno.EBUSY, f"{self.path} stays busy: {done.stderr.strip()}")
            if done.returncode:
                time.sleep(0.02)

    # ---------------------------------------------------------------- trees

    def create_tree(self, path: Path) -> None:
        """A sandbox's subvolume with an empty upper and work directory."""
        btrfs.create_subvolume(path)
        for part in TREE_PARTS:
            (path / part).mkdir()
            (path / part).chmod(0o755)

    def usage(self) -> Usage:
        fs = os.statvfs(self.path)
        return Usage(total=fs.f_blocks * fs.f_frsize, free=fs.f_bavail * fs.f_frsize)


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unsupported(f"{' '.join(argv)}: {done.stderr.strip() or done.stdout.strip()}")
