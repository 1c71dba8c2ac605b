"""One limit for all that a sandbox writes, whatever happens to its subvolumes."""

from __future__ import annotations

import errno
import os
import secrets
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sandbox.tree import btrfs, quota
from sandbox.tree.pool import BtrfsPool

MIB = 1 << 20


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A pool of this test alone."""
    pool = BtrfsPool(tmp_path, size=512 * MIB).ensure()
    yield pool.sandboxes
    pool.close()


def write(path: Path, mib: int) -> int:
    """How many MiB could be written."""
    with open(path, "wb", buffering=0) as file:
        for written in range(mib):
            try:
                file.write(os.urandom(MIB))
                os.fsync(file.fileno())
            except OSError as error:
                assert error.errno == errno.EDQUOT
                return written
    return mib


def tree(path: Path, sandbox: str, size: int | None) -> Path:
    quota.join(path, sandbox)
    quota.limit(path, sandbox, size)
    return path


def test_a_restore_begins_with_what_is_left(place: Path) -> None:
    btrfs.create_subvolume(place / "first")
    tree(place / "first", "s", 10 * MIB)
    assert write(place / "first/a", 6) == 6
    btrfs.snapshot(place / "first", place / "kept", readonly=True)
    for number in range(3):  # as often as one likes
        btrfs.snapshot(place / "kept", place / f"again{number}", readonly=False)
        btrfs.delete_subvolume(place / "first" if not number else place / f"again{number - 1}")
        tree(place / f"again{number}", "s", 10 * MIB)
    assert write(place / "again2/b", 10) < 5
    (place / "again2/b").unlink()
    (place / "again2/a").unlink()
    btrfs.delete_subvolume(place / "kept")
    btrfs.sync(place)


def test_scratch_and_tree_share_a_limit_and_others_have_their_own(place: Path) -> None:
    for name in ("tree", "scratch", "other"):
        btrfs.create_subvolume(place / name)
    tree(place / "tree", "s", 10 * MIB)
    quota.join(place / "scratch", "s")
    quota.join(place / "scratch", "s")  # again
    btrfs.limit(place / "scratch", 1 << 40)
    tree(place / "other", "t", 10 * MIB)
    assert write(place / "scratch/a", 6) == 6
    assert write(place / "tree/b", 6) < 5
    assert write(place / "other/c", 6) == 6
    tree(place / "tree", "s", None)
    assert write(place / "tree/d", 12) == 12


def test_groups_of_what_is_no_more_are_forgotten(place: Path) -> None:
    names = [secrets.token_hex(5) for _ in range(3)]
    for name in names:
        btrfs.create_subvolume(place / name)
        tree(place / name, name, 10 * MIB)
        write(place / name / "a", 1)
    btrfs.snapshot(place / names[0], place / "kept", readonly=True)
    for name in names[:2]:
        btrfs.delete_subvolume(place / name)
    cleaned(place)
    quota.sweep(place, [names[2]])
    assert groups(place) == {quota.group(names[0]), quota.group(names[2])}  # of the first, something is held
    assert write(place / names[2] / "b", 12) < 12  # and a living one keeps its limit
    btrfs.delete_subvolume(place / "kept")
    cleaned(place)
    quota.sweep(place, [names[2]])
    assert groups(place) == {quota.group(names[2])}


def groups(place: Path) -> set[int]:
    with btrfs.opened(place) as fd:
        return {offset for _, kind, offset, _ in btrfs.items(fd, tree=quota._QUOTAS) if kind == 242 and offset >> 48}


def cleaned(place: Path) -> None:
    """Wait until the kernel has removed what was deleted."""
    subprocess.run(["mount", "-o", "remount,commit=1", str(place.parent)], check=True)  # the cleaner's pace
    subprocess.run(["btrfs", "subvolume", "sync", str(place)], check=True, capture_output=True, timeout=120)
    btrfs.sync(place)


def test_a_full_subvolume_goes_with_all_that_lie_in_it(place: Path) -> None:
    btrfs.create_subvolume(place / "top")
    btrfs.create_subvolume(place / "top/inner")
    btrfs.limit(place / "top", 10 * MIB)
    tree(place / "top", "s", 10 * MIB)
    assert write(place / "top/a", 20) < 20
    btrfs.delete_subvolume(place / "top")
    assert not list(place.iterdir())


def test_sweeping_takes_no_group_from_a_sandbox_that_is_made_meanwhile(place: Path) -> None:
    done = threading.Event()

    def sweep() -> None:
        while not done.is_set():
            quota.sweep(place, [])

    with ThreadPoolExecutor(1) as pool:
        sweeping = pool.submit(sweep)
        try:
            for number in range(150):
                btrfs.create_subvolume(place / f"tree{number}")
                tree(place / f"tree{number}", f"s{number}", 10 * MIB)
        finally:
            done.set()
        sweeping.result()
    assert write(place / "tree149/a", 12) < 12
