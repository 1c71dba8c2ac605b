"""btrfs by ioctl, the pool, images: against a real file system."""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.errors import Conflict, NoSpace, NotFound, Unsupported
from sandbox.tree import btrfs
from sandbox.tree.extents import NODE, added_bytes
from sandbox.tree.pool import BtrfsPool
from tests.support.programs import Program


def test_ensure_twice_and_close_leave_what_they_should(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    made = BtrfsPool(tmp_path / "state", size=256 << 20)
    made.ensure()
    made.create_tree(made.sandboxes / "a")
    BtrfsPool(tmp_path / "state").ensure()
    assert (made.sandboxes / "a/upper").is_dir()
    assert made.file.stat().st_blocks * 512 < 64 << 20  # sparse
    options = next(
        line for line in Path("/proc/self/mounts").read_text().splitlines() if line.split()[1] == str(made.path)
    )
    assert "noatime" in options
    loop = options.split()[0]
    made.close()
    made.close()
    assert not made.mounted()
    backing = subprocess.run(["losetup", "-j", str(made.file)], capture_output=True, text=True, check=True).stdout
    assert loop not in backing
    made.ensure()
    assert (made.sandboxes / "a/work").is_dir()
    made.close()


def test_no_space_says_how_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    with pytest.raises(NoSpace, match="the pool needs 640 MiB"):
        BtrfsPool(tmp_path, size=1 << 20).ensure()
    assert not (tmp_path / "pool.btrfs").exists()


FREEZE, THAW = 0xC0045877, 0xC0045878  # FIFREEZE, FITHAW
WAITING = """
import fcntl, os, sys, threading, time
from pathlib import Path
from sandbox.tree import btrfs
pool = Path(sys.argv[1])
fcntl.ioctl(os.open(pool, os.O_RDONLY), %d, 0)
thread = threading.Thread(target=btrfs.snapshot, args=(pool / "a", pool / "b"), kwargs={"readonly": True})
thread.start()
while Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()[0] != "D":
    time.sleep(0.01)
print("others run", flush=True)
thread.join()
"""


def test_other_threads_run_while_the_kernel_makes_a_snapshot(pool: BtrfsPool) -> None:
    btrfs.create_subvolume(pool.sandboxes / "a")
    held = os.open(pool.sandboxes, os.O_RDONLY)
    program = [sys.executable, "-c", WAITING % FREEZE, str(pool.sandboxes)]
    process = Program(program, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and select.select([process.stdout], [], [], 60)[0], "everything stands still"
        assert process.stdout.readline() == "others run\n"
    finally:
        fcntl.ioctl(held, THAW, 0)
        os.close(held)
        process.communicate(timeout=60)
        for name in ("a", "b"):
            btrfs.delete_subvolume(pool.sandboxes / name)
    assert process.returncode == 0


def test_a_subvolume_goes_with_all_that_lie_in_it(pool: BtrfsPool) -> None:
    top = pool.sandboxes / "top"
    for path in (top, top / "inner", top / "inner/innermost", top / "other"):
        btrfs.create_subvolume(path)
    btrfs.create_subvolume(pool.sandboxes / "alongside")
    try:
        (top / "inner/innermost/file").write_text("x")
        btrfs.delete_subvolume(top)
        assert [path.name for path in pool.sandboxes.iterdir()] == ["alongside"]
    finally:
        btrfs.delete_subvolume(pool.sandboxes / "alongside")


def test_subvolumes_and_snapshots(pool: BtrfsPool) -> None:
    source, copy = pool.sandboxes / "source", pool.checkpoints / "copy"
    btrfs.create_subvolume(source)
    try:
        (source / "a").write_text("one")
        btrfs.snapshot(source, copy, readonly=True)
        (source / "a").write_text("two")
        assert (copy / "a").read_text() == "one"
        with pytest.raises(OSError, match="Read-only"):
            (copy / "a").write_text("three")
        with pytest.raises(Conflict):
            btrfs.create_subvolume(source)
        with pytest.raises(Conflict):
            btrfs.snapshot(source, copy, readonly=False)
        with pytest.raises(FileNotFoundError):
            btrfs.snapshot(pool.sandboxes / "none", pool.checkpoints / "x", readonly=True)
    finally:
        btrfs.delete_subvolume(source)
        btrfs.delete_subvolume(copy)
        btrfs.delete_subvolume(copy)
    assert not source.exists()


def test_not_btrfs_is_said(tmp_path: Path) -> None:
    if btrfs.is_btrfs(tmp_path):
        pytest.skip("the temporary directory is btrfs")
    with pytest.raises(Unsupported, match="not on btrfs"):
        btrfs.create_subvolume(tmp_path / "x")
    with pytest.raises(NotFound):
        raise btrfs._translate(FileNotFoundError(2, "no"), "snapshot", tmp_path)


def test_generation_tells_changed(pool: BtrfsPool) -> None:
    tree = pool.sandboxes / "generation"
    btrfs.create_subvolume(tree)
    try:
        btrfs.sync(tree)
        before = btrfs.generation(tree)
        (pool.sandboxes / "elsewhere").write_text("x")
        btrfs.sync(tree)
        assert btrfs.generation(tree) == before
        (tree / "a").write_text("x")
        btrfs.sync(tree)
        assert btrfs.generation(tree) > before
    finally:
        btrfs.delete_subvolume(tree)
        (pool.sandboxes / "elsewhere").unlink()


def test_added_bytes_count_what_is_new(pool: BtrfsPool) -> None:
    blocks = 30 * NODE  # of the trees: 300 inline files, directory entries, inodes
    tree, first, second = pool.sandboxes / "grow", pool.checkpoints / "grow-1", pool.checkpoints / "grow-2"
    btrfs.create_subvolume(tree)
    try:
        (tree / "old").write_bytes(os.urandom(3 << 20))
        btrfs.flush(tree)
        btrfs.snapshot(tree, first, readonly=True)
        for number in range(300):
            (tree / f"small-{number}").write_bytes(b"x" * 100)  # inline
        (tree / "new").write_bytes(os.urandom(5 << 20))
        os.truncate(tree / "new", 50 << 20)  # a hole
        btrfs.flush(tree)
        btrfs.snapshot(tree, second, readonly=True)
        assert 3 << 20 <= added_bytes(first, None) <= (3 << 20) + blocks
        assert (5 << 20) + 300 * 100 <= added_bytes(second, first) <= ((5 << 20) + 300 * 100) + blocks
        assert (8 << 20) + 300 * 100 <= added_bytes(second, None) <= ((8 << 20) + 300 * 100) + blocks
        assert 0 <= added_bytes(second, second) <= (0) + blocks
    finally:
        for path in (tree, first, second):
            btrfs.delete_subvolume(path)
