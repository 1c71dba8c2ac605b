"""The btrfs pool: the disk space of all sandboxes and checkpoints of a host.

Guarantee: after `ensure()` the directories exist on a mounted btrfs; calling it again changes nothing. `close()` leaves
no mount and no loop device behind (the kernel frees it with the last user). `need()` refuses new work before the disk
is full; restores and removals that find it full nevertheless get a reserve (`extend()`), which is given back later.

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
import logging
import os
import shutil
import struct
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from sandbox import durable, paths, private, procfs
from sandbox.descriptors import closing
from sandbox.errors import NoSpace, Unsupported
from sandbox.tree import btrfs, space

log = logging.getLogger("pagurus.pool")

GIB = 1 << 30
SMALLEST = 256 << 20
MIXED_BELOW = GIB  # bytes; what mkfs.btrfs recommends
TREE_PARTS = ("upper", "work")
OURS = ("pool", "pool.btrfs", "pool.lock", "images", "catalogue.sqlite", "tls", "runtime")  # in a state directory


RETAINED = 64 << 20  # bytes of the pool that new checkpoints and sandboxes leave free
RETAINED_METADATA = 6 << 20  # bytes of tree blocks that they leave free: a snapshot takes some 50 KiB
TIGHT = 4 << 20  # bytes of either below which a restore gets the reserve at once
RESERVE = 192 << 20  # bytes by which the pool's file grows when a restore or a removal needs room
_DATA, _METADATA, _GLOBAL_RESERVE = 1, 4, 1 << 49
_SPACE_INFO = (3 << 30) | (16 << 16) | (0x94 << 8) | 20
_DEV_INFO = (3 << 30) | (4096 << 16) | (0x94 << 8) | 30
_RESIZE = (1 << 30) | (4096 << 16) | (0x94 << 8) | 3
_LOOP_SET_CAPACITY = 0x4C07


@dataclass(frozen=True)
class PoolUsage:
    """Bytes of the pool. `free`: for files; `metadata`: for tree blocks; both count what is not allocated yet."""

    total: int
    free: int
    metadata: int = 1 << 60


class BtrfsPool:
    """The pool below a state directory.

    `size`: bytes of the pool's file, which is made or grown to it, never made smaller; None: as it is, and where it is
    made again 40 % of the free space, at most 32 GiB.
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

    def ensure(self) -> BtrfsPool:
        """Make and mount what is missing. Blocking; safe against another process that does the same."""
        private.directory(self.state, ours=OURS)
        with closing(os.open(self.state / "pool.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.path.mkdir(mode=0o700, exist_ok=True)
            self.images.mkdir(mode=0o700, exist_ok=True)
            if not btrfs.is_btrfs(self.path):
                if not self.file.exists():
                    self._make_file()
                self._mount()
            if self.file.exists():
                private.file(self.file)  # an older version let everybody read it
                space.promise(self.file)
                self._grow()
            try:
                btrfs.enable_quota(self.path)
            except Unsupported as error:  # an older kernel: it costs these limits only
                log.info("%s", error.message)
            for directory in (self.sandboxes, self.checkpoints):
                directory.mkdir(mode=0o700, exist_ok=True)
            private.directory(self.path, ours=(self.sandboxes.name, self.checkpoints.name))
        return self

    def planned(self) -> int:
        """Bytes of the pool's file, if it is made now."""
        return self._size or min(32 * GIB, shutil.disk_usage(self.state).free * 2 // 5)

    def _grow(self) -> None:
        """To the size that is requested. One that has its reserve grows when that is given back."""
        if self._size is None or self.file.with_suffix(".extended").exists() or self.file.stat().st_size >= self._size:
            return
        os.truncate(self.file, self._size)
        self._update_loop()
        self._resize("max")

    def _make_file(self) -> None:
        if shutil.which("mkfs.btrfs") is None:
            raise Unsupported("mkfs.btrfs is missing", hint="apt-get install btrfs-progs")
        free, size = shutil.disk_usage(self.state).free, self.planned()
        if size < SMALLEST:
            raise NoSpace(
                f"{self.state} has {free >> 20} MiB free; the pool needs {SMALLEST * 5 // 2 >> 20} MiB",
                hint="free space or set PAGURUS_STATE to another disk",
            )
        unfinished = self.file.with_suffix(".new")
        private.file(unfinished)
        os.truncate(unfinished, size)
        # On a small one data could claim all chunks; then no snapshot is possible any more, not even to go back.
        mixed = ["--mixed"] if size < MIXED_BELOW else []
        _run("mkfs.btrfs", "-q", "-f", *mixed, "--metadata", "single", "--data", "single", str(unfinished))
        for path in (unfinished, self.state):
            durable.sync(path)
        unfinished.rename(self.file)
        durable.sync(self.state)

    def _mount(self) -> None:
        # Discards give the space of deleted checkpoints back to the host's disk.
        _run("mount", "-t", "btrfs", "-o", "loop,noatime,discard=async,compress=no", str(self.file), str(self.path))

    def mounted(self) -> bool:
        return self.path.is_dir() and btrfs.is_btrfs(self.path)

    def close(self, *, timeout: float = 10.0) -> None:
        """Unmount. Overlays of sandboxes that ended a moment ago keep it busy briefly: waits for them."""
        deadline = time.monotonic() + timeout
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

    # ---------------------------------------------------------------- space

    def usage(self) -> PoolUsage:
        """What there is and what is left, from btrfs itself: statvfs does not know of tree blocks."""
        with closing(os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
            total, allocated = _device(fd)
            spaces = _spaces(fd)
        unallocated = max(0, total - allocated)
        data = sum(size - used for flags, size, used in spaces if flags & _DATA)
        tree = sum(size - used for flags, size, used in spaces if flags & _METADATA)
        tree -= sum(size for flags, size, _ in spaces if flags & _GLOBAL_RESERVE)
        return PoolUsage(total=total, free=unallocated + max(0, data), metadata=unallocated + max(0, tree))

    def need(self, target: int = 0) -> None:
        """Raise NoSpace, saying how much is missing, unless `target` bytes and what must stay free are there."""
        usage = self.usage()
        missing = max(target + RETAINED - usage.free, RETAINED_METADATA - usage.metadata)
        if missing > 0:
            raise NoSpace(
                f"{self.path} has {usage.free >> 20} MiB free for files and {usage.metadata >> 20} MiB for tree "
                f"blocks of {usage.total >> 20} MiB, {missing / (1 << 20):.1f} MiB more are needed",
                hint="remove sandboxes or checkpoints, keep fewer (`Retention`), or enlarge the disk; older "
                "checkpoints are whole",
            )

    def tight(self) -> bool:
        """Whether even a restore may find no room."""
        usage = self.usage()
        return min(usage.free, usage.metadata) < TIGHT

    def extend(self) -> bool:
        """Let the pool grow by its reserve, so that restores and removals work. False: it has grown already, or cannot.

        What it has grown by is remembered next to it, so that a crash in between is made good by the next call.
        """
        mark = self.file.with_suffix(".extended")
        if not self.file.exists() or shutil.disk_usage(self.state).free < RESERVE + TIGHT:
            return False
        if not mark.exists():
            mark.write_text(str(self.file.stat().st_size))
        size = int(mark.read_text()) + RESERVE
        if self.file.stat().st_size >= size and not self._resize("max"):
            return False
        os.truncate(self.file, size)
        self._update_loop()
        return self._resize("max")

    def give_back(self) -> bool:
        """Shrink to the size from before `extend()`, when there is room again. False: nothing to do, or not yet."""
        mark = self.file.with_suffix(".extended")
        if not mark.exists():
            return False
        size, usage = int(mark.read_text()), self.usage()
        if usage.free < RESERVE + 2 * RETAINED or not self._resize(str(size)):
            return False
        os.truncate(self.file, size)
        self._update_loop()
        mark.unlink()
        return True

    def _resize(self, size: str) -> bool:
        """BTRFS_IOC_RESIZE. False when nothing changes or it is refused."""
        before = self.usage().total
        argument = bytearray(4096)
        argument[8 : 8 + len(size)] = size.encode()
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            btrfs.ioctl(fd, _RESIZE, argument)
        except OSError:  # no room to move what lies behind the new end
            return False
        finally:
            os.close(fd)
        return self.usage().total != before

    def _update_loop(self) -> None:
        """Let the loop device see the size of its file."""
        for device, point, *_ in procfs.mounts():
            if point == str(self.path) and device.startswith("/dev/loop"):
                with closing(os.open(device, os.O_RDWR | os.O_CLOEXEC)) as fd:
                    fcntl.ioctl(fd, _LOOP_SET_CAPACITY)


def _spaces(fd: int) -> list[tuple[int, int, int]]:
    """(flags, bytes allocated, bytes used) of each kind of block group."""
    head = bytearray(struct.pack("=QQ", 0, 0))
    fcntl.ioctl(fd, _SPACE_INFO, head)
    (count,) = struct.unpack_from("=8xQ", head)
    args = bytearray(struct.pack("=QQ", count, 0) + bytes(24 * count))
    fcntl.ioctl(fd, _SPACE_INFO, args)
    (result,) = struct.unpack_from("=8xQ", args)
    return [struct.unpack_from("=QQQ", args, 16 + 24 * n) for n in range(min(count, result))]


def _device(fd: int) -> tuple[int, int]:
    """(bytes of the only device, bytes allocated to block groups)"""
    args = bytearray(4096)
    struct.pack_into("=Q", args, 0, 1)
    fcntl.ioctl(fd, _DEV_INFO, args)
    allocated, total = struct.unpack_from("=QQ", args, 24)
    return total, allocated


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unsupported(
            f"{' '.join(argv)}: {done.stderr.strip() or done.stdout.strip()}",
            hint="`pagurus doctor` tries btrfs; see `dmesg` for errors of the disk",
        )
