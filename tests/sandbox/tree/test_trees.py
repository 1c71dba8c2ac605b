"""File trees that are deep, wide, sparse, or changed while they are walked."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from daemon.verdict.compare import Bounds, Case, trees
from daemon.verdict.ignore import NOTHING
from sandbox.differences import differences
from sandbox.errors import Invalid
from sandbox.tree import btrfs, diff, facts, hashing, safe_path, space, sparse
from sandbox.tree import copy as copytree
from sandbox.tree.extents import shared_once
from sandbox.tree.holes import data_ranges
from sandbox.tree.pool import BtrfsPool
from sandbox.tree.walk import MAX_OPEN, remove_path, walk

DEPTH = 1200  # directories within one another: beyond PATH_MAX, beyond Python's recursion limit
MIB = 1 << 20


def deepen(top: Path, depth: int = DEPTH, *, name: str = "nested", file: str = "end") -> None:
    """Directories within one another, with a second one beside each and a file at the end."""
    here = os.open(top, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(f"{name}.too", dir_fd=here)
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT, dir_fd=here), "w") as made:
        made.write("bottom")
    os.close(here)


@pytest.fixture
def top(tmp_path: Path) -> Iterator[Path]:
    made = tmp_path / "top"
    made.mkdir()
    yield made
    for left in tmp_path.iterdir():
        remove_path(left)


# --------------------------------------------------------------------------- content


def hashed(path: Path) -> bytes:
    with open(path, "rb") as file:
        return sparse.of_file(file.fileno())


def test_the_hash_of_an_ordinary_content_is_blake3(tmp_path: Path) -> None:
    path = tmp_path / "f"
    for content in (b"", b"x", bytes(4096), os.urandom(3 * MIB + 5), bytes(MIB - 1) + b"x" + bytes(MIB - 1)):
        path.write_bytes(content)
        assert hashed(path) == blake3(content).digest()


@given(
    pieces=st.lists(st.tuples(st.integers(0, 2 * MIB), st.binary(min_size=1, max_size=64)), max_size=5),
    size=st.integers(0, 3 * MIB),
)
def test_holes_and_written_zeros_have_one_hash(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[tuple[int, bytes]], size: int
) -> None:
    directory = tmp_path_factory.mktemp("content")
    holes, full = directory / "holes", directory / "full"
    for path in (holes, full):
        with open(path, "wb") as file:
            if path == full:
                file.write(bytes(size))
            for offset, data in pieces:
                file.seek(offset)
                file.write(data)
            file.truncate(size)
    assert holes.read_bytes() == full.read_bytes()
    assert hashed(holes) == hashed(full)
    with open(holes, "rb") as one, open(full, "rb") as other:
        assert sparse.same(one.fileno(), other.fileno())


def test_contents_with_holes_differ_when_their_bytes_do(tmp_path: Path) -> None:
    observed = set()
    for number, (size, pieces) in enumerate(
        [
            (8 * MIB, {}),
            (8 * MIB + 1, {}),
            (16 * MIB, {}),
            (8 * MIB, {0: b"x"}),
            (8 * MIB, {1: b"x"}),
            (8 * MIB, {4096: b"x"}),
            (8 * MIB, {5 * MIB: b"x"}),
            (8 * MIB, {0: b"x", 5 * MIB: b"x"}),
            (8 * MIB, {8 * MIB - 1: b"x"}),
        ]
    ):
        with open(tmp_path / str(number), "wb") as file:
            for offset, data in pieces.items():
                file.seek(offset)
                file.write(data)
            file.truncate(size)
        observed.add(hashed(tmp_path / str(number)))
    assert len(observed) == 9


def test_a_hole_of_a_tebibyte_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    real = os.pread

    def counted(file: int, size: int, offset: int) -> bytes:
        read.append(size)
        return real(file, size, offset)

    monkeypatch.setattr(os, "pread", counted)
    for name in ("one", "other"):
        with open(tmp_path / name, "wb") as file:
            file.write(b"begin")
            file.truncate(1 << 40)
            file.seek((1 << 40) - 3)
            file.write(b"end")
    with open(tmp_path / "one", "rb") as one, open(tmp_path / "other", "rb") as other:
        assert sparse.of_file(one.fileno()) == sparse.of_file(other.fileno())
        assert sparse.same(one.fileno(), other.fileno())
    assert sum(read) <= 16 * sparse.BLOCK


# --------------------------------------------------------------------------- walks


def test_a_walk_is_as_deep_as_the_tree_with_few_descriptors(top: Path) -> None:
    deepen(top)
    before = len(os.listdir("/proc/self/fd"))
    limit = steps = 0
    left: list[int] = []
    with safe_path.directory(top) as root:
        for _ in walk(root, leave=lambda step: left.append(step.depth)):
            steps += 1
            if steps % 100 == 0:
                limit = max(limit, len(os.listdir("/proc/self/fd")))
    assert steps == 2 * DEPTH + 1
    assert sorted(set(left), reverse=True) == list(range(DEPTH, 0, -1))
    assert limit - before <= MAX_OPEN + 4
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_walk_of_what_is_moved_meanwhile_ends_and_leads_nowhere_else(top: Path, tmp_path: Path) -> None:
    deepen(top, MAX_OPEN + 20)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").touch()
    observed = []
    with safe_path.directory(top) as root, pytest.raises(OSError, match="moved"):
        for step in walk(root):
            observed.append(step.name)
            if step.name == "end":
                os.rename(top / "nested/nested/nested", tmp_path / "elsewhere" / "moved")
    assert "secret" not in observed


def test_a_walk_opens_nothing_but_directories_and_follows_no_link(top: Path) -> None:
    os.mkfifo(top / "fifo")
    (top / "link").symlink_to("/etc")
    with safe_path.directory(top) as root:
        assert [step.path for step in walk(root)] == ["fifo", "link"]
        with pytest.raises(Invalid), safe_path.regular(root, "fifo"):
            pass
        with pytest.raises(Invalid), safe_path.regular(root, "link"):
            pass


def test_a_deep_tree_is_compared_copied_and_removed(top: Path, tmp_path: Path) -> None:
    deepen(top)
    other, empty = tmp_path / "other", tmp_path / "empty"
    other.mkdir()
    empty.mkdir()
    os.chown(top / "nested", 7, 8)
    os.setxattr(top / "nested", "user.x", b"y")
    os.mkfifo(top / "nested/fifo")
    (top / "nested/hole").touch()
    os.truncate(top / "nested/hole", 1 << 40)
    os.link(top / "nested/hole", top / "nested/nested/again")
    (top / "link").symlink_to("nowhere")
    done = subprocess.run([sys.executable, "-m", "sandbox.tree.copy", top, other], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (other / "nested/hole").stat().st_blocks == 0
    assert facts.tree_differences(top, other) == []
    assert differences(facts.tree(top), facts.tree(other)) == []
    assert diff.changes(top, other, empty) == []
    assert trees(top, top, [empty], Case(), rules=NOTHING, bounds=Bounds(entries=10_000, seconds=60)).equal
    deepen(other, 1, name="new")
    assert [(change.path, change.kind) for change in diff.changes(top, other, empty)] == [
        ("/new", "added"),
        ("/new/end", "added"),
        ("/new.too", "added"),
    ]
    remove_path(other)
    assert not other.exists()


def test_a_copy_does_not_fill_the_disk(top: Path, tmp_path: Path) -> None:
    for number in range(5):
        (top / f"shared-{number}").write_bytes(bytes([1]) * (32 << 20))
    into = tmp_path / "small"
    into.mkdir()
    size = space.RETAINED + space.CHECK_INTERVAL + (16 << 20)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", into], check=True)
    try:
        with pytest.raises(OSError, match="No space left on device: 256 MiB of the disk stay free"):
            copytree.copy(top, into)
        assert shutil.disk_usage(into).free >= space.RETAINED
    finally:
        subprocess.run(["umount", into], check=True)


def test_a_copy_leaves_the_pool_what_its_file_may_grow_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    size = space.RETAINED + space.CHECK_INTERVAL + (64 << 20)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=True)
    try:
        pool = disk / "pool.btrfs"
        monkeypatch.setenv(space.PROMISED, str(pool))
        with safe_path.directory(disk) as target:
            space.Reserve(target).take(0)  # there is none yet
            pool.touch()
            os.truncate(pool, 96 << 20)
            with pytest.raises(OSError, match="352 MiB of the disk stay free"):
                space.Reserve(target).take(0)
            pool.write_bytes(bytes(48 << 20))  # it is used up in part, and smaller
            space.Reserve(target).take(0)
            with pytest.raises(OSError, match="256 MiB of the disk stay free"):
                space.Reserve(target).take(96 << 20)
        with safe_path.directory(Path("/var/tmp")) as elsewhere:
            assert space.promised(os.fstat(elsewhere).st_dev) == 0
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_copy_leaves_sockets_and_devices_out(top: Path, tmp_path: Path) -> None:
    os.mknod(top / "socket", stat.S_IFSOCK | 0o600)
    (top / "kept").touch()
    (tmp_path / "copy").mkdir()
    copytree.copy(top, tmp_path / "copy")
    assert os.listdir(tmp_path / "copy") == ["kept"]


def test_a_difference_that_is_too_long_to_tell_is_refused(
    top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diff, "MAX_REPORTED", 10_000)
    monkeypatch.setattr(facts, "MAX_PATHS", 10_000)
    deepen(top, 100)
    (tmp_path / "empty").mkdir()
    with pytest.raises(Invalid, match="more differs"):
        diff.changes(tmp_path / "empty", top, tmp_path / "empty")
    with pytest.raises(Invalid, match="paths"):
        facts.tree(top)


# --------------------------------------------------------------------------- snapshots


def test_a_deep_and_sparse_snapshot_is_hashed_and_verified(pool: BtrfsPool) -> None:
    name = f"deep-{secrets.token_hex(4)}"
    tree, first, second = (pool.sandboxes / f"{name}{end}" for end in ("", ".1", ".2"))
    pool.create_tree(tree)
    try:
        deepen(tree / "upper", 1200)
        with open(tree / "upper/hole", "wb") as file:
            file.truncate(1 << 40)
        btrfs.snapshot(tree, first, readonly=True)
        one = hashing.digest(first, None)
        assert hashing.damage(first, one) == []
        assert hashing.UNHASHED not in one.content_hashes
        (tree / "upper/nested/nested/new").write_text("new")
        btrfs.snapshot(tree, second, readonly=True)
        two = hashing.digest(second, (first, one))
        assert hashing.damage(second, two) == []
        assert any("hole" in item for item in hashing.damage(second, _with_former_holes(two)))
    finally:
        for path in (first, second, tree):
            btrfs.delete_subvolume(path)


def test_data_up_to_the_last_byte_that_a_file_can_have_are_found(pool: BtrfsPool) -> None:
    limit = (1 << 63) - 1
    tree = pool.sandboxes / f"last-{secrets.token_hex(4)}"
    pool.create_tree(tree)
    try:
        with (tree / "upper/file").open("w+b", buffering=0) as file:
            file.truncate(limit - 1)
            os.pwrite(file.fileno(), b"x", limit - 1)
            os.fsync(file.fileno())
            assert list(data_ranges(file.fileno())) == [(limit // 4096 * 4096, limit)]
            assert sparse.same(file.fileno(), file.fileno())
            first = sparse.of_file(file.fileno())
            os.pwrite(file.fileno(), b"y", limit - 1)
            assert sparse.of_file(file.fileno()) != first
    finally:
        btrfs.delete_subvolume(tree)


def test_what_files_share_is_read_once_and_everything_is(pool: BtrfsPool, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, shot = (pool.sandboxes / f"shared-{secrets.token_hex(4)}{end}" for end in ("", ".1"))
    pool.create_tree(tree)
    try:
        upper = tree / "upper"
        (upper / "one").write_bytes(os.urandom(3 << 20))
        with open(upper / "one", "rb") as one, open(upper / "large", "r+b", opener=_creating) as large:
            os.fsync(one.fileno())
            for place in range(0, 3 << 30, 3 << 20):  # 3 GiB on the same 3 MiB
                clone = struct.pack("=qQQQ", one.fileno(), 0, 3 << 20, place)
                fcntl.ioctl(large, 0x4020940D, clone)
            fcntl.ioctl(large, 0x4020940D, struct.pack("=qQQQ", one.fileno(), 1 << 20, 1 << 20, 3 << 30))
        (upper / "small").write_bytes(b"in the tree itself")
        (upper / "own").write_bytes(os.urandom(1 << 20))
        with open(upper / "own", "rb") as own:
            os.fsync(own.fileno())
        btrfs.snapshot(tree, shot, readonly=True)
        made = hashing.digest(shot, None, limit=0)
        numbers = {name: (shot / "upper" / name).stat().st_ino for name in ("one", "large", "small", "own")}
        with btrfs.opened(shot) as root:
            once = shared_once(root, set(numbers.values()))
        reported = {name: sum(size for _, size in once.get(number, [])) for name, number in numbers.items()}
        assert reported["one"] + reported["large"] == 3 << 20
        assert (reported["small"], reported["own"]) == (18, 1 << 20)
        assert hashing.damage(shot, made) == []
        monkeypatch.setattr(sparse, "read_once", _damaged)
        assert len(hashing.damage(shot, made)) == 4
    finally:
        for path in (shot, tree):
            if path.exists():
                btrfs.delete_subvolume(path)


def _creating(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o600)


def _damaged(*_: object) -> None:
    raise OSError(5, "Input/output error")


def _with_former_holes(made: hashing.Digest) -> hashing.Digest:
    """Other contents: each is found."""
    return hashing.Digest(made.inodes, made.attributes, made.contents ^ 1)
